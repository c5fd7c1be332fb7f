"""Applies staged pushes: adds contributions and steps optimizers, one bucket in order, several buckets in parallel.

The update rule (core/consistency.py) names a bucket's next operation: to add a contribution, or to step. A bucket is
`busy` while a thread works on it; that thread continues until the rule names no operation. The same holds for tables.

The update rule has no clock. So an update that is held back for a grace, although it has its quorum, is timed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ps_protocol.errors import PSError
from ps_runtime.background import note_error
from ps_server.core.consistency import Add, Step
from ps_server.failpoints import failpoint
from ps_server.shard.hosted_job import HostedJob, HostedUnit
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import Pulls
from ps_server.shard.threads import Task, Threads

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class Grace:
    """The time in which an open update, which has its quorum, still waits for more workers.

    job:     the job that the unit belongs to
    version: the version after which the update comes
    until:   the end of the grace, on the shard's clock
    """

    job: HostedJob
    version: int
    until: float


class Updates:
    """Applies updates on a shard's threads. All methods may be called from any thread."""

    def __init__(self, threads: Threads, pulls: Pulls, metrics: ShardMetrics, clock: Callable[[], float]) -> None:
        self._threads = threads
        self._pulls = pulls
        self._metrics = metrics
        self._clock = clock
        self._stopping = False
        self._graces: dict[HostedUnit[Any], Grace] = {}

    def stop(self) -> None:
        """Stops new work. Updates under way are completed by their threads."""
        self._stopping = True

    def schedule(self, job: HostedJob, units: Iterable[int]) -> None:
        """Queues the pending operations of units for the apply threads. Returns at once.

        units: the indices of buckets and tables
        """
        for index in units:
            task = self._due(job, index)
            if task is not None:
                self._threads.submit(task)

    def lend(self, job: HostedJob, units: Iterable[int]) -> None:
        """As `schedule`, but the calling thread does the operations itself, unless enough threads are at
        work already.
        """
        self._threads.lend([task for index in units if (task := self._due(job, index)) is not None])

    def _due(self, job: HostedJob, index: int) -> Task | None:
        """Returns the task for a unit; None if it has no operation to do, or a thread works on it already."""
        hosted = job.units[index]
        with job.lock:
            if hosted.busy or self._stopping:
                return None
            if hosted.rule.next() is None:
                self._note_grace(job, hosted)
                return None
            hosted.busy = True
        return partial(self._apply, job, hosted)

    def _note_grace(self, job: HostedJob, hosted: HostedUnit[Any]) -> None:
        """Begins the grace of a unit's open update, if it has all that it needs. The caller holds the job's lock."""
        rule = hosted.rule
        if hosted.grace_of < rule.version and (seconds := rule.grace()) is not None:
            hosted.grace_of = rule.version
            self._graces[hosted] = Grace(job, rule.version, self._clock() + seconds)
            self._threads.wake()

    @property
    def needs_ticks(self) -> bool:
        """Whether an update has a grace."""
        return bool(self._graces)

    def end_graces(self, now: float) -> None:
        """Schedules the updates whose grace is over at the time `now`."""
        for hosted, grace in list(self._graces.items()):
            if grace.until <= now:
                with grace.job.lock:
                    if self._graces.get(hosted) is grace:
                        del self._graces[hosted]
                    hosted.rule.end_grace(grace.version)
                self.schedule(grace.job, [hosted.index])

    def _apply(self, job: HostedJob, hosted: HostedUnit[Any]) -> None:
        """Does the operations of one unit, one after the other, until the update rule names none."""
        try:
            while True:
                with job.lock:
                    work = hosted.rule.next()
                    if work is None:
                        self._note_grace(job, hosted)
                        hosted.busy = False
                        return
                    is_last = isinstance(work, Add) and hosted.unit.completes(work)
                with hosted.tensors:
                    started = self._clock()
                    if isinstance(work, Add):
                        hosted.unit.weights.add(work.contribution, is_last)
                        failpoint("contribution-added")
                    else:
                        hosted.recall()
                        hosted.unit.weights.step()
                        failpoint("update-stepped")
                    self._metrics.applied(job.name, work, self._clock() - started)
                    with job.lock:
                        job.state.done(hosted.index, work)
                        releases = hosted.rule.releases(work)
                        if isinstance(work, Step) and job.times.follows_any(work.ranks):
                            job.times.applied(
                                zip(work.ranks, work.clocks, strict=True), hosted.index, self._pulls.now()
                            )
                    if isinstance(work, Step):
                        job.stepped(hosted, started)
                if releases:
                    self._pulls.release(job, hosted)
        except Exception:
            log.error("job %s: bucket %d cannot be applied", job.name, hosted.index)
            note_error("apply")
            job.failure = PSError(f"job {job.name!r} failed on this shard; its log says why")
            self._pulls.fail(job, job.failure)
