"""Splits a bucket of an edition into messages, as small as the reader wants. Needs no torch: relays use it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ps_protocol.messages.editions import EditionBucket, EditionPart, in_messages
from ps_server.shard.outbox import Lent, Outbox


class BucketMessages:
    """The messages of one bucket. Each is made when the one before has left, so each reader costs the memory of one
    message.

    bucket: the bucket with its payload, which must not change until the last message has left
    most:   bytes of a payload in one message; 0: all of it
    about:  returns the fields of a message that do not depend on the bucket: the job's progress
    then:   queues whatever follows the bucket
    """

    def __init__(
        self,
        outbox: Outbox,
        bucket: EditionBucket,
        most: int,
        about: Callable[[], EditionPart],
        then: Callable[[], None],
    ) -> None:
        self._outbox, self._about, self._then = outbox, about, then
        self._first, self._later = in_messages(bucket, most)

    def first(self) -> Lent:
        """Returns the first message, which the caller sends."""
        return Lent(self._about()._replace(bucket=self._first), None)

    def go_on(self) -> None:
        """Queues the next message, or calls `then` if none is left. Call it when a message has left."""
        if self._later:
            self._outbox.lend(self._more)
        else:
            self._then()

    @contextlib.contextmanager
    def _more(self) -> Iterator[Lent]:
        yield Lent(self._about()._replace(more=self._later.pop()), None)
        self.go_on()
