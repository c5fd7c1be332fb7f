"""A step whose pushes are under way: it is not known yet whether it counts. `count_step` notes a step that is done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.layout import BucketSpec
from ps_protocol.messages.workers import JoinResult
from ps_worker.metrics import WorkerMetrics, added
from ps_worker.model.flat import FlatModel
from ps_worker.tables.assigned import AssignedRows
from ps_worker.tables.server_rows import ServerTables
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class SentStep:
    """A step that is under way.

    place:      from which it is sent
    clock:      that it leads to
    pushed:     once all of these are done, it counts
    committing: those of them that are pulls, and wait for other workers
    buckets:    those of which it has a gradient
    assigned:   where the script has interrupted it and gone on, the rows that it takes along, by table
    """

    place: JoinResult
    clock: int
    pushed: Sequence[Future[Any]]
    committing: Sequence[Future[Any]]
    buckets: Sequence[BucketSpec]
    assigned: AssignedRows = field(default_factory=dict, kw_only=True)

    def counts(self, now: JoinResult | None) -> bool | None:
        """Whether the servers said, with a later place, that it counts: an answer to a push may have been lost. None:
        they said nothing. now: the worker's place
        """
        if now is None or now is self.place or now.pushed is None:
            return None
        return now.pushed >= self.clock

    def interrupted(self, tables: ServerTables) -> SentStep:
        """Returns it with the rows that it takes along: those that the script sets from here on go with the next."""
        assigned = tables.assigned()
        if not assigned:
            return self
        tables.forget_assigned()
        return replace(self, assigned=assigned)

    def has_counted(self, now: JoinResult) -> bool:
        """Whether it counts, in a place that has followed: every push is done."""
        counts = self.counts(now)
        return all(push.exception() is None for push in self.pushed) if counts is None else counts

    def counts_at_end(self, now: JoinResult | None, seconds: float) -> bool:
        """Whether it counts, as far as it is known after so many seconds: no push of it waits for longer. Of drafts,
        which count with the pull that commits them, it is known only if that has failed.
        """
        counts = self.counts(now)
        if counts is not None:
            return counts
        wait([push for push in self.pushed if push not in self.committing], seconds)
        failed = [push for push in self.pushed if (push.exception() if push.done() else push not in self.committing)]
        if failed and len(failed) < len(self.pushed):
            log.warning("this worker stops in step %d, of which a part may count", self.clock)
        return not failed

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
