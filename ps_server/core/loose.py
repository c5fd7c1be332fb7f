"""A table's protocol in a job of sync whose rule is looser than the job's: each push is an update, in order of arrival.

The job's buckets have one clock, and a checkpoint of the job is of one. Rows have none: they are applied as they come.
So a snapshot of the table is taken where it has all contributions up to the clock, and none beyond:

    hold   has contributions of later clocks wait, from when the clock is named
    is_at  says that every live worker's contribution of the clock is in

No worker waits for ever. A worker pushes for the clock after when its step of the clock has ended, and that ends when
the buckets have all workers' gradients of it. So what is held waits for pushes of rows that leave together with these
gradients, or for their worker to be gone; and those wait for nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol.modes import Consistency
from ps_server.core.consistency import NOT_BEGUN, Add, Live, Step, T, UpdateRule
from ps_server.core.quorum import update_rule
from ps_server.core.snapshot import VersionRange


@dataclass
class LooseRule(UpdateRule[T]):
    """The state of one table.

    held_after: contributions of later clocks wait; None: none do
    """

    held_after: int | None = None

    def is_awaited(self, rank: int, clock: int) -> bool:
        """Whether others wait for this contribution: kept back, what is held would wait for ever."""
        return not self._is_held(clock) and self.held_after is not None

    def next(self) -> Add[T] | Step | None:
        """Returns what to do now; see UpdateRule.next."""
        if self.added or not self.initialised:
            return super().next()
        return next((add for add in self.waiting.values() if not self._is_held(add.clock)), None)

    def hold(self, clock: int | None) -> None:
        """Has contributions of later clocks wait; None: no longer."""
        self.held_after = clock

    def is_at(self, clock: int) -> bool:
        """Whether all contributions of a clock are in that come. Where no worker is live, more may come of others."""
        reached = [self.applied.get(rank, 0) for rank in self.roster]
        coming = [add.clock for add in self.added] + [add.clock for add in self.waiting.values()]
        return bool(reached) and min(reached) >= clock and min(coming, default=clock + 1) > clock

    def has_passed(self, clock: int) -> bool:
        """Whether a contribution of a later clock is here: a thread may be adding it at this moment."""
        return self.frontier() > clock

    def versions(self) -> tuple[int, int]:
        """Returns the clock, where a bucket of the job has its version: the lowest and the highest.

        They are equal where nothing is on its way from a worker, as far as is known here.
        """
        highest = self.frontier()
        ranks = self.roster.keys() | self.waiting.keys() | {add.rank for add in self.added}
        return min((self.applied.get(rank, 0) for rank in ranks), default=highest), highest

    def extent(self) -> VersionRange:
        """Returns how far a snapshot is that is taken now. What a worker joined at is no contribution: of a clock that
        is held, no rank is further."""
        held = self.held_after
        if held is None or not self.is_at(held):
            return super().extent()
        return VersionRange(held, held, {rank: min(clock, held) for rank, clock in self.applied.items()})

    def _is_held(self, clock: int) -> bool:
        return self.held_after is not None and clock > self.held_after


def table_rule(
    job: Consistency, own: Consistency | None, roster: Mapping[int, Live], begun: bool = True
) -> UpdateRule[T]:
    """Returns the rule of a table at its beginning.

    own:   its own consistency; None: it has the job's
    begun: it begins at once, and not when rank 0 has sent its rows
    """
    is_loose = own is not None and job.one_clock
    rule: UpdateRule[T] = (
        LooseRule(own, roster, begun) if own is not None and is_loose else update_rule(own or job, roster, begun)
    )
    if not begun:
        rule.awaits = NOT_BEGUN
    return rule
