"""The last weights of a job that has ended, for the readers that follow it.

If readers follow a job when it is dropped, the buckets that they have asked for are copied, in the types in which they
asked. The copies stay until no reader has called for KEPT_SECONDS. They are dropped if a job needs their memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Set
from typing import ClassVar

from ps_protocol.errors import NotFound, OutOfOrder, PSError, TryLater
from ps_server.core.limits import check_feeds
from ps_server.core.unit import Bucket
from ps_server.shard.copied_buckets import CopiedBucket, TypedBucket
from ps_server.shard.editions import KEPT_SECONDS, Over, TakenEdition, WantedEdition
from ps_server.shard.hosted_job import Feed, HostedJob

log = logging.getLogger("ps_server")


class LastWeights:
    """The last weights of an ended job, as an EditionSource (weight_feeds.py). Its methods are thread-safe.

    spec, run, timeline, shards, specs: the job's
    versions: the versions of all buckets that an optimizer stepped, also of those that were not copied
    buffers:  see WeightsHere
    """

    ended: ClassVar[bool] = True
    editions: tuple[int, ...] = ()

    def __init__(self, job: HostedJob, edition: TakenEdition, now: float) -> None:
        self.spec, self.run, self.timeline = job.partition.spec, job.run, job.timeline
        self.shards = job.partition.row_checker.share.shards
        self.specs = {index: bucket.unit.spec for index, bucket in job.buckets.items()}
        self.versions = [bucket.rule.version for bucket in job.buckets.values() if bucket.unit.is_trained]
        versions = {index: bucket.unit.reader_version for index, bucket in job.buckets.items()}
        self.buffers = {index: version for index, version in versions.items() if version}
        self._edition, self._heard = edition, now
        self._readers: set[Feed] = set()
        self._lock = threading.Lock()

    def heard_of_reader(self, now: float, typed_buckets: Set[TypedBucket]) -> None:
        """Records that a reader has called. typed_buckets: ignored, as nothing more can be copied"""
        self._heard = now

    def is_wanted(self, now: float) -> bool:
        """Whether a reader has a feed, or has called within KEPT_SECONDS."""
        return bool(self._readers) or now - self._heard <= KEPT_SECONDS

    def add(self, feed: Feed, limit: float) -> None:
        """Adds a reader. Raises LimitExceeded if the job has `limit` feeds, or half of these are of the
        same principal.
        """
        with self._lock:
            check_feeds(self.spec.name, [each.caller for each in self._readers], feed.caller, limit)
            self._readers.add(feed)

    def take(self, feed: Feed, wanted: WantedEdition, over: Over, now: Callable[[], float]) -> TakenEdition:
        """Returns the edition, which is complete.

        Raises OutOfOrder if `wanted` names another version, NotFound for a bucket, or a type of it, that was not
        copied.
        """
        if wanted.version is not None and any(each != wanted.version for each in self.versions):
            raise OutOfOrder(f"job {self.spec.name!r} has ended with {max(self.versions)} updates")
        try:
            for typed_bucket in wanted.typed_buckets:
                self._edition.copy(typed_bucket)
        except TryLater:
            raise NotFound(f"job {self.spec.name!r} has ended: nobody had asked for these last weights") from None
        self._heard = now()
        return self._edition

    def change(self, typed_bucket: TypedBucket, base: int, new: CopiedBucket, sparse: bool) -> None:
        """Returns None: there is no older version, so buckets are sent whole."""

    def sent(self, size: int, whole: int) -> None:
        """Counts nothing: the shard no longer has the job, and no status shows it."""

    def give_back(self, feed: Feed, edition: TakenEdition | None, now: float) -> None:
        """Removes a reader."""
        self._heard = now
        with self._lock:
            self._readers.discard(feed)


def last_weights(job: HostedJob, now: float) -> LastWeights | None:
    """Returns the last weights of a job that is dropped; None: no reader follows it, or memory has no room for them."""
    typed_buckets = job.editions.followed(now)
    if typed_buckets is None:
        return None

    @contextlib.contextmanager
    def locked(index: int) -> Iterator[Bucket]:
        hosted = job.buckets[index]
        with hosted.tensors:
            yield hosted.unit

    edition = job.editions.copied_now(typed_buckets, locked)
    try:
        for typed_bucket in typed_buckets:
            edition.copy(typed_bucket)
    except PSError as error:
        log.warning("job %s: its readers do not get its last weights: %s", job.name, error)
        return None
    return LastWeights(job, edition, now)
