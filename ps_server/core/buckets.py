"""One job's buckets on one shard: the rule, the weights and the pending pushes of each.

A partition's commands change them (partition.py); all here but `Bucket.restore` only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_server.core.commands import Commit, Draft
from ps_server.core.consistency import Live, UpdateRule, update_rule
from ps_server.core.data_commits import Committed
from ps_server.core.dense import Assignment, DenseBucket, Gradient
from ps_server.core.snapshot import BucketSnapshot
from ps_server.core.sums import Agreement, Scratch


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

    def make_pending(self, rank: int, clock: int) -> Pending:
        """Returns what is pending of a worker for a clock; nothing is of another clock."""
        return self.pending.setdefault(rank, Pending(clock))

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
            None if self.weights.sent is None else self.weights.sent.flat.clone(),
            self.rule.joined_at(),
            self.weights.stage if self.weights.stage.number else None,
        )

    def restore(self, snapshot: BucketSnapshot, owned: bool = False) -> None:
        """Becomes what a snapshot is. owned: its tensors are this bucket's to keep."""
        self.pending.clear()
        values = snapshot.weights, snapshot.state, snapshot.groups
        self.weights.restore(*values, owned, snapshot.sent, snapshot.stage)
        self.rule.restore(snapshot.version, snapshot.clocks, snapshot.pushed)


class Buckets(Mapping[int, Bucket]):
    """The buckets of one job on this shard, by index.

    roster: the live workers by rank, as the partition keeps them
    """

    def __init__(self, spec: JobSpec, specs: Iterable[BucketSpec], roster: Mapping[int, Live]) -> None:
        scratch = Scratch()
        self._buckets = {
            bucket.index: Bucket(bucket, update_rule(spec.consistency, roster), DenseBucket(spec, bucket, scratch))
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

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state on this shard."""
        return sum(bucket.weights.optimizer_bytes for bucket in self.values())

    def agreement(self) -> Agreement | None:
        """Returns how alike workers have moved, over the last rounds of all buckets; None: none is known."""
        known = [bucket.weights.agreement for bucket in self.values()]
        return sum((each for each in known if each is not None), Agreement()) if any(known) else None

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(
            add.contribution.values.nbytes
            for bucket in self.values()
            for add in list(bucket.rule.waiting.values())
            if add.contribution.values is not None
        )
