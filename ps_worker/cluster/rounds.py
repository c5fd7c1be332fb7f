"""A worker's part in the job's rounds, in which all live workers exchange a value; the coordinator keeps the order.

number  The k-th call of a script is the job's k-th round. A worker that lost its place for a while, or whose process
        starts late, gets what the others had in the rounds that are over, and so decides what they decided.
late    A process that joins a job under way is placed once more, at its first call after its first step: rounds of
        before its clock are behind it.
steps   In sync and ssp another worker may be in a step that waits for a step of this one, which waits for it here:
        this one makes a step without a gradient, which a mean leaves out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_worker.values import Offer, RoundNews

log = logging.getLogger("ps_worker")

NOTICE_SECONDS, AGAIN_SECONDS = 1.5, 10.0

Heard = Callable[[RoundNews], bool]


class Stepper(Protocol):
    """What rounds need of the way this worker trains."""

    @property
    def clock(self) -> int:
        """Steps finished."""

    @property
    def stepped(self) -> bool:
        """Whether this process has made a step of its own."""

    @property
    def came_late(self) -> bool:
        """Whether the job was under way when this process joined."""

    @property
    def restore_count(self) -> int:
        """How often the job was set back to a checkpoint, as far as this worker has gone back with it."""

    def offer(self, offer: Offer, heard: Heard) -> RoundNews | None:
        """Gives a value; returns the round when it is complete.

        None: `heard` ended it, or this worker took another place.
        """

    def empty_step(self) -> None:
        """A step without a gradient."""


class Rounds:
    """One process' calls, in their order. For one thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._next = 1
        self._placed = False

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all that take part, by rank, ascending; blocks until each has given its own.

        what: the call, for messages
        Raises LimitExceeded if they are too many bytes together, or not kept any more; InvalidRequest where the job
        was set back to a checkpoint meanwhile, and the others have gone back to steps that this worker cannot repeat.
        """
        stepper = self._stepper
        if stepper.came_late and stepper.stepped and not self._placed:
            self._next = max(self._next, self._ask())
            self._placed = True
        number, restored, waiting = self._next, stepper.restore_count, _Waiting(what)
        while (news := stepper.offer(Offer(number, stepper.clock, value), waiting.heard)) is None:
            if waiting.step_wanted:
                if stepper.restore_count != restored:
                    raise InvalidRequest(
                        f"the job was set back to a checkpoint while this worker was in session.{what}, and others "
                        "repeat steps that belong to a loop which is over here: start this worker again"
                    )
                waiting.step_wanted = False
                stepper.empty_step()
        self._next = number + 1
        if news.refused:
            raise LimitExceeded(f"session.{what}: {news.refused}")
        return dict(sorted(news.values.items()))

    def _ask(self) -> int:
        """Returns the round that comes next at this worker's clock."""
        numbers: list[int] = []

        def heard(news: RoundNews) -> bool:
            numbers.append(news.number)
            return False

        while not numbers:
            self._stepper.offer(Offer(0, self._stepper.clock), heard)
        return numbers[0]


class _Waiting:
    """Listens while a round is open: logs which workers are waited for, after a moment and then now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._due = time.monotonic() + NOTICE_SECONDS
        self.step_wanted = False

    def heard(self, news: RoundNews) -> bool:
        now = time.monotonic()
        if now >= self._due:
            ranks = ", ".join(map(str, news.waiting_for))
            log.warning("waiting in session.%s for worker%s %s", self._what, "s" * (len(news.waiting_for) > 1), ranks)
            self._due = now + AGAIN_SECONDS
        self.step_wanted = news.step_wanted
        return not news.step_wanted
