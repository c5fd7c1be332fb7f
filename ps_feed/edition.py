"""An edition: an unchanging copy of a job's weights, put together from what shards send.

Its elements lie in one piece of memory for each of the job's flat spaces (ps_protocol/layout.py), so each tensor is a
view of it, wherever the job cuts its buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec, Layout, ParameterSpec, bucket_layout, space_of

# numpy has no bfloat16: its elements are given as the 16 bits that they are.
_NUMPY_TYPES: dict[str, str] = {**{name: name for name in DATA_TYPES}, "bfloat16": "uint16"}
_NOTHING = np.empty(0, np.uint8)


class Tensor(NamedTuple):
    """One tensor of an edition.

    values:  its elements, read-only; those of bfloat16 as uint16
    dtype:   the type that the elements have in `values`, by torch's name
    element: torch's name of the tensor's own type where `values` has the parts of each element, in one more dimension;
             else empty: see ParameterSpec.element_type in job.proto
    """

    values: npt.NDArray[np.generic]
    dtype: str
    element: str


class Contents:
    """Which tensors an edition has, and where they lie.

    parameters: names of those that are wanted; None: all
    wire:       the type in which float32 elements of trained parameters travel
    """

    def __init__(self, spec: JobSpec, parameters: Collection[str] | None, wire: str) -> None:
        """Raises InvalidRequest for names that the job has not, Unsupported for a job whose parameters are cut."""
        if any(each.piece is not None for each in spec.parameters):
            raise Unsupported(
                f"the workers of job {spec.name!r} are groups that hold its parameters in pieces, which have no "
                "editions yet: read a checkpoint of it, exported with `ps-server export`"
            )
        self.spec, self.wire = spec, wire
        self.layout: Layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        self.tensors: dict[str, int] = {
            each.name: index
            for index, each in enumerate(spec.parameters)
            if parameters is None or each.name in parameters
        }
        if parameters is not None:
            unknown = sorted(set(parameters) - self.tensors.keys())
            if unknown:
                raise InvalidRequest(
                    f"job {spec.name!r} has no parameter {', '.join(unknown[:3])}; it has {len(spec.parameters)}, such "
                    f"as {', '.join(each.name for each in spec.parameters[:3])}"
                )
        wanted = set(self.tensors.values())
        self.buckets: dict[int, BucketSpec] = {
            bucket.index: bucket
            for bucket in self.layout.buckets
            if any(piece.parameter in wanted for piece in bucket.slices)
        }

    def dtype(self, parameter: ParameterSpec | BucketSpec) -> str:
        """Returns the type in which elements lie in an edition."""
        frozen = parameter.group is None if isinstance(parameter, ParameterSpec) else parameter.frozen
        return self.wire if parameter.dtype == "float32" and not frozen else parameter.dtype

    def size(self, bucket: BucketSpec) -> int:
        """Returns the bytes of a bucket in an edition."""
        return bucket.numel * DATA_TYPES[self.dtype(bucket)].itemsize

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer steps any of it."""
        return any(not bucket.frozen for bucket in self.buckets.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(map(self.size, self.buckets.values()))


@dataclass(frozen=True)
class EditionArrays:
    """An unchanging copy of a job's weights.

    run:      of the job
    version:  updates that all of its tensors have. In sync and local modes all have exactly so many; in the other modes
              this is the lowest, and `versions` has each bucket's
    versions: by bucket
    timeline: which of several series of updates the version counts; another begins when the job is rolled back
    """

    contents: Contents
    run: str
    version: int
    versions: Mapping[int, int]
    timeline: int
    spaces: Mapping[str, npt.NDArray[np.uint8]]

    def names(self) -> Sequence[str]:
        """Returns the names of its tensors, as in the model's state_dict."""
        return list(self.contents.tensors)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor, without a copy. Raises KeyError for a name that it has not."""
        index = self.contents.tensors[name]
        parameter = self.contents.spec.parameters[index]
        dtype = self.contents.dtype(parameter)
        itemsize, start = DATA_TYPES[dtype].itemsize, self.contents.layout.offsets[index]
        space = self.spaces.get(space_of(parameter), _NOTHING)  # a parameter without elements lies in no bucket
        flat = space[start * itemsize : (start + parameter.numel) * itemsize]
        values = flat.view(_NUMPY_TYPES[dtype]).reshape(parameter.shape)
        return Tensor(values, dtype, parameter.element)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Iterates over names and tensors."""
        return ((name, self.tensor(name)) for name in self.contents.tensors)


class Arriving:
    """An edition that is being received. `take` may be called from any thread, for each bucket once.

    before: an edition of the same run, whose frozen tensors are taken over; None: none
    """

    def __init__(self, contents: Contents, before: EditionArrays | None) -> None:
        self._contents, self._versions = contents, dict[int, int]()
        self._spaces: dict[str, npt.NDArray[np.uint8]] = {}
        itemsizes = {each.space: DATA_TYPES[contents.dtype(each)].itemsize for each in contents.buckets.values()}
        frozen = {each.space for each in contents.buckets.values() if each.frozen}
        for space, itemsize in itemsizes.items():
            if before is not None and space in frozen:
                self._spaces[space] = before.spaces[space]
            else:
                self._spaces[space] = np.empty(contents.layout.space_sizes[space] * itemsize, np.uint8)
        has_frozen = before is not None
        self.missing = {each.index for each in contents.buckets.values() if not (each.frozen and has_frozen)}

    def take(self, index: int, version: int, payload: memoryview, checksum: int, what: str) -> None:
        """Takes a bucket. Raises InvalidRequest if it is not what was asked for, or was damaged on the way."""
        bucket = self._contents.buckets.get(index)
        if bucket is None or index in self._versions:
            raise InvalidRequest(f"{what}: bucket {index} was not asked for, or came twice")
        size = self._contents.size(bucket)
        if len(payload) != size:
            raise InvalidRequest(f"{what}: expected {size} bytes of bucket {index}, got {len(payload)}")
        if zlib.crc32(payload) != checksum:
            raise InvalidRequest(f"{what}: bucket {index} was damaged on the way: its checksum is another one")
        start = bucket.start * (size // bucket.numel)
        self._spaces[bucket.space][start : start + size] = np.frombuffer(payload, np.uint8)
        self._versions[index] = version
        self.missing.discard(index)

    def complete(self, run: str, timeline: int) -> EditionArrays:
        """Returns the edition. Raises InvalidRequest if a bucket is missing."""
        if self.missing:
            raise InvalidRequest(f"{len(self.missing)} buckets are missing, such as {min(self.missing)}")
        for space in self._spaces.values():
            space.flags.writeable = False
        trained = [version for index, version in self._versions.items() if not self._contents.buckets[index].frozen]
        return EditionArrays(self._contents, run, min(trained, default=0), self._versions, timeline, self._spaces)
