"""Steps that workers lost, or made again, because shards were rolled back to a checkpoint.

A rollback leaves a debt for each worker: the clock that the shards still have of it, and the last one that it reported.
The debt is settled when the worker comes back and reports its clock, or when the worker is given up. In sync every
shard goes back, and the workers make the steps between the two clocks again. In ssp and async these steps are lost on
the shards that went back. So are the steps of workers that had left before the rollback: their debts are settled at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_server.core.data_commits import Intervals, Span
from ps_server.core.snapshot import VersionRange

# Most spans kept for each rank. The steps of a dropped span may be counted once more: too many, rather than too few.
SPANS_KEPT = 32


@dataclass
class StepAccounting:
    """The lost and repeated steps of one job.

    goes_back_together: all shards go back together: see Consistency
    lost_steps, redone_steps: the steps of all workers that were lost, or made again, since the job began
    unaccounted: the debts: by rank, the clock that the shards have of the worker, and its last known clock
    began:       by rank, the clock at which a worker of that rank first joined
    departed:    by rank of a worker that is gone, its last known clock
    settled:     by rank, the last spans of clocks that need no more counting: they are counted as lost, or the worker
                 never made them, because it came back at a later clock
    """

    goes_back_together: bool
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: dict[int, tuple[int, int]] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)
    departed: dict[int, int] = field(default_factory=dict)
    settled: dict[int, tuple[Span, ...]] = field(default_factory=dict)

    def joined(self, rank: int, clock: int, before: int | None, pushed: int | None = None) -> None:
        """Records that a worker joined at `clock`.

        before: the number of steps that it had finished, if it comes back; None: a new process
        pushed: the last clock of which all shards have the worker's pushes. That may be the step under way, if all of
                its pushes have arrived
        """
        if before is not None and pushed is not None:
            before = max(before, pushed)
        self.settle(rank, before)
        self.departed.pop(rank, None)
        self.began.setdefault(rank, clock)
        if rank in self.settled:  # the worker makes the clocks after `clock` once more, so they may be lost once more
            self.settled[rank] = tuple((start, min(end, clock)) for start, end in self._spans(rank) if start < clock)
        if before is not None:
            self._add(rank, before, clock)

    def gone(self, rank: int, clock: int) -> None:
        """Records that a worker has left or was removed. clock: its last known clock"""
        self.departed[rank] = clock

    def settle(self, rank: int, clock: int | None = None) -> None:
        """Settles a worker's debt, if it has one. clock: the worker's clock before the rollback; None: its last known
        clock
        """
        if rank not in self.unaccounted:
            return
        restored, heard = self.unaccounted.pop(rank)
        clock = heard if clock is None else clock
        steps = max(0, clock - restored) - Intervals(self._spans(rank)).count(restored, clock)
        if self.goes_back_together:
            self.redone_steps += steps
        else:
            self.lost_steps += steps
            self._add(rank, restored, clock)

    def give_up(self, rank: int) -> None:
        """Settles the debt of a worker that did not come back, up to its last known clock.

        Steps that it made after that clock stay a debt, which is settled if it comes back after all.
        """
        if rank in self.unaccounted:
            restored, heard = self.unaccounted[rank]
            self.settle(rank)
            self.unaccounted[rank] = max(restored, heard), heard

    def rolled_back(
        self, reached: Sequence[VersionRange], heard: Mapping[int, int], gone: Mapping[int, int] | None = None
    ) -> None:
        """Records each worker's debt after a rollback.

        reached: the versions and clocks of each shard that was rolled back
        heard:   by rank, the last known clock of a worker that was live
        gone:    by rank of a worker that was not live, its clock on the shards that were not rolled back; None if there
                 are none
        """
        for rank in heard:
            self.settle(rank)  # the debt of an earlier rollback, after which the worker never came back
        reached = [extent for extent in reached if extent.clocks]  # a shard that trains no bucket has nothing to lose
        if not reached:
            return
        for rank in heard.keys() | self.unaccounted.keys():
            restored = self._restored(rank, reached)
            before, clock = (restored, heard[rank]) if rank in heard else self.unaccounted[rank]
            if rank in heard or before < clock:  # otherwise the worker was given up, and its debt is settled
                self.unaccounted[rank] = min(before, restored), clock
        if self.goes_back_together:
            return  # all shards go back: the workers that remain repeat the clocks of those that are gone
        known = gone or {}
        for rank in (self.departed.keys() | known.keys()) - self.unaccounted.keys():
            clock = max(self.departed.get(rank, 0), known.get(rank, 0))
            self.unaccounted[rank] = self._restored(rank, reached), clock
            self.give_up(rank)

    def _spans(self, rank: int) -> tuple[Span, ...]:
        return self.settled.get(rank, ())

    def _add(self, rank: int, start: int, end: int) -> None:
        """Marks the clocks from `start` to `end` as settled: later rollbacks do not count them again."""
        if start < end:
            settled = Intervals(self._spans(rank))
            settled.add(start, end)
            self.settled[rank] = tuple(settled.spans()[-SPANS_KEPT:])

    def _restored(self, rank: int, reached: Sequence[VersionRange]) -> int:
        """Returns the worker's clock on the shards that were rolled back."""
        known = [extent.clocks[rank] for extent in reached if rank in extent.clocks]
        return min(known, default=self.began.get(rank, 0))
