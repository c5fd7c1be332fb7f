"""What a push contributes: checks it against the job and makes the command that stages it. Changes nothing.

The heavy part of a push. It touches nothing that a command changes, so that it can run outside of the lock that guards
a partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from ps_protocol.codecs import PLAIN, Codec, gradient_codec, plain_codec
from ps_protocol.errors import InvalidRequest, LimitExceeded, NonFiniteGradient, NotFound
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizer_state import is_scalar_state, required_state
from ps_protocol.optimizers import check_change, check_hyper_parameters
from ps_protocol.stages import MAX_STAGES, StageSpec, first_stage, stage_difference
from ps_protocol.tensors import is_finite
from ps_server.core.commands import Assign, Commit, DraftGradient, Initialise, StageGradient, UnitCommand
from ps_server.core.data_commits import check_ranges
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.named_values import GoodValues
from ps_server.core.requests import Push, PushKind
from ps_server.core.sums import wide
from ps_server.core.validation import check_stage

ASSIGNING = (PushKind.ASSIGN, PushKind.ASSIGN_STATE)
GRADIENTS = (PushKind.GRADIENT, PushKind.DRAFT)
MAX_WEIGHT = 2.0**53  # the whole numbers up to there are exact


class GradientChecks:
    """What every gradient of a job has to be, of a bucket or of a table: finite, and within the limit of the norm.

    looks:  whether infinities and NaNs are looked for
    limits: whether there is a limit of the norm
    """

    def __init__(self, spec: JobSpec, norm_limit: float) -> None:
        """norm_limit: the L2 norm that the gradient in one push may have"""
        self._skips, self._limit = spec.non_finite is NonFinite.SKIP, norm_limit
        self.looks, self.limits = spec.non_finite is not NonFinite.ALLOW, norm_limit < math.inf

    def refuse_or_skip(self, rank: int, what: str) -> None:
        """Raises NonFiniteGradient for a gradient that is not finite, unless the job leaves such a step out."""
        if not self._skips:
            raise NonFiniteGradient(f"the gradient of {what} from worker {rank} is not finite")

    def check_norm(self, rank: int, what: str, norm: float) -> None:
        """Raises LimitExceeded for a gradient of too large a norm."""
        if not norm <= self._limit:  # NaN is past every limit
            raise LimitExceeded(
                f"worker {rank}: the gradient of {what} has norm {norm:g}, and max-push-norm is {self._limit:g}"
            )


class PushChecker:
    """Checks the pushes of one job for the buckets that one shard has.

    norm_limit: the L2 norm that the gradient in one push may have
    """

    def __init__(self, spec: JobSpec, buckets: Mapping[int, BucketSpec], norm_limit: float = math.inf) -> None:
        self._spec = spec
        self._buckets = buckets
        self._gradients = GradientChecks(spec, norm_limit)
        self._good = GoodValues()  # by stage and group
        # What trains each bucket in each stage. Commands add to it, and none takes away: it is read without a lock.
        self._stages = {index: {0: first_stage(spec, bucket)} for index, bucket in buckets.items()}

    def bucket(self, index: int) -> BucketSpec:
        """Returns the bucket with this index. Raises NotFound when this shard does not have it."""
        if index not in self._buckets:
            raise NotFound(f"this shard holds no bucket {index} of job {self._spec.name!r}")
        return self._buckets[index]

    def trained(self, index: int) -> BucketSpec:
        """Returns a bucket that an optimizer steps. Raises InvalidRequest for one that is frozen."""
        bucket = self.bucket(index)
        if bucket.frozen:
            raise InvalidRequest(f"bucket {index} holds what no optimizer steps: it is not in a segment")
        return bucket

    def begin(self, index: int, stage: StageSpec) -> None:
        """Takes what trains a bucket in one stage, which is checked. For commands alone.

        Raises InvalidRequest where something else is known to train it then, LimitExceeded for too many stages.
        """
        known = self._stages[index]
        if stage.number not in known and len(known) >= MAX_STAGES:
            raise LimitExceeded(f"a job may come to {MAX_STAGES} stages, each with other optimizers, and got one more")
        differs = stage_difference(known.setdefault(stage.number, stage), stage)
        if differs is not None:
            raise InvalidRequest(f"bucket {index} of job {self._spec.name!r}, in stage {stage.number}: {differs}")

    def stage(self, bucket: BucketSpec, number: int) -> StageSpec:
        """Returns what trains a bucket in a stage. Raises InvalidRequest for one that is not known."""
        stage = self._stages[bucket.index].get(number)
        if stage is None:
            raise InvalidRequest(f"bucket {bucket.index} of job {self._spec.name!r}: stage {number} is not known here")
        return stage

    def check(self, push: Push, principal: str = "") -> UnitCommand:
        """Returns the command that stages a push. Raises InvalidRequest naming what was expected and what came.

        principal: whose bytes they are
        """
        bucket = self.bucket(push.bucket) if push.kind is PushKind.INITIAL_VALUE else self.trained(push.bucket)
        if push.ranges:
            check_ranges(push.ranges)
        _check_positions(bucket, push.absent)
        if push.kind is PushKind.NEXT_OPTIMIZER:
            return self._next(push, bucket, principal)
        stage = self.stage(bucket, push.stage)
        self._check_groups(push.groups or {}, stage)
        self._check_weight(push)
        values = self._values(push, bucket)
        worker = push.rank, push.incarnation, push.key, push.bucket
        if push.kind is PushKind.INITIAL_VALUE:
            assert values is not None
            return Initialise(*worker, values)
        if push.kind in ASSIGNING:
            assignment = self._assignment(push, bucket, values)
            if push.kind is PushKind.ASSIGN_STATE and push.clock == 0:
                return Initialise(*worker, assignment)
            return Assign(*worker, push.clock, assignment, principal=principal)
        if push.kind is PushKind.COMMIT:
            return Commit(*worker, push.clock, push.groups or {}, push.ranges, push.stage)
        gradient = self._gradient(push, bucket, values)
        if push.kind is PushKind.DRAFT:
            return DraftGradient(*worker, push.clock, gradient, principal=principal)
        return StageGradient(*worker, push.clock, gradient, push.ranges, principal=principal)

    def _next(self, push: Push, bucket: BucketSpec, principal: str) -> Assign:
        """Returns the command that has something else train a bucket."""
        if push.next_optimizer is None or push.clock == 0 or len(push.payload):
            raise InvalidRequest(
                f"bucket {push.bucket}: expected what trains it from a step on, without a payload, got a clock of "
                f"{push.clock} and {len(push.payload)} bytes" + " without it" * (push.next_optimizer is None)
            )
        check_stage(push.next_optimizer, bucket)
        number = push.next_optimizer.number
        worker = push.rank, push.incarnation, push.key, push.bucket
        assignment = Assignment(stage=number, next=push.next_optimizer)
        return Assign(*worker, push.clock, assignment, principal=principal)

    def payload_size(self, index: int, kind: PushKind, state: str, stage: int = 0) -> int:
        """Returns the bytes that a push of this kind to a bucket has in a message. state: that is assigned"""
        bucket = self.bucket(index)
        codec, count = self._encoding(bucket, kind, state, self.stage(bucket, stage).optimizer)
        return codec.size(count)

    def _encoding(
        self, bucket: BucketSpec, kind: PushKind, state: str, optimizer: str, shared: bool = False
    ) -> tuple[Codec, int]:
        """Returns how the payload of a push is encoded, and of how many elements.

        optimizer: that of the worker's stage
        shared:    it lies in a segment
        """
        if kind in GRADIENTS and not shared:
            return gradient_codec(self._spec, bucket), bucket.numel
        empty = PushKind.SKIP, PushKind.COMMIT, PushKind.NEXT_OPTIMIZER
        if kind in empty or (kind is PushKind.ASSIGN_STATE and not state):
            return plain_codec(bucket), 0
        if kind is PushKind.ASSIGN_STATE and is_scalar_state(optimizer, state):
            return PLAIN["float32"], len(bucket.slices)
        return plain_codec(bucket), bucket.numel

    def _values(self, push: Push, bucket: BucketSpec) -> torch.Tensor | None:
        """Returns the payload of a push as a flat tensor; None where it has none to have."""
        optimizer = self.stage(bucket, push.stage).optimizer
        codec, count = self._encoding(bucket, push.kind, push.state, optimizer, push.borrowed)
        if push.kind in GRADIENTS:  # those in a segment have the bucket's type
            codec.check_format(bucket, push.wire_format)
        expected = codec.size(count)
        if len(push.payload) != expected:
            raise InvalidRequest(
                f"bucket {push.bucket}: expected {expected} bytes ({count} x {codec.name}), got {len(push.payload)}"
            )
        if count and self._gradients.looks and not codec.is_finite(push.payload):
            self._gradients.refuse_or_skip(push.rank, f"a block of bucket {push.bucket}")
            return None
        return codec.decode(push.payload, count) if count else None

    def _gradient(self, push: Push, bucket: BucketSpec, values: torch.Tensor | None) -> Gradient:
        none = Gradient(None, push.absent, push.groups, stage=push.stage)
        if values is None:
            return none
        limited, borrowed = self._gradients.limits, push.borrowed
        codec, _ = self._encoding(bucket, push.kind, push.state, "", borrowed)
        own = codec.copies or not (borrowed or memoryview(push.payload).readonly)
        if limited and borrowed:
            # A copy: its worker could write another gradient there after this one was checked.
            values, borrowed, own = values.clone(), False, True
        if self._gradients.looks and not (push.finite or codec.copies):
            for position, part in enumerate(bucket.slices):
                if position not in push.absent and not is_finite(values[part.offset : part.offset + part.length]):
                    self._gradients.refuse_or_skip(push.rank, self._spec.parameters[part.parameter].name)
                    return none
        if limited:
            self._gradients.check_norm(push.rank, f"bucket {push.bucket}", _norm(bucket, values, push.absent))
        return Gradient(values, push.absent, push.groups, borrowed, own, weight=push.weight or 1, stage=push.stage)

    def _assignment(self, push: Push, bucket: BucketSpec, values: torch.Tensor | None) -> Assignment:
        """Returns what an assigning push sets."""
        present = [position for position in range(len(bucket.slices)) if position not in push.absent]
        if values is None:
            return Assignment(reset=frozenset(present), stage=push.stage)
        optimizer = self.stage(bucket, push.stage).optimizer
        if push.kind is PushKind.ASSIGN_STATE and is_scalar_state(optimizer, push.state):
            if not bool(torch.isfinite(values[present]).all()):
                raise InvalidRequest(f"the state {push.state!r} of bucket {push.bucket} is not finite")
            return Assignment(state={p: {push.state: values[p].clone()} for p in present}, stage=push.stage)
        slices = {p: values[bucket.slices[p].offset :][: bucket.slices[p].length] for p in present}
        if push.kind is PushKind.ASSIGN:
            return Assignment(slices, stage=push.stage)
        return Assignment(state={p: {push.state: tensor} for p, tensor in slices.items()}, stage=push.stage)

    def check_assigned(self, bucket: BucketSpec, assignment: Assignment) -> None:
        """Raises InvalidRequest for state that the optimizer could not go on with."""
        stage = self.stage(bucket, assignment.stage)
        for position, state in assignment.state.items():
            missing = required_state(stage.optimizer, stage.of(position)) - state.keys()
            if missing:
                name, lacks = self._spec.parameters[bucket.slices[position].parameter].name, ", ".join(sorted(missing))
                raise InvalidRequest(f"the state assigned to {name} lacks {lacks}, which {stage.optimizer} needs")

    def _check_groups(self, groups: Mapping[int, HyperParameters], stage: StageSpec) -> None:
        """stage: of the bucket at hand. A message of several buckets names the groups of all of them"""
        for group, values in groups.items():
            if stage.number == 0:
                if not 0 <= group < len(self._spec.groups):
                    raise InvalidRequest(f"expected a group below {len(self._spec.groups)}, got {group}")
                registered, name = self._spec.groups[group], self._spec.optimizer_of(group)
            elif group in stage.groups:
                registered, name = stage.groups[group], stage.optimizer
            else:  # of another bucket
                continue
            if not self._good.has((stage.number, group), values):
                check_hyper_parameters(name, {**registered, **values})
                check_change(name, registered, values)
                self._good.note((stage.number, group), values)

    def _check_weight(self, push: Push) -> None:
        weighted = self._spec.local is not None and self._spec.local.seconds is not None
        if not weighted and push.weight:
            raise InvalidRequest(
                f"worker {push.rank}: all gradients weigh the same in mode {self._spec.mode}, got the weight "
                f"{push.weight:g}"
            )
        if weighted and push.kind in GRADIENTS and not 1 <= push.weight <= MAX_WEIGHT:  # nor NaN
            raise InvalidRequest(
                f"worker {push.rank}: a gradient has a weight from 1 to 2^53 in mode {self._spec.mode}, got "
                f"{push.weight:g}"
            )


def _norm(bucket: BucketSpec, values: torch.Tensor, absent: frozenset[int]) -> float:
    """Returns the L2 norm of what is present of a gradient."""
    present = [s for position, s in enumerate(bucket.slices) if position not in absent]
    kind = wide(values.dtype)
    norms = [torch.linalg.vector_norm(values[s.offset : s.offset + s.length], dtype=kind).item() for s in present]
    return math.hypot(*norms)


def _check_positions(bucket: BucketSpec, absent: Iterable[int]) -> None:
    for position in absent:
        if position >= len(bucket.slices):
            raise InvalidRequest(f"bucket {bucket.index} has {len(bucket.slices)} slices, got slice {position}")
