"""A bucket of an edition on its way to one reader, in as many messages as the reader wants. Needs no torch: relays send
their buckets with it, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ps_protocol.messages.editions import EditionBucket, EditionPart, in_messages
from ps_server.shard.outbox import Lent, Outbox


class BucketMessages:
    """The messages of one bucket. Each is made when the one before has left, so a reader takes the memory of one.

    bucket: with its whole payload, which stays as it is until the last message has left
    most:   bytes of a payload in one message; 0: all of it
    about:  returns the part of a message that does not depend on the bucket: how far the job is
    then:   queues what follows the bucket
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
        """Queues the next message, or what follows the bucket if none is left. To be called when one has left."""
        if self._later:
            self._outbox.lend(self._more)
        else:
            self._then()

    @contextlib.contextmanager
    def _more(self) -> Iterator[Lent]:
        yield Lent(self._about()._replace(more=self._later.pop()), None)
        self.go_on()
