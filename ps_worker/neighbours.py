"""The other members of a group, as each member sees them: whether they have come, and whether they go on.

A member that is stopped, or whose machine is gone, breaks no connection. The others would wait for it until the timeout
of the script's collective, which is half an hour over gloo by default, and in a collective of ours for ever. So a
thread of each member counts up a key of its own in torch's default store, and reads those of the others. It goes on
while the thread that trains is in a collective. Where a member gives no sign for the group timeout, this process ends,
and whatever has started the group starts it again.

A heartbeat that the coordinator accepts counts as a sign of all members: the lease of a group is that of its most
silent one. So a member whose C code keeps the GIL, and whose heartbeats come from a child process, is not taken for
gone.

Where the process that keeps the store is stopped, a call to the store never returns. So the thread that calls it
decides nothing, and those that do, in `check`, call no store. Without its answers no member gives a sign.

Where the training thread alone waits for ever, for a loader or a lock, signs and heartbeats go on. So a sign may also
tell where that thread is. Where it stays in the script for the step timeout, while another member waits for it, the
group ends as if that member were silent. Collectives count as steps: members that evaluate together meet in them, and
one of them may be in the script, and another one in a collective, each time that they look. A member that gives no sign
is a matter of the group timeout alone.

A connection to the store that breaks off is made anew. Where this fails, too, nobody is taken for gone: the process
that kept the store has ended, and a process that ends breaks its collectives.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ps_protocol.errors import LimitExceeded
from ps_runtime.background import join_within, start
from ps_runtime.launch_id import SILENT_MEMBER_CODE
from ps_runtime.troubles import Troubles
from ps_worker.launched import end_at_once
from ps_worker.training_thread import SCRIPT, TrainingThread

log = logging.getLogger("ps_worker")

NOTICE_SECONDS = 30.0  # the time before a member logs that it waits for others to come
LEAVE_SECONDS = 1.0  # the longest that a member takes to say that it leaves
SIGNS = 10  # the number of signs that a member gives within the group timeout
_MISSED = 3  # so many signs that have not come tell that a member gives none now
_COMING_SECONDS = 0.05  # the pause between two looks for members that have not come
_CONNECT_SECONDS = 0.5  # the longest that a store that has broken off takes to answer a new connection
_ANSWER = timedelta(days=1)  # the longest wait for the store's answer: `check` notices a stopped store, not an error
_LEFT = "left"  # the last sign of a member, in place of a number
_TAB = "\t"  # between a sign and what it tells of the training thread


def _end(text: str) -> None:
    end_at_once(text, SILENT_MEMBER_CODE)


class Neighbours:
    """The other members of a group. Does nothing in a group of one.

    store:   a torch.distributed.Store of all members
    key_prefix: begins the names of the keys that belong to this group; the same on all members
    member:  which of `size` members this one is
    seconds: the group timeout; 0: there is none
    end:     ends this process, with a text
    step_seconds: the step timeout; 0: there is none
    pause:   between two signs; 0: members give none
    thread:  the training thread of this member
    awaits_all: this member is in a collective, to which one that has left comes no more. For the training thread
    """

    def __init__(
        self,
        store: Any,
        key_prefix: str,
        member: int,
        size: int,
        seconds: float,
        end: Callable[[str], object] = _end,
        step_seconds: float = 0.0,
    ) -> None:
        self._store, self._key_prefix, self._member, self._end = store, key_prefix, member, end
        self._seconds, self._step_seconds = seconds, step_seconds
        self.pause = min((each for each in (seconds, step_seconds) if each), default=0.0) / SIGNS
        self.thread = TrainingThread()
        self.awaits_all = False
        self._others = [other for other in range(size) if other != member]
        self._signs: dict[int, str] = {}  # by member, its last sign
        self._heard: set[int] = set()  # whose sign is new since the last `check`
        self._silent = dict.fromkeys(self._others, 0.0)  # for how long, while this process ran
        self._unheard = dict.fromkeys(self._others, 0.0)  # the same time, if heartbeats do not count as signs
        self._stands: dict[int, tuple[list[str], float]] = {}  # by member, what it has told, and for how long the same
        self._checked = time.monotonic()
        self._connection: Any = None  # to the store; None: there is none yet, or it has broken off
        self._last: Any = None  # the last connection that could be made
        self._failed = 0  # how often the store was called in vain, without a success in between
        self._broken: BaseException | None = None  # a new connection was of no use
        self._troubles = Troubles(log, None)
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)

    def begin(self) -> None:
        """Begins to give signs, and to look for those of the others."""
        if self._others:
            start(self._thread)

    def await_all(self, seconds: float) -> None:
        """Waits until all members have come. Raises LimitExceeded, with those that have not, after so many seconds."""
        began = time.monotonic()
        notice_at = began + NOTICE_SECONDS
        with self._changed:
            while missing := [other for other in self._others if other not in self._signs]:
                if self._broken is not None:
                    raise self._broken
                now = time.monotonic()
                waited = f"waiting for {_named(missing)} of this worker's group to come to prepare"
                if now - began >= seconds:
                    raise LimitExceeded(f"gave up after --start-timeout {seconds:g} s: {waited}")
                if now >= notice_at:
                    log.warning("member %d is %s", self._member, waited)
                    notice_at = began + seconds
                self._changed.wait(min(notice_at, began + seconds) - now)

    def all_go_on(self) -> None:
        """Records a sign of each member that has not left.

        The heartbeats' thread calls it when the coordinator has accepted one. The coordinator accepts heartbeats only
        while no member's lease has run out.
        """
        with self._changed:
            self._silent = {other: silent if self._has_left(other) else 0.0 for other, silent in self._silent.items()}

    def check(self) -> None:
        """Ends this process where a member has given no sign for the group timeout, or lets the others wait for the
        step timeout. For threads that call often.
        """
        with self._changed:
            now = time.monotonic()
            passed, self._checked = now - self._checked, now
            if self._broken is not None or not self.pause or not self._have_come:
                return
            members, what = self._gone(passed), f"given no sign for {self._seconds:g} s (--group-timeout)"
            if not members and self._step_seconds:
                members = self._hanging(passed)
                what = (
                    f"made no step and no call of the session for {self._step_seconds:g} s, while another member "
                    "waits (--step-timeout)"
                )
            who = _named(members, " and ", {**self._signs, self._member: self._told("")}) if members else ""
        if members:
            has = "has" if len(members) == 1 else "have"
            self._end(
                f"{who} of this worker's group {has} {what}: this process ends, so that the group is started again"
            )

    def _gone(self, passed: float) -> list[int]:
        """Returns the members that have given no sign for the group timeout. passed: seconds since the last call"""
        # This process may have been stopped: the others were not silent then, as far as it knows.
        most = 2 * self._seconds / SIGNS
        for other in self._others:
            is_heard, has_left = other in self._heard, self._has_left(other)
            has_given = is_heard or (has_left and not self.awaits_all)
            self._silent[other] = 0.0 if has_given else self._silent[other] + min(passed, most)
            self._unheard[other] = 0.0 if is_heard or has_left else self._unheard[other] + passed
        self._heard.clear()
        return [other for other in self._others if self._seconds and self._silent[other] >= self._seconds]

    def _hanging(self, passed: float) -> list[int]:
        """Returns the members whose training thread has stayed in the script for the step timeout, while another one
        waits. passed: seconds since the last call

        Nobody may have moved. A member that makes steps, or comes to another collective, does not wait for them yet.
        Where a member is that gives no sign now, nobody knows: its thread may have gone on since.
        """
        if max(self._unheard.values()) > _MISSED * self.pause:
            self._stands.clear()
            return []
        signs = {**self._signs, self._member: self._told("")}
        told = {
            each: sign.split(_TAB)[1:3] for each, sign in signs.items() if _TAB in sign and not self._has_left(each)
        }
        for member, now in told.items():
            before, seconds = self._stands.get(member, ([], 0.0))
            self._stands[member] = now, seconds + min(passed, 2 * self.pause) if now == before else 0.0
        if min(self._stands[member][1] for member in told) < self._step_seconds:
            return []
        hanging = [member for member, (_, where) in sorted(told.items()) if where == SCRIPT]
        return hanging if len(hanging) < len(told) else []

    def _told(self, sign: str) -> str:
        """Returns a sign of this member, with its host and process, and where its training thread is."""
        who = f"{sign} {socket.gethostname()}, pid {os.getpid()}"
        return _TAB.join((who, str(self.thread.moves()), *self.thread.place())) if self._step_seconds else who

    def leave(self) -> None:
        """Tells the others that no more signs come, and ends the thread."""
        self._leaving.set()
        if self._thread.is_alive():
            join_within([self._thread], LEAVE_SECONDS)

    @property
    def _have_come(self) -> bool:
        """Whether all members have come."""
        return len(self._signs) == len(self._others)

    def _has_left(self, other: int) -> bool:
        """Whether a member has told that it gives no more signs."""
        return self._signs.get(other, "").startswith(_LEFT)

    def _run(self) -> None:
        count = 0
        while not self._leaving.is_set():
            try:
                if self._connection is None:
                    self._connection = self._connected()
                if self._have_come or not count:
                    self._connection.set(self._key(self._member), self._told(str(count)))
                self._read(count)
                count += 1
                self._reached()
            except Exception as error:
                self._broke_off(error)
            if self._have_come and not self.pause:
                return
            self._leaving.wait(self.pause if self._have_come else _COMING_SECONDS)
        with suppress(Exception):  # the process that kept the store may have ended
            if self._connection is not None:
                self._connection.set(self._key(self._member), self._told(_LEFT))

    def _connected(self) -> Any:
        """Returns a connection of this thread's own to the store: another thread may wait in a call of the store."""
        if not hasattr(self._store, "clone"):
            return self._store  # an earlier version of torch makes no second one
        if self._last is None:
            made = self._store.clone()
        else:
            _check_there(self._last)
            self._last.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
            made = self._last.clone()
        made.set_timeout(_ANSWER)
        self._last = made
        return made

    def _read(self, turn: int) -> None:
        """Reads the signs of the other members; until all have come, of those that have come since.

        turn: a number that rises by 1
        """
        for other in self._others if self._have_come else self._newcomers(turn):
            sign = self._connection.get(self._key(other)).decode()
            with self._changed:
                if self._signs.get(other) != sign:
                    self._signs[other] = sign
                    self._heard.add(other)
                    self._changed.notify_all()

    def _newcomers(self, turn: int) -> list[int]:
        """Returns members that have come, and were missing. It asks the store twice, however many are missing."""
        missing = [other for other in self._others if other not in self._signs]
        if self._connection.check([self._key(other) for other in missing]):
            return missing
        one = missing[turn % len(missing)]  # `await_all` names those that have not come
        return [one] if self._connection.check([self._key(one)]) else []

    def _reached(self) -> None:
        """Records that the store has answered."""
        if self._failed:
            self._failed = 0
            with self._changed:
                self._broken = None
                self._heard.update(self._others)  # it is not known who was silent meanwhile
            self._troubles.over("store")

    def _broke_off(self, error: Exception) -> None:
        """Records that a call to the store has failed."""
        self._connection = None
        self._failed += 1
        if self._failed == 1:
            log.debug("the connection to the group's store broke off, and is made anew: %s", error)
            return
        with self._changed:
            self._broken = error
            self._changed.notify_all()
        if self._have_come and not self._leaving.is_set():
            self._troubles.met(
                "store",
                "member %d cannot reach the store of its group, and tries again: until it can, it takes no member "
                "for gone, and the others may take it for gone (--group-timeout): %s",
                self._member,
                error,
            )

    def _key(self, member: int) -> str:
        return f"{self._key_prefix}/{member}"


def _check_there(store: Any) -> None:
    """Raises OSError if nothing listens at the address of a store. torch would write its trace to stderr each time."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        socket.create_connection((store.host, store.port), _CONNECT_SECONDS).close()


def _named(members: Iterable[int], between: str = ", ", signs: dict[int, str] | None = None) -> str:
    """Returns members with their numbers, and where they run, as far as they have told."""
    names = []
    for member in members:
        told, *thread = (signs or {}).get(member, "").split(_TAB)
        sign, _, who = told.partition(" ")
        who += ", has closed its session" if sign == _LEFT else ""
        who += f", at {thread[2]}" if thread and thread[2] else ""
        names.append(f"member {member}" + (f" ({who})" if who else ""))
    return between.join(names)
