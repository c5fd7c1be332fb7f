"""Steps that workers lost, or made again, because shards were rolled back to a checkpoint.

A rollback leaves a debt for each worker: the clock that the shards still have of it, and the one it was heard at last.
The debt is settled when the worker comes back and says how far it was, or when it is given up. In sync every shard goes
back, and the steps between are made again; in ssp and async they are lost on the shards that went back, also those of
workers that were gone before: their debts are settled at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_server.core.data_commits import Intervals, Span
from ps_server.core.snapshot import VersionRange

SPANS_KEPT = 32  # one that is forgotten counts as lost once more: too many, rather than too few


@dataclass
class StepAccounting:
    """The lost and repeated steps of one job.

    goes_back_together: all shards go back: see Consistency
    lost_steps, redone_steps: of all workers, since the job began
    unaccounted: debts: by rank, the clock that the shards have of the worker, and the one it was heard at last
    began:       by rank, the clock at which a worker of that rank joined first
    departed:    by rank of a worker that is gone, how far it was at least
    settled:     by rank, spans of clocks that are not lost any more: they were, and are counted, or it never made them,
                 because it came back at a later one; the last few
    """

    goes_back_together: bool
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: dict[int, tuple[int, int]] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)
    departed: dict[int, int] = field(default_factory=dict)
    settled: dict[int, tuple[Span, ...]] = field(default_factory=dict)

    def joined(self, rank: int, clock: int, before: int | None, pushed: int | None = None) -> None:
        """Books that a worker joined at a clock.

        before: the steps that it had finished, if it comes back; None: a new process
        pushed: the last clock that all shards have of it: of the step at hand, too, if nothing of that is missing
        """
        if before is not None and pushed is not None:
            before = max(before, pushed)
        self.settle(rank, before)
        self.departed.pop(rank, None)
        self.began.setdefault(rank, clock)
        if rank in self.settled:  # if all shards went back, it makes clocks once more that are counted as lost
            self.settled[rank] = tuple((start, min(end, clock)) for start, end in self._spans(rank) if start < clock)
        if before is not None:
            self._add(rank, before, clock)

    def gone(self, rank: int, clock: int) -> None:
        """Notes that a worker left, or was taken off, and how far it was when it was heard of last."""
        self.departed[rank] = clock

    def settle(self, rank: int, clock: int | None = None) -> None:
        """Settles a worker's debt, if it has one. clock: how far it was; None: as far as it was heard of."""
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
        """Settles the debt of a worker that did not come back, up to the clock at which it was heard of last.

        Steps that it made after that clock stay a debt, which is settled if it comes back after all.
        """
        if rank in self.unaccounted:
            restored, heard = self.unaccounted[rank]
            self.settle(rank)
            self.unaccounted[rank] = max(restored, heard), heard

    def rolled_back(
        self, reached: Sequence[VersionRange], heard: Mapping[int, int], gone: Mapping[int, int] | None = None
    ) -> None:
        """Notes each worker's debt after a rollback.

        reached: of each shard that went back, how far it is now
        heard:   by rank of a worker that was live, how far it was
        gone:    by rank of one that was not, how far it was, as shards know that kept what they hold
        """
        for rank in heard:
            self.settle(rank)  # of an earlier rollback, after which it never came back
        reached = [extent for extent in reached if extent.clocks]  # a shard that trains no bucket has nothing to lose
        if not reached:
            return
        for rank in heard.keys() | self.unaccounted.keys():
            restored = self._restored(rank, reached)
            before, clock = (restored, heard[rank]) if rank in heard else self.unaccounted[rank]
            if rank in heard or before < clock:  # otherwise it was given up, and that is booked
                self.unaccounted[rank] = min(before, restored), clock
        if self.goes_back_together:
            return  # the others make these steps again
        known = gone or {}
        for rank in (self.departed.keys() | known.keys()) - self.unaccounted.keys():
            clock = max(self.departed.get(rank, 0), known.get(rank, 0))
            self.unaccounted[rank] = self._restored(rank, reached), clock
            self.give_up(rank)

    def _spans(self, rank: int) -> tuple[Span, ...]:
        return self.settled.get(rank, ())

    def _add(self, rank: int, start: int, end: int) -> None:
        """Has steps from one clock to another count no more."""
        if start < end:
            settled = Intervals(self._spans(rank))
            settled.add(start, end)
            self.settled[rank] = tuple(settled.spans()[-SPANS_KEPT:])

    def _restored(self, rank: int, reached: Sequence[VersionRange]) -> int:
        """Returns how far the shards that went back are with a worker now."""
        known = [extent.clocks[rank] for extent in reached if rank in extent.clocks]
        return min(known, default=self.began.get(rank, 0))
