"""An edition that a relay keeps, as long as somebody reads it or no newer one has taken its place."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from ps_feed.edition import EditionArrays
from ps_feed.edition_file import TensorFile
from ps_protocol.errors import PSError
from ps_protocol.messages.editions import EditionBucket


class Reader(Protocol):
    """Whoever reads an edition. caller: the principal; empty: nobody in particular"""

    caller: str

    def end(self, error: PSError) -> None:
        """Takes the edition away."""


class KeptEdition:
    """An edition, who reads it, and when it was the newest last.

    equal: the moment at which it was known last to be what the shards have
    """

    def __init__(self, arrays: EditionArrays, equal: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.arrays, self.equal = arrays, equal
        self.readers: set[Reader] = set()
        self.replaced: float | None = None  # when a newer one took its place
        self._clock = clock

    @property
    def series(self) -> tuple[str, int]:
        """The run and the timeline that its version is of."""
        return self.arrays.run, self.arrays.timeline

    @cached_property
    def etag(self) -> str:
        """What tells its bytes from those of any other edition, for HTTP.

        A run has a version once; again only on another timeline, and where workers share no clock with other buckets.
        """
        edition = self.arrays
        text = f"{edition.run}-{edition.version}" + (f"-{edition.timeline}" if edition.timeline else "")
        if not edition.contents.spec.consistency.has_one_version:
            each = ",".join(f"{index}:{version}" for index, version in sorted(edition.versions.items()))
            text += f"-{zlib.crc32(each.encode()):08x}"
        if edition.buffers_version:
            told = ",".join(
                f"{index}:{edition.versions[index]}" for index in edition.contents.buckets if edition.tells(index)
            )
            text += f"-{zlib.crc32(told.encode()):08x}"
        wire = edition.contents.wire
        text += "" if wire == "float32" else f"-{wire}"
        return f'"{text}"'

    @cached_property
    def file(self) -> TensorFile:
        """It as a safetensors file."""
        return TensorFile(self.arrays, self.arrays.contents.spec.name)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return sum(space.nbytes for space in self.arrays.spaces.values())

    def age(self) -> float:
        """Returns the seconds since it was known last to be what the shards have."""
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
