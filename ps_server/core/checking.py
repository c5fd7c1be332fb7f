"""Checks a pushed bucket against the job, and makes the command that stages it. Changes no state.

This is the expensive part of a push. It runs outside of the lock of a partition, because it uses nothing that a command
changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded, NonFiniteGradient, NotFound
from ps_protocol.framing import Buffer
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.optimizer_state import is_scalar_state, required_state
from ps_protocol.optimizers import check_change, check_hyper_parameters
from ps_protocol.stage_spec import MAX_STAGES, StageSpec, first_stage, stage_difference
from ps_protocol.tensors import PLAIN, Codec, gradient_codec, is_finite, plain_codec
from ps_server.core.commands import Assign, Commit, DraftGradient, Initialise, StageGradient, UnitCommand
from ps_server.core.data_commits import check_ranges
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.sums import GoodValues, wide
from ps_server.core.validation import check_stage

ASSIGNING = (PushKind.ASSIGN, PushKind.ASSIGN_STATE)
GRADIENTS = (PushKind.GRADIENT, PushKind.DRAFT)
MAX_WEIGHT = 2.0**53  # the whole numbers up to there are exact


class GradientChecks:
    """Checks the gradients of a job's buckets and tables: they must be finite, and their norm within a limit.

    checks_finite:  whether gradients are searched for infinities and NaNs
    has_norm_limit: whether the norm is limited
    """

    def __init__(self, spec: JobSpec, norm_limit: float) -> None:
        """norm_limit: the L2 norm that the gradient in one push may have"""
        self._skips, self._limit = spec.non_finite is NonFinite.SKIP, norm_limit
        self.checks_finite, self.has_norm_limit = spec.non_finite is not NonFinite.ALLOW, norm_limit < math.inf

    def refuse_or_skip(self, rank: int, what: str) -> None:
        """Raises NonFiniteGradient, unless the job skips steps whose gradient is not finite. Then the caller must leave
        the gradient out.
        """
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
        # By bucket, its stages by number. Commands only add to it, so it is read without a lock.
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
        """Registers the stage of a bucket, which is checked already. Only commands call it.

        Raises InvalidRequest if the stage is known and differs, LimitExceeded for too many stages.
        """
        known = self._stages[index]
        if stage.number not in known and len(known) >= MAX_STAGES:
            raise LimitExceeded(f"a job may come to {MAX_STAGES} stages, each with other optimizers, and got one more")
        differs = stage_difference(known.setdefault(stage.number, stage), stage)
        if differs is not None:
            raise InvalidRequest(f"bucket {index} of job {self._spec.name!r}, in stage {stage.number}: {differs}")

    def stage(self, bucket: BucketSpec, number: int) -> StageSpec:
        """Returns the stage of a bucket by its number. Raises InvalidRequest if it is not known."""
        stage = self._stages[bucket.index].get(number)
        if stage is None:
            raise InvalidRequest(f"bucket {bucket.index} of job {self._spec.name!r}: stage {number} is not known here")
        return stage

    def check(self, call: PushCall, pushed: PushedBucket, payload: Buffer, principal: str = "") -> UnitCommand:
        """Returns the command that stages one bucket of a call. Raises InvalidRequest with what was expected and what
        came.

        payload:   the bucket's bytes
        principal: the caller, to whom the bytes are accounted
        """
        kind = pushed.kind
        bucket = (self.bucket if kind is PushKind.INITIAL_VALUE else self.trained)(pushed.bucket)
        if call.ranges:
            check_ranges(call.ranges)
        _check_positions(bucket, pushed.absent)
        if kind is PushKind.NEXT_OPTIMIZER:
            return self._next(call, pushed, bucket, payload, principal)
        stage = self.stage(bucket, call.stage)
        self._check_groups(call.groups, stage)
        self._check_weight(call, kind)
        values = self._values(call, pushed, bucket, payload)
        unit = call.worker, pushed.bucket
        if kind is PushKind.INITIAL_VALUE:
            assert values is not None
            return Initialise(*unit, values, call.clock)
        if kind in ASSIGNING:
            assignment = self._assignment(call, pushed, bucket, values)
            if kind is PushKind.ASSIGN_STATE and call.clock == 0:
                return Initialise(*unit, assignment)
            return Assign(*unit, call.clock, assignment, principal=principal)
        if kind is PushKind.COMMIT:
            return Commit(*unit, call.clock, call.groups, call.ranges, call.stage)
        gradient = self._gradient(call, pushed, bucket, payload, values)
        if kind is PushKind.DRAFT:
            return DraftGradient(*unit, call.clock, gradient, principal=principal)
        return StageGradient(*unit, call.clock, gradient, call.ranges, principal=principal)

    def holds_for_all_clocks(self, call: PushCall) -> bool:
        """Whether `check` need not be repeated for the same call at another clock.

        That is so if this shard does not read the gradients: they lie in a segment, no norm is limited, and their
        worker has checked that they are finite, if the job demands that. `check` must also have seen all groups that
        the call names. If the call comes with other hyper-parameters of these groups, only `check_groups` must be
        called again.
        """
        groups: set[int] = set()
        for pushed in call.buckets:
            if pushed.kind is PushKind.GRADIENT:
                is_read = self._gradients.has_norm_limit or (self._gradients.checks_finite and not pushed.finite)
                if is_read or call.payload is not None:
                    return False
            elif pushed.kind not in (PushKind.SKIP, PushKind.COMMIT):
                return False
            groups.update(self.stage(self.bucket(pushed.bucket), call.stage).groups)
        return call.groups.keys() <= groups  # `_check_groups` may have skipped the groups of other buckets

    def check_groups(self, call: PushCall) -> None:
        """Raises InvalidRequest for hyper-parameters that the call's buckets cannot have."""
        for pushed in call.buckets:
            self._check_groups(call.groups, self.stage(self.bucket(pushed.bucket), call.stage))
            if call.stage == 0:  # then groups are those of the whole job: to check them once is enough
                break

    def _next(
        self, call: PushCall, pushed: PushedBucket, bucket: BucketSpec, payload: Buffer, principal: str
    ) -> Assign:
        """Returns the command that begins the next stage of the script in a bucket: another optimizer trains it, or
        none.
        """
        following = pushed.next_optimizer
        if following is None or call.clock == 0 or len(payload):
            raise InvalidRequest(
                f"bucket {pushed.bucket}: expected what trains it from a step on, without a payload, got a clock of "
                f"{call.clock} and {len(payload)} bytes" + " without it" * (following is None)
            )
        check_stage(following, bucket)
        assignment = Assignment(stage=following.number, next=following)
        return Assign(call.worker, pushed.bucket, call.clock, assignment, principal=principal)

    def payload_size(self, index: int, kind: PushKind, state: str, stage: int = 0) -> int:
        """Returns the bytes of the payload of a push in a message.

        state: the name of the optimizer state, if the push assigns one
        """
        bucket = self.bucket(index)
        codec, count = self._encoding(bucket, kind, state, self.stage(bucket, stage).optimizer)
        return codec.size(count)

    def _encoding(
        self, bucket: BucketSpec, kind: PushKind, state: str, optimizer: str, shared: bool = False
    ) -> tuple[Codec, int]:
        """Returns the codec of a push's payload, and the number of its elements.

        optimizer: the optimizer of the worker's stage
        shared:    the payload lies in a segment
        """
        if kind in GRADIENTS and not shared:
            return gradient_codec(self._spec, bucket), bucket.numel
        empty = PushKind.SKIP, PushKind.COMMIT, PushKind.NEXT_OPTIMIZER
        if kind in empty or (kind is PushKind.ASSIGN_STATE and not state):
            return plain_codec(bucket), 0
        if kind is PushKind.ASSIGN_STATE and is_scalar_state(optimizer, state):
            return PLAIN["float32"], len(bucket.slices)
        return plain_codec(bucket), bucket.numel

    def _values(self, call: PushCall, pushed: PushedBucket, bucket: BucketSpec, payload: Buffer) -> torch.Tensor | None:
        """Returns the payload of a bucket as a flat tensor; None for an empty payload, or for a gradient to
        leave out.
        """
        optimizer = self.stage(bucket, call.stage).optimizer
        codec, count = self._encoding(bucket, pushed.kind, pushed.state, optimizer, call.payload is None)
        if pushed.kind in GRADIENTS:  # in a message they have the job's wire format, in a segment the bucket's type
            codec.check_format(bucket, pushed.wire_format)
        expected = codec.size(count)
        if len(payload) != expected:
            raise InvalidRequest(
                f"bucket {pushed.bucket}: expected {expected} bytes ({count} x {codec.name}), got {len(payload)}"
            )
        if count and self._gradients.checks_finite and not codec.is_finite(payload):
            self._gradients.refuse_or_skip(call.worker.rank, f"a block of bucket {pushed.bucket}")
            return None
        return codec.decode(payload, count) if count else None

    def _gradient(
        self, call: PushCall, pushed: PushedBucket, bucket: BucketSpec, payload: Buffer, values: torch.Tensor | None
    ) -> Gradient:
        rank, absent = call.worker.rank, pushed.absent
        none = Gradient(None, absent, call.groups, stage=call.stage)
        if values is None:
            return none
        borrowed = call.payload is None
        is_checked = borrowed and pushed.finite  # a worker's own check counts only for values in its segment
        codec, _ = self._encoding(bucket, pushed.kind, pushed.state, "", borrowed)
        own = codec.decode_copies or not (borrowed or memoryview(payload).readonly)
        if self._gradients.has_norm_limit and borrowed:
            # Copied before the check: afterwards the worker could write another gradient into its segment.
            values, borrowed, own = values.clone(), False, True
        if self._gradients.checks_finite and not (is_checked or codec.is_checked_by_scales):
            for position, part in enumerate(bucket.slices):
                if position not in absent and not is_finite(values[part.offset : part.offset + part.length]):
                    self._gradients.refuse_or_skip(rank, self._spec.parameters[part.parameter].name)
                    return none
        if self._gradients.has_norm_limit:
            self._gradients.check_norm(rank, f"bucket {pushed.bucket}", _norm(bucket, values, absent))
        return Gradient(values, absent, call.groups, borrowed, own, weight=call.weight or 1, stage=call.stage)

    def _assignment(
        self, call: PushCall, pushed: PushedBucket, bucket: BucketSpec, values: torch.Tensor | None
    ) -> Assignment:
        """Returns the weights that a script has set in a bucket, or the optimizer state of one name, by slice.

        A push without values resets the optimizer state of its slices. Raises InvalidRequest for a scalar state that is
        not finite.
        """
        name, number = pushed.state, call.stage
        present = [position for position in range(len(bucket.slices)) if position not in pushed.absent]
        if values is None:
            return Assignment(reset=frozenset(present), stage=number)
        optimizer = self.stage(bucket, number).optimizer
        if pushed.kind is PushKind.ASSIGN_STATE and is_scalar_state(optimizer, name):
            if not bool(torch.isfinite(values[present]).all()):
                raise InvalidRequest(f"the state {name!r} of bucket {pushed.bucket} is not finite")
            return Assignment(state={p: {name: values[p].clone()} for p in present}, stage=number)
        slices = {p: values[bucket.slices[p].offset :][: bucket.slices[p].length] for p in present}
        if pushed.kind is PushKind.ASSIGN:
            return Assignment(slices, stage=number)
        return Assignment(state={p: {name: tensor} for p, tensor in slices.items()}, stage=number)

    def check_assigned(self, bucket: BucketSpec, assignment: Assignment) -> None:
        """Raises InvalidRequest if assigned optimizer state lacks something that the optimizer needs to continue."""
        stage = self.stage(bucket, assignment.stage)
        for position, state in assignment.state.items():
            missing = required_state(stage.optimizer, stage.of(position)) - state.keys()
            if missing:
                name, lacks = self._spec.parameters[bucket.slices[position].parameter].name, ", ".join(sorted(missing))
                raise InvalidRequest(f"the state assigned to {name} lacks {lacks}, which {stage.optimizer} needs")

    def _check_groups(self, groups: Mapping[int, HyperParameters], stage: StageSpec) -> None:
        """Raises InvalidRequest for hyper-parameters that the stage's optimizer cannot have.

        stage: the stage of the checked bucket. A message of several buckets names the groups of all of them
        """
        for group, values in groups.items():
            if stage.number == 0:
                if not 0 <= group < len(self._spec.param_groups):
                    raise InvalidRequest(f"expected a group below {len(self._spec.param_groups)}, got {group}")
            elif group not in stage.groups:  # a group of another bucket
                continue
            if self._good.has((stage.number, group), values):
                continue
            if stage.number == 0:
                registered, name = self._spec.param_groups[group], self._spec.optimizer_of(group)
            else:
                registered, name = stage.groups[group], stage.optimizer
            check_hyper_parameters(name, {**registered, **values})
            check_change(name, registered, values)
            self._good.note((stage.number, group), values)

    def _check_weight(self, call: PushCall, kind: PushKind) -> None:
        weighted = self._spec.local is not None and self._spec.local.seconds is not None
        rank, weight = call.worker.rank, call.weight
        if not weighted and weight:
            raise InvalidRequest(
                f"worker {rank}: all gradients weigh the same in mode {self._spec.mode}, got the weight {weight:g}"
            )
        if weighted and kind in GRADIENTS and not 1 <= weight <= MAX_WEIGHT:  # also for NaN
            raise InvalidRequest(
                f"worker {rank}: a gradient has a weight from 1 to 2^53 in mode {self._spec.mode}, got {weight:g}"
            )


def _norm(bucket: BucketSpec, values: torch.Tensor, absent: frozenset[int]) -> float:
    """Returns the L2 norm of a bucket's gradient over the slices that are present.

    absent: the positions of the slices without a gradient
    """
    present = [s for position, s in enumerate(bucket.slices) if position not in absent]
    kind = wide(values.dtype)
    norms = [torch.linalg.vector_norm(values[s.offset : s.offset + s.length], dtype=kind).item() for s in present]
    return math.hypot(*norms)


def _check_positions(bucket: BucketSpec, absent: Iterable[int]) -> None:
    for position in absent:
        if position >= len(bucket.slices):
            raise InvalidRequest(f"bucket {bucket.index} has {len(bucket.slices)} slices, got slice {position}")
