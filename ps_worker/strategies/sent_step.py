"""A step that is under way: whether it counts is not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ps_protocol.layout import BucketSpec
from ps_worker.values import JoinResult


@dataclass(frozen=True)
class SentStep:
    """A step that is under way.

    place:      from which it is sent
    clock:      that it leads to
    pushed:     once all of these are done, it counts
    committing: those of them that are pulls, and wait for other workers
    buckets:    those of which it has a gradient
    """

    place: JoinResult
    clock: int
    pushed: Sequence[Future[Any]]
    committing: Sequence[Future[Any]]
    buckets: Sequence[BucketSpec]

    def counts(self, now: JoinResult | None) -> bool | None:
        """Whether the servers said, with a later place, that it counts: an answer to a push may have been lost. None:
        they said nothing. now: the worker's place
        """
        if now is None or now is self.place or now.pushed is None:
            return None
        return now.pushed >= self.clock
