"""An edition: an unchanging copy of a job's weights, assembled from the messages of shards.

Its elements lie in one piece of memory for each of the job's flat spaces (ps_protocol/layout.py), so each tensor is a
view of it, wherever the job cuts its buckets. Where workers are groups that hold a parameter in pieces, each piece is a
view, and the tensor is joined of them when it is asked for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_feed.mapping import HandedOver
from ps_protocol.changes import apply_change
from ps_protocol.errors import InvalidRequest, NotShared, TryLater
from ps_protocol.handover import MOST_FILES
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec, Layout, ParameterSpec, bucket_layout, space_of
from ps_protocol.messages.editions import EditionBucket
from ps_protocol.pieces import validate_pieces
from ps_protocol.tables import TableSpec
from ps_runtime.memory_files import MemoryFile

log = logging.getLogger("ps_feed")

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


class Form(NamedTuple):
    """The shape and types of a tensor of an edition, without its elements; see Tensor."""

    shape: tuple[int, ...]
    dtype: str
    element: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DATA_TYPES[self.dtype].itemsize


class Damaged(Exception):
    """A received bucket differs from the sent one."""


class Contents:
    """Which tensors an edition has, and where they lie.

    parameters: names of those that are wanted, and of tables; None: all
    wire:       the type in which float32 elements of trained parameters travel
    tensors:    by name, its pieces among the job's parameters; of most jobs one each
    tables:     the tables of rows that are wanted, by name: no edition has their rows
    is_part:    only some are wanted
    """

    def __init__(self, spec: JobSpec, parameters: Collection[str] | None, wire: str) -> None:
        """Raises InvalidRequest for names that the job has not, and for pieces that are no whole tensors."""
        validate_pieces(spec.parameters, spec.group_size)
        self.spec, self.wire, self.is_part = spec, wire, parameters is not None
        self.layout: Layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        self.tensors: dict[str, list[int]] = {}
        for index, each in enumerate(spec.parameters):
            if parameters is None or each.name in parameters:
                self.tensors.setdefault(each.name, []).append(index)
        tables = {each.rows.name: each.rows for each in spec.tables}
        if parameters is not None:
            # A table is asked for by its own name, or by that of its handle.
            tables = {name: rows for name, rows in tables.items() if {name, f"{name}.weight"} & set(parameters)}
            handles = {f"{name}.weight" for name in tables}
            unknown = sorted(set(parameters) - self.tensors.keys() - tables.keys() - handles)
            if unknown:
                names = [*(each.name for each in spec.parameters), *(each.rows.name for each in spec.tables)]
                raise InvalidRequest(
                    f"job {spec.name!r} has no parameter {', '.join(unknown[:3])}; it has {len(names)}, such "
                    f"as {', '.join(names[:3])}"
                )
        self.tables: dict[str, TableSpec] = tables
        wanted = {index for pieces in self.tensors.values() for index in pieces}
        self.buckets: dict[int, BucketSpec] = {
            bucket.index: bucket
            for bucket in self.layout.buckets
            if any(piece.parameter in wanted for piece in bucket.slices)
        }

    def dtype(self, parameter: ParameterSpec | BucketSpec) -> str:
        """Returns the type in which elements lie in an edition."""
        frozen = parameter.param_group is None if isinstance(parameter, ParameterSpec) else parameter.frozen
        return self.wire if parameter.dtype == "float32" and not frozen else parameter.dtype

    def size(self, bucket: BucketSpec) -> int:
        """Returns the bytes of a bucket in an edition."""
        return bucket.numel * DATA_TYPES[self.dtype(bucket)].itemsize

    def is_saved(self, name: str) -> bool:
        """Whether a tensor is in the model's state_dict."""
        return self.spec.parameters[self.tensors[name][0]].is_saved

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

    run:      which run of the job's name the weights are from
    version:  updates that all of its tensors have. In sync and local modes all have exactly so many; in the other modes
              this is the lowest, and `versions` has each bucket's
    versions: by bucket
    timeline: which of several series of updates the version counts; another begins when the job is rolled back
    timelines: by bucket: where workers share no clock, each shard may have another one
    checksums: by bucket: the checksum of its elements that the shard sent with it; of mapped ones there is none
    files:     the sealed memory files of this process in which spaces lie, if they do
    """

    contents: Contents
    run: str
    version: int
    versions: Mapping[int, int]
    timeline: int
    spaces: Mapping[str, npt.NDArray[np.uint8]]
    checksums: Mapping[int, int]
    timelines: Mapping[int, int] = field(default_factory=dict)
    files: Mapping[str, MemoryFile] = field(default_factory=dict)

    def tells(self, index: int) -> bool:
        """Whether a bucket has values that rank 0 has sent: no optimizer steps it."""
        return self.contents.buckets[index].frozen and self.versions.get(index, 0) > 0

    def is_older(self, index: int, shard_versions: Mapping[int, int]) -> bool:
        """Whether rank 0 has sent newer values of a bucket that no optimizer steps."""
        return shard_versions.get(index, 0) > self.versions.get(index, 0)

    @property
    def buffers_version(self) -> int:
        """The version up to which this edition has rank 0's values of what no optimizer steps (buffers, frozen
        parameters): the lowest version of those buckets. 0: rank 0 has sent none.
        """
        return min((self.versions[index] for index in self.contents.buckets if self.tells(index)), default=0)

    def elements(self, index: int) -> npt.NDArray[np.uint8]:
        """Returns the elements of a bucket, as bytes, without a copy."""
        bucket = self.contents.buckets[index]
        itemsize = DATA_TYPES[self.contents.dtype(bucket)].itemsize
        return self.spaces[bucket.space][bucket.start * itemsize : (bucket.start + bucket.numel) * itemsize]

    def bases(self, buckets: Collection[int], timeline: int) -> dict[int, int]:
        """Returns the versions of the buckets that are of this timeline. The changes since then may be requested."""
        return {index: self.versions[index] for index in buckets if self.timelines.get(index) == timeline}

    def names(self) -> Sequence[str]:
        """Returns the names of its tensors, as in the model's state_dict."""
        return list(self.contents.tensors)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor, without a copy if it is in one piece. Raises KeyError for a name that it has not."""
        first, *others = self.contents.tensors[name]
        if not self.is_in_pieces(name):
            return self._piece(first)
        shape, dtype, element = self.form(name)
        whole = np.empty(shape, DATA_TYPES[dtype].numpy)
        for index in (first, *others):
            parameter = self.contents.spec.parameters[index]
            assert parameter.piece is not None
            ends = zip(parameter.piece.offsets, parameter.shape, strict=True)
            whole[tuple(slice(start, start + length) for start, length in ends)] = self._piece(index).values
        whole.flags.writeable = False
        return Tensor(whole, dtype, element)

    def is_in_pieces(self, name: str) -> bool:
        """Whether `tensor` has to join a tensor of several pieces. Raises KeyError for an unknown name."""
        first, *others = self.contents.tensors[name]
        return bool(others) and self.contents.spec.parameters[first].piece is not None

    def form(self, name: str) -> Form:
        """Returns a tensor's form. Nothing is joined. Raises KeyError for a name that it has not."""
        parameter = self.contents.spec.parameters[self.contents.tensors[name][0]]
        place = parameter.piece if self.is_in_pieces(name) else None
        shape = parameter.shape if place is None else place.whole_shape
        return Form(tuple(shape), self.contents.dtype(parameter), parameter.element)

    def _piece(self, index: int) -> Tensor:
        parameter = self.contents.spec.parameters[index]
        dtype = self.contents.dtype(parameter)
        itemsize, start = DATA_TYPES[dtype].itemsize, self.contents.layout.offsets[index]
        space = self.spaces.get(space_of(parameter), _NOTHING)  # a parameter without elements lies in no bucket
        flat = space[start * itemsize : (start + parameter.numel) * itemsize]
        values = flat.view(DATA_TYPES[dtype].numpy).reshape(parameter.shape)
        return Tensor(values, dtype, parameter.element)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Iterates over names and tensors."""
        return ((name, self.tensor(name)) for name in self.contents.tensors)


class Arriving:
    """An edition that is being received. `take` may be called from any thread, for each bucket once.

    before: an edition of the same run and timeline, whose frozen tensors are taken over, and of which changes may come;
            None: none
    shard_versions: by bucket that no optimizer steps, the version on the shard; `before` may have older values
    memory: makes a memory file of so many bytes for a space; None if it is to lie in memory of this process alone
    nbytes: that have come of buckets; whole: of those that came whole; elements: of the buckets that have come, as they
            lie in the edition
    """

    def __init__(
        self,
        contents: Contents,
        before: EditionArrays | None,
        shard_versions: Mapping[int, int] | None = None,
        memory: Callable[[int], MemoryFile | None] = lambda size: None,
    ) -> None:
        self._contents, self._before = contents, before
        self._versions, self._timelines = dict[int, int](), dict[int, int]()
        self._checksums = dict[int, int]()
        self._spaces: dict[str, npt.NDArray[np.uint8]] = {}
        self._files: dict[str, MemoryFile] = {}  # those of `before`, and those that are to be sealed
        self._own: set[str] = set()  # spaces that are new in this edition
        self._empty: set[str] = set()  # those of them of which nothing has come
        self._mapped: set[str] = set()  # spaces that a server has handed over
        self._lock = threading.Lock()
        self.nbytes = self.whole = self.elements = 0
        itemsizes = {each.space: DATA_TYPES[contents.dtype(each)].itemsize for each in contents.buckets.values()}
        frozen = [each for each in contents.buckets.values() if each.frozen]
        newer = {
            each.index for each in frozen if before is not None and before.is_older(each.index, shard_versions or {})
        }
        spaces = {each.space for each in frozen}
        renewed = {each.space for each in frozen if each.index in newer}
        is_shared = len(itemsizes) <= MOST_FILES  # otherwise no relay could hand them over
        for space, itemsize in itemsizes.items():
            if before is not None and space in spaces - renewed:
                self._spaces[space] = before.spaces[space]
                if space in before.files:
                    self._files[space] = before.files[space]
                continue
            self._own.add(space)
            size = contents.layout.space_sizes[space] * itemsize
            file = memory(size) if is_shared else None
            if file is not None:
                self._files[space] = file
            self._spaces[space] = np.empty(size, np.uint8) if file is None else file.fill()
            if before is not None and space in renewed:
                self._spaces[space][:] = before.spaces[space]
            else:
                self._empty.add(space)
        taken_over = [] if before is None else [each.index for each in frozen if each.index not in newer]
        if before is not None:
            self._checksums = {each: before.checksums[each] for each in taken_over if each in before.checksums}
            self._versions = {each: before.versions.get(each, 0) for each in taken_over}
            self._timelines = {each: before.timelines[each] for each in taken_over if each in before.timelines}
        self.missing = contents.buckets.keys() - set(taken_over)

    @property
    def left(self) -> int:
        """Bytes of the buckets that are still to come, as they will lie in the edition."""
        with self._lock:
            return sum(self._contents.size(self._contents.buckets[index]) for index in self.missing)

    def take(self, sent: EditionBucket, timeline: int, what: str) -> None:
        """Adds a bucket. Raises Damaged if its checksum or type differs, or if it was not requested or came before."""
        bucket = self._awaited(sent, what)
        with self._lock:
            self._empty.discard(bucket.space)
            if bucket.space in self._mapped:
                raise Damaged(f"{what}: bucket {sent.bucket} came, and others of its space lie in a file")
        elements = self._elements(bucket, sent, what)
        if zlib.crc32(elements.data) != sent.checksum:
            raise Damaged(f"{what}: bucket {sent.bucket} was damaged on the way: its checksum is another one")
        memory = self._memory_of(bucket)
        if memory.ctypes.data != elements.ctypes.data:  # otherwise it came there
            memory[:] = elements
        self._took(sent, timeline, len(elements))

    def map(self, sent: EditionBucket, timeline: int, memory: npt.NDArray[np.uint8], what: str) -> None:
        """Takes a bucket that lies in memory which a server has handed over. Raises Damaged.

        A file that has all of a space is kept as it is. The elements are copied where the space lies on several shards,
        or where only a part of it is wanted.

        memory: all bytes of the file
        """
        bucket = self._awaited(sent, what)
        size, lies = self._contents.size(bucket), sent.lies
        if lies is None or lies.offset + size > memory.nbytes:
            raise Damaged(
                f"{what}: expected {size} bytes of bucket {sent.bucket} in a file of {memory.nbytes}, got {lies}"
            )
        is_whole = (lies.offset, memory.nbytes) == (
            bucket.start * (size // bucket.numel),
            self._spaces[bucket.space].nbytes,
        )
        with self._lock:
            if is_whole and bucket.space in self._empty:
                self._spaces[bucket.space] = memory
                self._mapped.add(bucket.space)
            self._empty.discard(bucket.space)
        if bucket.space not in self._mapped:
            self._memory_of(bucket)[:] = memory[lies.offset : lies.offset + size]
        elif self._spaces[bucket.space] is not memory or not is_whole:
            raise Damaged(f"{what}: bucket {sent.bucket} lies in another file than others of its space, or elsewhere")
        self._took(sent, timeline, size)

    def file_size(self, sent: EditionBucket, what: str) -> int:
        """Returns the most bytes of the file in which a bucket lies. Raises Damaged if it was not asked for."""
        return self._spaces[self._awaited(sent, what).space].nbytes

    def _awaited(self, sent: EditionBucket, what: str) -> BucketSpec:
        bucket = self._contents.buckets.get(sent.bucket)
        if bucket is None or sent.bucket in self._versions:
            raise Damaged(f"{what}: bucket {sent.bucket} was not asked for, or came twice")
        came_as, expected = sent.wire_format or bucket.dtype, self._contents.dtype(bucket)
        if came_as != expected:  # it may have as many bytes, and they would be read as other numbers
            raise Damaged(f"{what}: expected bucket {sent.bucket} as {expected}, got {came_as}")
        return bucket

    def _took(self, sent: EditionBucket, timeline: int, size: int) -> None:
        with self._lock:
            self._versions[sent.bucket], self._timelines[sent.bucket] = sent.version, timeline
            if sent.lies is None:
                self._checksums[sent.bucket] = sent.checksum
            self.missing.discard(sent.bucket)
            self.nbytes += len(sent.payload)
            self.elements += size
            self.whole += 0 if sent.base is not None else len(sent.payload)

    def memory_for(self, sent: EditionBucket) -> memoryview | None:
        """Returns a bucket's memory in the edition, for one that comes in several messages: it may be put together
        there before `take`. None: it is a change, or nothing that `take` would accept.
        """
        bucket = self._contents.buckets.get(sent.bucket)
        if bucket is None or sent.base is not None or sent.bucket in self._versions or bucket.space in self._mapped:
            return None
        memory = self._memory_of(bucket)
        return memory.data if memory.nbytes == sent.payload_bytes else None

    def _memory_of(self, bucket: BucketSpec) -> npt.NDArray[np.uint8]:
        itemsize = self._contents.size(bucket) // bucket.numel
        return self._spaces[bucket.space][bucket.start * itemsize : (bucket.start + bucket.numel) * itemsize]

    def _elements(self, bucket: BucketSpec, sent: EditionBucket, what: str) -> npt.NDArray[np.uint8]:
        """Returns the elements of a bucket that came, as bytes."""
        size, before = self._contents.size(bucket), self._before
        if sent.base is None:
            if len(sent.payload) != size:
                raise Damaged(f"{what}: expected {size} bytes of bucket {sent.bucket}, got {len(sent.payload)}")
            return np.frombuffer(sent.payload, np.uint8)
        if before is None or before.versions.get(sent.bucket) != sent.base:
            raise Damaged(f"{what}: bucket {sent.bucket} came as a change of version {sent.base}, which is not here")
        try:
            base = before.elements(bucket.index).data
            return apply_change(sent.payload, base, size // bucket.numel, self._memory_of(bucket), sent.sparse)
        except InvalidRequest as error:
            raise Damaged(f"{what}: bucket {sent.bucket}: {error}") from None

    def complete(self, run: str, timeline: int) -> EditionArrays:
        """Returns the edition. Raises InvalidRequest if a bucket is missing, TryLater if memory cannot be mapped."""
        if self.missing:
            raise InvalidRequest(f"{len(self.missing)} buckets are missing, such as {min(self.missing)}")
        for name in self._own & self._files.keys():
            del self._spaces[name]  # no reference may be left
            try:
                self._spaces[name] = self._files[name].seal()
            except NotShared as error:
                log.warning("an edition is not handed over as memory: %s", error)
                self._spaces[name] = self._files.pop(name).fill()
            except OSError as error:
                raise TryLater(f"the memory of an edition cannot be mapped again ({error.strerror})") from None
        for space in self._spaces.values():
            space.flags.writeable = False
        trained = [version for index, version in self._versions.items() if not self._contents.buckets[index].frozen]
        version = min(trained, default=0)
        return EditionArrays(
            self._contents,
            run,
            version,
            self._versions,
            timeline,
            self._spaces,
            self._checksums,
            self._timelines,
            self._files,
        )


class ReceivingRoom:
    """The memory into which editions are received. This one has no limit; a relay's has one."""

    def memory(self, size: int) -> MemoryFile | None:
        """Returns a memory file for one of an edition's spaces; None if it need not lie in one."""
        return None

    def check(self, arriving: Arriving) -> None:
        """Raises LimitExceeded if there is none for an edition: it is not even asked for."""

    def begin(self, arriving: Arriving) -> None:
        """Promises an edition memory for its missing buckets, before its first bucket is added; may be called again.

        Raises LimitExceeded if memory has become too little: it may have taken long until that bucket came.
        """

    def end(self, arriving: Arriving) -> None:
        """Ends the promise: all of it has come, or no more of it comes."""


class Incoming:
    """What has come of an edition, from any shard. parts: when how many bytes came of payloads, the first ones first"""

    def __init__(self, arriving: Arriving, room: ReceivingRoom, what: str) -> None:
        self._arriving, self._room, self._what = arriving, room, what
        self.parts: list[tuple[float, int]] = []

    def memory_for(self, bucket: EditionBucket) -> memoryview | None:
        """See ShardReader.pull."""
        self._room.begin(self._arriving)
        return self._arriving.memory_for(bucket)

    def take(self, files: HandedOver | None, bucket: EditionBucket, timeline: int) -> None:
        """Takes a bucket, which may lie in memory that a server has handed over."""
        if files is not None and bucket.lies is not None:
            size = self._arriving.file_size(bucket, self._what)
            self._arriving.map(bucket, timeline, files.file(bucket.lies.file, size), self._what)
            return
        self._room.begin(self._arriving)
        self.parts.append((time.monotonic(), len(bucket.payload)))
        self._arriving.take(bucket, timeline, self._what)
