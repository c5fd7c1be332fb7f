"""A worker's part in the job's rounds of values, in which all live workers exchange a value. The coordinator orders
them.

number  The k-th call of a script is the job's k-th round. A worker that was away for a while, or whose process starts
        late, gets the values of the past rounds, and so makes the same decisions.
late    A process that joins a job under way asks once which round is next, at its first call after its first step. It
        takes no part in rounds from before its clock.
steps   In sync and ssp this worker may wait in a round for another worker, which waits in a step for a step of this
        one. This worker then makes a step without a gradient, which the mean leaves out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.messages.workers import ValueNews, group_state, member_states
from ps_runtime.troubles import Troubles
from ps_worker.cluster.participation import Participation, PlaceLost
from ps_worker.group import Group, RaisedByAll

log = logging.getLogger("ps_worker")

NOTICE_SECONDS, AGAIN_SECONDS = 1.5, 10.0

# Messages of a group's first member to the others while it is in a round.
_DONE, _STEP, _BACK = b"d", b"s", b"b"

T = TypeVar("T")
Heard = Callable[[ValueNews], bool]


class Stepper(Protocol):
    """The interface of the training loop for rounds of values."""

    @property
    def stepped(self) -> bool:
        """Whether this process has made a step of its own."""

    def empty_step(self) -> None:
        """Makes a step without a gradient."""

    def pause(self, seconds: float) -> None:
        """Waits for `seconds`. Raises PSError if this worker's part in the job has ended."""

    def come_back(self) -> bool:
        """Joins again after a loss of the place. Returns whether the step under way counts."""


class ValueRounds:
    """The exchanges of one process, in their order. For the training thread."""

    def __init__(self, participation: Participation, stepper: Stepper) -> None:
        self._participation = participation
        self._stepper = stepper
        self._next = 1
        self._placed = False  # a process that came late has asked for its round
        self._waits = Troubles(log, None)

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Gives a value, waits until all live workers have given theirs, and returns all of them, by rank, ascending.

        what: the name of the call, for messages
        Raises LimitExceeded if the values are too many bytes together, or are not kept any more; InvalidRequest if the
        job was rolled back to a checkpoint meanwhile, and the others have gone back to steps that this worker cannot
        repeat.
        """
        if self._participation.came_late and self._stepper.stepped and not self._placed:
            self._next = max(self._next, self._ask())
            self._placed = True
        restored, waiting = self._restore_count, Waiting(what, self._waits)
        while (news := self._offer(self._next, value, waiting.heard)) is None:
            if waiting.step_wanted:
                if self._restore_count != restored:
                    raise InvalidRequest(
                        f"the job was rolled back to a checkpoint while this worker was in session.{what}, and others "
                        "repeat steps that belong to a loop which is over here: start this worker again"
                    )
                waiting.step_wanted = False
                self._stepper.empty_step()
        self._next += 1
        waiting.over()
        if news.refused:
            raise LimitExceeded(f"session.{what}: {news.refused}")
        return dict(sorted(news.values.items()))

    def _ask(self) -> int:
        """Returns the round that comes next at this worker's clock."""
        numbers: list[int] = []

        def heard(news: ValueNews) -> bool:
            numbers.append(news.number)
            return False

        while not numbers:
            self._offer(0, b"", heard)
        return numbers[0]

    def _offer(self, number: int, value: bytes, heard: Heard) -> ValueNews | None:
        """Gives a value; returns the round when it is complete. None: `heard` has ended the call, or the place has
        changed.
        """
        participation = self._participation
        self._stepper.pause(0.0)
        clock = participation.connection.clock

        def stays(news: ValueNews) -> bool:
            return heard(news) and participation.has_place

        try:
            exchange = participation.coordinator.exchange
            return participation.call(lambda identity: exchange(identity, number, clock, value, stays))
        except PlaceLost:
            self._stepper.come_back()
            return None

    @property
    def _restore_count(self) -> int:
        return self._participation.connection.place.restore_count


class Exchanging(Protocol):
    """The calls of this process in which all live workers exchange a value."""

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all live workers; see ValueRounds."""


def value_rounds(participation: Participation, stepper: Stepper) -> Exchanging:
    """Returns the rounds of a worker of one process, or of a member of a group."""
    own = ValueRounds(participation, stepper)
    group = participation.group
    return own if group is None else GroupRounds(group, participation, stepper)


class GroupRounds:
    """The exchanges of one member of a group. The first member makes them with the values of all members. If it makes
    an empty step or joins again meanwhile, the other members follow.
    """

    def __init__(self, group: Group, participation: Participation, stepper: Stepper) -> None:
        self._group, self._stepper = group, stepper
        self._rounds = ValueRounds(participation, _Leading(group, stepper))

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all processes that take part, by rank and, in a group, by member."""
        with self._group.during(f"session.{what}"):
            return self._exchanged(value, what)

    def _exchanged(self, value: bytes, what: str) -> dict[int, bytes]:
        own = group_state(self._group.gather(value))
        while True:
            answer = self._group.from_first(lambda: _DONE + self._given(own, what))
            if answer[:1] == _DONE:
                break
            if answer == _STEP:
                self._stepper.empty_step()
            else:
                self._stepper.come_back()
        size = self._group.size
        of_groups = {int(rank): bytes.fromhex(each) for rank, each in json.loads(answer[1:]).items()}
        return {
            rank * size + member: each
            for rank, content in sorted(of_groups.items())
            for member, each in enumerate(member_states(content))
        }

    def _given(self, own: bytes, what: str) -> bytes:
        values = self._rounds.exchange(own, what)
        return json.dumps({rank: value.hex() for rank, value in values.items()}).encode()


class _Leading:
    """The stepper of a group's first member: the other members step, and join again, with it."""

    def __init__(self, group: Group, stepper: Stepper) -> None:
        self._group, self._stepper = group, stepper
        self.pause = stepper.pause

    @property
    def stepped(self) -> bool:
        return self._stepper.stepped

    def empty_step(self) -> None:
        self._with_all(_STEP, self._stepper.empty_step)

    def come_back(self) -> bool:
        return self._with_all(_BACK, self._stepper.come_back)

    def _with_all(self, message: bytes, make: Callable[[], T]) -> T:
        """Makes a call on all members. An error of it is raised on all of them, and need not be sent to them."""
        self._group.from_first(lambda: message)
        try:
            return make()
        except Exception as error:
            raise RaisedByAll from error


class Waiting:
    """Logs which workers an open round waits for: after a moment, and whenever they change."""

    def __init__(self, what: str, waits: Troubles) -> None:
        self._what, self._waits = what, waits
        self._has_said = False
        self._due = time.monotonic() + NOTICE_SECONDS
        self.step_wanted = False

    def over(self) -> None:
        """Records that the round is complete. If no wait in it was logged, an earlier logged wait counts as over, and
        the log says so.
        """
        if not self._has_said:
            self._waits.over(self._what)

    def heard(self, news: ValueNews) -> bool:
        """Processes news of the round. Returns False if this worker must make a step first, otherwise True."""
        now = time.monotonic()
        if now >= self._due:
            ranks = ", ".join(map(str, news.waiting_for))
            plural = "s" * (len(news.waiting_for) > 1)
            self._waits.met(
                self._what, "waiting in session.%s for worker%s %s", self._what, plural, ranks, detail=news.waiting_for
            )
            self._has_said = True
            self._due = now + AGAIN_SECONDS
        self.step_wanted = news.step_wanted
        return not news.step_wanted
