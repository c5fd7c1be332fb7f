"""One bucket's tensors: its weights, its optimizer, and the gradients being added up for the open update.

**Weights that travel in blocks** (int8, int4) are rounded, and all workers have to have the same bits. So the shard
keeps what they have (`SentWeights`). Each update sends the codes of what is missing, weights - sent, and adds their
values to `sent`: what one update rounds off is part of what the next one sends, and nothing is lost for good. A worker
that does not have the version before asks for the whole, and gets `sent` as it is. So do all workers after an update
before which a script had set weights: those have to arrive as they were set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizer_state import is_scalar_state
from ps_protocol.optimizers import ELEMENTWISE, FUSED_ON_CPU, bare_step, hyper_parameters
from ps_protocol.stages import StageSpec, first_stage
from ps_protocol.tensors import TORCH_DTYPES, Blocks, weight_codec
from ps_server.core.agreement import Agreement
from ps_server.core.snapshot import OptimizerState
from ps_server.core.sums import PIECE, NamedValues, PieceStep, Scratch, Sum, ValuesInUse, square, wide


class SentWeights:
    """What workers have of a bucket's weights, where these travel in blocks. For one caller at a time.

    flat:  [numel] float32
    codes: what leads here from the version before; None: this version comes whole
    """

    def __init__(self, codec: Blocks, numel: int) -> None:
        self.codec = codec
        self.flat = torch.zeros(numel)
        self.codes: torch.Tensor | None = None

    def begin(self, values: torch.Tensor) -> None:
        """Begins, or goes on, with what workers will have: [numel]."""
        self.flat.copy_(values)
        self.codes = None

    def advance(self, weights: torch.Tensor, whole: bool) -> None:
        """Sends the weights of the next version: [numel]. whole: as they are"""
        if whole:
            self.begin(weights)
            return
        self.codes = self.codec.encode(weights - self.flat)
        self.flat += self.codec.values(self.codes, len(self.flat))


@dataclass(frozen=True)
class Assignment:
    """What a worker's script has set itself in one bucket, by the slice's position.

    weights: [length of the slice] each
    reset:   slices whose optimizer state becomes what `state` has for them, and nothing else
    stage:   of the script that has set it: the state is that of this stage's optimizer
    next:    what trains the bucket from here on
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
        """Returns both together; where both name the same thing, the other counts."""
        state = {position: dict(tensors) for position, tensors in self.state.items()}
        for position, tensors in other.state.items():
            state.setdefault(position, {}).update(tensors)
        stage = max(self.stage, other.stage)  # a script that goes on is in no earlier one
        return Assignment(
            {**self.weights, **other.weights}, self.reset | other.reset, state, stage, other.next or self.next
        )


@dataclass(frozen=True)
class Gradient:
    """One worker's contribution to one bucket.

    values: [numel of the bucket] in the bucket's dtype, read only; None when this step has no gradient
    absent: positions of slices that have no gradient in this step; without values, all of them or, where the whole
            step was left out, none
    groups: hyper-parameters to use from this update on, by group
    borrowed: the values lie in the worker's own memory, which it may write again once it is told that it was fenced
    own: this contribution alone uses the memory of its values, so that the sum may be made in it
    assignment: what the worker's script has set before this step
    clock: the worker's, where those in one update may have several (UpdateRule.mixes_clocks); else 0
    weight: what it weighs in the mean
    stage: of the script: that of `groups`
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
        """Bytes of the gradient, and of what the worker's script has set."""
        values = 0 if self.values is None else self.values.nbytes
        return values + (0 if self.assignment is None else self.assignment.nbytes)

    @property
    def is_empty(self) -> bool:
        """Whether this step has no gradient."""
        return self.values is None

    def left_out(self) -> Gradient:
        """Returns it without its gradient: as a step that no mean counts."""
        return replace(self, values=None, absent=frozenset(), borrowed=False, own=False)

    def owned(self) -> Gradient:
        """Returns the same contribution in memory of this process."""
        if not self.borrowed or self.values is None:
            return self
        return replace(self, values=self.values.clone(), borrowed=False, own=True)


class OpenUpdate:
    """The gradients that are added up for one update of a bucket, and what goes with them.

    sum:     of the gradients, each [numel]
    terms:   how many those are
    count:   what the mean is over: those without any gradient too; of weighted ones, the sum of the weights
    present: positions of the slices with a gradient
    named, assignment: the hyper-parameters that contributions name, and what is set before it
    stage:   that of the hyper-parameters: the highest of a contribution
    next:    what trains the bucket from this update on; None: what did before
    """

    def __init__(self, bucket: BucketSpec, scratch: Scratch, mixes_clocks: bool = False, local: bool = False) -> None:
        """mixes_clocks: see UpdateRule; local: what is added are the differences of rounds"""
        self.sum = Sum(scratch)
        self.terms, self.count = 0, 0.0
        self.present: set[int] = set()
        self.named = NamedValues()
        self.assignment: Assignment | None = None
        self.stage = 0
        self.next: StageSpec | None = None
        self._bucket, self._mixes_clocks = bucket, mixes_clocks
        self._squares = 0.0 if local else None  # of the norms of what was added
        self._is_empty = True

    def add(self, gradient: Gradient, is_last: bool = False) -> None:
        """Adds one contribution. The order of calls is the order of the sum.

        is_last: the update is complete with it, as it seems now
        """
        # The first contributor's assignments count: in sync that is the lowest rank's, in whatever order contributions
        # came. Where clocks are mixed the first may be late: assignments, which the lowest rank alone sends, count
        # whenever they come.
        if self._is_empty or (self._mixes_clocks and self.assignment is None):
            self._is_empty, self.assignment = False, gradient.assignment
        self._note_stage(gradient)
        if gradient.stage == self.stage:
            for group, changed in (gradient.groups or {}).items():
                self.named.add(group, changed, gradient.clock)
        slices = self._bucket.slices
        if gradient.values is None:
            # Without a gradient for any slice it counts as zero, as in a bucket that it fills in part; otherwise it is
            # a step that was left out, and the mean is that of the others.
            self.count += gradient.weight * (len(gradient.absent) == len(slices))
            return
        values, own = gradient.values, gradient.own
        if gradient.absent:
            values, own = values if own else values.clone(), True
            for position in gradient.absent:
                values[slices[position].offset :][: slices[position].length] = 0
        self.present.update(set(range(len(slices))) - gradient.absent)
        self.count += gradient.weight
        self.terms += 1
        if self._squares is not None:
            self._squares += gradient.weight * square(values)
        if gradient.weight != 1:
            values, own = values.to(wide(values.dtype)) * gradient.weight, True
        # Where clocks are mixed, a worker goes on, and writes its memory, while what it has contributed is here.
        self.sum.add(values, own, self._mixes_clocks and gradient.borrowed, is_last and self._squares is None)

    def _note_stage(self, gradient: Gradient) -> None:
        """Takes what trains the bucket from here on, of whichever contributor is in the highest stage: a worker that
        has joined late may be in an earlier one, and have the lowest rank."""
        if gradient.stage > self.stage:
            self.stage, self.named = gradient.stage, NamedValues()
        following = None if gradient.assignment is None else gradient.assignment.next
        if following is not None and (self.next is None or following.number > self.next.number):
            self.next = following

    def agreement(self) -> Agreement | None:
        """Returns how alike the differences of a round are, before the sum is written; None: there are not several."""
        if self._squares is None or self.terms < 2 or self.sum.total is None:
            return None
        return Agreement(square(self.sum.total) / self.count**2, self._squares / self.count)


class DenseBucket:
    """Weights and optimizer of one bucket. Not thread-safe: one caller at a time.

    The optimizer is the real one of torch.optim, over one tensor a slice, each a view into `flat`. A slice without a
    gradient is left alone by it, as in a plain training loop.

    mixes_clocks: see UpdateRule
    stage:     what trains it now
    agreement: of the workers' differences in the last round, in mode local:H; None: there were not several
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
        """Has what a stage says train the bucket, without any state."""
        self.stage, self._trained = stage, stage.trained
        self._name = stage.optimizer
        self._optimizer = _optimizer(stage, self.bucket, self._slices) if self._trained else None
        self._step = None if self._optimizer is None else bare_step(self._optimizer)
        self._divides = _is_fused(self._name, self.bucket)
        self._pieces = self._new_pieces()
        self._in_use = ValuesInUse()

    def begin(self, stage: StageSpec) -> None:
        """Begins a stage, unless the bucket has come to it, or to a later one, already."""
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

        is_last: the update is complete with it, as it seems now, so that it may be added while the optimizer steps
        """
        self._open.add(gradient, is_last)

    def _new_pieces(self) -> PieceStep | None:
        """Returns what steps this bucket in pieces; None where it steps as a whole."""
        is_whole = len(self._trained) == len(self._slices)
        if is_whole and self._divides and isinstance(self._optimizer, torch.optim.SGD) and self.bucket.numel > PIECE:
            return PieceStep(self.bucket, self._optimizer, self._slices)
        return None

    @property
    def wants_last(self) -> bool:
        """Whether `add` wants to know which contribution is the last: the bucket steps in pieces."""
        return self._pieces is not None

    def _new_update(self) -> OpenUpdate:
        return OpenUpdate(self.bucket, self._scratch, self._mixes_clocks, self._local)

    def step(self) -> None:
        """Steps the optimizer with the mean of what was added, from what was assigned. Without either, the weights stay
        as they are."""
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
        divides = update.terms > 1 and self._divides
        if divides:
            # Gradient scaling, whose inverse torch's fused kernels apply on the way: the same division, but not a pass
            # over memory of its own.
            optimizer.grad_scale = _scale(update.count)  # type: ignore[attr-defined]
        total, last = update.sum.total, update.sum.last
        pieces = self._pieces if len(update.present) == len(self._slices) else None
        if pieces is not None and pieces.has_state() and total is not None and last is not None:
            pieces.run(step, total, last, self._scratch)
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
        """Returns the mean of the gradients, or their sum where the optimizer divides it."""
        update.sum.complete()
        total = update.sum.total
        assert total is not None
        if update.terms > 1:
            return total if self._divides else total.div_(update.count).to(self.flat.dtype)
        mean = total.to(self.flat.dtype)  # the sum is the contribution itself, and perhaps another's: not to be written
        return mean / update.count if update.count > 1 else mean

    def assign(self, assignment: Assignment) -> None:
        """Sets weights and optimizer state. State of an optimizer that trains the bucket no more is left out."""
        for position, values in assignment.weights.items():
            self._slices[position].copy_(values)
        if self._optimizer is not None and assignment.stage == self.stage.number:
            for position in assignment.reset | assignment.state.keys():
                state = {name: value.clone() for name, value in assignment.state.get(position, {}).items()}
                self._set_state(self._optimizer, position, state)

    def _set_state(
        self, optimizer: torch.optim.Optimizer, position: int, state: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Sets one slice's optimizer state; without any, to what its optimizer begins with."""
        if position not in self._trained:
            return
        tensor = self._slices[position]
        optimizer.state.pop(tensor, None)
        if state:
            optimizer.state[tensor] = dict(state)
        elif self._name == "Adagrad":  # makes its state in its constructor, and cannot step without
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
        states = {position: optimizer.state.get(self._slices[position], {}) for position in present}
        fresh = {position for position, state in states.items() if state.get("momentum_buffer") is None}
        return [positions for positions in (present - fresh, fresh) if positions]

    def read_state(self, name: str) -> tuple[torch.Tensor, frozenset[int]]:
        """Returns one kind of optimizer state, and the positions of the slices that have none.

        [numel] in the bucket's dtype, with zeros where there is none; for a state of one number a parameter, a float32
        for each slice.
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

        owned: the state is this bucket's to keep; otherwise it is copied. `weights` may be `flat` itself.
        sent:  what workers have; None: the weights
        stage: what trained the bucket; None: what its job is registered with
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
        """Sets hyper-parameters, of the groups that there are."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group.update(groups.get(group["index"], {}))

    def own(self) -> None:
        """Copies what the open update borrowed of a worker's memory."""
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
    """Returns the bucket's optimizer over the slices that one has, with their parameter groups."""
    members: dict[int, list[torch.Tensor]] = {}
    for group, tensor in zip(stage.members, slices, strict=True):
        if group is not None:
            members.setdefault(group, []).append(tensor)
    cls = ELEMENTWISE[stage.optimizer]
    groups = [{"params": tensors, "index": group, **stage.groups[group]} for group, tensors in members.items()]
    # Handed to the constructor too: Adagrad makes its state there, and looks at no group for how.
    arguments = dict(stage.groups[next(iter(members))])
    if _is_fused(stage.optimizer, bucket):
        arguments["fused"] = True  # ten times faster than one tensor operation after the other
    return cls(groups, **arguments)  # type: ignore[arg-type]


_SCALES: dict[float, torch.Tensor] = {}  # a tensor of one number each: to make one costs as much as to add a bucket
_SCALES_KEPT = 4096  # more than there are workers of a job, and fewer than there are sums of weights


def _scale(count: float) -> torch.Tensor:
    if count not in _SCALES and len(_SCALES) >= _SCALES_KEPT:
        return torch.tensor(float(count))
    if count not in _SCALES:
        _SCALES[count] = torch.tensor(float(count))
    return _SCALES[count]


def _is_fused(name: str, bucket: BucketSpec) -> bool:
    return bucket.dtype == "float32" and name in FUSED_ON_CPU
