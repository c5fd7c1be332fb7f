"""One bucket's tensors: its weights, its optimizer, and the gradients being added up for the open update.

**Weights that travel in blocks** (int8, int4) are rounded, and all workers must have the same bits. So the shard keeps
a copy of the workers' weights (`SentWeights`). Each update encodes the difference weights - sent, and adds the decoded
difference to `sent`. The next update sends what this one has rounded off, so nothing is lost for good. A worker that
lacks the version before asks for the whole bucket, and gets `sent` unrounded. After an update that includes an
assignment, all workers get the whole bucket: assigned weights must arrive as they were set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizer_state import FUSED_ON_CPU, is_scalar_state
from ps_protocol.optimizers import ELEMENTWISE, bare_step, hyper_parameters
from ps_protocol.stage_spec import StageSpec, first_stage
from ps_protocol.tensors import TORCH_DTYPES, Blocks, weight_codec
from ps_server.core.agreement import Agreement
from ps_server.core.snapshot import OptimizerState
from ps_server.core.sums import STRETCH, NamedValues, Scratch, StretchStep, Sum, ValuesInUse, square, wide


class SentWeights:
    """The workers' copy of a bucket's weights, where weights travel in blocks. Not thread-safe.

    flat:  [numel] float32
    codes: the encoded difference to the version before; None: this version is sent whole
    """

    def __init__(self, codec: Blocks, numel: int) -> None:
        self.codec = codec
        self.flat = torch.zeros(numel)
        self.codes: torch.Tensor | None = None

    def begin(self, values: torch.Tensor) -> None:
        """Sets the workers' copy without a difference: [numel]."""
        self.flat.copy_(values)
        self.codes = None

    def advance(self, weights: torch.Tensor, whole: bool) -> None:
        """Moves the workers' copy to the weights of the next version: [numel]. whole: send them unrounded"""
        if whole:
            self.begin(weights)
            return
        self.codes = self.codec.encode(weights - self.flat)
        self.flat += self.codec.values(self.codes, len(self.flat))


@dataclass(frozen=True)
class Assignment:
    """Weights and optimizer state that a worker's script has set in one bucket, by the slice's position.

    weights: [length of the slice] each
    reset:   slices whose optimizer state is replaced by that in `state`. A slice that `state` lacks begins without
             state, as with a new optimizer
    stage:   the script's stage; `state` belongs to this stage's optimizer
    next:    the stage that the bucket enters
    """

    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    reset: frozenset[int] = frozenset()
    state: OptimizerState = field(default_factory=dict)
    stage: int = 0
    next: StageSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        states = sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
        return sum(tensor.nbytes for tensor in self.weights.values()) + states

    def union(self, other: Assignment) -> Assignment:
        """Returns both assignments together. Where both set the same state or weights, `other` counts."""
        state = {position: dict(tensors) for position, tensors in self.state.items()}
        for position, tensors in other.state.items():
            state.setdefault(position, {}).update(tensors)
        stage = max(self.stage, other.stage)  # a script never returns to an earlier stage
        return Assignment(
            {**self.weights, **other.weights}, self.reset | other.reset, state, stage, other.next or self.next
        )


@dataclass(frozen=True)
class Gradient:
    """One worker's contribution to one bucket.

    values: [numel of the bucket] in the bucket's dtype, read only; None when this step has no gradient
    absent: positions of slices that have no gradient in this step. Without values: all positions; or none, if the whole
            step was left out
    groups: hyper-parameters to use from this update on, by group
    borrowed: the values lie in the worker's own memory, which it may overwrite once it learns that it was fenced
    own: nothing else uses the memory of the values, so the sum may be made in it
    assignment: the assignment of the worker's script before this step
    clock: the worker's clock, if one update may have contributions of several (UpdateRule.mixes_clocks); else 0
    weight: its weight in the mean
    stage: the script's stage, to which `groups` belongs
    """

    values: torch.Tensor | None
    absent: frozenset[int] = frozenset()
    groups: Mapping[int, HyperParameters] | None = None
    borrowed: bool = False
    own: bool = False
    assignment: Assignment | None = None
    clock: int = 0
    weight: float = 1
    stage: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient and of the assignment."""
        values = 0 if self.values is None else self.values.nbytes
        return values + (0 if self.assignment is None else self.assignment.nbytes)

    @property
    def is_empty(self) -> bool:
        """Whether this step has no gradient."""
        return self.values is None

    def left_out(self) -> Gradient:
        """Returns the contribution without its gradient: the mean does not count it."""
        return replace(self, values=None, absent=frozenset(), borrowed=False, own=False)

    def owned(self) -> Gradient:
        """Returns the same contribution in memory of this process."""
        if not self.borrowed or self.values is None:
            return self
        return replace(self, values=self.values.clone(), borrowed=False, own=True)


class OpenUpdate:
    """The open update of a bucket: the sum of its gradients, with their hyper-parameters and assignments.

    sum:     the sum of the gradients, each [numel]
    summands: the number of gradients in the sum
    count:   the divisor of the mean: it counts steps without any gradient too; for weighted contributions, the sum of
             the weights
    present: positions of the slices with a gradient
    named, assignment: the hyper-parameters that contributions name, and the assignment that comes before the step
    stage:   the stage of the hyper-parameters: the highest one of a contribution
    next:    the stage that begins with this update; None: the bucket stays in its stage
    """

    def __init__(self, bucket: BucketSpec, scratch: Scratch, mixes_clocks: bool = False, local: bool = False) -> None:
        """mixes_clocks: see UpdateRule; local: the contributions are the differences of rounds"""
        self.sum = Sum(scratch)
        self.summands, self.count = 0, 0.0
        self.present: set[int] = set()
        self.named = NamedValues()
        self.assignment: Assignment | None = None
        self.stage = 0
        self.next: StageSpec | None = None
        self._bucket, self._mixes_clocks = bucket, mixes_clocks
        self._squares = 0.0 if local else None  # the sum of the squared norms of the contributions
        self._is_empty = True

    def add(self, gradient: Gradient, is_last: bool = False) -> None:
        """Adds one contribution. The order of calls is the order of the sum.

        is_last: no further contribution to this update is expected
        """
        # The first contributor's assignments count: in sync those of the lowest rank, in whatever order contributions
        # came. If clocks are mixed, the first one may be a late worker's. Then assignments count whenever they come:
        # the lowest rank alone sends them.
        if self._is_empty or (self._mixes_clocks and self.assignment is None):
            self._is_empty, self.assignment = False, gradient.assignment
        if gradient.stage > self.stage or gradient.assignment is not None:
            self._note_stage(gradient)
        if gradient.stage == self.stage:
            for group, changed in (gradient.groups or {}).items():
                self.named.add(group, changed, gradient.clock)
        slices = self._bucket.slices
        if gradient.values is None:
            # A step that has a gradient for no slice counts as a gradient of zeros, as does each slice that a step
            # lacks. A step that was left out does not count: the mean is that of the other workers.
            self.count += gradient.weight * (len(gradient.absent) == len(slices))
            return
        values, own = gradient.values, gradient.own
        if gradient.absent:
            values, own = values if own else values.clone(), True
            for position in gradient.absent:
                values[slices[position].offset :][: slices[position].length] = 0
        self.present.update(set(range(len(slices))) - gradient.absent)
        self.count += gradient.weight
        self.summands += 1
        if self._squares is not None:
            self._squares += gradient.weight * square(values)
        if gradient.weight != 1:
            values, own = values.to(wide(values.dtype)) * gradient.weight, True
        # With mixed clocks a worker continues, and overwrites its memory, while the sum holds its contribution.
        self.sum.add(values, own, self._mixes_clocks and gradient.borrowed, is_last and self._squares is None)

    def _note_stage(self, gradient: Gradient) -> None:
        """Adopts the next stage of whichever contributor is in the highest stage.

        A worker that has joined late may be in an earlier stage, and have the lowest rank.
        """
        if gradient.stage > self.stage:
            self.stage, self.named = gradient.stage, NamedValues()
        following = None if gradient.assignment is None else gradient.assignment.next
        if following is not None and (self.next is None or following.number > self.next.number):
            self.next = following

    def agreement(self) -> Agreement | None:
        """Returns how alike the differences of a round are; None for fewer than two. Call it before the sum is
        overwritten.
        """
        if self._squares is None or self.summands < 2 or self.sum.total is None:
            return None
        return Agreement(square(self.sum.total) / self.count**2, self._squares / self.count)


class DenseBucket:
    """Weights and optimizer of one bucket. Not thread-safe: one caller at a time.

    The optimizer is the real one of torch.optim, over one tensor a slice, each a view into `flat`. It leaves a slice
    without a gradient unchanged, as in a plain training loop.

    mixes_clocks: see UpdateRule
    stage:     the stage that trains it now
    agreement: how alike the workers' differences were in the last round of local:H; None: fewer than two
    """

    def __init__(self, spec: JobSpec, bucket: BucketSpec, scratch: Scratch, mixes_clocks: bool = False) -> None:
        self.bucket = bucket
        self._scratch = scratch
        self.flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])  # [numel]
        self._slices = [self.flat[s.offset : s.offset + s.length] for s in bucket.slices]  # each [length]
        self._first = first_stage(spec, bucket)
        self._enter(self._first)
        self._mixes_clocks, self._local = mixes_clocks, spec.local is not None
        self._open = self._new_update()
        self.agreement: Agreement | None = None
        codec = weight_codec(spec, bucket)
        self.sent = SentWeights(codec, bucket.numel) if isinstance(codec, Blocks) else None

    def _enter(self, stage: StageSpec) -> None:
        """Makes the optimizer of a stage train the bucket, without any state."""
        self.stage, self._trained = stage, stage.trained
        self._name = stage.optimizer
        self._optimizer = _optimizer(stage, self.bucket, self._slices) if self._trained else None
        self._step = None if self._optimizer is None else bare_step(self._optimizer)
        self._divides = _is_fused(self._name, self.bucket)
        self._stretches = self._new_stretches()
        self._in_use = ValuesInUse()

    def begin(self, stage: StageSpec) -> None:
        """Begins a stage, unless the bucket is in it, or in a later one, already."""
        if stage.number <= self.stage.number:
            return
        before = self._states()
        self._enter(stage)
        if self._optimizer is not None:
            for position in stage.kept:
                self._set_state(self._optimizer, position, before[position])

    def load(self, values: torch.Tensor) -> None:
        """Sets the weights: [numel] in the bucket's dtype. Workers get them as they are."""
        self.flat.copy_(values)
        if self.sent is not None:
            self.sent.begin(values)

    def add(self, gradient: Gradient, is_last: bool = False) -> None:
        """Adds one contribution to the open update. The order of calls is the order of the sum.

        is_last: no further contribution to this update is expected: this one may be added while the optimizer steps
        """
        self._open.add(gradient, is_last)

    def _new_stretches(self) -> StretchStep | None:
        """Returns the stepper that steps this bucket in stretches; None if it steps as a whole."""
        is_whole = len(self._trained) == len(self._slices)
        if is_whole and self._divides and isinstance(self._optimizer, torch.optim.SGD) and self.bucket.numel > STRETCH:
            return StretchStep(self.bucket, self._optimizer, self._slices)
        return None

    @property
    def wants_last(self) -> bool:
        """Whether `add` uses `is_last`: it does if the bucket steps in stretches."""
        return self._stretches is not None

    def _new_update(self) -> OpenUpdate:
        return OpenUpdate(self.bucket, self._scratch, self._mixes_clocks, self._local)

    def step(self) -> None:
        """Makes an update: sets what was assigned, then steps the optimizer with the mean of the added gradients.

        Without either, the weights stay unchanged.
        """
        update, self._open = self._open, self._new_update()
        self.agreement = update.agreement()
        if update.next is not None:
            self.begin(update.next)
        if update.assignment is not None:
            self.assign(update.assignment)
        update.present &= self._trained
        steps = update.sum.total is not None and bool(update.present)
        if steps and self._optimizer is not None and self._step is not None:
            if update.stage == self.stage.number:
                self._use(self._in_use.newer(update.named))
            self._step_with(update, self._optimizer, self._step)
        update.sum.close()
        if self.sent is not None:
            self.sent.advance(self.flat, whole=update.assignment is not None and bool(update.assignment.weights))

    def _step_with(self, update: OpenUpdate, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Steps with the mean of the gradients that were added."""
        divides = update.summands > 1 and self._divides
        if divides:
            # torch's fused kernels divide by the gradient scale as they step. So the mean needs no pass over memory of
            # its own.
            optimizer.grad_scale = _scale(update.count)  # type: ignore[attr-defined]
        total, last = update.sum.total, update.sum.last
        stretches = self._stretches if len(update.present) == len(self._slices) else None
        if stretches is not None and stretches.has_state() and total is not None and last is not None:
            stretches.run(step, total, last, self._scratch)
        else:
            mean = self._mean(update)
            for positions in self._step_sets(optimizer, update.present):
                for position in positions:
                    part = self.bucket.slices[position]
                    self._slices[position].grad = mean[part.offset : part.offset + part.length]
                step()
                for tensor in self._slices:
                    tensor.grad = None
        if divides:
            optimizer.grad_scale = None  # type: ignore[attr-defined]

    def _mean(self, update: OpenUpdate) -> torch.Tensor:
        """Returns the mean of the gradients, or their sum if the optimizer divides it."""
        if update.sum.last is not None:
            update.sum.complete()
        total = update.sum.total
        assert total is not None
        if update.summands > 1:
            return total if self._divides else total.div_(update.count).to(self.flat.dtype)
        mean = total.to(self.flat.dtype)  # never divided in place: `total` may be the one contribution, in its memory
        return mean / update.count if update.count > 1 else mean

    def assign(self, assignment: Assignment) -> None:
        """Sets weights and optimizer state. State of the optimizer of an earlier stage is left out."""
        for position, values in assignment.weights.items():
            self._slices[position].copy_(values)
        if self._optimizer is not None and assignment.stage == self.stage.number:
            for position in assignment.reset | assignment.state.keys():
                state = {name: value.clone() for name, value in assignment.state.get(position, {}).items()}
                self._set_state(self._optimizer, position, state)

    def _set_state(
        self, optimizer: torch.optim.Optimizer, position: int, state: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Sets one slice's optimizer state. Without `state`, the slice begins anew, as with a new optimizer."""
        if position not in self._trained:
            return
        tensor = self._slices[position]
        optimizer.state.pop(tensor, None)
        if state:
            optimizer.state[tensor] = dict(state)
        elif self._name == "Adagrad":  # it makes its state in its constructor, and cannot step without it
            [group] = [group for group in optimizer.param_groups if any(member is tensor for member in group["params"])]
            [fresh] = ELEMENTWISE[self._name]([tensor], **hyper_parameters(self._name, group)).state.values()  # type: ignore[arg-type]
            optimizer.state[tensor] = fresh

    def _step_sets(self, optimizer: torch.optim.Optimizer, present: set[int]) -> list[set[int]]:
        """Returns the slices with a gradient, as sets to step one after the other: mostly one.

        torch's fused SGD fails where some momentum buffers exist and others do not yet, because a slice's first
        gradient came later than its neighbour's.
        """
        if not isinstance(optimizer, torch.optim.SGD):
            return [present]
        fresh = {p for p in present if optimizer.state.get(self._slices[p], {}).get("momentum_buffer") is None}
        return [present - fresh, fresh] if 0 < len(fresh) < len(present) else [present]

    def read_state(self, name: str) -> tuple[torch.Tensor, frozenset[int]]:
        """Returns one kind of optimizer state, and the positions of the slices that have none.

        The state is [numel] in the bucket's dtype, with zeros in slices that have none. A state of one number for each
        parameter, such as a count of steps, is [slices] in float32.
        """
        states = self._states()
        absent = frozenset(p for p in range(len(self._slices)) if not isinstance(states[p].get(name), torch.Tensor))
        if is_scalar_state(self._name, name):
            numbers = [0.0 if p in absent else float(state[name]) for p, state in enumerate(states)]
            return torch.tensor(numbers, dtype=torch.float32), absent
        values = torch.zeros_like(self.flat)
        for position, part in enumerate(self.bucket.slices):
            if position not in absent:
                values[part.offset : part.offset + part.length] = states[position][name]
        return values, absent

    def state_names(self) -> list[str]:
        """Returns the kinds of optimizer state that any slice has now."""
        return sorted({n for state in self._states() for n, v in state.items() if isinstance(v, torch.Tensor)})

    def _states(self) -> list[dict[str, Any]]:
        if self._optimizer is None:
            return [{} for _ in self._slices]
        return [dict(self._optimizer.state.get(tensor) or {}) for tensor in self._slices]

    def copy_state(self) -> dict[int, dict[str, torch.Tensor]]:
        """Returns a copy of the optimizer's state, by slice."""
        return {
            position: {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
            for position, state in enumerate(self._states())
            if state
        }

    def groups(self) -> dict[int, HyperParameters]:
        """Returns the hyper-parameters that the last update was made with, by group."""
        if self._optimizer is None:
            return {}
        return {group["index"]: hyper_parameters(self._name, group) for group in self._optimizer.param_groups}

    def restore(
        self,
        weights: torch.Tensor,
        state: OptimizerState,
        groups: Mapping[int, HyperParameters],
        owned: bool = False,
        sent: torch.Tensor | None = None,
        stage: StageSpec | None = None,
    ) -> None:
        """Sets weights, optimizer state and hyper-parameters to those of a snapshot.

        owned: the bucket keeps the state's tensors; otherwise it copies them. `weights` may be `flat` itself.
        sent:  the workers' copy of the weights; None: the weights themselves
        stage: the stage that trained the bucket; None: the first one, with which its job is registered
        """
        stage = stage or self._first
        if stage != self.stage:
            self._enter(stage)
        if weights is not self.flat:
            self.flat.copy_(weights)
        if self.sent is not None:
            self.sent.begin(weights if sent is None else sent)
        if self._optimizer is None:
            return
        for position in range(len(self._slices)):
            kept = {name: value if owned else value.clone() for name, value in state.get(position, {}).items()}
            self._set_state(self._optimizer, position, kept)
        self._in_use = ValuesInUse()
        self._use(groups)

    def _use(self, groups: Mapping[int, HyperParameters]) -> None:
        """Sets the hyper-parameters of the groups that the optimizer has."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group.update(groups.get(group["index"], {}))

    def own(self) -> None:
        """Copies the gradients that the open update borrows from workers' memory."""
        self._open.sum.own()

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        if self._optimizer is None:
            return 0
        # Copies of the dictionaries: the optimizer may be adding to them in another thread.
        states = list(self._optimizer.state.values())
        return sum(v.nbytes for state in states for v in list(state.values()) if isinstance(v, torch.Tensor))


def _optimizer(stage: StageSpec, bucket: BucketSpec, slices: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Returns the bucket's optimizer, over the slices that have a parameter group."""
    members: dict[int, list[torch.Tensor]] = {}
    for group, tensor in zip(stage.group_of_slice, slices, strict=True):
        if group is not None:
            members.setdefault(group, []).append(tensor)
    cls = ELEMENTWISE[stage.optimizer]
    groups = [{"params": tensors, "index": group, **stage.groups[group]} for group, tensors in members.items()]
    # Also passed as defaults: Adagrad makes its state in its constructor, from the defaults and not from the groups.
    arguments = dict(stage.groups[next(iter(members))])
    if _is_fused(stage.optimizer, bucket):
        arguments["fused"] = True  # ten times faster than one tensor operation after the other
    return cls(groups, **arguments)  # type: ignore[arg-type]


# Tensors of one number, cached because making one costs as much as adding a bucket. The cache has room for more counts
# than a job has workers. Sums of weights may be any numbers, so not all of them fit.
_SCALES: dict[float, torch.Tensor] = {}
_SCALES_KEPT = 4096


def _scale(count: float) -> torch.Tensor:
    if count not in _SCALES and len(_SCALES) >= _SCALES_KEPT:
        return torch.tensor(float(count))
    if count not in _SCALES:
        _SCALES[count] = torch.tensor(float(count))
    return _SCALES[count]


def _is_fused(name: str, bucket: BucketSpec) -> bool:
    return bucket.dtype == "float32" and name in FUSED_ON_CPU
