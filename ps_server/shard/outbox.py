"""Where the answers to one call go: values, one after the other. How they become messages is the business of the room
that sends them. Needs no torch, for relays answer so, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, Union

from ps_frames.loans import Loan
from ps_protocol.errors import PSError
from ps_protocol.messages.editions import EditionPart

if TYPE_CHECKING:
    from ps_protocol.messages.data import Notice, PulledBucket, PulledState
    from ps_protocol.messages.rows import FeedPart, PulledRows, PulledTable

Answer: TypeAlias = Union[
    "PulledBucket", "PulledRows", "PulledTable", "PulledState", "FeedPart", EditionPart, "Notice"
]  # by their names: those in quotes need torch


class Lent(NamedTuple):
    """An answer whose payload lies in memory of the shard. loan: of this memory; None: it changes no more"""

    answer: Answer
    loan: Loan | None


SMALL_BYTES = 2**16


class Outbox(Protocol):
    """Where the answers to one pull go, one after the other. No method waits; all are thread-safe."""

    def tell(self, answer: Answer) -> None:
        """Sends an answer."""

    def tell_last(self, answer: Answer) -> None:
        """Sends an answer, and ends the stream after it."""
        self.tell(answer)
        self.finish()

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]]) -> None:
        """Sends an answer that is made when its turn has come, and whose payload may be read until it is given back."""

    def lend_small(self, lent: Callable[[], AbstractContextManager[Lent]]) -> None:
        """As `lend`, of a payload of at most SMALL_BYTES: it may be copied, so that no other thread has to send it."""
        self.lend(lent)

    def finish(self) -> None:
        """Ends the stream after what was put before."""

    def fail(self, error: PSError) -> None:
        """Ends the stream with an error, after what was put before."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has another thread call back when the stream is over, however it ended; also if it already is."""
