"""Steps that workers lost, or made again, because shards were rolled back to a checkpoint.

A rollback leaves a debt for each worker: the clock that the shards still have of it, and the one it was heard at last.
The debt is settled when the worker comes back and says how far it was, or when it is given up. In sync every shard goes
back, and the steps between are made again; in ssp and async they are lost on the shards that went back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_server.core.snapshot import VersionRange

SKIPS_KEPT = 32  # one that is forgotten counts as lost, where it is not: too many, rather than too few


@dataclass
class StepAccounting:
    """The account of one job.

    aggregate:   True in sync: every shard goes back
    lost_steps, redone_steps: of all workers, since the job began
    unaccounted: debts: by rank, the clock that the shards have of the worker, and the one it was heard at last
    began:       by rank, the clock at which a worker of that rank joined first
    skipped:     by rank, spans of clocks that it never made, because it came back at a later one; the last few
    """

    aggregate: bool
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: dict[int, tuple[int, int]] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def joined(self, rank: int, clock: int, before: int | None) -> None:
        """Books that a worker joined at a clock. before: how far it was, if it comes back; None: a new process."""
        self.settle(rank, before)
        self.began.setdefault(rank, clock)
        if before is not None and before < clock:
            self.skipped[rank] = (*self.skipped.get(rank, ()), (before, clock))[-SKIPS_KEPT:]

    def settle(self, rank: int, clock: int | None = None) -> None:
        """Settles a worker's debt, if it has one. clock: how far it was; None: as far as it was heard of."""
        if rank not in self.unaccounted:
            return
        restored, heard = self.unaccounted.pop(rank)
        clock = heard if clock is None else clock
        steps = max(0, clock - restored)
        steps -= sum(max(0, min(end, clock) - max(start, restored)) for start, end in self.skipped.get(rank, ()))
        if self.aggregate:
            self.redone_steps += steps
        else:
            self.lost_steps += steps

    def give_up(self, rank: int) -> None:
        """Settles for what was heard of a worker that did not come back. What it did beyond stays a debt."""
        if rank in self.unaccounted:
            restored, heard = self.unaccounted[rank]
            self.settle(rank)
            self.unaccounted[rank] = max(restored, heard), heard

    def rolled_back(self, reached: Sequence[VersionRange], heard: Mapping[int, int]) -> None:
        """Notes each worker's debt after a rollback.

        reached: of each shard that went back, how far it is now
        heard:   by rank of a worker that was live, how far it was
        """
        for rank in heard:
            self.settle(rank)  # of an earlier rollback, after which it never came back
        reached = [extent for extent in reached if extent.clocks]  # a shard that trains no bucket has nothing to lose
        for rank in heard.keys() | self.unaccounted.keys() if reached else ():
            known = [extent.clocks[rank] for extent in reached if rank in extent.clocks]
            restored = min(known, default=self.began.get(rank, 0))
            before, clock = (restored, heard[rank]) if rank in heard else self.unaccounted[rank]
            if rank in heard or before < clock:  # otherwise it was given up, and that is booked
                self.unaccounted[rank] = min(before, restored), clock
