"""One bucket's tensors: its weights, its optimizer, and the gradients being added up for the open update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ps_protocol.job import HyperParameters, JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizers import ELEMENTWISE, hyper_parameters, is_scalar_state
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.snapshot import OptimizerState


@dataclass(frozen=True)
class Assignment:
    """What a worker's script has set itself in one bucket, by the segment's position.

    weights: [length of the segment] each
    reset:   segments whose optimizer state becomes what `state` has for them, and nothing else
    """

    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    reset: frozenset[int] = frozenset()
    state: OptimizerState = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        states = sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
        return sum(tensor.nbytes for tensor in self.weights.values()) + states

    def union(self, other: Assignment) -> Assignment:
        """Both together; where both name the same thing, the other counts."""
        state = {position: dict(found) for position, found in self.state.items()}
        for position, found in other.state.items():
            state.setdefault(position, {}).update(found)
        return Assignment({**self.weights, **other.weights}, self.reset | other.reset, state)


@dataclass(frozen=True)
class Gradient:
    """One worker's contribution to one bucket.

    values: [numel of the bucket] in the bucket's dtype, read only; None when this step has no gradient
    absent: positions of segments that have no gradient in this step; without values, all of them or, where the whole
            step was left out, none
    groups: hyper-parameters to use from this update on, by group
    borrowed: the values lie in the worker's own memory, which it may write again once it is told that it was fenced
    assignment: what the worker's script has set before this step
    """

    values: torch.Tensor | None
    absent: frozenset[int] = frozenset()
    groups: Mapping[int, HyperParameters] | None = None
    borrowed: bool = False
    assignment: Assignment | None = None

    def owned(self) -> Gradient:
        """The same contribution in memory of this process."""
        if not self.borrowed or self.values is None:
            return self
        return replace(self, values=self.values.clone(), borrowed=False)


class Scratch:
    """Memory for sums, used again and again: to touch fresh memory costs as much as to sum in it. Thread-safe.

    keep: tensors of a size that are kept; where more are open at a time, their memory is given back
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of [numel] with anything in it."""
        try:
            return self._free[numel, dtype].pop()  # in one go: another thread may take the last one
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Takes a tensor back."""
        free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
        if len(free) < self._keep:
            free.append(tensor)


class DenseBucket:
    """Weights and optimizer of one bucket. Not thread-safe: one caller at a time.

    The optimizer is the real one of torch.optim, over one tensor a segment, each a view into `flat`. A segment without
    a gradient is left alone by it, as in a plain training loop.
    """

    def __init__(self, spec: JobSpec, bucket: BucketSpec, scratch: Scratch) -> None:
        self.bucket = bucket
        self._name = spec.optimizers[bucket.optimizer]
        self._scratch = scratch
        self.flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])  # [numel]
        self._segments = [self.flat[s.offset : s.offset + s.length] for s in bucket.slices]  # each [length]
        self._optimizer = None if bucket.frozen else _optimizer(spec, self._name, bucket, self._segments)
        self._step = None if self._optimizer is None else _bare_step(self._optimizer)
        self._divides = _is_fused(self._name, bucket)
        self._sum: torch.Tensor | None = None  # [numel], of the open update
        self._terms = 0  # what was added up
        self._count = 0  # what the mean is over: those without any gradient too
        self._present: set[int] = set()
        self._groups: dict[int, HyperParameters] = {}
        self._is_open = False  # something was added to the open update, if without a gradient
        self._assignment: Assignment | None = None

    def load(self, values: torch.Tensor) -> None:
        """Sets the weights: [numel] in the bucket's dtype."""
        self.flat.copy_(values)

    def add(self, gradient: Gradient) -> None:
        """Adds one contribution to the open update. The order of calls is the order of the sum."""
        # The first contributor's hyper-parameters and assignments count: in sync that is the lowest rank's, in whatever
        # order contributions came.
        if not self._is_open:
            self._is_open, self._assignment = True, gradient.assignment
        for group, told in (gradient.groups or {}).items():
            self._groups.setdefault(group, told)
        if gradient.values is None:
            # Without a gradient for any segment it counts as zero, as in a bucket that it fills in part; else it is a
            # step that was left out, and the mean is that of the others.
            self._count += len(gradient.absent) == len(self._segments)
            return
        values = gradient.values
        if gradient.absent:
            values = values.clone()
            for position in gradient.absent:
                segment = self.bucket.slices[position]
                values[segment.offset : segment.offset + segment.length] = 0
        self._present.update(set(range(len(self._segments))) - gradient.absent)
        self._count += 1
        self._terms += 1
        if self._sum is None:
            self._sum = values  # not copied: with one contribution it is only read
        elif self._terms == 2:
            wide = torch.float32 if values.itemsize < 4 else values.dtype  # half types would lose the small terms
            total = self._scratch.take(values.numel(), wide)
            if values.dtype == wide:
                self._sum = torch.add(self._sum, values, out=total)
            else:
                self._sum = total.copy_(self._sum)
                self._add_narrow(values)
        elif values.dtype == self._sum.dtype:
            self._sum += values
        else:
            self._add_narrow(values)

    def _add_narrow(self, values: torch.Tensor) -> None:
        """Widened first: adding mixed types takes up to three times as long as both together (measured)."""
        assert self._sum is not None
        wide = self._scratch.take(values.numel(), self._sum.dtype)
        self._sum += wide.copy_(values)
        self._scratch.give(wide)

    def step(self) -> None:
        """One optimizer step with the mean of what was added, from what was assigned. Without any of both, the weights
        stay as they are."""
        if self._assignment is not None:
            self.assign(self._assignment)
        if self._optimizer is not None and self._step is not None and self._sum is not None:
            if self._terms > 1 and self._divides:
                # Gradient scaling, whose inverse torch's fused kernels apply on the way: the same division, but not a
                # pass over memory of its own.
                mean = self._sum
                self._optimizer.grad_scale = _scale(self._count)  # type: ignore[attr-defined]
            elif self._terms > 1:
                mean = self._sum.div_(self._count).to(self.flat.dtype)
            else:  # the sum is the contribution itself, and perhaps another's memory: not to be written
                mean = self._sum.to(self.flat.dtype)
                mean = mean / self._count if self._count > 1 else mean
            for group in self._optimizer.param_groups:
                group.update(self._groups.get(group["index"], {}))
            for positions in self._rounds(self._optimizer):
                for position in positions:
                    segment = self.bucket.slices[position]
                    self._segments[position].grad = mean[segment.offset : segment.offset + segment.length]
                self._step()
                for tensor in self._segments:
                    tensor.grad = None
            if self._divides:
                self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        if self._sum is not None and self._terms > 1:
            self._scratch.give(self._sum)
        self._sum = None
        self._terms = self._count = 0
        self._present.clear()
        self._groups.clear()
        self._is_open, self._assignment = False, None

    def assign(self, assignment: Assignment) -> None:
        """Sets weights and optimizer state."""
        for position, values in assignment.weights.items():
            self._segments[position].copy_(values)
        if self._optimizer is not None:
            for position in assignment.reset | assignment.state.keys():
                state = {name: value.clone() for name, value in assignment.state.get(position, {}).items()}
                self._set_state(self._optimizer, position, state)

    def _set_state(
        self, optimizer: torch.optim.Optimizer, position: int, state: Mapping[str, torch.Tensor] | None
    ) -> None:
        """One segment's optimizer state; without any, what its optimizer begins with."""
        tensor = self._segments[position]
        optimizer.state.pop(tensor, None)
        if state:
            optimizer.state[tensor] = dict(state)
        elif self._name == "Adagrad":  # makes its state in its constructor, and cannot step without
            [group] = [group for group in optimizer.param_groups if any(one is tensor for one in group["params"])]
            [fresh] = ELEMENTWISE[self._name]([tensor], **hyper_parameters(self._name, group)).state.values()  # type: ignore[arg-type]
            optimizer.state[tensor] = fresh

    def _rounds(self, optimizer: torch.optim.Optimizer) -> list[set[int]]:
        """The segments with a gradient, as sets to step one after the other: mostly one.

        torch's fused SGD fails where some momentum buffers exist and others do not yet, because a segment's first
        gradient came later than its neighbour's.
        """
        if not isinstance(optimizer, torch.optim.SGD):
            return [self._present]
        states = {position: optimizer.state.get(self._segments[position], {}) for position in self._present}
        fresh = {position for position, state in states.items() if state.get("momentum_buffer") is None}
        return [positions for positions in (self._present - fresh, fresh) if positions]

    def read_state(self, name: str) -> tuple[torch.Tensor, frozenset[int]]:
        """One kind of optimizer state, and the positions of the segments that have none.

        [numel] in the bucket's dtype, with zeros where there is none; for a state of one number a parameter, a float32
        for each segment.
        """
        states = self._states()
        absent = frozenset(p for p in range(len(self._segments)) if not isinstance(states[p].get(name), torch.Tensor))
        if is_scalar_state(self._name, name):
            numbers = [0.0 if p in absent else float(state[name]) for p, state in enumerate(states)]
            return torch.tensor(numbers, dtype=torch.float32), absent
        found = torch.zeros_like(self.flat)
        for position, segment in enumerate(self.bucket.slices):
            if position not in absent:
                found[segment.offset : segment.offset + segment.length] = states[position][name]
        return found, absent

    def state_names(self) -> list[str]:
        """The kinds of optimizer state that any segment has now."""
        return sorted({n for state in self._states() for n, v in state.items() if isinstance(v, torch.Tensor)})

    def _states(self) -> list[dict[str, Any]]:
        if self._optimizer is None:
            return [{} for _ in self._segments]
        return [dict(self._optimizer.state.get(tensor) or {}) for tensor in self._segments]

    def copy_state(self) -> dict[int, dict[str, torch.Tensor]]:
        """A copy of the optimizer's state, by segment."""
        return {
            position: {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
            for position, state in enumerate(self._states())
            if state
        }

    def groups(self) -> dict[int, HyperParameters]:
        """The hyper-parameters that the last update was made with, by group."""
        if self._optimizer is None:
            return {}
        return {group["index"]: hyper_parameters(self._name, group) for group in self._optimizer.param_groups}

    def restore(self, weights: torch.Tensor, state: OptimizerState, groups: Mapping[int, HyperParameters]) -> None:
        """Sets weights, optimizer state and hyper-parameters to those of an image, by copying them."""
        self.load(weights)
        if self._optimizer is None:
            return
        for position in range(len(self._segments)):
            found = {name: value.clone() for name, value in state.get(position, {}).items()}
            self._set_state(self._optimizer, position, found)
        for group in self._optimizer.param_groups:
            group.update(groups.get(group["index"], {}))

    def own(self) -> None:
        """Copies what the open update borrowed of a worker's memory."""
        if self._sum is not None and self._terms == 1:
            self._sum = self._sum.clone()

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        if self._optimizer is None:
            return 0
        # Copies of the dictionaries: the optimizer may be adding to them in another thread.
        states = list(self._optimizer.state.values())
        return sum(v.nbytes for state in states for v in list(state.values()) if isinstance(v, torch.Tensor))


def _optimizer(spec: JobSpec, name: str, bucket: BucketSpec, segments: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The bucket's optimizer over its segments, with the job's parameter groups."""
    members: dict[int, list[torch.Tensor]] = {}
    for segment, tensor in zip(bucket.slices, segments, strict=True):
        group = spec.parameters[segment.parameter].group
        assert group is not None
        members.setdefault(group, []).append(tensor)
    cls = ELEMENTWISE[name]
    groups = [{"params": tensors, "index": group, **spec.groups[group]} for group, tensors in members.items()]
    # Handed to the constructor too: Adagrad makes its state there, and looks at no group for how.
    arguments = dict(spec.groups[next(iter(members))])
    if _is_fused(name, bucket):
        arguments["fused"] = True  # ten times faster than one tensor operation after the other
    return cls(groups, **arguments)  # type: ignore[arg-type]


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """One step, without what torch wraps around it for its profiler and for hooks, which nobody sets here: that takes
    as long as a small bucket (measured)."""
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", step)
    return lambda: bare(optimizer)


_SCALES: dict[int, torch.Tensor] = {}  # a tensor of one number each: to make one costs as much as to add up a bucket


def _scale(count: int) -> torch.Tensor:
    if count not in _SCALES:
        _SCALES[count] = torch.tensor(float(count))
    return _SCALES[count]


def _is_fused(name: str, bucket: BucketSpec) -> bool:
    return bucket.dtype == "float32" and name in _FUSED_ON_CPU


_FUSED_ON_CPU = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
