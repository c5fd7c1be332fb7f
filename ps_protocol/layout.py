"""How a model's parameters become buckets: one pure function that both ends run on the same job.

All parameters of one element type that one optimizer steps form one flat space, in reverse registration order, because
backward finishes the last layers first (as DDP does). Frozen parameters and buffers form spaces of their own behind
them. Each parameter starts on a 64-byte boundary. The space is cut every `bucket_bytes`; a bucket lists the slices of
parameters that lie in it.

    space "float32":   |-- w3 --|-- b3 --|------------- w2 -------------|-- b2 --| ...
    buckets:           |------ bucket 0 ------|------ bucket 1 ------|-- bucket 2 ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
DEFAULT_BUCKET_BYTES = 4 * 2**20
# In a worker's own part of a checkpoint, a frozen parameter is called this and its index: buffers that training
# changes, which `ps-server export` puts into the model. Files of earlier versions have the same name.
FROZEN = "held/"


@dataclass(frozen=True)
class DataType:
    """An element type: its name (torch's own), its size, and whether an optimizer can step it."""

    name: str
    itemsize: int
    floating: bool


DATA_TYPES: dict[str, DataType] = {
    entry.name: entry
    for entry in (
        DataType("float32", 4, True),
        DataType("bfloat16", 2, True),
        DataType("float16", 2, True),
        DataType("float64", 8, True),
        DataType("int64", 8, False),
        DataType("int32", 4, False),
        DataType("bool", 1, False),
        DataType("uint8", 1, False),
    )
}


@dataclass(frozen=True)
class ParameterSpec:
    """One named tensor of the model.

    group:     the optimizer group that steps it; None for what none steps
    optimizer: the job's optimizer that the group belongs to
    element:   torch's name of the model's own element type, where `dtype` is that of its parts: the last dimension of
               `shape` counts the parts of an element (tensors.py). Empty: that type is `dtype`
    is_saved:  it is in the model's state_dict; a buffer that is not persistent is not
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None
    optimizer: int = 0
    element: str = ""
    is_saved: bool = True

    @property
    def numel(self) -> int:
        """How many elements it has: 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in memory, without padding."""
        return self.numel * DATA_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Slice:
    """A slice of one parameter inside a bucket. All numbers count elements.

    parameter: index into the job's parameters
    start:     where the slice begins in the flattened parameter
    offset:    where it begins in the bucket
    length:    how long it is
    """

    parameter: int
    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class BucketSpec:
    """A contiguous slice of one flat space: elements [start, start + numel) of `space`.

    frozen:    no optimizer steps it: what is in it never changes on a shard
    optimizer: the job's optimizer that steps it; 0 where none does
    """

    index: int
    space: str
    dtype: str
    frozen: bool
    start: int
    numel: int
    slices: tuple[Slice, ...]
    optimizer: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in memory, without padding."""
        return self.numel * DATA_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Layout:
    """Every bucket of a job, and where each parameter begins in its space (in elements)."""

    buckets: tuple[BucketSpec, ...]
    offsets: tuple[int, ...]
    space_sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


def space_of(parameter: ParameterSpec) -> str:
    """Returns the name of the flat space that a parameter lies in."""
    if parameter.group is None:
        return f"frozen-{parameter.dtype}"
    return f"{parameter.dtype}.{parameter.optimizer}" if parameter.optimizer else parameter.dtype


def bucket_layout(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> Layout:
    """Returns the buckets of a job. Deterministic: equal arguments give equal layouts on every machine.

    bucket_bytes: bytes of a full bucket, a multiple of 64.
    """
    spaces: dict[tuple[bool, str, int], list[int]] = {}
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        frozen = spec.group is None
        spaces.setdefault((frozen, spec.dtype, 0 if frozen else spec.optimizer), []).append(index)
    buckets: list[BucketSpec] = []
    offsets = [0] * len(parameters)
    sizes: dict[str, int] = {}
    ordered = sorted(spaces.items(), key=lambda item: item[0][0])  # stable: what trains comes first
    for (frozen, dtype, optimizer), members in ordered:
        space = space_of(parameters[members[0]])
        itemsize = DATA_TYPES[dtype].itemsize
        step = ALIGNMENT_BYTES // itemsize
        end = 0
        for index in members:
            offsets[index] = end
            end += -(-parameters[index].numel // step) * step
        sizes[space] = end
        pieces = _cut(members, parameters, offsets, end, bucket_bytes // itemsize)
        buckets += [
            BucketSpec(k + len(buckets), space, dtype, frozen, start, numel, slices, optimizer)
            for k, (start, numel, slices) in enumerate(pieces)
        ]
    return Layout(tuple(buckets), tuple(offsets), sizes)


def _cut(
    members: list[int], parameters: Sequence[ParameterSpec], offsets: list[int], end: int, size: int
) -> list[tuple[int, int, tuple[Slice, ...]]]:
    """Cuts one space into buckets of `size` elements: of each, its start, its elements and its slices.

    members: the space's parameters in the order of their offsets
    """
    slices: list[list[Slice]] = [[] for _ in range(-(-end // size))]
    for index in members:
        start, stop = offsets[index], offsets[index] + parameters[index].numel
        position = start
        while position < stop:
            bucket = position // size
            cut = min(stop, (bucket + 1) * size)
            slices[bucket].append(Slice(index, position - start, position - bucket * size, cut - position))
            position = cut
    return [(k * size, min(size, end - k * size), tuple(inside)) for k, inside in enumerate(slices)]
