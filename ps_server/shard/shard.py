"""A shard: its jobs, and the calls to it.

jobs        created, restored and dropped; a job is refused if memory has no room for it
workers     added and removed by the coordinator; the segment of a worker on this host is mapped
pushes      checked, staged, applied as soon as the rule permits (pushes.py)
pulls       sent as soon as they are admitted; the others wait without a thread (pulls.py)
snapshots   copied between two updates, written beside training (snapshots.py)

RPC threads check and stage, and wait for no worker. Apply threads step and write to the outboxes of pulls; an outbox
sends in threads of its own. A ticker tells waiting pulls which workers they wait for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ps_protocol.errors import Fenced, NoCheckpoints, NotFound, PSError, TryLater, anew
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.data import PullCall, PushCall
from ps_protocol.messages.rows import RowsPull, RowsPush, TablePull, TablePush
from ps_protocol.segment_layout import SegmentOffer
from ps_runtime.memory import limit_bytes, resident_bytes
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_runtime.troubles import Troubles
from ps_server.core.budget import PrincipalBudget
from ps_server.core.commands import AddWorker, RemoveWorker, Staged
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import WorkerId
from ps_server.core.membership import Arrival, ShardProgress
from ps_server.core.server_figures import ShardFigures
from ps_server.core.snapshot import (
    CheckpointFile,
    RestoreProgress,
    RestoreRequest,
    ShardSnapshot,
    Snapshot,
    SnapshotRequest,
)
from ps_server.core.statistics import ShardStatistics
from ps_server.shard.feed_bytes import FeedBytes
from ps_server.shard.feed_context import FeedContext
from ps_server.shard.hosted import HostedJobs, TableBudgets
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Outbox
from ps_server.shard.pulls import NOTICE_AFTER_SECONDS, STAGED_AFTER_SECONDS, Pulls
from ps_server.shard.pushes import Checked, Pushes, Updates
from ps_server.shard.row_feeds import RowFeeds
from ps_server.shard.snapshots import Refusal, Saved, SnapshotTask, TableCopying
from ps_server.shard.threads import OwnThreads, Threads
from ps_server.shard.waiting import READER, SharedBudget
from ps_server.shard.weight_feeds import WeightFeeds
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.row_files import RowFiles
from ps_tables.choosing import library_in_use

log = logging.getLogger("ps_server")


class Shard:
    """One shard: its jobs, and the calls to it. Methods may be called from any thread; none waits for a worker.

    threads:     run updates, writes of snapshots, and the ticker; NoThreads: the calling thread runs them, see `tick`
    clock:       returns the time in seconds, from an arbitrary zero
    shared_directory: where workers on this host hand over their segments, and readers take over editions
    staged_limit: bytes of a job that may be staged; None: derived from its size
    checkpoints: the store of checkpoints; None: the servers make none
    index:       the index of the shard, after which its part of a checkpoint is named
    norm_limit:  the largest L2 norm of the gradient in one push
    principal_limit: bytes that one principal may have staged, over all its workers
    pulled_limit: buckets that one principal may have asked for and not received, over all its workers
    feed_limit:  the largest number of feeds, of rows and of weights, of one job
    feed_bytes:  bytes that messages of the feeds of one principal may take, over all jobs
    table_limit: bytes of memory for the tables of one job; None: half of the free memory
    row_files:   makes files for rows that do not fit into memory; None if there are none
    """

    def __init__(
        self,
        metrics: ShardMetrics,
        threads: Threads | None = None,
        clock: Callable[[], float] = time.monotonic,
        shared_directory: Path = DEFAULT_SHARED_DIRECTORY,
        staged_limit: int | None = None,
        checkpoints: CheckpointStore | None = None,
        index: int = 0,
        norm_limit: float = math.inf,
        principal_limit: float = math.inf,
        pulled_limit: float = math.inf,
        feed_limit: float = math.inf,
        feed_bytes: float = math.inf,
        table_limit: int | None = None,
        row_files: RowFiles | None = None,
    ) -> None:
        self.principals: PrincipalBudget = SharedBudget(principal_limit)
        self._checkpoints = checkpoints
        self._index = index
        self._metrics = metrics
        self._clock, self._began = clock, clock()
        self._threads = threads or OwnThreads()
        wake = self._threads.wake
        self._pulls = Pulls(metrics, clock, wake, pulled_limit)
        self._updates = Updates(self._threads, self._pulls, metrics, clock)
        self._pushes = Pushes(metrics, self._pulls, self._updates, shared_directory)
        limits = staged_limit, norm_limit
        tables = TableBudgets(index, table_limit, row_files)
        self._hosted = HostedJobs(index, limits, self.principals, self._threads, self._pulls, metrics, tables)
        feeds = FeedContext(self._hosted, clock, wake, feed_limit, FeedBytes(feed_bytes))
        self.feeds, self.weight_feeds = RowFeeds(feeds), WeightFeeds(feeds, shared_directory)
        self._notify_at = clock() + NOTICE_AFTER_SECONDS
        self._troubles = Troubles(log, "snapshot")
        self._threads.repeat(STAGED_AFTER_SECONDS, self.tick)

    def tick(self) -> bool:
        """Does the periodic work: tells waiting pulls that their pushes are staged and which workers they wait for,
        ends graces, begins rounds of feeds, and drops editions that nobody reads.

        Returns whether anything waits for the next tick; otherwise the next tick may come later.
        """
        now = self._clock()
        self._pulls.tell_staged(now)
        self._updates.end_graces(now)
        self.feeds.tick(now)
        self.weight_feeds.tick(now)
        self._hosted.tick(now)
        if now >= self._notify_at:
            self._notify_at = now + NOTICE_AFTER_SECONDS
            for job in self.jobs().values():
                self._pulls.notify(job, now)
        return any(each.needs_ticks for each in (self._pulls, self._updates, self.feeds, self.weight_feeds))

    def stop(self) -> None:
        """Completes the updates that can be made, and ends the threads. Waiting calls get TryLater."""
        self._hosted.stop()
        for job in self.jobs().values():
            task = job.snapshot_task  # read once: a job that is dropped meanwhile loses its task
            if task is not None:
                task.stop()
        self._updates.stop()
        self._threads.stop()
        for job in self.jobs().values():
            self._pulls.fail(job, TryLater("the shard is stopping"))
        self.feeds.stop()
        self.weight_feeds.stop()

    def statistics(self) -> ShardStatistics:
        """Returns the shard's statistics."""
        now = self._clock()
        return ShardStatistics({name: job.statistics(now) for name, job in sorted(self.jobs().items())})

    def statistics_with_figures(self) -> ShardStatistics:
        """Returns the statistics with the measurements of the shard's process. Reads its memory from the system."""
        statistics, figures = self.statistics(), self._metrics.figures()
        jobs = {name: replace(job, figures=figures.get(name)) for name, job in statistics.jobs.items()}
        memory = resident_bytes() or 0, limit_bytes() or 0
        return ShardStatistics(jobs, ShardFigures(self._clock() - self._began, *memory, library_in_use()))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def create_job(self, spec: JobSpec, buckets: Sequence[int], run: str = "", shards: int = 1) -> None:
        """Creates the buckets of a run of a job; see HostedJobs.create."""
        self._hosted.create(spec, buckets, run, shards)

    def restore_job(self, request: RestoreRequest, seconds: float = 0.0) -> RestoreProgress:
        """Restores a job from a checkpoint, and drops its present part; see HostedJobs.restore."""
        return self._hosted.restore(self._store(), request, seconds)

    def drop_job(self, name: str, run: str = "") -> None:
        """Drops a run of a job and frees its memory; another run of that name stays."""
        self._hosted.drop(name, run, self._clock())

    def jobs(self) -> dict[str, HostedJob]:
        """Returns the jobs of this shard, by name."""
        return self._hosted.all()

    def run_of(self, name: str) -> str:
        """Returns the run of a job on this shard; empty if there is none."""
        return self._hosted.run_of(name)

    # -- workers -----------------------------------------------------------------------------------------------------

    def add_worker(
        self, name: str, rank: int, incarnation: int, clock: int | None, key: bytes = b"", run: str = ""
    ) -> ShardProgress:
        """Counts a worker as live; see AddWorker."""
        job = self._hosted.get(name, run)
        with job.lock:
            counted = job.partition.execute(AddWorker(rank, incarnation, clock, key))
            job.refusals.worker_added(incarnation)
        job.detach(rank, incarnation)
        self._roster_changed(job)
        return counted

    def add_workers(self, name: str, workers: Sequence[Arrival], run: str = "") -> list[ShardProgress | Fenced]:
        """Counts workers as live. Returns for each the shard's state, or a Fenced with the reason."""
        added: list[ShardProgress | Fenced] = []
        for each in workers:
            try:
                added.append(self.add_worker(name, each.rank, each.incarnation, each.clock, each.key, run))
            except Fenced as error:
                added.append(anew(error))
        return added

    def remove_workers(self, name: str, workers: Sequence[WorkerId], run: str = "") -> None:
        """Stops counting workers as live."""
        for rank, incarnation in workers:
            self.remove_worker(name, rank, incarnation, run)

    def remove_worker(self, name: str, rank: int, incarnation: int, run: str = "") -> None:
        """Stops counting a worker as live; pulls that waited for it alone are sent."""
        job = self._hosted.get(name, run)
        with job.lock:
            job.partition.execute(RemoveWorker(rank, incarnation))
            job.times.follow(rank, False)
        job.detach(rank, incarnation + 1)
        self._roster_changed(job)

    def attach(self, worker: Identity, offer: SegmentOffer) -> None:
        """Maps the segment that a live worker offers. Raises NotShared if the shard cannot map it."""
        self._pushes.attach(self._of(worker), worker, offer)

    def check_worker(self, worker: Identity) -> None:
        """Raises UnknownWorker, Fenced or Forbidden unless this is a live worker with its key."""
        self._of(worker).check_worker(worker)

    def connect(self, worker: Identity, end: Callable[[], None]) -> Callable[[], None]:
        """Registers a live worker's data connection. Returns a function to call when it has closed.

        end: closes the connection; called when the worker is removed, or opens another connection
        Raises as check_worker.
        """
        return self._of(worker).connect(worker, end)

    def _of(self, worker: Identity) -> HostedJob:
        """Returns the job of a worker. Raises the errors of HostedJobs.get."""
        job = self._hosted.jobs.get(worker.job)
        if job is not None and job.run == worker.run and job.failure is None:
            return job
        return self._hosted.get(worker.job, worker.run, of_worker=True)

    def committed(self, name: str, run: str = "") -> tuple[Committed, bool]:
        """Returns the leased data that all trained buckets of this shard have had, and whether it has a trained
        bucket.
        """
        job = self._hosted.get(name, run)
        with job.lock:
            return job.partition.data.whole(), job.partition.data.has_say

    def _roster_changed(self, job: HostedJob) -> None:
        job.look_at_tables()  # one may have all rows of a clock now
        for unit in job.units.values():
            self._pulls.release(job, unit)
        self._updates.schedule(job, job.units)

    # -- pushes and pulls --------------------------------------------------------------------------------------------

    def push(self, call: PushCall, principal: str = "") -> list[Staged]:
        """Checks all buckets of a call, then stages each and schedules its update. Returns a Staged for each bucket.

        principal: the caller, to whom the staged bytes are accounted
        """
        return self._pushes.push(self._of(call.worker), call, principal)

    def exchange(
        self,
        push: PushCall | RowsPush,
        pull: PullCall | RowsPull,
        outbox: Outbox,
        principal: str = "",
        checked: Checked | None = None,
    ) -> None:
        """Does as `push` or `push_rows`, then as `pull`, for one worker at one clock; rows must be of one table.

        checked: notes what depends on neither the clock nor the hyper-parameters, for an exchange that differs in
                 nothing else; None: of this one alone
        """
        job = self._of(push.worker)
        if isinstance(push, RowsPush):
            assert isinstance(pull, RowsPull)
            self._pushes.exchange_rows(job, push, principal, pull, outbox)
        else:
            assert isinstance(pull, PullCall)
            self._pushes.exchange(job, push, principal, pull, outbox, checked or Checked())

    def pull(self, call: PullCall | RowsPull | TablePull, outbox: Outbox, principal: str = "") -> None:
        """Sends buckets, or rows, on the outbox as they are admitted; see Pulls."""
        is_reader = call.worker.incarnation == READER
        job = self._hosted.get(call.worker.job, call.worker.run) if is_reader else self._of(call.worker)
        if isinstance(call, RowsPull | TablePull):
            pull, table = self._pulls.check_rows(job, call, outbox, principal)
            indices: tuple[int, ...] = (table,)
        else:
            pull, indices = self._pulls.check(job, call, outbox, principal), call.buckets
        self._pulls.ask(job, pull, indices)
        if pull.all_staged:  # an open update may wait for no more now: see UpdateRule.owed
            self._updates.schedule(job, [index for index in indices if index in job.partition.rules])

    def push_rows(self, push: RowsPush | TablePush, principal: str = "") -> Staged:
        """Checks and stages rows: the rows of a step count once all its messages have come, a table's initial rows at
        once.

        principal: the caller, to whom the staged bytes are accounted
        """
        return self._pushes.push_rows(self._of(push.worker), push, principal)

    def pull_state(self, call: PullCall, outbox: Outbox, principal: str = "") -> None:
        """Sends the optimizer state of buckets as it is now on the outbox, and ends it. Returns at once."""
        self._pulls.send_state(self._of(call.worker), call, outbox, principal)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def begin_snapshot(self, request: SnapshotRequest) -> None:
        """Begins a snapshot: each bucket is copied when it has applied the request's clock; now if it names none.
        Returns at once.
        """
        hosted, store, job = self._hosted.get(request.job, request.run), self._store(), request.job
        store.path(job, request.checkpoint)

        saved: dict[int, Saved] = {}  # by table, its version in the file

        def write(checkpoint: str, snapshots: list[Snapshot]) -> CheckpointFile:
            try:
                part = store.write_shard(job, checkpoint, self._index, snapshots, request.kept)
            except PSError as error:
                # A job's end abandons the checkpoint, which is no error. Of any other error the coordinator logs a
                # message too.
                level = logging.DEBUG if store.is_given_up(job, checkpoint) else logging.WARNING
                self._troubles.met(job, "job %s: checkpoint %s: %s", job, checkpoint, error, level=level)
                raise
            self._troubles.over(job)
            for index, table in hosted.tables.items():
                table.saved.written(part.sha256, saved[index])
            return part

        def copy(index: int) -> Snapshot | TableCopying:
            snapshot = hosted.units[index].begin_copy(hosted.lock, self._clock)
            if isinstance(snapshot, TableCopying):
                saved[index] = snapshot.saved
            return snapshot

        clock = request.clock
        trained = {index: unit.unit.is_trained for index, unit in hosted.units.items()}
        task = SnapshotTask(request.checkpoint, clock, trained, copy, write, self._threads, self._clock)
        seconds = max(request.refusal, hosted.refusals.seconds)
        newest = None if hosted.refusals.seconds else request.last_incarnation
        until = self._clock() + seconds
        refusal = Refusal(clock, until, self._clock, newest) if seconds else None
        hosted.begin_snapshot(task, refusal, request.built_on)
        # Updates that waited for further pushes may be made without them: see UpdateRule.close.
        self._updates.schedule(hosted, hosted.units)

    def await_snapshot(self, job: str, checkpoint: str, seconds: float, run: str = "") -> ShardSnapshot:
        """Returns this shard's part of a checkpoint, once it is on disk; see SnapshotTask.wait."""
        task = self._hosted.get(job, run).snapshot_task
        if task is None or task.name != checkpoint:
            raise NotFound(f"no checkpoint {checkpoint} of job {job!r} was begun here, or another took its place")
        return task.wait(seconds)

    def _store(self) -> CheckpointStore:
        if self._checkpoints is None:
            raise NoCheckpoints("this shard was started without --checkpoint-dir")
        return self._checkpoints
