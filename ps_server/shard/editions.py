"""Editions: unchanging copies of a job's weights on one shard, for readers that follow training.

A bucket is copied as a checkpoint's is: by the thread that steps it, at the moment at which it has exactly the updates
that a reader has asked for. A bucket that is there already is copied by the thread that asks. Where workers share no
clock, all buckets are copied as they are, by the thread that asks. Nothing is copied unless a reader asks.

At most `MOST` editions are in memory at a time, however many readers there are: those who ask for the same share one. A
third one takes the place of the oldest that nobody reads. If all are read, whoever asks is told to come back; readers
that are so slow that they hold up others for `HELD_SECONDS` lose theirs.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from functools import cached_property

import torch

from ps_protocol.codecs import PLAIN, Cast
from ps_protocol.errors import LimitExceeded, OutOfOrder, PSError, TryLater
from ps_protocol.tensors import bytes_of
from ps_runtime.memory import free_bytes
from ps_server.core.buckets import Bucket

MOST = 2
KEPT_SECONDS = 10.0  # for which an edition that nobody reads is kept for others
HELD_SECONDS = 10.0  # for which readers may hold an edition that others wait to replace
RETRY_SECONDS = 0.05  # after which a reader that finds no room asks again


class CopiedBucket:
    """A bucket of an edition: its index, the updates that it has, and its elements as they travel.

    is_trained:  an optimizer steps it
    wire_format: of the elements; empty: the bucket's own type
    """

    def __init__(self, bucket: Bucket, codec: Cast) -> None:
        """The caller keeps the bucket from being stepped."""
        weights = bucket.weights.flat
        encoded = codec.encode(weights)
        self.index, self.version, self.is_trained = bucket.index, bucket.rule.version, bucket.is_trained
        self.wire_format = codec.wire_format(bucket.spec)
        self._values: torch.Tensor = weights.clone() if encoded is weights else encoded

    @property
    def payload(self) -> memoryview:
        """The elements, as bytes."""
        return bytes_of(self._values)

    @cached_property
    def checksum(self) -> int:
        """The CRC-32 of the payload. Whoever sends the bucket first computes it, and not the thread that copies."""
        return zlib.crc32(self.payload)


class Edition:
    """One edition, while it is taken and as long as it is kept.

    version: the updates that each bucket is to have; None: those that it has when it is copied
    least:   without a version, those that each is to have at least, where an older edition is shared
    wire:    the type in which float32 elements travel
    wanted:  the buckets that it is to have, by index
    """

    def __init__(self, version: int | None, least: int, wire: str, wanted: Collection[int], now: float) -> None:
        self.version, self._least, self.wire, self.wanted = version, least, wire, frozenset(wanted)
        self.began = self.used = now
        self.error: PSError | None = None
        self._copied: dict[int, CopiedBucket] = {}
        self._readers: dict[object, Callable[[], None]] = {}  # with what tells each that it is over
        self._lock = threading.Lock()

    def serves(self, wanted: Edition) -> bool:
        """Whether it will do as well as one that is wanted."""
        is_fresh = wanted.version is not None or all(
            bucket.version >= wanted._least for bucket in self._copied.values() if bucket.is_trained
        )
        is_same = (self.version, self.wire) == (wanted.version, wanted.wire) and wanted.wanted <= self.wanted
        return is_same and is_fresh and self.error is None

    @property
    def is_complete(self) -> bool:
        """Whether all buckets are copied."""
        return len(self._copied) == len(self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether it is complete, or will never be."""
        return self.error is not None or self.is_complete

    @property
    def is_read(self) -> bool:
        """Whether a reader has it."""
        return bool(self._readers)

    @property
    def buckets(self) -> list[CopiedBucket]:
        """The buckets that are copied, by index."""
        return [self._copied[index] for index in sorted(self._copied)]

    @property
    def nbytes(self) -> int:
        """Bytes of what is copied."""
        return sum(len(bucket.payload) for bucket in self.buckets)

    def look(self, bucket: Bucket) -> None:
        """Copies a bucket if its moment is now, and fails if that is past. The caller keeps it from being stepped."""
        index, version = bucket.index, bucket.rule.version
        if index not in self.wanted or index in self._copied or self.error is not None:
            return
        if self.version is not None and bucket.is_trained and version != self.version:
            if version > self.version:
                self.fail(OutOfOrder(f"bucket {index} has {version} updates: more than the {self.version} asked for"))
            return
        copied = CopiedBucket(bucket, _codec(bucket, self.wire))
        with self._lock:
            self._copied[index] = copied
            calls = list(self._readers.values()) if self.is_complete else []
        for call in calls:
            call()

    def fail(self, error: PSError) -> None:
        """Gives it up."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            calls = list(self._readers.values())
        for call in calls:
            call()

    def hand_to(self, reader: object, over: Callable[[], None]) -> None:
        """Notes a reader until `give_back`. over: is called, from any thread, when the edition comes to be over"""
        with self._lock:
            self._readers[reader] = over

    def give_back(self, reader: object, now: float) -> None:
        """Forgets a reader."""
        with self._lock:
            self._readers.pop(reader, None)
        self.used = now


class Editions:
    """The editions of one job on one shard. Methods may be called from any thread.

    buckets:   of the job, by index
    promised:  returns the bytes of what is free that training still takes
    under_way: editions that wait for updates
    """

    def __init__(self, job: str, buckets: Mapping[int, Bucket], promised: Callable[[], int]) -> None:
        self._name, self._buckets, self._promised = job, buckets, promised
        self._lock = threading.Lock()
        self._kept: list[Edition] = []  # the oldest first, with those that are under way
        self._closed: PSError | None = None
        self.under_way: tuple[Edition, ...] = ()

    def versions(self) -> list[int]:
        """Returns the versions of editions of one version that are here or under way."""
        with self._lock:
            return sorted({each.version for each in self._kept if each.version is not None and not each.error})

    @property
    def nbytes(self) -> int:
        """Bytes of all that is copied."""
        with self._lock:
            return sum(each.nbytes for each in self._kept)

    def take(self, reader: object, wanted: Edition, over: Callable[[], None]) -> Edition:
        """Returns an edition as is wanted for a reader, until `give_back`: `wanted` itself if no other will do. The
        caller then has it look at its buckets.

        over: is called, by any thread, when the edition comes to be over

        Raises TryLater where other editions are held by readers, LimitExceeded where memory has no room.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            edition = self._shared(wanted)
            if edition is None:
                edition = wanted
                self._make_room(wanted)
                self._kept.append(wanted)
            edition.hand_to(reader, over)
            self._note_under_way()
        return edition

    def give_back(self, edition: Edition, reader: object, now: float) -> None:
        """Ends a reader's use of an edition. What is under way for nobody is given up."""
        edition.give_back(reader, now)
        with self._lock:
            if edition in self._kept and (edition.error or not (edition.is_complete or edition.is_read)):
                self._kept.remove(edition)
            self._note_under_way()

    def look(self, bucket: Bucket) -> None:
        """Copies a bucket that was stepped for editions whose moment is now. The caller keeps it from being stepped."""
        for edition in self.under_way:
            edition.look(bucket)
            if edition.is_over:
                with self._lock:
                    self._note_under_way()

    def tick(self, now: float) -> None:
        """Forgets what nobody has read for a while."""
        if not self._kept:
            return
        with self._lock:
            self._kept = [each for each in self._kept if each.is_read or now - each.used < KEPT_SECONDS]
            self._note_under_way()

    def close(self, error: PSError) -> None:
        """Forgets all, and takes nothing more: the job is no longer here, or goes back to a checkpoint."""
        with self._lock:
            self._closed = error
            kept, self._kept, self.under_way = self._kept, [], ()
        for each in kept:
            each.fail(error)

    def _note_under_way(self) -> None:
        """The caller holds the lock."""
        self.under_way = tuple(each for each in self._kept if not each.is_over)

    def _shared(self, wanted: Edition) -> Edition | None:
        """Returns an edition that will do as well as the one that is wanted. The caller holds the lock."""
        return next((each for each in reversed(self._kept) if each.serves(wanted)), None)

    def _make_room(self, wanted: Edition) -> None:
        """Forgets the oldest editions that nobody reads until there is room for one more. The caller holds the lock."""
        while len(self._kept) >= MOST:
            free = next((each for each in self._kept if not each.is_read), None)
            if free is None and wanted.began - self._kept[0].began > HELD_SECONDS:
                free = self._kept[0]
            if free is None:
                later = TryLater(f"job {self._name!r}: {MOST} editions are being read, which is the most at a time")
                later.retry_after = RETRY_SECONDS
                raise later
            self._kept.remove(free)
            free.fail(TryLater("this edition was given up for a newer one: it was not read in time"))
        buckets = [self._buckets[index] for index in wanted.wanted]
        size = sum(_codec(bucket, wanted.wire).size(bucket.spec.numel) for bucket in buckets)
        left, promised = free_bytes(), self._promised()
        if left is not None and size + promised > left:
            raise LimitExceeded(
                f"job {self._name!r}: this shard's memory has no room for an edition of {size} bytes: {left} are "
                f"free, of which training still takes {promised}"
            )


def _codec(bucket: Bucket, wire: str) -> Cast:
    """Returns how a bucket's elements travel in an edition."""
    is_cast = bucket.spec.dtype == "float32" and not bucket.spec.frozen
    return PLAIN[wire if is_cast else bucket.spec.dtype]
