"""One job's buckets on one shard: roster, protocol and weights put together.

Not thread-safe. `check` and `DenseBucket` methods are the heavy parts and touch nothing shared, so that the caller
can run them outside of the lock that guards the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ps_protocol.codecs import PLAIN, gradient_codec
from ps_protocol.data import DataRange
from ps_protocol.errors import (
    Backlogged,
    Fenced,
    InvalidRequest,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    OutOfOrder,
)
from ps_protocol.job import HyperParameters, JobSpec, NonFinite
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.optimizers import check_change, check_hyper_parameters, is_scalar_state, required_state
from ps_protocol.tensors import is_finite
from ps_server.core.budget import Held, derived_limit
from ps_server.core.commands import Commit, Push, PushKind, SharedBucket, Staged
from ps_server.core.consistency import Admission, Live, UpdateRule
from ps_server.core.data_commits import Committed, DataCommits, check_ranges
from ps_server.core.dense import Assignment, DenseBucket, Gradient, Scratch
from ps_server.core.membership import check_incarnation, check_key
from ps_server.core.snapshot import BucketSnapshot, VersionRange, extent

ASSIGNED_WEIGHTS = 4  # what may be assigned and wait for its step, in weights: they and three optimizer states


@dataclass
class Pending:
    """What one worker has sent to one bucket for its next clock, and that does not count before its push does.

    draft:  the gradient, which may still change
    commit: the worker has ended its step: the draft counts as soon as it is here
    """

    clock: int
    draft: Gradient | None = None
    commit: Commit | None = None
    assignment: Assignment | None = None


class BucketPartition:
    """One bucket: its place in the layout, its protocol state, its weights, and by rank what is pending."""

    def __init__(self, spec: JobSpec, bucket: BucketSpec, roster: Mapping[int, Live], scratch: Scratch) -> None:
        self.layout = bucket
        self.protocol: UpdateRule[Gradient] = UpdateRule(spec.consistency, roster)
        self.weights = DenseBucket(spec, bucket, scratch)
        self.pending: dict[int, Pending] = {}

    def pending_of(self, rank: int, clock: int) -> Pending:
        """What is pending of a worker for a clock; what was of another clock is dropped."""
        found = self.pending.get(rank)
        if found is None or found.clock != clock:
            found = self.pending[rank] = Pending(clock)
        return found

    def image(self, committed: Committed | None = None) -> BucketSnapshot:
        """A copy of the bucket as it is, with the leased data in it. The caller keeps it from being stepped."""
        weights, protocol = self.weights, self.protocol
        state = weights.copy_state()
        return BucketSnapshot(
            self.layout.index,
            protocol.version,
            dict(protocol.applied),
            weights.flat.clone(),
            state,
            weights.groups(),
            committed or {},
        )

    def restore(self, image: BucketSnapshot) -> None:
        """Becomes what the image is."""
        self.pending.clear()
        self.weights.restore(image.weights, image.state, image.groups)
        self.protocol.restore(image.version, image.clocks)


class JobPartition:
    """The buckets of one job that this shard holds."""

    def __init__(
        self, spec: JobSpec, indices: Iterable[int], staged_limit: int | None = None, norm_limit: float = math.inf
    ) -> None:
        """staged_limit: bytes that may be staged here; past it, pushes are told to try again, but for those that an
        update waits for. None: as much as the weights here, or two buckets for each worker.
        norm_limit: the L2 norm that the gradient in one push may have."""
        layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        indices = list(indices)
        odd = next((index for index in indices if not 0 <= index < len(layout.buckets)), None)
        if odd is not None or len(set(indices)) != len(indices):
            raise InvalidRequest(f"expected buckets below {len(layout.buckets)}, each once, got {odd}")
        self.spec = spec
        self.roster: dict[int, Live] = {}
        scratch = Scratch()
        self.buckets = {i: BucketPartition(spec, layout.buckets[i], self.roster, scratch) for i in indices}
        # Bytes of the weights on this shard, added up once: it is asked for at each push.
        self.parameter_bytes = sum(bucket.layout.nbytes for bucket in self.buckets.values())
        self.data = DataCommits(index for index in indices if not layout.buckets[index].held)
        self._retired: dict[int, int] = {}  # by rank, the highest incarnation that was retired
        self._fenced = 0  # no incarnation up to this one may come back
        self.layout = layout
        self._checked: dict[int, HyperParameters] = {}
        self._staged_limit = staged_limit
        buckets = self.buckets  # not `self`: in a circle, a job that was dropped would keep its memory for a while

        def is_staged(index: int, rank: int, clock: int) -> bool:
            found = buckets[index].protocol.waiting.get(rank)
            return found is not None and found.clock == clock

        def is_pending(index: int, rank: int, clock: int) -> bool:
            found = buckets[index].pending.get(rank)
            return found is not None and found.clock == clock

        self._held, self._drafts, self._assigned = Held(is_staged), Held(is_pending), Held(is_pending)
        self._norm_limit = norm_limit

    def bucket(self, index: int) -> BucketPartition:
        """The bucket with this index. Raises NotFound when this shard does not hold it."""
        if index not in self.buckets:
            raise NotFound(f"this shard holds no bucket {index} of job {self.spec.name!r}")
        return self.buckets[index]

    def trained(self, index: int) -> BucketSpec:
        """The layout of a bucket that an optimizer steps. Raises InvalidRequest for one that is held."""
        bucket = self.bucket(index).layout
        if bucket.held:
            raise InvalidRequest(f"bucket {index} holds what no optimizer steps: it is not in a segment")
        return bucket

    def check_worker(self, rank: int, incarnation: int, key: bytes | None = None) -> None:
        """Raises UnknownWorker or Fenced unless this is a live worker, Forbidden if a key is given and not its own."""
        live = self.roster.get(rank)
        check_incarnation(rank, incarnation, live.incarnation if live else None)
        if live is not None and key is not None:
            check_key(rank, key, live.key)

    # -- who takes part ----------------------------------------------------------------------------------------------

    def admit(self, rank: int, incarnation: int, clock: int | None, key: bytes = b"") -> int:
        """Counts a worker as live from `clock` on (None: from this shard's frontier on); answers with the frontier.

        An older incarnation of the rank is fenced at once. Repeating a call changes nothing. A call that comes after
        its worker was retired (the coordinator had given up on it) raises Fenced: nobody would ever retire it again.
        """
        live = self.roster.get(rank)
        if incarnation <= max(self._retired.get(rank, 0), self._fenced):
            raise Fenced(f"worker {rank}: incarnation {incarnation} was retired before it was admitted")
        if live is not None and live.incarnation > incarnation:
            check_incarnation(rank, incarnation, live.incarnation)
        frontier = max((b.protocol.frontier() for b in self._trained()), default=0)
        start = frontier if clock is None else clock
        known = live is not None and live.incarnation == incarnation
        if not (known and (clock is None or live == Live(incarnation, start, key))):
            self._own(rank)
            self.roster[rank] = Live(incarnation, start, key)
            for bucket in self.buckets.values():
                bucket.pending.pop(rank, None)
                bucket.protocol.admit_worker(rank, start)
        return frontier

    def retire(self, rank: int, incarnation: int) -> None:
        """Stops counting a worker as live, for good; a newer incarnation is left alone.

        What it had staged stays staged, in memory of our own: from here on it may write its own again.
        """
        self._retired[rank] = max(incarnation, self._retired.get(rank, 0))
        live = self.roster.get(rank)
        if live is not None and live.incarnation <= incarnation:
            del self.roster[rank]
            self._own(rank)
            for bucket in self.buckets.values():
                bucket.pending.pop(rank, None)

    def restore(self, images: Mapping[int, BucketSnapshot], last_incarnation: int) -> None:
        """Goes on from images of all its buckets. Nobody is live; who was, up to that incarnation, has to join again.

        Raises InvalidRequest if there is a bucket without an image, before anything is changed.
        """
        missing = sorted(self.buckets.keys() - images.keys())
        if missing:
            raise InvalidRequest(f"expected an image of each bucket, got none of {missing[:8]}")
        self._fenced = last_incarnation
        self.roster.clear()
        for index, bucket in self.buckets.items():
            bucket.restore(images[index])
        self.data.restore({index: images[index].committed for index in self.buckets})

    def _own(self, rank: int) -> None:
        for bucket in self.buckets.values():
            waiting = bucket.protocol.waiting.get(rank)
            if waiting is not None:
                bucket.protocol.waiting[rank] = replace(waiting, contribution=waiting.contribution.owned())

    # -- pushes ------------------------------------------------------------------------------------------------------

    def check(self, push: Push) -> Gradient:
        """What a push contributes. Raises InvalidRequest naming what was expected and what came. Changes nothing."""
        bucket = self.bucket(push.bucket).layout
        check_ranges(push.ranges)
        if push.kind is not PushKind.INITIAL_VALUE:
            self.trained(push.bucket)
        self._check_positions(bucket, push.absent)
        self._check_groups(push.groups or {})
        is_gradient, count = push.kind is PushKind.GRADIENT, bucket.numel
        codec = gradient_codec(self.spec, bucket) if is_gradient else PLAIN[bucket.dtype]
        if push.kind is PushKind.SKIP or (push.kind is PushKind.ASSIGN_STATE and not push.state):
            count = 0
        elif push.kind is PushKind.ASSIGN_STATE and is_scalar_state(self._optimizer(bucket), push.state):
            codec, count = PLAIN["float32"], len(bucket.segments)
        expected = codec.size(count)
        if len(push.payload) != expected:
            raise InvalidRequest(
                f"bucket {push.bucket}: expected {expected} bytes ({count} x {codec.dtype}), got {len(push.payload)}"
            )
        if not count:
            return Gradient(None, push.absent, push.groups)
        values, borrowed = codec.decode(push.payload), push.borrowed
        if not is_gradient:
            return Gradient(values, push.absent)
        limited = self._norm_limit < math.inf
        if limited and borrowed:
            values, borrowed = values.clone(), False  # or its worker could write another after this one was checked
        if not push.finite and self.spec.non_finite is not NonFinite.ALLOW:
            for position, segment in enumerate(bucket.segments):
                if position not in push.absent and not is_finite(
                    values[segment.offset : segment.offset + segment.length]
                ):
                    if self.spec.non_finite is NonFinite.SKIP:
                        return Gradient(None, push.absent, push.groups)
                    name = self.spec.parameters[segment.parameter].name
                    raise NonFiniteGradient(f"the gradient of {name} from worker {push.rank} is not finite")
        if limited:
            self._check_norm(push, values)
        return Gradient(values, push.absent, push.groups, borrowed)

    def check_commit(self, commit: Commit) -> None:
        """Raises as `check` for what a commit names. Changes nothing."""
        check_ranges(commit.ranges)
        self._check_groups(commit.groups)
        for one in commit.buckets:
            self._check_positions(self.trained(one.index), one.absent)

    def _check_groups(self, groups: Mapping[int, HyperParameters]) -> None:
        for group, hyper_parameters in groups.items():
            if not 0 <= group < len(self.spec.groups):
                raise InvalidRequest(f"expected a group below {len(self.spec.groups)}, got {group}")
            if self._checked.get(group) != hyper_parameters:
                registered, name = self.spec.groups[group], self.spec.optimizer_of(group)
                check_hyper_parameters(name, {**registered, **hyper_parameters})
                check_change(name, registered, hyper_parameters)
                self._checked[group] = hyper_parameters

    @staticmethod
    def _check_positions(bucket: BucketSpec, absent: Iterable[int]) -> None:
        for position in absent:
            if position >= len(bucket.segments):
                raise InvalidRequest(
                    f"bucket {bucket.index} has {len(bucket.segments)} segments, got segment {position}"
                )

    def _optimizer(self, bucket: BucketSpec) -> str:
        return self.spec.optimizers[bucket.optimizer]

    def _check_norm(self, push: Push, values: torch.Tensor) -> None:
        segments = self.bucket(push.bucket).layout.segments
        present = [s for position, s in enumerate(segments) if position not in push.absent]
        wide = torch.float32 if values.itemsize < 4 else values.dtype  # half types overflow
        norms = [torch.linalg.vector_norm(values[s.offset : s.offset + s.length], dtype=wide).item() for s in present]
        norm = math.hypot(*norms)
        if not norm <= self._norm_limit:  # NaN is past every limit
            raise LimitExceeded(
                f"worker {push.rank}: the gradient of bucket {push.bucket} has norm {norm:g}, "
                f"and max-push-norm is {self._norm_limit:g}"
            )

    def stage(self, push: Push, gradient: Gradient) -> Staged:
        """Takes a checked push, once. Changes nothing if it raises UnknownWorker, Fenced, OutOfOrder or Backlogged."""
        self.check_worker(push.rank, push.incarnation, push.key)
        bucket = self.bucket(push.bucket)
        protocol = bucket.protocol
        if push.kind is PushKind.INITIAL_VALUE or (push.kind is PushKind.ASSIGN_STATE and push.clock == 0):
            return self._initialise(push, bucket, gradient)
        if not protocol.initialised:
            raise InvalidRequest(f"bucket {push.bucket} has no initial value yet: pull before the first push")
        start = self.roster[push.rank].start
        if push.clock <= start:  # taken for a repeat, it would be acknowledged and lost
            raise OutOfOrder(f"worker {push.rank} joined at clock {start}, and a push of clock {push.clock} came")
        if protocol.is_repeat(push.rank, push.clock):
            return Staged(protocol.version, duplicate=True)
        if push.kind in (PushKind.ASSIGN, PushKind.ASSIGN_STATE):
            return self._keep_assignment(push, bucket, gradient)
        pending = bucket.pending.get(push.rank)
        commit = pending.commit if pending is not None and pending.clock == push.clock else None
        if push.draft and commit is None:
            self._check_draft(push, gradient)
            bucket.pending_of(push.rank, push.clock).draft = gradient
            return Staged(protocol.version, duplicate=False, kept=True)
        ranges = push.ranges
        if push.draft and commit is not None:
            gradient, ranges = replace(gradient, groups=commit.groups), commit.ranges
        self._check_budget(push, gradient)
        return self._stage(bucket, push.rank, push.clock, gradient, ranges)

    def commit(self, rank: int, incarnation: int, key: bytes, clock: int, one: SharedBucket, whole: Commit) -> Staged:
        """Makes one bucket of a checked commit count: its draft, now or when it comes; or the word that it has none.

        Changes nothing if it raises, as `stage`.
        """
        if one.skip:
            push = Push(
                self.spec.name, rank, incarnation, one.index, clock, PushKind.SKIP, b"", one.absent, key=key,
                ranges=whole.ranges,
            )  # fmt: skip
            return self.stage(push, Gradient(None, one.absent, whole.groups))
        self.check_worker(rank, incarnation, key)
        bucket = self.bucket(one.index)
        if clock <= self.roster[rank].start:
            raise OutOfOrder(f"worker {rank} joined at clock {self.roster[rank].start}, and a commit of {clock} came")
        if bucket.protocol.is_repeat(rank, clock):
            return Staged(bucket.protocol.version, duplicate=True)
        pending = bucket.pending_of(rank, clock)
        if pending.draft is None:
            pending.commit = whole
            return Staged(bucket.protocol.version, duplicate=False, kept=True)
        draft = pending.draft
        if draft.values is not None:
            self._held.take(one.index, rank, clock, draft.values.nbytes, self.staged_limit, always=True)
        return self._stage(bucket, rank, clock, replace(draft, groups=whole.groups), whole.ranges)

    def _stage(
        self, bucket: BucketPartition, rank: int, clock: int, gradient: Gradient, ranges: tuple[DataRange, ...]
    ) -> Staged:
        pending = bucket.pending.get(rank)
        if pending is not None and pending.clock == clock and pending.assignment is not None:
            self._check_assigned(bucket.layout, pending.assignment)
            gradient = replace(gradient, assignment=pending.assignment)
        bucket.pending.pop(rank, None)
        use = self.data.use(bucket.layout.index, ranges)
        if use.spent:
            gradient = Gradient(None, groups=gradient.groups, assignment=gradient.assignment)
        bucket.protocol.stage(rank, clock, gradient, ranges)
        return Staged(bucket.protocol.version, duplicate=False, skipped=gradient.values is None, use=use)

    def _assignment(self, push: Push, bucket: BucketPartition, values: torch.Tensor | None) -> Assignment:
        """What an assigning push sets."""
        layout = bucket.layout
        present = [position for position in range(len(layout.segments)) if position not in push.absent]
        if push.kind is PushKind.ASSIGN_STATE and not push.state:
            return Assignment(reset=frozenset(present))
        assert values is not None
        if push.kind is PushKind.ASSIGN_STATE and is_scalar_state(self._optimizer(layout), push.state):
            if not bool(torch.isfinite(values[present]).all()):
                raise InvalidRequest(f"the state {push.state!r} of bucket {push.bucket} is not finite")
            return Assignment(state={p: {push.state: values[p].clone()} for p in present})
        slices = {p: values[layout.segments[p].offset :][: layout.segments[p].length] for p in present}
        if push.kind is PushKind.ASSIGN:
            return Assignment(slices)
        return Assignment(state={p: {push.state: found} for p, found in slices.items()})

    def _keep_assignment(self, push: Push, bucket: BucketPartition, gradient: Gradient) -> Staged:
        assignment = self._assignment(push, bucket, gradient.values)
        pending = bucket.pending.get(push.rank)
        before = pending.assignment if pending is not None and pending.clock == push.clock else None
        whole = assignment if before is None else before.union(assignment)
        awaited = bucket.protocol.is_awaited(push.rank, push.clock)
        limit = ASSIGNED_WEIGHTS * max(self.parameter_bytes, self.spec.bucket_bytes)
        what = push.bucket, push.rank, push.clock, whole.nbytes, limit
        # One worker's always fit; where others' are here too, they go with their steps.
        fits = self._assigned.take(*what, always=awaited)
        if not fits and not (self._assigned.is_all_of(push.rank) and self._assigned.take(*what, always=True)):
            raise Backlogged(f"{self._assigned.bytes} bytes are assigned here and wait for their workers' steps")
        bucket.pending_of(push.rank, push.clock).assignment = whole
        return Staged(bucket.protocol.version, duplicate=False, kept=True)

    def _check_assigned(self, bucket: BucketSpec, assignment: Assignment) -> None:
        """Raises InvalidRequest for state that the optimizer could not go on with."""
        name = self._optimizer(bucket)
        for position, state in assignment.state.items():
            group = self.spec.parameters[bucket.segments[position].parameter].group
            assert group is not None
            missing = required_state(name, self.spec.groups[group]) - state.keys()
            if missing:
                parameter = self.spec.parameters[bucket.segments[position].parameter].name
                raise InvalidRequest(
                    f"the state assigned to {parameter} lacks {', '.join(sorted(missing))}, which {name} needs"
                )

    @property
    def staged_limit(self) -> int:
        """Bytes that may be staged here, but for what an update waits for."""
        return self._staged_limit or derived_limit(self.parameter_bytes, self.spec.bucket_bytes, len(self.roster))

    def _check_budget(self, push: Push, gradient: Gradient) -> None:
        """Counts a push in. Raises Backlogged if there is no room for it.

        What an update waits for is always taken: all that is staged may be waiting behind it. Where no update waits for
        others (ssp, async), what is staged is applied without anybody's help, and there is room again.
        """
        protocol = self.bucket(push.bucket).protocol
        if not gradient.within and not protocol.is_awaited(push.rank, push.clock):
            raise Backlogged(
                f"worker {push.rank}: whom it pushes for has more bytes staged that are not applied yet, "
                "over all workers, than max-caller-bytes lets it"
            )
        if gradient.borrowed or gradient.values is None:
            return
        awaited = protocol.is_awaited(push.rank, push.clock)
        if not self._held.take(push.bucket, push.rank, push.clock, len(push.payload), self.staged_limit, awaited):
            raise Backlogged(
                f"{self._held.bytes} bytes are staged here and wait for other workers, "
                f"and max-staged-bytes is {self.staged_limit}"
            )

    def _check_draft(self, push: Push, gradient: Gradient) -> None:
        """Counts a draft in. Raises Backlogged if there is no room for it beside what is staged.

        What the next update waits for is always taken: once it counts it is the open sum, which is no part of the
        budget.
        """
        if self.bucket(push.bucket).protocol.is_awaited(push.rank, push.clock):
            return
        staged = self._held.bytes if self.spec.consistency.aggregate else 0
        limit = max(0, self.staged_limit - staged)
        fits = gradient.within and self._drafts.take(
            push.bucket, push.rank, push.clock, len(push.payload), limit, always=False
        )
        if not fits:
            raise Backlogged(f"{self._drafts.bytes} bytes are here before their step, and there is no room for more")

    def _initialise(self, push: Push, bucket: BucketPartition, gradient: Gradient) -> Staged:
        """The bucket's first value, or the optimizer state that goes with it and comes before it."""
        if push.rank != 0:
            raise InvalidRequest(f"initial values are rank 0's to send, got them from rank {push.rank}")
        if bucket.protocol.initialised:
            return Staged(bucket.protocol.version, duplicate=True)
        pending = bucket.pending_of(0, 0)
        if push.kind is PushKind.ASSIGN_STATE:
            assignment = self._assignment(push, bucket, gradient.values)
            pending.assignment = assignment if pending.assignment is None else pending.assignment.union(assignment)
            return Staged(bucket.protocol.version, duplicate=False, kept=True)
        if pending.assignment is not None:
            self._check_assigned(bucket.layout, pending.assignment)
            bucket.weights.assign(pending.assignment)
        del bucket.pending[0]
        assert gradient.values is not None
        bucket.weights.load(gradient.values)
        bucket.protocol.initialised = True
        return Staged(bucket.protocol.version, duplicate=False)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def admits(self, index: int, rank: int, clock: int) -> Admission:
        """Whether this bucket may be sent to a worker at `clock`. What no optimizer steps only waits for rank 0."""
        bucket = self.bucket(index)
        return bucket.protocol.admits(rank, 0 if bucket.layout.held else clock)

    # -- leased data -------------------------------------------------------------------------------------------------

    def committed(self, index: int) -> Committed:
        """The leased data that is in the weights of a bucket, for a snapshot of it: what is only staged is left out."""
        return self.data.of(index, self.bucket(index).protocol.unapplied())

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state on this shard."""
        return sum(bucket.weights.optimizer_bytes for bucket in self.buckets.values())

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(
            add.contribution.values.nbytes
            for bucket in self.buckets.values()
            for add in list(bucket.protocol.waiting.values())
            if add.contribution.values is not None
        )

    def versions(self) -> tuple[int, int]:
        """The lowest and the highest version of a bucket that trains."""
        versions = [bucket.protocol.version for bucket in self._trained()]
        return min(versions, default=0), max(versions, default=0)

    def clocks(self) -> dict[int, int]:
        """By live rank, the lowest clock over this shard's buckets."""
        each = [bucket.protocol.clocks() for bucket in self._trained()]
        return {rank: min((clocks[rank] for clocks in each), default=0) for rank in self.roster}

    def extent(self) -> VersionRange:
        """How far the buckets that train are, with the clocks of the dead."""
        return extent(
            (bucket.protocol.version, bucket.protocol.applied)
            for bucket in self.buckets.values()
            if not bucket.layout.held
        )

    def _trained(self) -> Iterable[BucketPartition]:
        return (bucket for bucket in self.buckets.values() if not bucket.layout.held)
