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
decides nothing, and those that do, in `check`, call no store. Without its answers no member gives a sign. A store that
breaks off is another matter: a process that has ended breaks its collectives, too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ps_protocol.errors import LimitExceeded
from ps_runtime.background import join_within, start
from ps_runtime.launch_id import SILENT_MEMBER_CODE
from ps_worker.launched import end_at_once

log = logging.getLogger("ps_worker")

NOTICE_SECONDS = 30.0  # after which a member says that it waits for others to come
LEAVE_SECONDS = 1.0  # the longest that a member takes to say that it leaves
SIGNS = 10  # that a member gives within the group timeout
_COMING_SECONDS = 0.05  # between two looks for those that have not come
_LEFT = "left"


def _end(text: str) -> None:
    end_at_once(text, SILENT_MEMBER_CODE)


class Neighbours:
    """The other members of a group. Does nothing in a group of one.

    store:   a torch.distributed.Store of all members
    place:   begins the names of the keys that belong to this group; the same on all members
    member:  which of `size` members this one is
    seconds: the group timeout; 0: there is none
    end:     ends this process, with a text
    pause:   between two signs
    """

    def __init__(
        self,
        store: Any,
        place: str,
        member: int,
        size: int,
        seconds: float,
        end: Callable[[str], object] = _end,
    ) -> None:
        self._store, self._place, self._member, self._seconds, self._end = store, place, member, seconds, end
        self.pause = seconds / SIGNS
        self._others = [other for other in range(size) if other != member]
        self._told: dict[int, str] = {}  # by member, its last sign
        self._heard: set[int] = set()  # whose sign is new since the last `check`
        self._silent = dict.fromkeys(self._others, 0.0)  # for how long, while this process ran
        self._checked = time.monotonic()
        self._broken: BaseException | None = None
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
            while missing := [other for other in self._others if other not in self._told]:
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
        """Counts as a sign of all members. For the thread that has had an answer to a heartbeat."""
        with self._changed:
            self._silent = dict.fromkeys(self._others, 0.0)

    def check(self) -> None:
        """Ends this process where a member has given no sign for the group timeout. For threads that call often."""
        with self._changed:
            now = time.monotonic()
            # This process may have been stopped: the others were not silent then, as far as it knows.
            passed, self._checked = min(now - self._checked, 2 * self.pause), now
            if self._broken is not None or not self._seconds or len(self._told) < len(self._others):
                return
            for other in self._others:
                has_given = other in self._heard or self._told[other] == _LEFT
                self._silent[other] = 0.0 if has_given else self._silent[other] + passed
            self._heard.clear()
            gone = [other for other in self._others if self._silent[other] >= self._seconds]
            who = _named(gone, " and ", self._told)
        if gone:
            self._end(
                f"{who} of this worker's group {'has' if len(gone) == 1 else 'have'} given no sign for "
                f"{self._seconds:g} s (--group-timeout): this process ends, so that the group is started again"
            )

    def leave(self) -> None:
        """Tells the others that no more signs come, and ends the thread."""
        self._leaving.set()
        if self._thread.is_alive():
            join_within([self._thread], LEAVE_SECONDS)

    def _run(self) -> None:
        who = f"{socket.gethostname()}, pid {os.getpid()}"
        count = 0
        try:
            # In a connection of its own: another thread may wait in a call of the store.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            while not self._leaving.is_set():
                store.set(self._key(self._member), f"{count} {who}")
                count += 1
                self._read(store)
                have_come = len(self._told) == len(self._others)
                if have_come and not self._seconds:
                    return
                self._leaving.wait(self.pause if have_come else _COMING_SECONDS)
            store.set(self._key(self._member), _LEFT)
        except Exception as error:  # its process has ended: see above
            log.debug("no signs in the group's store any more: %s", error)
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _read(self, store: Any) -> None:
        """Reads the signs of the other members."""
        for other in self._others:
            key = self._key(other)
            if other in self._told or store.check([key]):
                told = store.get(key).decode()
                with self._changed:
                    if self._told.get(other) != told:
                        self._told[other] = told
                        self._heard.add(other)
                        self._changed.notify_all()

    def _key(self, member: int) -> str:
        return f"{self._place}/{member}"


def _named(members: Iterable[int], between: str = ", ", told: dict[int, str] | None = None) -> str:
    """Returns members with their numbers, and where they run, as far as they have told."""
    names = []
    for member in members:
        _, _, who = (told or {}).get(member, "").partition(" ")
        names.append(f"member {member}" + (f" ({who})" if who else ""))
    return between.join(names)
