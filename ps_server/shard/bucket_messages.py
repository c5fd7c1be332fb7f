"""Splits a bucket of an edition into messages, as small as the reader wants. Needs no torch: relays use it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ps_protocol.framing import Buffer
from ps_protocol.messages.editions import EditionBucket, EditionMessage, in_messages
from ps_server.shard.outbox import Lent, Outbox


class BucketMessages:
    """The messages of one bucket. Each is made when the one before has left, so each reader costs the memory of one
    message.

    bucket: the bucket with its payload, which must not change until the last message has left
    most:   bytes of a payload in one message; 0: all of it
    about:  returns the fields of a message that do not depend on the bucket: the job's progress
    then:   queues whatever follows the bucket
    copies: each message has a copy of its part of the payload: after `drop` nothing refers to that any more
    """

    def __init__(
        self,
        outbox: Outbox,
        bucket: EditionBucket,
        most: int,
        about: Callable[[], EditionMessage],
        then: Callable[[], None],
        copies: bool = False,
    ) -> None:
        self._outbox, self._about, self._then, self._copies = outbox, about, then, copies
        first, self._later = in_messages(bucket, most)
        self._first = [first._replace(payload=bytes(first.payload)) if copies else first]  # until it is sent

    def first(self) -> Lent:
        """Returns the first message, which the caller sends."""
        return Lent(self._about()._replace(bucket=self._first.pop()), None)

    def go_on(self) -> None:
        """Queues the next message, or calls `then` if none is left. Call it when a message has left."""
        if self._later:
            self._outbox.lend(self._more)
        else:
            self._then()

    @contextlib.contextmanager
    def _more(self) -> Iterator[Lent]:
        yield Lent(self._about()._replace(more=self._part()), None)
        self.go_on()

    def _part(self) -> Buffer | None:
        """Returns what the next message brings; None if the payload was dropped."""
        later = self._later  # `drop` puts another list in its place
        if not later:
            return None
        part = later.pop()
        return bytes(part) if self._copies else part

    def drop(self, then: Callable[[], None]) -> None:
        """Sends no further message, and forgets the payload. Any thread may call it.

        then: is called in place of what follows the bucket
        """
        self._then, self._later = then, []
