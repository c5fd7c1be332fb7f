"""Applies what is staged: adds contributions and steps optimizers, one bucket in order, several buckets in parallel.

The update rule (core/consistency.py) names a bucket's next operation: to add a contribution, or to step. A bucket is
`busy` while a thread works on it; that thread continues until the rule names no operation. A table is one more bucket.

Where an update has its quorum and is held back for others, the time is kept here: the rule knows none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ps_protocol.errors import PSError
from ps_runtime.background import note_error
from ps_server.core.consistency import Add, Step
from ps_server.failpoints import failpoint
from ps_server.shard.job import Hosted, HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import Pulls
from ps_server.shard.threads import Task, Threads

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class Grace:
    """An open update that waits for more than its quorum: that after `version`, until a time."""

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
        self._graces: dict[Hosted, Grace] = {}

    def stop(self) -> None:
        """Begins nothing more. What is begun is ended by the threads."""
        self._stopping = True

    def schedule(self, job: HostedJob, buckets: Iterable[int]) -> None:
        """Has the pending operations of these buckets done by apply threads."""
        for index in buckets:
            task = self._due(job, index)
            if task is not None:
                self._threads.submit(task)

    def lend(self, job: HostedJob, buckets: Iterable[int]) -> None:
        """As `schedule`, but the calling thread applies what there is, unless enough threads are at it already."""
        self._threads.lend([task for index in buckets if (task := self._due(job, index)) is not None])

    def _due(self, job: HostedJob, index: int) -> Task | None:
        """Returns the task for a bucket; None if it has no operation to do, or a thread works on it already."""
        bucket = job.parts[index]
        with job.lock:
            if bucket.busy or self._stopping:
                return None
            if bucket.rule.next() is None:
                self._note_grace(job, bucket)
                return None
            bucket.busy = True
        return partial(self._apply, job, bucket)

    def _note_grace(self, job: HostedJob, bucket: Hosted) -> None:
        """Begins the grace of a bucket's open update, if it has its quorum now. The caller holds the job's lock."""
        rule = bucket.rule
        if bucket.grace_of < rule.version and rule.waits_for_grace():
            bucket.grace_of = rule.version
            until = self._clock() + rule.consistency.quorum_grace
            self._graces[bucket] = Grace(job, rule.version, until)

    def end_graces(self, now: float) -> None:
        """Has the updates made whose grace is over."""
        for bucket, grace in list(self._graces.items()):
            if grace.until <= now:
                with grace.job.lock:
                    if self._graces.get(bucket) is grace:
                        del self._graces[bucket]
                    bucket.rule.end_grace(grace.version)
                self.schedule(grace.job, [bucket.index])

    def _apply(self, job: HostedJob, bucket: Hosted) -> None:
        """Does the operations of one bucket, one after the other, until the update rule names none."""
        try:
            while True:
                with job.lock:
                    work = bucket.rule.next()
                    if work is None:
                        self._note_grace(job, bucket)
                        bucket.busy = False
                        return
                    is_last = isinstance(work, Add) and bucket.completes(work)
                with bucket.tensors:
                    started = self._clock()
                    if isinstance(work, Add):
                        bucket.add(work.contribution, is_last)
                        failpoint("contribution-added")
                    else:
                        bucket.loans.recall()
                        bucket.weights.step()
                        failpoint("update-stepped")
                    self._metrics.applied(job.name, work, self._clock() - started)
                    with job.lock:
                        job.state.done(bucket.index, work)
                        releases = bucket.rule.releases(work)
                        if isinstance(work, Step) and job.times.follows_any(work.ranks):
                            job.times.applied(
                                zip(work.ranks, work.clocks, strict=True), bucket.index, self._pulls.now()
                            )
                    if job.snapshot_task is not None and isinstance(work, Step):
                        job.look(bucket)
                if releases:
                    self._pulls.release(job, bucket)
        except Exception:
            log.error("job %s: bucket %d cannot be applied", job.name, bucket.index)
            note_error("apply")
            job.failure = PSError(f"job {job.name!r} failed on this shard; its log says why")
            self._pulls.fail(job, job.failure)
