"""Editions: unchanging copies of a job's weights on one shard, for readers that follow training.

A bucket is copied as a checkpoint's is: by the thread that steps it, at the moment at which it has exactly the updates
that a reader has asked for. A bucket that is there already is copied by the thread that asks. Where workers share no
clock, all buckets are copied as they are, by the thread that asks. Nothing is copied unless a reader asks.

A reader with an older version may get the changes since (shared_changes.py). As long as a reader that wants changes
follows the job, the newest edition stays.

When a job ends, the buckets that readers have asked for are copied once more: its last weights (last_weights.py).

Copies of `MOST` editions are in memory at a time, however many readers there are: those who ask for the same version
share them. A further one replaces the oldest that nobody reads. If all are being read, a reader gets TryLater; readers
so slow that they hold up others for `HELD_SECONDS` lose their edition. To wait for an edition takes no memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from ps_protocol.changes import BucketDelta
from ps_protocol.errors import LimitExceeded, OutOfOrder, PSError, TryLater, anew, without_traceback
from ps_protocol.tensors import PLAIN
from ps_runtime.background import guarded, note_error
from ps_runtime.memory import free_bytes
from ps_runtime.memory_files import WrittenFile
from ps_server.core.feed_figures import FeedFigures
from ps_server.core.unit import Bucket
from ps_server.shard.copied_buckets import CopiedBucket, EditionMemories, TypedBucket, memory_files
from ps_server.shard.feed_tally import FeedTally
from ps_server.shard.mapped import MappedFiles, NewFiles
from ps_server.shard.relay_reports import RelayReports
from ps_server.shard.shared_changes import BucketChanges

MOST = 2
KEPT_SECONDS = 10.0  # an edition that nobody reads is kept for this long
HELD_SECONDS = 10.0  # the longest that readers may hold an edition that others wait to replace
RETRY_SECONDS = 0.05  # the pause before a reader that found no room asks again

Over = Callable[[PSError | None], None]  # called when all that a reader wants is copied, or with why it never will be


@dataclass(frozen=True)
class WantedEdition:
    """A reader's request for an edition.

    version: the version at which each bucket is to be copied; None: its version when it is copied
    least:   without `version`, the lowest version that each bucket may have
    typed_buckets:  the buckets, each with the element type in which it is to be sent
    changes: the reader accepts changes since an older version
    maps:    the memory that readers of this host have mapped, if this reader is one of them; None if it is elsewhere
    """

    version: int | None
    least: int
    typed_buckets: frozenset[TypedBucket]
    changes: bool = False
    maps: MappedFiles | None = None


class TakenEdition:
    """One edition, while it is taken and as long as it is kept.

    version:  see WantedEdition
    has_room: makes room before a bucket is copied, if there is none yet. Raises PSError if there can be none
    files:    the files into which buckets are copied from now on; None: into no file
    """

    def __init__(self, version: int | None, has_room: Callable[[TakenEdition, float], None]) -> None:
        self.version, self._has_room = version, has_room
        self.files: EditionMemories | None = None
        self.error: PSError | None = None
        self.began: float | None = None  # when the first bucket was copied
        self.used = 0.0
        # Its lowest version, if an optimizer steps any of it, and when a reader had all that it wants:
        self.completed: tuple[int | None, float] | None = None
        # The typed buckets that are to be copied, before `_check_room` has looked for memory for them:
        self.unchecked: set[TypedBucket] = set()
        self._copied: dict[TypedBucket, CopiedBucket] = {}
        self._missing: dict[int, set[str]] = {}  # by bucket, the types in which somebody wants it
        self._readers: dict[object, tuple[frozenset[TypedBucket], Over]] = {}
        self._lock = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        """Whether buckets are still to be copied."""
        return self.error is None and bool(self._missing)

    @property
    def is_whole(self) -> bool:
        """Whether a reader has all that it wants."""
        return self.completed is not None

    @property
    def is_read(self) -> bool:
        """Whether a reader has it."""
        return bool(self._readers)

    @property
    def nbytes(self) -> int:
        """Bytes of what is copied."""
        return sum(len(bucket.payload) for bucket in list(self._copied.values()))

    def missing(self) -> list[TypedBucket]:
        """Returns what is wanted and not copied yet."""
        with self._lock:
            return [(index, dtype) for index, dtypes in self._missing.items() for dtype in dtypes]

    def serves(self, wanted: WantedEdition) -> bool:
        """Whether it will do for a reader."""
        if self.error is not None or self.version != wanted.version:
            return False
        if self.version is not None:
            return True
        return all(each.version >= wanted.least for each in list(self._copied.values()) if each.is_trained)

    def hand_to(self, reader: object, wanted: WantedEdition, over: Over) -> None:
        """Adds a reader, and the typed buckets that it wants, until `give_back`."""
        with self._lock:
            self._readers[reader] = wanted.typed_buckets, over
            for index, dtype in wanted.typed_buckets - self._copied.keys():
                dtypes = self._missing.setdefault(index, set())
                if dtype not in dtypes:
                    dtypes.add(dtype)
                    self.unchecked.add((index, dtype))
            if self.files is not None:
                self.files.add(wanted.typed_buckets - self._copied.keys())

    def give_back(self, reader: object, now: float) -> None:
        """Forgets a reader, and what only this reader wants and is not copied yet."""
        with self._lock:
            typed_buckets, _ = self._readers.get(reader, (None, None))
            if typed_buckets is not None and self.has(typed_buckets):  # not where it was refused, or is gone too early
                self.used = now
            self._forget(reader)

    def _forget(self, *readers: object) -> None:
        """The caller holds the lock."""
        for reader in readers:
            self._readers.pop(reader, None)
        wanted = {typed_bucket for typed_buckets, _ in self._readers.values() for typed_bucket in typed_buckets}
        for index, dtypes in list(self._missing.items()):
            dtypes &= {dtype for dtype in dtypes if (index, dtype) in wanted}
            if not dtypes:
                del self._missing[index]

    def has(self, typed_buckets: frozenset[TypedBucket]) -> bool:
        """Whether all of these are copied."""
        return typed_buckets <= self._copied.keys()

    def copied(self, typed_bucket: TypedBucket) -> CopiedBucket | None:
        """Returns the copy of a bucket, if it is there."""
        return self._copied.get(typed_bucket)

    def copy(self, typed_bucket: TypedBucket) -> CopiedBucket:
        """Returns the copy of a bucket. Raises why the edition was given up."""
        copied = self._copied.get(typed_bucket)
        if copied is None:
            raise anew(self.error or TryLater("this edition was given up"))
        return copied

    def copies(self) -> dict[TypedBucket, CopiedBucket]:
        """Returns all that is copied."""
        with self._lock:
            return dict(self._copied)

    def look(self, bucket: Bucket, now: float) -> None:
        """Copies a bucket if its moment is now. If that is past, readers that want it are told that it is.

        The caller keeps the bucket from being stepped.
        """
        index, version = bucket.index, bucket.rule.version
        if not bucket.is_trained:
            self._renew(bucket)
        dtypes = tuple(self._missing.get(index, ()))
        if not dtypes or self.error is not None:
            return
        if self.version is not None and bucket.is_trained and version != self.version:
            if version > self.version:
                self._refuse(index, version)
            return
        try:
            self._has_room(self, now)
            dtypes = tuple(self._missing.get(index, ()))
            files = self.files
            places = {dtype: None if files is None else files.place((index, dtype)) for dtype in dtypes}
            copied = {(index, dtype): CopiedBucket(bucket, dtype, place) for dtype, place in places.items()}
        except PSError as error:
            self.fail(without_traceback(error))
            return
        except Exception:  # training goes on, whatever a copy for a reader meets
            note_error("edition")
            self.fail(PSError("the edition cannot be copied on this shard; its log says why"))
            return
        with self._lock:
            if self.error is not None:  # it was given up meanwhile
                return
            self._copied |= copied
            left = self._missing.get(index, set()) - set(dtypes)
            self._missing.pop(index, None)
            if left:
                self._missing[index] = left
            calls = [over for keys, over in self._readers.values() if copied.keys() & keys and self.has(keys)]
            if calls and (self.completed is None or self.completed[0] is None):  # None: only frozen ones were wanted
                trained = [each.version for each in self._copied.values() if each.is_trained]
                self.completed = min(trained, default=None), now
        for over in calls:
            guarded("edition", partial(over, None))

    def _renew(self, bucket: Bucket) -> None:
        """Copies a bucket that no optimizer steps once more, if rank 0 has sent newer values since the last copy: the
        reader that asks now may have newer ones already.
        """
        version, _ = bucket.shown()
        with self._lock:
            old = [key for key, each in self._copied.items() if key[0] == bucket.index and each.version < version]
        try:
            copied = {key: CopiedBucket(bucket, key[1]) for key in old}
        except Exception:  # as in `look`: what there is stays, and is older than it could be
            note_error("edition")
            return
        with self._lock:
            self._copied |= {key: each for key, each in copied.items() if key in self._copied}

    def share(self, other: TakenEdition, bucket: Bucket) -> None:
        """Reuses another edition's copies of a bucket, if they are of the bucket's version."""
        index, (version, _) = bucket.index, bucket.shown()
        with self._lock:
            for dtype in tuple(self._missing.get(index, ())):
                copied = other._copied.get((index, dtype))
                if copied is not None and copied.version == version:
                    self._copied[index, dtype] = copied
                    self._missing[index].discard(dtype)

    def _refuse(self, index: int, version: int) -> None:
        """Tells readers that want a bucket that it has more updates already."""
        error = OutOfOrder(f"bucket {index} has {version} updates: more than the {self.version} asked for")
        self.refuse({(index, dtype) for dtype in tuple(self._missing.get(index, ()))}, error)

    def refuse(self, typed_buckets: Set[TypedBucket], error: PSError) -> None:
        """Tells readers that wait for any of these typed buckets that they cannot be had."""
        with self._lock:
            missing = {(index, dtype) for index, dtype in typed_buckets if dtype in self._missing.get(index, ())}
            refused = {reader: over for reader, (wanted, over) in self._readers.items() if missing & wanted}
            self._forget(*refused)
        for over in refused.values():
            guarded("edition", partial(over, error))

    def fail(self, error: PSError) -> None:
        """Gives it up."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self._copied, self._missing, self.files = {}, {}, None
            calls = [over for _, over in self._readers.values()]
        for over in calls:
            guarded("edition", partial(over, error))


class Editions:
    """The editions of one job on one shard. Methods may be called from any thread.

    buckets:  of the job, by index
    promised: returns the bytes of free memory that training was promised and has not allocated yet
    waiting:  editions that wait for updates
    tally:    what readers have had
    relays:   the relays among the readers
    """

    def __init__(self, job: str, buckets: Mapping[int, Bucket], promised: Callable[[], int]) -> None:
        self._name, self._buckets, self._promised = job, buckets, promised
        self._lock = threading.Lock()
        self._kept: list[TakenEdition] = []  # the oldest first, with those that wait
        self._closed: PSError | None = None
        self._followed = -math.inf  # when a reader was heard of last
        self._typed_buckets: set[TypedBucket] = set()  # what readers have asked for, as long as they are heard of
        self._changes: dict[TypedBucket, BucketChanges] = {}
        self._keeps_newest = False  # for changes
        # What readers of this host have, where such follow the job, and when one of these has asked last:
        self._mapped: dict[MappedFiles, float] = {}
        self._new_files = NewFiles(WrittenFile)
        self.waiting: tuple[TakenEdition, ...] = ()
        self.tally, self.relays = FeedTally(), RelayReports()

    def versions(self) -> list[int]:
        """Returns the versions of editions of one version that somebody waits for, or that no bucket is past yet."""
        now = max((each.rule.version for each in self._buckets.values()), default=0)
        with self._lock:
            there = [
                each.version for each in self._kept if each.version is not None and (each.is_waiting or each.is_whole)
            ]
            return sorted({version for version in there if version >= now})

    @property
    def nbytes(self) -> int:
        """Bytes of all that is copied, and of changes."""
        with self._lock:
            changes = sum(each.nbytes for each in self._changes.values())
            return sum(each.nbytes for each in self._kept) + changes

    def heard_of_reader(self, now: float, typed_buckets: Set[TypedBucket]) -> None:
        """Records that a reader follows the job, and wants these typed buckets: at the job's end they are kept, even if
        none was pulled.
        """
        self._followed = now
        if not typed_buckets <= self._typed_buckets:
            with self._lock:
                self._typed_buckets |= typed_buckets

    def take(self, reader: object, wanted: WantedEdition, over: Over, now: float) -> TakenEdition:
        """Returns an edition for a reader, until `give_back`. The caller then has it look at its buckets.

        over: is called, by any thread, when all that is wanted is copied, or when the edition has failed
        """
        with self._lock:
            if self._closed is not None:
                raise anew(self._closed)  # several threads may raise it
            self._followed = now
            self._typed_buckets |= wanted.typed_buckets
            self._keeps_newest |= wanted.changes
            if wanted.maps is not None:
                self._mapped[wanted.maps] = now
            edition = next((each for each in reversed(self._kept) if each.serves(wanted)), None)
            if edition is None:
                edition = TakenEdition(wanted.version, self._make_room)
                self._kept.append(edition)
            if self._mapped and edition.files is None:
                edition.files = EditionMemories(lambda index: self._buckets[index].spec, self._new_files)
            edition.hand_to(reader, wanted, over)
            self._note_waiting()
        return edition

    def give_back(self, edition: TakenEdition, reader: object, now: float) -> None:
        """Ends a reader's use of an edition."""
        edition.give_back(reader, now)
        with self._lock:
            if edition in self._kept and (edition.error or not (edition.is_whole or edition.is_read)):
                self._kept.remove(edition)
            self._note_waiting()

    def look(self, bucket: Bucket, now: float) -> None:
        """Copies a bucket that was stepped for editions whose moment is now. The caller keeps it from being stepped."""
        for edition in self.waiting:
            edition.look(bucket, now)
            self.looked_at(edition)

    def looked_at(self, edition: TakenEdition) -> None:
        """Forgets an edition that has failed, and notes whether it still waits, and whether a reader has all of it."""
        if edition.completed is not None:
            self.tally.complete(*edition.completed)
        if not edition.is_waiting:
            with self._lock:
                if edition.error is not None and edition in self._kept:
                    self._kept.remove(edition)
                self._note_waiting()

    def tick(self, now: float) -> None:
        """Drops editions, and the changes between them, that no reader has used for KEPT_SECONDS.

        The newest edition stays as long as a reader that asks for changes follows the job. The edition before it stays
        while the newest is being read, because readers may get what has changed since that edition.
        """
        if not self._kept and not self._typed_buckets and not self._mapped:
            return
        with self._lock:
            if any(each.is_read for each in self._kept):
                self._followed = now
            is_followed = now - self._followed <= KEPT_SECONDS
            self._keeps_newest &= is_followed
            whole = [each for each in self._kept if each.is_whole] if self._keeps_newest else []
            bases = whole[-2:] if whole and whole[-1].is_read else whole[-1:]
            self._kept = [
                each for each in self._kept if each.is_read or each in bases or now - each.used < KEPT_SECONDS
            ]
            self._mapped = {
                each: asked for each, asked in self._mapped.items() if now - asked <= KEPT_SECONDS or each.held_bytes()
            }
            if not is_followed:
                self._typed_buckets.clear()
                self._changes.clear()
            self._note_waiting()

    def change(self, typed_bucket: TypedBucket, base: int, new: CopiedBucket, sparse: bool) -> BucketDelta | None:
        """Returns the changes of a bucket since a version; None: send the bucket whole. May take long."""
        with self._lock:
            if self._closed is not None:
                return None
            changes = self._changes.get(typed_bucket)
            if changes is None:
                changes = self._changes[typed_bucket] = BucketChanges(typed_bucket[1], self._has_free)
            copies = [copied for each in self._kept if (copied := each.copied(typed_bucket)) is not None]
        return changes.between(base, new, copies, sparse)

    def _has_free(self, size: int) -> bool:
        """Whether training leaves so many bytes free."""
        left = free_bytes()
        return left is None or size + self._promised() <= left

    def followed(self, now: float) -> frozenset[TypedBucket] | None:
        """Returns the typed buckets that readers of the job want, possibly none of this shard; None: no reader follows
        the job.
        """
        with self._lock:
            is_followed = now - self._followed <= KEPT_SECONDS or any(each.is_read for each in self._kept)
            return frozenset(self._typed_buckets) if is_followed else None

    def figures(self, readers: int, lowest: int, now: float) -> FeedFigures | None:
        """Returns how the job is read; None if nobody follows it.

        readers: that have an edition or wait for one
        lowest:  the lowest version of the job's buckets and tables now
        """
        with self._lock:
            mapped, own = list(self._mapped), [file for each in self._kept for file in memory_files(each.copies())]
        for each in mapped:
            each.look()
        held = sum(each.held_bytes(own) for each in mapped)
        if not self._kept and not held and now - self._followed > KEPT_SECONDS:
            return None
        seen = self.tally.figures(readers, lowest, self.nbytes, now)
        # Tables of rows count in the lowest version, but are in no edition: a relay's may be a step ahead of it.
        highest = max((each.rule.version for each in self._buckets.values()), default=0)
        relays = self.relays.figures(lowest, now, highest)
        return replace(seen, mapped=sum(each.readers for each in mapped), held=held, relays=relays)

    def copied_now(
        self, typed_buckets: frozenset[TypedBucket], locked: Callable[[int], AbstractContextManager[Bucket]]
    ) -> TakenEdition:
        """Returns a copy of these as they are, or one with its `error` if there is no room. The job takes no more
        updates.

        locked: gives a bucket by its index, and keeps it from being stepped
        """
        edition = TakenEdition(None, lambda each, _: self._check_added(each))
        edition.hand_to(self, WantedEdition(None, 0, typed_buckets), lambda _: None)
        with self._lock:
            kept = list(self._kept)
        for index in sorted({index for index, _ in typed_buckets}):
            with locked(index) as bucket:
                for each in kept:
                    edition.share(each, bucket)
                edition.look(bucket, 0.0)
        edition.give_back(self, 0.0)
        return edition

    def close(self, error: PSError) -> None:
        """Drops all editions, and takes no more: the shard no longer has the job, or it goes back to a checkpoint."""
        with self._lock:
            self._closed = error
            kept, self._kept, self.waiting = self._kept, [], ()
            self._changes.clear()
        for each in kept:
            each.fail(error)

    def _note_waiting(self) -> None:
        """The caller holds the lock."""
        self.waiting = tuple(each for each in self._kept if each.is_waiting)

    def _make_room(self, edition: TakenEdition, now: float) -> None:
        """Makes room for what readers want of an edition, the first time before any of it is copied.

        Raises TryLater if too many editions are read, LimitExceeded if memory has no room. A reader that comes to
        an edition later, and wants typed buckets for which there is no room, is refused by itself.
        """
        if not edition.unchecked:
            return
        try:
            self._find_room(edition, now)
        except PSError as error:
            self.tally.refused(error)
            raise

    def _find_room(self, edition: TakenEdition, now: float) -> None:
        with self._lock:
            is_first = edition.began is None
            given_up = self._give_up(now) if is_first else []
            edition.began = now if is_first else edition.began
            added, edition.unchecked = edition.unchecked & set(edition.missing()), set()
            begun = [each for each in self._kept if each.began is not None and each is not edition]
        for each in given_up:
            each.fail(TryLater("this edition was given up for a newer one: it was not read in time"))
        try:
            self._check_room(added, sum(self._size(each.missing()) for each in begun))
        except LimitExceeded as error:
            if is_first:
                raise
            self.tally.refused(error)
            edition.refuse(added, without_traceback(error))

    def _give_up(self, now: float) -> list[TakenEdition]:
        """Takes out the editions that go for a new one: first the oldest that nobody reads, then the oldest that is
        read too slowly. The caller holds the lock. Raises TryLater if there are none."""
        begun = sorted((each for each in self._kept if each.began is not None), key=lambda each: each.began or 0.0)
        surplus = max(0, len(begun) - MOST + 1)
        slow = [each for each in begun if each.is_read and now - (each.began or 0.0) > HELD_SECONDS]
        free = [*(each for each in begun if not each.is_read), *slow][:surplus]
        if len(free) < surplus:
            later = TryLater(f"job {self._name!r}: {MOST} editions are being read, which is the most at a time")
            later.retry_after = RETRY_SECONDS
            raise later
        for each in free:
            self._kept.remove(each)
        return free

    def _size(self, typed_buckets: Iterable[TypedBucket]) -> int:
        return sum(PLAIN[dtype].size(self._buckets[index].spec.numel) for index, dtype in typed_buckets)

    def _check_added(self, edition: TakenEdition) -> None:
        added, edition.unchecked = edition.unchecked, set()
        if added:
            self._check_room(added, 0)

    def _check_room(self, typed_buckets: Set[TypedBucket], begun: int) -> None:
        """Raises LimitExceeded if memory has no room for copies.

        begun: bytes that other editions are still to take
        """
        size = self._size(typed_buckets)
        left, promised = free_bytes(), self._promised() + begun
        if left is not None and size + promised > left:
            raise LimitExceeded(
                f"job {self._name!r}: this shard's memory has no room for an edition of {size} bytes: {left} are "
                f"free, of which training and other editions still take {promised}"
            )
