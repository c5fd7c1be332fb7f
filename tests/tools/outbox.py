"""An outbox that keeps what it is told: what comes of a pull on a shard without threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ps_frames.frames import nothing
from ps_protocol.errors import PSError
from ps_server.shard.outbox import Answer, Lent, Outbox


class Answers(Outbox):
    """An outbox that keeps what it is told. close: a test calls it as the end of the caller does"""

    def __init__(self) -> None:
        self.close: Callable[[], None] = nothing
        self.told: list[Answer] = []
        self.error: PSError | None = None
        self.finished = False

    def tell(self, answer: Answer) -> None:
        self.told.append(answer)

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        with lent() as (answer, _):
            self.told.append(answer)

    def finish(self) -> None:
        self.finished = True

    def fail(self, error: PSError) -> None:
        self.error = error

    def on_close(self, callback: Callable[[], None]) -> None:
        self.close = callback
