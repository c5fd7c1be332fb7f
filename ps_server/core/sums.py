"""The sum of the contributions to one update: of their gradients, and the hyper-parameters that they name.

The memory for sums is pooled, and a step may be made in stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.layout import BucketSpec

STRETCH = 2**19  # elements, 2 MiB: smaller ones cost more calls than they save, larger ones leave the cache (measured)
KEPT = 4  # most free tensors of one size and type in the pool; the memory of others is freed
SUMMED_AS_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16})


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that elements are added in: float32 at least, because half types overflow, and lose the small
    terms."""
    return torch.promote_types(dtype, torch.float32)


def square(values: torch.Tensor) -> float:
    """Returns the square of the L2 norm of [n] elements."""
    return float(torch.linalg.vector_norm(values, dtype=wide(values.dtype))) ** 2


class Scratch:
    """A pool of memory for sums: to touch fresh memory takes as long as to sum in it. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor [numel] with undefined content."""
        try:
            return self._free[numel, dtype].pop()  # one operation: another thread may pop the last tensor
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Gives a tensor back to the pool."""
        free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
        if len(free) < KEPT:
            free.append(tensor)


class Sum:
    """A sum of tensors [numel], in the order in which they are added. Not thread-safe.

    total: the sum, in float32 if its terms are narrower; None if it has no term
    last:  the last term, which is not added to `total` yet; None if there is none
    """

    def __init__(self, scratch: Scratch) -> None:
        self.total: torch.Tensor | None = None
        self.last: torch.Tensor | None = None
        self._scratch = scratch
        self._owns = self._owns_last = False  # whether `total`, and `last`, may be overwritten
        self._is_scratch = False

    def add(self, values: torch.Tensor, own: bool, copy: bool = False, is_last: bool = False) -> None:
        """Adds a term.

        own:     nothing else uses the memory of the term, so that the sum may be made in it
        copy:    the term's owner may overwrite it while the sum exists, so it is copied
        is_last: no other term is expected: it may be kept as `last`
        """
        if self.last is not None:
            self.complete()
        if self.total is None and copy and not own:
            self.total = self._scratch.take(values.numel(), values.dtype).copy_(values)
            self._owns = self._is_scratch = True
        elif self.total is None:
            self.total, self._owns = values, own  # no copy: a sum of one term is only read
        elif is_last and {values.dtype, self.total.dtype} <= SUMMED_AS_FLOAT32:
            self.last, self._owns_last = values, own
        else:
            self._add(self.total, values)

    def complete(self) -> None:
        """Adds `last` to `total`, if there is one."""
        if self.total is not None and self.last is not None:
            values, self.last = self.last, None
            self._add(self.total, values)

    def _add(self, total: torch.Tensor, values: torch.Tensor) -> None:
        summed = wide(total.dtype)
        if not self._owns or summed is not total.dtype:
            self.total = self._scratch.take(total.numel(), summed)
            self._owns = self._is_scratch = True
        assert self.total is not None
        if total.dtype == values.dtype == self.total.dtype:
            torch.add(total, values, out=self.total)
            return
        stretch = self._scratch.take(STRETCH, self.total.dtype)
        for some in zip(total.split(STRETCH), values.split(STRETCH), self.total.split(STRETCH), strict=True):
            add(*some, stretch)
        self._scratch.give(stretch)

    def own(self) -> None:
        """Copies what the sum has borrowed from a worker's memory."""
        if self.total is not None and not self._owns:
            self.total, self._owns = self.total.clone(), True
        if self.last is not None and not self._owns_last:
            self.last, self._owns_last = self.last.clone(), True

    def close(self) -> None:
        """Gives the memory of the sum back."""
        if self.total is not None and self._is_scratch:
            self._scratch.give(self.total)


def add(total: torch.Tensor, values: torch.Tensor, out: torch.Tensor, wide: torch.Tensor) -> None:
    """Sets `out` to the sum of two tensors of the same size, in the type of `out`, which may be `total`.

    wide: memory of that type, at least as large, in which values are widened: to add tensors of different types takes
          up to three times as long as to widen and add (measured)
    """
    if total.dtype == values.dtype == out.dtype:
        torch.add(total, values, out=out)
        return
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)
    out += values if values.dtype == out.dtype else wide[: values.numel()].copy_(values)


@dataclass(frozen=True)
class StretchPart:
    """The elements [start, stop) of one slice, which lie in a stretch from element `offset` on.

    position: the slice's position in its bucket
    """

    position: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Stretch:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int
    parts: tuple[StretchPart, ...]


def stretches_of(bucket: BucketSpec, size: int = STRETCH) -> tuple[Stretch, ...]:
    """Returns the stretches of a bucket. size: the elements of a stretch; the last one has the rest"""
    found = []
    for start in range(0, bucket.numel, size):
        stop = min(start + size, bucket.numel)
        parts = []
        for position, part in enumerate(bucket.slices):
            first, last = max(start, part.offset), min(stop, part.offset + part.length)
            if first < last:
                parts.append(StretchPart(position, first - part.offset, last - part.offset, first - start))
        found.append(Stretch(start, stop, tuple(parts)))
    return tuple(found)


class StretchStep:
    """The fused SGD of one bucket, stretch by stretch: it adds the last contribution and steps. Not thread-safe.

    A stretch's sum stays in the processor's cache. To add all and step afterwards writes the sum to memory, reads it
    again, and writes it once more: the fused kernel keeps the mean that it has made of the sum. Measured, buckets of
    25 MiB, two contributions: SGD takes 0.82 of the time in stretches, AdamW 1.0 (its arithmetic takes longer than the
    memory), so others step as a whole.

    slices: the optimizer's parameters, each [length of the slice]
    """

    def __init__(self, bucket: BucketSpec, optimizer: torch.optim.SGD, slices: list[torch.Tensor]) -> None:
        self._stretches = stretches_of(bucket)
        self._optimizer, self._slices = optimizer, slices
        ids = {id(tensor): position for position, tensor in enumerate(slices)}
        groups = enumerate(optimizer.param_groups)
        self._group_of = {ids[id(tensor)]: number for number, group in groups for tensor in group["params"]}

    def has_state(self) -> bool:
        """Whether the optimizer has all its state. A slice gets its state in its first step."""
        return all(
            not self._optimizer.param_groups[number]["momentum"]
            or self._optimizer.state.get(self._slices[position], {}).get("momentum_buffer") is not None
            for position, number in self._group_of.items()
        )

    def run(self, step: Callable[[], object], total: torch.Tensor, last: torch.Tensor, scratch: Scratch) -> None:
        """Steps with total + last, both [numel of the bucket] and only read."""
        gradients, wide = (scratch.take(STRETCH, torch.float32) for _ in range(2))
        groups = self._optimizer.param_groups
        own = [group["params"] for group in groups]
        try:
            for stretch in self._stretches:
                gradient, here = gradients[: stretch.stop - stretch.start], slice(stretch.start, stretch.stop)
                add(total[here], last[here], gradient, wide)
                self._step_stretch(step, stretch, gradient)
        finally:
            for group, members in zip(groups, own, strict=True):
                group["params"] = members
            scratch.give(gradients)
            scratch.give(wide)

    def _step_stretch(self, step: Callable[[], object], stretch: Stretch, gradient: torch.Tensor) -> None:
        """Steps one stretch: for this step, views of the slices and of their momentum replace the slices in the
        optimizer.
        """
        state, groups = self._optimizer.state, self._optimizer.param_groups
        for group in groups:
            group["params"] = []
        views = []
        for part in stretch.parts:
            whole = self._slices[part.position]
            view = whole[part.start : part.stop]
            view.grad = gradient[part.offset :][: part.stop - part.start]
            momentum = state.get(whole, {}).get("momentum_buffer")
            state[view] = {} if momentum is None else {"momentum_buffer": momentum[part.start : part.stop]}
            groups[self._group_of[part.position]]["params"].append(view)
            views.append(view)
        step()
        for view in views:
            del state[view]


# -- hyper-parameters --------------------------------------------------------------------------------------------------
# Which hyper-parameters an update uses, out of those that contributions name: one rule for buckets and tables.
#
# A contribution names its worker's hyper-parameters, or none if its step was left out. Those of the first contribution
# count, which in sync is that of the lowest live rank. If contributions may differ in their clocks
# (`UpdateRule.mixes_clocks`), those with the highest clock count; an update in which only late workers name some keeps
# those that the bucket has. So a late worker never sets a schedule back.


class GoodValues:
    """The hyper-parameters that last passed the check, by key. Most steps name those of the step before, and need no
    check.
    """

    def __init__(self) -> None:
        self._last: dict[object, HyperParameters] = {}

    def has(self, key: object, values: HyperParameters) -> bool:
        """Whether these are the hyper-parameters that passed the last check."""
        return self._last.get(key) == values

    def note(self, key: object, values: HyperParameters) -> None:
        """Records that these hyper-parameters have passed the check."""
        self._last[key] = values


class NamedValues:
    """The hyper-parameters that the contributions to one update name, by group."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[int, HyperParameters]] = {}

    def add(self, group: int, values: HyperParameters, clock: int) -> None:
        """Adds the values that one contribution names. clock: its worker's, if the clocks in an update may differ; else
        0
        """
        if group not in self._named or clock > self._named[group][0]:
            self._named[group] = clock, values

    def items(self) -> Iterable[tuple[int, tuple[int, HyperParameters]]]:
        """Returns, by group, the values that count, and the clock of the worker that named them."""
        return self._named.items()


class ValuesInUse:
    """By group, the clock of the worker that named the hyper-parameters in use; 0 at first, and after a restore."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}

    def newer(self, named: NamedValues) -> dict[int, HyperParameters]:
        """Returns, by group, the values that an update uses from now on. Values named at a lower clock than those in
        use are left out.
        """
        newer = {}
        for group, (clock, values) in named.items():
            if clock >= self._clocks.get(group, 0):
                self._clocks[group], newer[group] = clock, values
        return newer
