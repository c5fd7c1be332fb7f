"""Steps of a group: all members make one, or none does.

end    Each member ends the step at hand. The members compare before any of them pushes. If one raises an error, all
       raise it. If one leaves the step out, because its gradient is not finite, all do. Here they also decide whether
       the group's assignments count, and send them. If the servers refuse those of one member, no member pushes. What
       the script has set on any of them before a step that none makes goes with the next one.
push   Each member pushes what it holds. They compare again when all pushes are through. If one has lost the place, all
       take the next one, and push the step again from there. If servers refuse the push of one, all raise its error,
       and all go on from the clock of the step. What was not pushed of it is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ps_runtime.signals import interruptible
from ps_worker.cluster.participation import Participation, PlaceLost, end_last_step
from ps_worker.group import Group
from ps_worker.model.base import Base
from ps_worker.strategies.assignments import Assignments
from ps_worker.strategies.unfinished import Fate, Unfinished

log = logging.getLogger("ps_worker")

T = TypeVar("T")

# What becomes of a step, the last one first where members differ: what is pushed again by one is by all. Shards skip
# what they have had.
_FATES = (
    *(Fate.COUNTS, Fate.NO_STEP, Fate.INTERRUPTED, Fate.NOT_KNOWN, Fate.OF_LATER_WEIGHTS, Fate.DATA_COMES_AGAIN),
    Fate.AGAIN,
)


@dataclass
class StepsTogether:
    """One member's part in the steps of its group. For the training thread.

    assignments: what the script has set
    end:       ends the step of an optimizer, or of none, on this member; returns whether it has no gradient
    leave_out: removes the gradient from the step that has ended
    push:      pushes it, with all members
    come_back: takes the next place, with all members
    broke_off: ends an exchange after an error
    base:      sends parameters that members hold alike from their owners to the others
    """

    group: Group
    participation: Participation
    assignments: Assignments
    end: Callable[[int | None], bool]
    leave_out: Callable[[], None]
    push: Callable[[], None]
    come_back: Callable[[], bool]
    broke_off: Callable[[BaseException], None]
    base: Base
    _signals: list[BaseException] = field(default_factory=list)
    _has_failed: bool = False  # the push of the step at hand, for some member: weights may be there all the same

    def step(self, index: int | None) -> bool | None:
        """Makes a step of one optimizer, or of none. Returns what JobTraining.in_place does."""

        def step() -> None:
            self._end(index)
            self.push()

        with self.group.during("optimizer.step"):
            return self._in_place(step)

    def run(self, exchange: Callable[[], None], compares: bool) -> bool | None:
        """Runs an exchange with the shards that is no step. compares: see JobTraining.in_place"""
        if compares:
            return self._in_place(exchange, shares=False)
        here = partial(in_this_place, self.participation, exchange)
        return self._in_place(lambda: self.group.all_through(here))

    def _in_place(self, make: Callable[[], None], shares: bool = True) -> bool | None:
        """Makes a call of all members, whose errors all of them raise; where the place is lost, takes the next one.

        shares: they hand on what they hold alike then
        """
        try:
            make()
        except PlaceLost:
            return self.go_on()
        except BaseException as error:
            self.broke_off(error)
            self._share_what_failed()
            raise
        if shares:
            self.base.share_alike()
        return None

    def go_on(self) -> bool:
        """Takes the next place with all members, who hand on what they hold alike there: each pulls only what it owns.
        Returns what JobTraining.come_back does."""
        self._has_failed = False
        with self.group.during("optimizer.step"):  # in no other call
            try:
                counts = self.come_back()
            except BaseException:
                self._share_what_failed()
                raise
            try:
                self.base.share_alike()  # also where a signal is to act: the others wait for this member
            finally:
                self.arrived()
        return counts

    def _share_what_failed(self) -> None:
        """Hands on the weights of a push that has failed for some member: the others may have pushed theirs."""
        if self._has_failed:
            self._has_failed = False
            self.base.share_alike()

    def _end(self, index: int | None) -> None:
        """Ends the step at hand on all members. Raises what any of them raises."""
        error: Exception | None = None
        is_empty = False
        try:
            if self.participation.may_call:
                end_last_step(self.participation)
        except Exception as raised:
            error = raised
        if error is None or isinstance(error, PlaceLost):
            try:
                is_empty = self.end(index)
            except Exception as raised:
                error = raised
        if error is None and not self.participation.has_place:
            error = PlaceLost()
        own_lowest = min(self.participation.ranks, default=self.participation.rank)
        clock = self.participation.connection.clock
        lost, (some_empty, lowest, some_assign, highest, behind) = self.group.compare(
            error, is_empty, -own_lowest, self.assignments.has_some, clock, -clock
        )
        if some_empty and not is_empty:
            self.leave_out()
        self.assignments.rely_on(-lowest, self.participation.rank)
        if lost is not None:
            raise lost
        if highest != -behind:
            self.group.all_through(partial(self._reach, highest))
        if not some_empty and self.base.alike is not None:
            self.base.alike.check()
        if some_assign:
            self.group.all_through(self._assign)

    def _reach(self, clock: int) -> None:
        """Leaves out what this member has not pushed of a step: it was interrupted before, and others have pushed."""
        connection = self.participation.connection
        if connection.clock < clock:
            connection.fail(clock)
            end_last_step(self.participation)
            log.warning("step %d was interrupted before this member had pushed its part of it, which is lost", clock)

    def _assign(self) -> None:
        if self.assignments.send(self.participation.connection):
            self.participation.settle()

    def push_failed(self, error: BaseException, unfinished: Unfinished, clock: int) -> None:
        """Notes that the push of a clock has failed for one member or more: others may have pushed what is theirs. All
        go on from that clock, and what shards have not had of it is left out, or pushed again from the next place. A
        signal fails nothing that was sent; where it came before that, this member goes on from that clock, too."""
        connection = self.participation.connection
        if not isinstance(error, Exception):
            if connection.clock < clock:
                connection.fail(clock)
            return
        unfinished.begun = unfinished.begun or clock
        if not isinstance(error, PlaceLost):
            self._has_failed = True
            connection.fail(clock)

    def fate(self, own: Fate) -> Fate:
        """Returns the fate of the current step in a new place, for all members. own: the fate on this one"""
        with self.interrupt_later(), interruptible():  # another member may hang
            _, (highest,) = self.group.compare(None, _FATES.index(own))
            return _FATES[highest]
        return own

    @contextmanager
    def interrupt_later(self) -> Iterator[None]:
        """A `with` block in which this member waits for the others on its way to a place. A signal ends it, and acts
        once the member has arrived: otherwise it would go on with one half of what the others do there."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as signal:
            self._signals.append(signal)

    def arrived(self) -> None:
        """Raises a signal that came on the way to the place."""
        signals = [*self._signals]
        self._signals.clear()
        for signal in signals:
            raise signal


def in_this_place(participation: Participation, make: Callable[[], T]) -> T:
    """Returns what a call returns that is made from the place at hand. Raises PlaceLost where it is lost, and the error
    that has ended this worker's part in the job.
    """
    if not participation.may_call:
        raise PlaceLost
    return make()
