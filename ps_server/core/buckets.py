"""One job's buckets on one shard: the rule, the weights and the pending pushes of each, and how far they are together.

A partition's commands change them (partition.py); all here but `Bucket.restore` only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_server.core.commands import Commit, Draft
from ps_server.core.consistency import Live, UpdateRule
from ps_server.core.data_commits import Committed
from ps_server.core.dense import Assignment, DenseBucket, Gradient, Scratch
from ps_server.core.snapshot import BucketSnapshot, VersionRange, extent


@dataclass
class Pending:
    """What one worker has sent to one bucket for its next clock, and that does not count before its push does.

    draft:  the gradient, which may still change
    commit: the worker has ended its step: the draft counts as soon as it is here
    """

    clock: int
    draft: Draft | None = None
    commit: Commit | None = None
    assignment: Assignment | None = None


@dataclass(frozen=True, eq=False)
class Bucket:
    """One bucket: its place in the layout, the rule of its updates, its weights, and by rank what is pending."""

    spec: BucketSpec
    rule: UpdateRule[Gradient]
    weights: DenseBucket
    pending: dict[int, Pending] = field(default_factory=dict)

    def pending_at(self, rank: int, clock: int) -> Pending | None:
        """Returns what is pending of a worker for a clock."""
        pending = self.pending.get(rank)
        return pending if pending is not None and pending.clock == clock else None

    def snapshot(self, committed: Committed | None = None) -> BucketSnapshot:
        """Returns a copy of the bucket as it is, with the leased data in it. The caller keeps it from being stepped."""
        return BucketSnapshot(
            self.spec.index,
            self.rule.version,
            dict(self.rule.applied),
            self.weights.flat.clone(),
            self.weights.copy_state(),
            self.weights.groups(),
            committed or {},
        )

    def restore(self, snapshot: BucketSnapshot, owned: bool = False) -> None:
        """Becomes what a snapshot is. owned: its tensors are this bucket's to keep."""
        self.pending.clear()
        self.weights.restore(snapshot.weights, snapshot.state, snapshot.groups, owned)
        self.rule.restore(snapshot.version, snapshot.clocks)


class Buckets(Mapping[int, Bucket]):
    """The buckets of one job on this shard, by index.

    roster: the live workers by rank, as the partition keeps them
    """

    def __init__(self, spec: JobSpec, specs: Iterable[BucketSpec], roster: Mapping[int, Live]) -> None:
        scratch = Scratch()
        self._roster = roster
        self._buckets = {
            bucket.index: Bucket(bucket, UpdateRule(spec.consistency, roster), DenseBucket(spec, bucket, scratch))
            for bucket in specs
        }
        # Bytes of the weights on this shard, added up once: it is asked for at each push.
        self.parameter_bytes = sum(bucket.spec.nbytes for bucket in self.values())

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def _trained(self) -> list[Bucket]:
        return [bucket for bucket in self.values() if not bucket.spec.frozen]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state on this shard."""
        return sum(bucket.weights.optimizer_bytes for bucket in self.values())

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(
            add.contribution.values.nbytes
            for bucket in self.values()
            for add in list(bucket.rule.waiting.values())
            if add.contribution.values is not None
        )

    def frontier(self) -> int:
        """Returns the highest clock that any worker has reached on a bucket that trains."""
        return max((bucket.rule.frontier() for bucket in self._trained()), default=0)

    def pushed(self, rank: int) -> int | None:
        """Returns the last clock of which every bucket that trains has a push of this rank; None: no bucket trains."""
        return min((bucket.rule.pushed.get(rank, 0) for bucket in self._trained()), default=None)

    def versions(self) -> tuple[int, int]:
        """Returns the lowest and the highest version of a bucket that trains."""
        versions = [bucket.rule.version for bucket in self._trained()]
        return min(versions, default=0), max(versions, default=0)

    def clocks(self) -> dict[int, int]:
        """Returns the lowest clock over this shard's buckets, by live rank."""
        each = [bucket.rule.clocks() for bucket in self._trained()]
        return {rank: min((clocks[rank] for clocks in each), default=0) for rank in self._roster}

    def departed_clocks(self) -> dict[int, int]:
        """Returns the lowest clock over this shard's buckets, by rank of a worker that is not live any more."""
        return {rank: clock for rank, clock in self.extent().clocks.items() if rank not in self._roster}

    def extent(self) -> VersionRange:
        """Returns how far the buckets that train are, with the clocks of the dead."""
        return extent((bucket.rule.version, bucket.rule.applied) for bucket in self._trained())
