"""A bucket of an edition, copied: into memory of its own, or into a memory file that readers of this host can map.

While such readers follow a job, its editions lie in memory files. Each file has what readers have asked for of one flat
space in one element type, bucket after bucket without padding. It is sealed once all of that is copied, and handed over
then (MappingOffer in feed.proto). The thread that steps a bucket writes it to the file's descriptor. So it waits for no
page, maps nothing that would keep the kernel from sealing the file, and makes one pass over memory: what it converts is
in the processor's cache when it is written.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Set
from functools import cached_property
from typing import NamedTuple

import torch

from ps_protocol.errors import NotShared
from ps_protocol.handover import MOST_FILES
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import PLAIN, Cast, bytes_of
from ps_runtime.memory_files import SharedFile, WrittenFile
from ps_server.core.unit import Bucket
from ps_server.shard.mapped import NewFiles

TypedBucket = tuple[int, str]  # a bucket by its index, and the type in which its elements travel
_CONVERTED_BYTES = 2**20  # at a time, so that they are in the cache when they are written


def as_typed(bucket: BucketSpec, wire: str) -> TypedBucket:
    """Returns a bucket with the type in which a wire format sends it. The format applies only to trained float32
    weights; all others keep their type.
    """
    return bucket.index, wire if bucket.dtype == "float32" and not bucket.frozen else bucket.dtype


class EditionMemory(NamedTuple):
    """A memory file, and the typed buckets of an edition for which it has room.

    failed: is called where the file gets no memory
    """

    memory: WrittenFile
    typed_buckets: frozenset[TypedBucket]
    failed: Callable[[NotShared], None]


class FileOffset(NamedTuple):
    """Where a typed bucket lies in a file, in bytes."""

    file: EditionMemory
    offset: int
    size: int


class _Scratch(threading.local):
    """Memory of one thread, into which it converts."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for so many elements, until the next call."""
        size = numel * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(max(size, _CONVERTED_BYTES), dtype=torch.uint8)
        return self._memory[:size].view(dtype)


_scratch = _Scratch()


class CopiedBucket:
    """A bucket of an edition: its index, the updates that it has, and its elements as they travel.

    is_trained:  an optimizer steps it
    wire_format: the wire format of the elements; empty: the bucket's own type
    space:       the flat space in which it lies
    place:       where it is to lie in a memory file; None: in memory of its own
    lies:        where it does
    """

    def __init__(self, bucket: Bucket, dtype: str, place: FileOffset | None = None) -> None:
        """The caller keeps the bucket from being stepped."""
        (version, weights), codec = bucket.shown(), PLAIN[dtype]
        self.index, self.version, self.is_trained = bucket.index, version, bucket.is_trained
        self.wire_format, self.space = codec.wire_format(bucket.spec), bucket.spec.space
        self.lies = place if place is not None and _is_written(weights, codec, place) else None
        self._own: torch.Tensor | None = None
        if self.lies is None:
            encoded = codec.encode(weights)
            self._own = weights.clone() if encoded is weights else encoded

    @property
    def payload(self) -> memoryview:
        """The elements, as bytes."""
        if self._own is not None:
            return bytes_of(self._own)
        assert self.lies is not None
        file, offset, size = self.lies
        return file.memory.content[offset : offset + size].data

    @cached_property
    def checksum(self) -> int:
        """The CRC-32 of the payload. Whoever sends the bucket first computes it, and not the thread that copies."""
        return zlib.crc32(self.payload)


def _is_written(weights: torch.Tensor, codec: Cast, place: FileOffset) -> bool:
    """Writes elements to their place. Returns False if the file gets no memory: they have to lie elsewhere."""
    step = weights.numel() if weights.dtype == codec.torch_dtype else _CONVERTED_BYTES // codec.torch_dtype.itemsize
    offset = place.offset
    try:
        for part in weights.split(step):
            content = bytes_of(codec.encode(part, _scratch.memory))
            place.file.memory.write(offset, content)
            offset += len(content)
    except NotShared as error:
        place.file.failed(error)
        return False
    return True


class EditionMemories:
    """The memory files of one edition, MOST_FILES at most. For one thread at a time, apart from `place`.

    specs: the job's buckets, by index
    new:   makes the files
    """

    def __init__(self, specs: Callable[[int], BucketSpec], new: NewFiles[WrittenFile]) -> None:
        self._specs, self._new = specs, new
        self._places: dict[TypedBucket, FileOffset] = {}
        self._files = 0

    def add(self, typed_buckets: Set[TypedBucket]) -> None:
        """Makes files for typed buckets of which nothing is copied; those that have a place keep it. Makes none where
        not all of these could have one.
        """
        spaces: dict[tuple[str, str], list[tuple[BucketSpec, TypedBucket]]] = {}
        for typed_bucket in typed_buckets - self._places.keys():
            spec = self._specs(typed_bucket[0])
            spaces.setdefault((spec.space, typed_bucket[1]), []).append((spec, typed_bucket))
        if self._files + len(spaces) > MOST_FILES:
            return
        for (_, dtype), found in spaces.items():
            found.sort(key=lambda each: each[0].start)
            sizes = {typed_bucket: PLAIN[dtype].size(spec.numel) for spec, typed_bucket in found}
            memory = self._new.make(sum(sizes.values()))
            if memory is None:
                return
            self._files += 1
            file, offset = EditionMemory(memory, frozenset(sizes), self._new.failed), 0
            for typed_bucket, size in sizes.items():
                self._places[typed_bucket] = FileOffset(file, offset, size)
                offset += size

    def place(self, typed_bucket: TypedBucket) -> FileOffset | None:
        """Returns where a typed bucket is to be copied to; None: into memory of its own."""
        return self._places.get(typed_bucket)


class SharedTypedBuckets(NamedTuple):
    """What of an edition can be handed over to a reader: see mapped.InFiles.

    files: all sealed files of the edition, each under a name
    lies:  by typed bucket that the reader wants, the name of its file, and the offset there
    """

    files: Mapping[str, SharedFile]
    lies: Mapping[TypedBucket, tuple[str, int]]


def shared_buckets(copied: Mapping[TypedBucket, CopiedBucket], wanted: Collection[TypedBucket]) -> SharedTypedBuckets:
    """Returns what can be handed over of the typed buckets that a reader wants. Those of one space all lie in files,
    or none.

    copied: all that is copied of the edition; nothing is there of one that was given up
    """
    if not all(typed_bucket in copied for typed_bucket in wanted):
        return SharedTypedBuckets({}, {})

    def lies_in(typed_bucket: TypedBucket, number: int) -> bool:
        found = copied.get(typed_bucket)
        return found is not None and found.lies is not None and found.lies.file.memory.number == number

    files: dict[str, SharedFile] = {}
    for file in _files_of(copied):
        memory = file.memory
        if all(lies_in(each, memory.number) for each in file.typed_buckets) and _is_sealed(memory):
            files[str(memory.number)] = memory
    lies: dict[TypedBucket, tuple[str, int]] = {}
    elsewhere: set[str] = set()
    for typed_bucket in wanted:
        place = copied[typed_bucket].lies
        if place is None or str(place.file.memory.number) not in files:
            elsewhere.add(copied[typed_bucket].space)
        else:
            lies[typed_bucket] = str(place.file.memory.number), place.offset
    return SharedTypedBuckets(
        files,
        {typed_bucket: place for typed_bucket, place in lies.items() if copied[typed_bucket].space not in elsewhere},
    )


def memory_files(copied: Mapping[TypedBucket, CopiedBucket]) -> set[SharedFile]:
    """Returns the memory files in which any of these lies."""
    return {file.memory for file in _files_of(copied)}


def _files_of(copied: Mapping[TypedBucket, CopiedBucket]) -> set[EditionMemory]:
    return {each.lies.file for each in copied.values() if each.lies is not None}


def _is_sealed(memory: WrittenFile) -> bool:
    try:
        memory.seal()
    except NotShared:
        return False
    return True
