"""Cuts a model's parameters into buckets: pure functions that servers and workers run on the same job.

All parameters of one element type and one optimizer form one flat space. They are in reverse order of registration, as
in DDP, because backward finishes the last layers first. Frozen parameters and buffers form further spaces. Each
parameter starts on a 64-byte boundary. The space is cut every `bucket_bytes`; a bucket lists the slices of parameters
that lie in it.

    space "float32":   |-- w3 --|-- b3 --|------------- w2 -------------|-- b2 --| ...
    buckets:           |------ bucket 0 ------|------ bucket 1 ------|-- bucket 2 ...

If a worker is a group of processes, the parameters of each member form spaces of their own: a bucket is pushed by one
process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 64
DEFAULT_BUCKET_BYTES = 4 * 2**20
# The prefix of a frozen parameter's name in a worker's own part of a checkpoint, before its index. These are buffers
# that training changes; `ps-server export` puts them into the model. The old word stays, so that old files can be read.
FROZEN = "held/"


@dataclass(frozen=True)
class DataType:
    """An element type: its name (torch's own), its size, and whether an optimizer can step it.

    code: its name in a safetensors file
    numpy: numpy's type for its elements; for a type that numpy lacks, unsigned integers of the same size
    """

    name: str
    itemsize: int
    floating: bool
    code: str
    numpy: str


DATA_TYPES: dict[str, DataType] = {
    entry.name: entry
    for entry in (
        DataType("float32", 4, True, "F32", "float32"),
        DataType("bfloat16", 2, True, "BF16", "uint16"),
        DataType("float16", 2, True, "F16", "float16"),
        DataType("float64", 8, True, "F64", "float64"),
        DataType("int64", 8, False, "I64", "int64"),
        DataType("int32", 4, False, "I32", "int32"),
        DataType("bool", 1, False, "BOOL", "bool"),
        DataType("uint8", 1, False, "U8", "uint8"),
    )
}


@dataclass(frozen=True)
class PiecePlace:
    """The position of a piece in its parameter: it begins at `offsets`, one per dimension, in the parameter of shape
    `whole_shape`.
    """

    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ParameterSpec:
    """One named tensor of the model, or a piece of one.

    param_group: the parameter group of its optimizer; None if no optimizer steps it
    optimizer: the number of that optimizer in the job
    element: torch's name of the element type if `dtype` is that of its parts (tensors.py); the last dimension of
    `shape` then counts the parts. Empty: the element type is `dtype`
    is_saved: whether the model's state_dict has it; a non-persistent buffer is not saved
    member: of each worker's group, the process that holds it
    piece: the position of the piece in the whole parameter; None: this is the whole parameter
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    param_group: int | None
    optimizer: int = 0
    element: str = ""
    is_saved: bool = True
    member: int = 0
    piece: PiecePlace | None = None

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Identifies the parameter within the job: its name, and the offsets at which it begins in the
        whole parameter.
        """
        return self.name, () if self.piece is None else self.piece.offsets

    @property
    def numel(self) -> int:
        """The number of elements: 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in memory, without padding."""
        return self.numel * DATA_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Slice:
    """A slice of one parameter inside a bucket. All numbers count elements.

    parameter: index into the job's parameters
    start: first element in the flattened parameter
    offset: first element in the bucket
    length: number of elements
    """

    parameter: int
    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class BucketSpec:
    """A contiguous piece of one flat space: elements [start, start + numel) of `space`.

    frozen: whether no optimizer steps it; a shard then never changes its values
    optimizer: the number of its optimizer in the job; 0 if it is frozen
    member: of each worker's group, the process that pushes it
    """

    index: int
    space: str
    dtype: str
    frozen: bool
    start: int
    numel: int
    slices: tuple[Slice, ...]
    optimizer: int = 0
    member: int = 0

    @cached_property  # asked several times a step
    def nbytes(self) -> int:
        """Its size in memory, without padding."""
        return self.numel * DATA_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Layout:
    """Every bucket of a job, and where each parameter begins in its space (in elements).

    member: the member of a group whose view of the layout this is; None: the view of a worker of one process, or of a
            server
    """

    buckets: tuple[BucketSpec, ...]
    offsets: tuple[int, ...]
    space_sizes: dict[str, int]
    member: int | None = None

    @property
    def held(self) -> tuple[BucketSpec, ...]:
        """The buckets whose initial values this process sends."""
        return self.buckets if self.member is None else tuple(b for b in self.buckets if b.member == self.member)

    @property
    def trained(self) -> tuple[BucketSpec, ...]:
        """The buckets that an optimizer steps, and that this process pushes and pulls."""
        return tuple(bucket for bucket in self.held if not bucket.frozen)

    def trains(self, parameter: ParameterSpec) -> bool:
        """Whether an optimizer steps a parameter, and this process pushes it."""
        return parameter.param_group is not None and self.member in (None, parameter.member)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


def space_of(parameter: ParameterSpec) -> str:
    """Returns the name of the flat space that a parameter lies in."""
    member = f"@{parameter.member}" if parameter.member else ""
    if parameter.param_group is None:
        return f"frozen-{parameter.dtype}{member}"
    return f"{parameter.dtype}.{parameter.optimizer}{member}" if parameter.optimizer else f"{parameter.dtype}{member}"


def bucket_layout(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> Layout:
    """Returns the buckets of a job. Deterministic: equal arguments give equal layouts on every machine.

    bucket_bytes: bytes of a full bucket, a multiple of 64.
    """
    spaces: dict[tuple[bool, str, int, int], list[int]] = {}
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        frozen = spec.param_group is None
        key = frozen, spec.dtype, 0 if frozen else spec.optimizer, spec.member
        spaces.setdefault(key, []).append(index)
    buckets: list[BucketSpec] = []
    offsets = [0] * len(parameters)
    sizes: dict[str, int] = {}
    ordered = sorted(spaces.items(), key=lambda item: item[0][0])  # sorted is stable; trained spaces first
    for (frozen, dtype, optimizer, member), inside in ordered:
        space = space_of(parameters[inside[0]])
        itemsize = DATA_TYPES[dtype].itemsize
        step = ALIGNMENT_BYTES // itemsize
        end = 0
        for index in inside:
            offsets[index] = end
            end += -(-parameters[index].numel // step) * step
        sizes[space] = end
        cuts = _cut(inside, parameters, offsets, end, bucket_bytes // itemsize)
        buckets += [
            BucketSpec(k + len(buckets), space, dtype, frozen, start, numel, slices, optimizer, member)
            for k, (start, numel, slices) in enumerate(cuts)
        ]
    return Layout(tuple(buckets), tuple(offsets), sizes)


def _cut(
    indices: list[int], parameters: Sequence[ParameterSpec], offsets: list[int], end: int, size: int
) -> list[tuple[int, int, tuple[Slice, ...]]]:
    """Cuts one space into buckets of `size` elements. Returns the start, the elements and the slices of each.

    indices: the space's parameters in the order of their offsets
    """
    slices: list[list[Slice]] = [[] for _ in range(-(-end // size))]
    for index in indices:
        start, stop = offsets[index], offsets[index] + parameters[index].numel
        position = start
        while position < stop:
            bucket = position // size
            cut = min(stop, (bucket + 1) * size)
            slices[bucket].append(Slice(index, position - start, position - bucket * size, cut - position))
            position = cut
    return [(k * size, min(size, end - k * size), tuple(inside)) for k, inside in enumerate(slices)]
