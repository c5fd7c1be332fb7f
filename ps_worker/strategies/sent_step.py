"""A step that is under way, of which it is not known yet whether it counts; and how one that is over is counted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ps_protocol.layout import BucketSpec
from ps_protocol.messages.workers import JoinResult
from ps_worker.metrics import WorkerMetrics, added
from ps_worker.model.flat import FlatModel
from ps_worker.values import PullResult, PushResult


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

    def lost(self, model: FlatModel) -> None:
        """It does not count, as far as this worker can say: all of its gradient is to be sent again, or given up."""


def count_step(
    metrics: WorkerMetrics,
    pushes: Sequence[Future[PushResult]],
    pulls: Sequence[Future[PullResult]],
    began: float,
    clock: int,
) -> bool:
    """Counts a step whose pushes and pulls are done; returns whether a checkpoint wants this worker's state after it.

    began: when the worker began to wait for it, on the timer's clock
    clock: that it leads to
    """
    sent, received = [push.result() for push in pushes], [pull.result() for pull in pulls]
    pushed = max([began, *(push.staged for push in sent)])
    waited = max((pull.waited for pull in received), default=0.0)
    out = added({push.wire: push.size} for push in sent)
    metrics.stepped(out, added(pull.sizes for pull in received), pushed, waited, clock)
    return any(pull.checkpoint for pull in received)
