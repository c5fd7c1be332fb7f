"""An edition that a relay keeps, as long as it has readers or no newer one has replaced it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from ps_feed.edition import EditionArrays
from ps_feed.edition_file import EditionFile
from ps_protocol.errors import PSError
from ps_protocol.messages.editions import EditionBucket


class Reader(Protocol):
    """A reader of an edition. caller: its principal; empty: unknown"""

    caller: str

    def end(self, error: PSError) -> None:
        """Ends the reader with an error: its edition is dropped."""


class KeptEdition:
    """An edition with its readers, and the time until which it was the newest.

    equal: when it was last known to equal the shards' weights
    """

    def __init__(self, arrays: EditionArrays, equal: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.arrays, self.equal = arrays, equal
        self.readers: set[Reader] = set()
        self.replaced: float | None = None  # when a newer one took its place
        self._clock = clock

    @property
    def series(self) -> tuple[str, int]:
        """The run and the timeline of its version."""
        return self.arrays.run, self.arrays.timeline

    @cached_property
    def etag(self) -> str:
        """An ETag for HTTP, which differs for editions with different bytes.

        A run repeats a version number only on another timeline; and in modes without a common clock, where buckets
        differ in their versions.
        """
        edition = self.arrays
        text = f"{edition.run}-{edition.version}" + (f"-{edition.timeline}" if edition.timeline else "")
        if not edition.contents.spec.consistency.has_one_version:
            each = ",".join(f"{index}:{version}" for index, version in sorted(edition.versions.items()))
            text += f"-{zlib.crc32(each.encode()):08x}"
        if edition.buffers_version:
            buffers = ",".join(
                f"{index}:{edition.versions[index]}" for index in edition.contents.buckets if edition.tells(index)
            )
            text += f"-{zlib.crc32(buffers.encode()):08x}"
        wire = edition.contents.wire
        text += "" if wire == "float32" else f"-{wire}"
        return f'"{text}"'

    @cached_property
    def file(self) -> EditionFile:
        """The edition as a safetensors file."""
        return EditionFile(self.arrays, self.arrays.contents.spec.name)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return sum(space.nbytes for space in self.arrays.spaces.values())

    def age(self) -> float:
        """Returns the seconds since it was last known to equal the shards' weights."""
        return max(0.0, self._clock() - self.equal)

    def offset(self, index: int) -> int:
        """Returns where a bucket lies in its space, in bytes."""
        contents = self.arrays.contents
        spec = contents.buckets[index]
        return spec.start * (contents.size(spec) // spec.numel)

    def bucket(self, index: int) -> EditionBucket:
        """Returns a bucket as it travels: a view of the edition's memory."""
        edition = self.arrays
        spec = edition.contents.buckets[index]
        dtype = edition.contents.dtype(spec)
        wire_format = "" if dtype == spec.dtype else dtype
        version, checksum = edition.versions.get(index, 0), edition.checksums[index]
        return EditionBucket(index, version, wire_format, checksum, edition.elements(index).data)
