"""One reader that gets one edition from a relay, bucket after bucket.

A message is made when the one before has left, from the edition's own memory: a reader takes the memory of one message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Protocol

from ps_protocol.changes import BucketDelta
from ps_protocol.errors import PSError, anew
from ps_protocol.handover import MappingOffer
from ps_protocol.messages.editions import BucketOffset, EditionBegin, EditionMessage
from ps_server.failpoints import failpoint
from ps_server.relay.kept import KeptEdition
from ps_server.shard.bucket_messages import BucketMessages
from ps_server.shard.mapped import MappedFiles
from ps_server.shard.outbox import Lent, Outbox

SIGN_SECONDS = 0.25  # interval of the keep-alive messages to a waiting reader


class RelayedJob(Protocol):
    """The job of a reader, as far as RelaySender uses it."""

    @property
    def latest(self) -> int:
        """The highest known version of the job."""

    @property
    def mapped(self) -> MappedFiles:
        """The editions that readers on this host have mapped."""

    def sent(self, size: int, whole: int) -> None:
        """Counts sent bytes. whole: the bytes of the same elements without changes"""

    def change(self, kept: KeptEdition, index: int, base: int, sparse: bool) -> BucketDelta | None:
        """Returns the changes of a bucket since a version; None: send it whole. sparse: they may be sparse"""

    def leave(self, reader: RelaySender) -> None:
        """Forgets a reader."""


class RelaySender:
    """One reader, until its stream is over.

    series:  the run and the timeline that it reads
    version: the lowest version that the reader accepts
    buckets: the indices of the wanted buckets, each once
    bases:   versions that the reader has, by bucket
    caller:  the principal that reads; empty: unknown
    mapping: where the reader waits for the memory of the edition; None: payloads are sent
    sparse:  changes may be sparse
    most:    bytes of a payload in one message; 0: all of it
    """

    def __init__(
        self,
        source: RelayedJob,
        series: tuple[str, int],
        version: int,
        buckets: Collection[int],
        bases: Mapping[int, int],
        outbox: Outbox,
        caller: str,
        now: float,
        most: int = 0,
        mapping: MappingOffer | None = None,
        sparse: bool = False,
    ) -> None:
        self._most, self._mapping, self._sparse = most, mapping, sparse
        self._files: dict[str, int] | None = None  # by space, the file that was handed over
        self.series, self.version, self.caller = series, version, caller
        self._source, self._outbox, self._bases = source, outbox, bases
        self._left = sorted(buckets, reverse=True)
        self._sign_due = now + SIGN_SECONDS
        self._is_over = False  # an edition, or an error, is being sent
        self._lock = threading.Lock()

    def send(self, kept: KeptEdition) -> None:
        """Sends an edition."""
        if self._begin():
            self._outbox.lend(partial(self._head, kept))

    def end(self, error: PSError) -> None:
        """Ends the stream with an error, even in the middle of an edition."""
        with self._lock:
            self._is_over = True
        self._outbox.fail(anew(error))

    def tick(self, now: float, age: float) -> None:
        """Sends a keep-alive message if one is due. For one thread. age: the age of the newest edition"""
        if not self._is_over and now >= self._sign_due:
            self._sign_due = now + SIGN_SECONDS
            self._outbox.tell(EditionMessage(self._source.latest, age=age))

    def forget(self) -> None:
        """Forgets the reader: its stream is over."""
        self._source.leave(self)

    def _begin(self) -> bool:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        return not was_over

    @contextlib.contextmanager
    def _head(self, kept: KeptEdition) -> Iterator[Lent]:
        """Lends the first message of an edition, then its first bucket. A mapped edition's files are handed over."""
        edition = kept.arrays
        if self._mapping is not None:
            spaces = {edition.contents.buckets[index].space for index in self._left}
            self._files = self._source.mapped.hand_over(self._mapping, edition, spaces)
        begin = EditionBegin(edition.version, edition.timeline, len(self._left))
        yield Lent(self._about(kept)._replace(begin=begin), None)
        self._lend_next(kept)

    def _about(self, kept: KeptEdition) -> EditionMessage:
        return EditionMessage(self._source.latest, age=kept.age())

    def _lend_next(self, kept: KeptEdition) -> None:
        if self._left:
            self._outbox.lend(partial(self._bucket, kept, self._left.pop()))
        else:
            self._outbox.finish()

    @contextlib.contextmanager
    def _bucket(self, kept: KeptEdition, index: int) -> Iterator[Lent]:
        """Lends the messages of a bucket, then the next bucket.

        A reader of a mapped edition gets the offset of the bucket in the file. Other readers get the changes since the
        version that they have, or the whole bucket.
        """
        failpoint("edition-half-relayed")
        sent, base = kept.bucket(index), self._bases.get(index)
        size, about = len(sent.payload), partial(self._about, kept)
        if self._files is not None:
            lies = BucketOffset(self._files[kept.arrays.contents.buckets[index].space], kept.offset(index))
            yield Lent(about()._replace(bucket=sent._replace(payload=b"", lies=lies)), None)
            self._source.sent(0, size)
            self._lend_next(kept)
            return
        change = None if base is None else self._source.change(kept, index, base, self._sparse)
        if change is not None:
            sent = sent._replace(payload=change.payload, base=base, sparse=change.is_sparse)
        messages = BucketMessages(self._outbox, sent, self._most, about, partial(self._lend_next, kept))
        yield messages.first()
        self._source.sent(len(sent.payload), size)
        messages.go_on()
