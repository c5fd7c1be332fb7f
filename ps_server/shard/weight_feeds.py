"""Feeds of weights: each reader is sent one edition, bucket after bucket, once it is complete.

A message is made when the one before has left, so a reader takes the memory of one message beside the edition, which
it shares with others (editions.py). A reader on this host is handed the edition's memory in place of messages with its
elements (mapped.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from ps_protocol.changes import BucketDelta
from ps_protocol.errors import InvalidRequest, OutOfOrder, PSError, TryLater, anew
from ps_protocol.handover import MappingOffer
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.editions import (
    BucketOffset,
    EditionBegin,
    EditionBucket,
    EditionCall,
    EditionMessage,
    WeightsAsked,
    WeightsHere,
)
from ps_protocol.tensors import PLAIN
from ps_protocol.wire_formats import EDITION_WIRES
from ps_server.failpoints import failpoint
from ps_server.shard.bucket_messages import BucketMessages
from ps_server.shard.copied_buckets import CopiedBucket, TypedBucket, as_typed, shared_buckets
from ps_server.shard.editions import Over, TakenEdition, WantedEdition
from ps_server.shard.feed_context import FeedContext
from ps_server.shard.hosted_job import Feed, HostedJob
from ps_server.shard.mapped import MappedFiles
from ps_server.shard.outbox import Lent, Outbox

SIGN_SECONDS = 0.25  # the pause between two signs of life while an edition is not complete


class EditionSource(Protocol):
    """Where editions are taken from: a job, or the last weights of a job that has ended.

    ended: the job has ended
    """

    ended: ClassVar[bool]

    @property
    def spec(self) -> JobSpec:
        """The job."""

    @property
    def run(self) -> str:
        """The run of the job."""

    @property
    def timeline(self) -> int:
        """See HostedJob."""

    @property
    def shards(self) -> int:
        """How many shards have a part of it."""

    @property
    def specs(self) -> Mapping[int, BucketSpec]:
        """The buckets that are here, by index."""

    @property
    def versions(self) -> Sequence[int]:
        """The versions of the buckets that an optimizer steps."""

    @property
    def editions(self) -> tuple[int, ...]:
        """See WeightsHere."""

    @property
    def buffers(self) -> Mapping[int, int]:
        """See WeightsHere."""

    def heard_of_reader(self, now: float, typed_buckets: Set[TypedBucket]) -> None:
        """Notes that a reader follows the job, and wants these buckets."""

    def add(self, feed: Feed, limit: float) -> None:
        """Adds a reader. Raises LimitExceeded if there are too many."""

    def take(self, feed: Feed, wanted: WantedEdition, over: Over, now: Callable[[], float]) -> TakenEdition:
        """Returns an edition for a reader; see Editions.take. Buckets that are at its version are copied now."""

    def change(self, typed_bucket: TypedBucket, base: int, new: CopiedBucket, sparse: bool) -> BucketDelta | None:
        """Returns what changed in a bucket since a version; None if it is to be sent whole. sparse: it may be sparse"""

    def sent(self, size: int, whole: int) -> None:
        """Counts bytes sent to readers. whole: the bytes of the same elements without changes"""

    def give_back(self, feed: Feed, edition: TakenEdition | None, now: float) -> None:
        """Removes a reader, and gives its edition back. edition: None: it had none"""


class JobSource:
    """The EditionSource of a job that runs on this shard."""

    ended: ClassVar[bool] = False

    def __init__(self, job: HostedJob) -> None:
        self.job, self.spec, self.run, self.timeline = job, job.partition.spec, job.run, job.timeline
        self.shards = job.partition.row_checker.share.shards
        self.specs = {index: bucket.unit.spec for index, bucket in job.buckets.items()}

    @property
    def versions(self) -> Sequence[int]:
        """The versions of the buckets that an optimizer steps."""
        return [bucket.rule.version for bucket in self.job.buckets.values() if bucket.unit.is_trained]

    @property
    def editions(self) -> tuple[int, ...]:
        """The versions of the editions that readers wait for or can get."""
        return tuple(self.job.editions.versions())

    @property
    def buffers(self) -> Mapping[int, int]:
        """The steps of rank 0 after which it has told what is in buckets that no optimizer steps."""
        versions = {index: bucket.unit.reader_version for index, bucket in self.job.buckets.items()}
        return {index: version for index, version in versions.items() if version}

    def heard_of_reader(self, now: float, typed_buckets: Set[TypedBucket]) -> None:
        """Notes that a reader follows the job, and wants these buckets."""
        self.job.editions.heard_of_reader(now, typed_buckets)

    def add(self, feed: Feed, limit: float) -> None:
        """Adds a reader. Raises LimitExceeded if there are too many."""
        self.job.add_feed(self.job.readers, feed, limit)

    def take(self, feed: Feed, wanted: WantedEdition, over: Over, now: Callable[[], float]) -> TakenEdition:
        """Returns an edition. Buckets that are at its version are copied now."""
        editions = self.job.editions
        edition = editions.take(feed, wanted, over, now())
        for index, _ in sorted(wanted.typed_buckets):
            hosted = self.job.buckets[index]
            with hosted.tensors:
                edition.look(hosted.unit, now())
        editions.looked_at(edition)
        return edition

    def change(self, typed_bucket: TypedBucket, base: int, new: CopiedBucket, sparse: bool) -> BucketDelta | None:
        """Returns the change of a bucket from version `base` to `new`; None: send the bucket whole."""
        return self.job.editions.change(typed_bucket, base, new, sparse)

    def sent(self, size: int, whole: int) -> None:
        """Counts bytes sent to readers. whole: the bytes of the same elements without changes"""
        self.job.editions.tally.sent(size, whole)

    def give_back(self, feed: Feed, edition: TakenEdition | None, now: float) -> None:
        """Removes a reader, and gives its edition back."""
        with self.job.lock:
            self.job.readers.discard(feed)
        if edition is not None:
            self.job.editions.give_back(edition, feed, now)


class EditionSender:
    """Sends one edition to one reader.

    caller: the principal that reads; empty: unknown
    bases:  by bucket, the version that the reader has: it gets the change since then
    most:   bytes of a payload in one message; 0: all of it
    sparse: changes may be sparse
    give_back: is called once the stream is over, or is to count no more
    handed: where the reader waits for memory of the edition, and what readers of the job have mapped; None if it gets
            payloads
    """

    def __init__(
        self,
        source: EditionSource,
        wanted: WantedEdition,
        bases: Mapping[int, int],
        outbox: Outbox,
        caller: str,
        now: Callable[[], float],
        most: int,
        sparse: bool,
        give_back: Callable[[], None],
        handed: tuple[MappingOffer, MappedFiles] | None = None,
    ) -> None:
        self._most, self._sparse, self._give_back, self._handed = most, sparse, give_back, handed
        self._lies: dict[TypedBucket, tuple[EditionBucket, int]] = {}  # what was handed over, and its bytes
        self._messages: BucketMessages | None = None  # of a bucket in a file, which they refer to
        self._source, self._bases, self.outbox, self.caller = source, bases, outbox, caller
        self._wanted, self._now = wanted, now
        self._edition: TakenEdition | None = None
        self._result: tuple[PSError | None] | None = None  # once it is over: why there is no edition
        self._begun = False
        self._left: list[TypedBucket] = []  # to be sent
        self._lock = threading.Lock()
        self._sign_due = now() + SIGN_SECONDS

    def begin(self) -> None:
        """Requests the edition, and sends it once all wanted buckets are copied."""
        edition = self._edition = self._source.take(self, self._wanted, self._over, self._now)
        if self._result is not None:  # it was over before `_edition` was known
            self._over(*self._result)
        elif edition.error is not None or edition.has(self._wanted.typed_buckets):  # copied for another reader
            self._over(edition.error)

    def _over(self, error: PSError | None) -> None:
        """Sends the edition, or why there is none. May be called twice."""
        with self._lock:
            self._result = self._result or (error,)
            if self._begun and error is not None and self._messages is not None:
                self._messages.drop(partial(self._fail, anew(error)))
            if self._begun or self._edition is None:
                return
            self._begun = True
        if error is not None:
            self._fail(anew(error))
        else:
            self._left = sorted(self._wanted.typed_buckets, reverse=True)
            self.outbox.lend(partial(self._head, self._edition))

    @contextlib.contextmanager
    def _head(self, edition: TakenEdition) -> Iterator[Lent]:
        now = lowest(self._source)
        try:
            trained = [each.version for each in map(edition.copy, self._left) if each.is_trained]
            self._hand_over(edition)
        except PSError as error:
            self._fail(error)
            yield Lent(EditionMessage(now), None)
            return
        begin = EditionBegin(min(trained, default=0), self._source.timeline, len(self._left))
        yield Lent(EditionMessage(now, begin), None)
        self._lend_next(edition)

    def _hand_over(self, edition: TakenEdition) -> None:
        """Hands over the memory of what lies in files."""
        if self._handed is None:
            return
        offer, mapped = self._handed
        copies = edition.copies()  # what is handed over has the versions of these, also where `edition` gets newer ones
        shared = shared_buckets(copies, self._wanted.typed_buckets)
        numbers = mapped.hand_over(offer, shared, {name for name, _ in shared.lies.values()})
        if numbers is None:
            return
        for typed_bucket, (name, offset) in shared.lies.items():
            copied, place = copies[typed_bucket], BucketOffset(numbers[name], offset)
            # Nobody needs a checksum of memory that is shared, and to compute it takes long.
            sent = EditionBucket(copied.index, copied.version, copied.wire_format, 0, b"", lies=place)
            self._lies[typed_bucket] = sent, len(copied.payload)

    def _lend_next(self, edition: TakenEdition) -> None:
        """Queues the next bucket only, so that an error that comes meanwhile does not wait behind all of them."""
        if self._left:
            self.outbox.lend(partial(self._bucket, edition, self._left.pop()))
        else:
            self.forget()  # a reader asks for the next edition as soon as it has this one, which is to count no more
            self.outbox.finish()

    @contextlib.contextmanager
    def _bucket(self, edition: TakenEdition, typed_bucket: TypedBucket) -> Iterator[Lent]:
        failpoint("edition-half-sent")
        about = partial(EditionMessage, lowest(self._source))
        try:
            copied = edition.copy(typed_bucket)
        except PSError as error:  # it was given up meanwhile
            self._fail(error)
            yield Lent(about(), None)
            return
        if typed_bucket in self._lies:
            del copied
            sent, whole = self._lies[typed_bucket]
            yield Lent(about()._replace(bucket=sent), None)
            self._source.sent(0, whole)
            self._lend_next(edition)
            return
        base = self._bases.get(copied.index)
        change = None if base is None else self._source.change(typed_bucket, base, copied, self._sparse)
        head = copied.index, copied.version, copied.wire_format, copied.checksum
        sent = EditionBucket(*head, copied.payload)
        if change is not None:
            sent = sent._replace(payload=change.payload, base=base, sparse=change.is_sparse)
        in_file, size, whole = change is None and copied.lies is not None, len(sent.payload), len(copied.payload)
        messages = BucketMessages(self.outbox, sent, self._most, about, partial(self._lend_next, edition), in_file)
        # A reader may never take the message: what is given up is not to stay for it, above all no whole file.
        del copied, sent, change
        self._messages = messages if in_file else None
        if edition.error is not None:
            self._over(edition.error)
        yield messages.first()
        self._source.sent(size, whole)
        messages.go_on()

    def tick(self, now: float) -> None:
        """Sends a sign of life if one is due, while the edition is not complete. For one thread."""
        if not self._begun and now >= self._sign_due:
            self._sign_due = now + SIGN_SECONDS
            self.outbox.tell(EditionMessage(lowest(self._source)))

    def end(self, error: PSError) -> None:
        """Ends the feed with an error."""
        with self._lock:
            self._begun = True
        self._fail(error)

    def _fail(self, error: PSError) -> None:
        """Ends the stream with an error. The feed is not counted any more before the reader learns of it: it may ask
        again at once.
        """
        # The outbox calls it, too, but later than that where the error comes before `pull` has returned.
        self.forget()
        self.outbox.fail(error)

    def forget(self) -> None:
        """Gives the edition back, because the stream is over."""
        edition, self._edition = self._edition, None
        self._source.give_back(self, edition, self._now())
        self._give_back()


class WeightFeeds:
    """The feeds of weights of one shard. Methods may be called from any thread.

    shared_directory: where readers of this host wait for the memory of editions; None: all is sent
    """

    def __init__(self, context: FeedContext, shared_directory: Path | None = None) -> None:
        self._hosted, self._clock, self._wake, self._limit, self._taken = context
        self._directory = shared_directory
        # By job and wire format, what readers have mapped. That stays in memory, and counts, also when a job has ended.
        self._mapped: dict[tuple[str, str], MappedFiles] = {}
        self._lock = threading.Lock()

    def describe(self, asked: WeightsAsked, caller: str = "") -> WeightsHere:
        """Returns what this shard has of a job's weights. Raises NotFound, RunEnded, TryLater, or InvalidRequest.

        caller: the principal that asks; empty: unknown
        """
        source = self._source(asked.job, asked.run)
        _check_wire(asked.wire)
        if isinstance(source, JobSource):  # nobody is shown who reads what is left of a job
            source.job.editions.relays.tell(asked.relay, caller, self._clock())
        if asked.follows:
            followed = source.specs.keys() & (asked.buckets or source.specs.keys())
            source.heard_of_reader(self._clock(), _typed_buckets(asked.wire, followed, source))
        versions = source.versions
        return WeightsHere(
            source.run,
            min(versions, default=0),
            max(versions, default=0),
            source.timeline,
            source.shards,
            tuple(sorted(source.specs)),
            source.spec.consistency.has_one_version,
            source.editions,
            source.spec if asked.with_spec else None,
            ended=source.ended,
            buffers=source.buffers,
        )

    def pull(self, call: EditionCall, outbox: Outbox, caller: str = "") -> None:
        """Sends an edition to `outbox`, then ends the stream. Returns at once.

        Raises NotFound, RunEnded, TryLater, InvalidRequest, OutOfOrder or LimitExceeded; see feed.proto.
        """
        _check_wire(call.wire)
        source = self._source(call.job, call.run)
        handed = self._handed(call)
        wanted = replace(_wanted(call, source), maps=None if handed is None else handed[1])
        bases = {index: call.bases[index] for index in source.specs if index in call.bases}  # it may name any number
        give_back = self._taken.take(caller, _message_bytes(wanted, source, call.part_bytes))
        how = call.part_bytes, call.sparse, give_back, handed
        feed = EditionSender(source, wanted, bases, outbox, caller, self._clock, *how)
        try:
            source.add(feed, self._limit)
        except PSError:
            give_back()
            raise
        self._wake()
        try:
            # The job may have ended its feeds meanwhile, without this one.
            if isinstance(source, JobSource) and self._hosted.get(call.job, "") is not source.job:
                raise TryLater(f"job {call.job!r} is no longer what it was when the call came")
            feed.begin()
        except BaseException:
            feed.forget()
            raise
        outbox.on_close(feed.forget)

    def _handed(self, call: EditionCall) -> tuple[MappingOffer, MappedFiles] | None:
        """Returns the reader's offer and the files to hand over, for a reader on this host; None for one elsewhere."""
        if call.mapping is None:
            return None
        with self._lock:
            if self._directory is None:
                return None
            mapped = self._mapped.setdefault((call.job, call.wire), MappedFiles(self._directory))
        return (call.mapping, mapped) if mapped.sees(call.mapping) else None

    def _source(self, name: str, run: str) -> EditionSource:
        """Returns a job, or what is left of it. Raises NotFound, RunEnded, or TryLater."""
        last = self._hosted.last(name, run)
        return last if last is not None else JobSource(self._begun(name, run))

    @property
    def needs_ticks(self) -> bool:
        """Whether any reader waits for an edition."""
        return any(job.readers for job in self._hosted.all().values())

    def tick(self, now: float) -> None:
        """Sends signs of life, and forgets editions that nobody reads. For one thread."""
        self._forget_mapped()
        for job in self._hosted.all().values():
            job.editions.tick(now)
            if job.readers:
                with job.lock:
                    readers = [each for each in job.readers if isinstance(each, EditionSender)]
                for reader in readers:
                    reader.tick(now)

    def stop(self) -> None:
        """Forgets what readers have mapped, which stays theirs, and hands nothing more over."""
        with self._lock:
            self._directory = None
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()

    def _forget_mapped(self) -> None:
        """Forgets what readers had mapped, once they have given all of it back."""
        jobs = self._hosted.all()
        with self._lock:
            for key, mapped in list(self._mapped.items()):
                mapped.look()
                if key[0] not in jobs and not mapped.held_bytes():
                    self._mapped.pop(key).close()

    def _begun(self, name: str, run: str) -> HostedJob:
        """Returns a job that has its initial weights here."""
        job = self._hosted.get(name, run)
        if not all(bucket.rule.initialised for bucket in job.buckets.values()):
            raise TryLater(f"job {name!r} has no weights yet: rank 0 has not sent them")
        return job


def _check_wire(wire: str) -> None:
    """Raises InvalidRequest for a wire format in which no edition travels."""
    if wire not in EDITION_WIRES:
        raise InvalidRequest(f"an edition travels in {', '.join(EDITION_WIRES)}, not in {wire}")


def _typed_buckets(wire: str, buckets: Iterable[int], source: EditionSource) -> frozenset[TypedBucket]:
    """Returns the typed buckets that a reader of this wire format wants."""
    return frozenset(as_typed(source.specs[index], wire) for index in buckets)


def _wanted(call: EditionCall, source: EditionSource) -> WantedEdition:
    """Returns what a call wants. Raises InvalidRequest, or OutOfOrder for another timeline."""
    unknown = [index for index in call.buckets if index not in source.specs]
    if unknown:
        raise InvalidRequest(f"this shard has no bucket {unknown[0]} of job {call.job!r}")
    has_one_version = source.spec.consistency.has_one_version
    if call.timeline != source.timeline:
        raise OutOfOrder(f"job {call.job!r} is on timeline {source.timeline}, and not on {call.timeline}")
    typed_buckets = _typed_buckets(call.wire, call.buckets or source.specs, source)
    return WantedEdition(call.version if has_one_version else None, call.version, typed_buckets, bool(call.bases))


def _message_bytes(wanted: WantedEdition, source: EditionSource, most: int) -> int:
    """Returns the bytes of the largest message with which an edition is sent. most: bytes of a payload; 0: any"""
    largest = max((PLAIN[dtype].size(source.specs[index].numel) for index, dtype in wanted.typed_buckets), default=0)
    return min(largest, most) if most else largest


def lowest(source: EditionSource) -> int:
    """Returns the lowest version of the buckets that an optimizer steps; 0 if there are none."""
    return min(source.versions, default=0)
