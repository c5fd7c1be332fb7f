"""A step that is under way, of which it is not known yet whether it counts; and how one that is over is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.identity import BegunStep
from ps_protocol.layout import BucketSpec
from ps_worker.metrics import WorkerMetrics, added
from ps_worker.model.step import EndedStep
from ps_worker.tables.server_rows import RowsPush
from ps_worker.values import BucketPush, JoinResult, PullResult, PushResult


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


@dataclass
class StepAtHand:
    """A step that the script makes now, until it counts or is given up.

    Where the place is lost, the step is pushed again from the next one, whole: each shard says with the new place what
    it has of the furthest step of this rank, and what has a push already gets an empty one.

    ended:   the step as it is pushed
    base:    the clock of the weights that its gradient was taken at
    counted: the buckets and tables that have a push of it, each as its shard and its index
    """

    ended: EndedStep
    base: int
    counted: frozenset[tuple[int, int]] = frozenset()
    _attempts: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def sent(self, clock: int) -> None:
        """Notes that it is pushed, leading to this clock."""
        self._attempts[clock] = self.counted

    @property
    def was_sent(self) -> bool:
        """Whether it has been pushed from any place."""
        return bool(self._attempts)

    def find_counted(self, begun: Mapping[int, BegunStep]) -> None:
        """Finds out what counts of it. begun: by shard, what this rank had pushed when it took its present place"""
        counted: set[tuple[int, int]] = set()
        for shard, step in begun.items():
            if step.clock in self._attempts:  # otherwise the shard has gone back to before it, or never had any of it
                counted |= {unit for unit in self._attempts[step.clock] if unit[0] == shard}
                counted |= {(shard, index) for index in step.units}
        self.counted = frozenset(counted)

    def pushes(self, made: Sequence[BucketPush]) -> list[BucketPush]:
        """Returns the pushes of buckets as they are sent: what counts already gets an empty one."""
        indices = {index for _, index in self.counted}
        return [replace(push, empty=True, absent=()) if push.bucket.index in indices else push for push in made]

    def rows(self, first: int) -> list[RowsPush]:
        """Returns the pushes of tables likewise. first: the index of the job's first table"""
        return [
            replace(push, counted_on=frozenset(shard for shard, index in self.counted if index == first + push.table))
            for push in self.ended.rows
        ]


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
