"""The interface to which a shard hands its answers to a call. The rpc package turns them into messages.

Relays answer in the same way, so this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, Union

from ps_frames.loans import Loan
from ps_protocol.errors import PSError
from ps_protocol.messages.editions import EditionMessage

if TYPE_CHECKING:
    from ps_protocol.messages.data import Notice, PulledBucket, PulledState
    from ps_protocol.messages.rows import PulledRows, PulledTable, RowsMessage

Answer: TypeAlias = Union[
    "PulledBucket", "PulledRows", "PulledTable", "PulledState", "RowsMessage", EditionMessage, "Notice"
]  # types in quotes are not imported: they need torch


class Lent(NamedTuple):
    """An answer whose payload lies in memory of the shard. loan: gives that memory back; None if it never
    changes again
    """

    answer: Answer
    loan: Loan | None


SMALL_BYTES = 2**16


class Outbox(Protocol):
    """Sends the answers to one pull, one after the other. No method waits; all are thread-safe."""

    def tell(self, answer: Answer) -> None:
        """Sends an answer."""

    def tell_last(self, answer: Answer) -> None:
        """Sends an answer, and ends the stream after it."""
        self.tell(answer)
        self.finish()

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        """Queues an answer that is made when its turn comes.

        lent:     opens a context that has the answer; its payload may be read until the context is closed
        is_small: the payload has at most SMALL_BYTES. The outbox may copy it, and so needs no other thread to send it
        """

    def together(self) -> AbstractContextManager[None]:
        """Returns a context: small answers, and the end, that are sent inside it may leave in one write."""
        return nullcontext()

    def finish(self) -> None:
        """Ends the stream after the answers before it."""

    def fail(self, error: PSError) -> None:
        """Ends the stream with an error, after the answers before it."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Registers a function that another thread calls when the stream is over, for any reason; at once if it is
        over.
        """
