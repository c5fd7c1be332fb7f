"""The jobs of a shard: creates, restores and drops them.

**A restore** runs in a thread of its own, however long the files are. The shard frees its part of the job before it
reads, so a restore needs no more memory than the job. That loses nothing: the coordinator requests a restore only when
the whole job goes back to a checkpoint, or when this shard has lost its part. A restore that fails leaves the shard
without the job, and the coordinator asks again.

A call is answered after a few seconds, with the number of bytes read so far, and is repeated until the restore is
complete. Calls may be late or come twice. Each new restore of a job has a higher `last_incarnation`. By it the shard
tells a late call, which changes nothing, from a new one, which replaces the restore under way.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence

from ps_protocol.errors import (
    CheckpointDamaged,
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NotFound,
    OutOfOrder,
    PSError,
    RunEnded,
    TryLater,
    UnknownWorker,
    anew,
)
from ps_protocol.job import JobSpec, difference
from ps_protocol.layout import bucket_layout
from ps_runtime.background import note_error
from ps_runtime.memory import free_bytes
from ps_runtime.quantities import counted
from ps_runtime.troubles import Troubles
from ps_server.core.budget import JobRoom, PrincipalBudget, room_for
from ps_server.core.commands import RestoreSnapshot
from ps_server.core.partition import JobPartition, check_buckets
from ps_server.core.placement import TableShare
from ps_server.core.snapshot import RestoreProgress, RestoreRequest, VersionRange
from ps_server.failpoints import failpoint
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.last_weights import LastWeights, last_weights
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import Pulls
from ps_server.shard.restored_files import RestoredFiles
from ps_server.shard.threads import Threads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.row_files import RowFiles


class Restoring:
    """One restore of a job on this shard, with its progress and its result. Methods may be called from any thread."""

    def __init__(self, request: RestoreRequest) -> None:
        self.request = request
        self._changed = threading.Condition()
        self._done, self._total = 0, 0
        self._extent: VersionRange | None = None
        self._error: PSError | None = None

    def begin(self, total: int) -> None:
        """Sets the number of bytes that the restore will read."""
        self._total = total

    def read(self, count: int) -> None:
        """Counts `count` more bytes as read. Raises TryLater if the restore was abandoned: the reader must stop."""
        if self._error is not None:
            raise TryLater(str(self._error))
        self._done += count

    def complete(self, extent: VersionRange) -> None:
        """Completes the restore. extent: the versions and clocks of the job's buckets"""
        with self._changed:
            self._extent = extent
            self._changed.notify_all()

    def fail(self, error: PSError) -> None:
        """Ends the restore with an error, unless it has ended. The thread that reads stops soon; calls that wait get
        the error.
        """
        with self._changed:
            if self._extent is None and self._error is None:
                self._error = anew(error)  # a new error: the frames of this one refer to the tensors that were read
                self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether the restore has ended with an error."""
        return self._error is not None

    @property
    def complete_or_failed(self) -> bool:
        """Whether the restore has ended."""
        return self._extent is not None or self._error is not None

    def wait(self, seconds: float) -> RestoreProgress:
        """Waits up to `seconds` for the end of the restore; returns its progress. Raises its error if it failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.complete_or_failed, seconds)
            if self._error is not None:
                raise anew(self._error)
            return RestoreProgress(self._done, self._total, self._extent)

    def __str__(self) -> str:
        job, read = self.request.spec.name, f"{self._done} of {self._total} bytes"
        return f"job {job!r} is being rolled back to checkpoint {self.request.checkpoint}: {read} are read"


class Restores:
    """The last restore of each job on this shard. Not thread-safe: the shard's lock guards it."""

    def __init__(self) -> None:
        self._last: dict[str, Restoring] = {}

    def get(self, job: str) -> Restoring | None:
        """Returns a job's last restore that has not failed, unless the job was dropped since."""
        last = self._last.get(job)
        return None if last is None or last.failed else last

    def ask(self, request: RestoreRequest, highest_incarnation: int) -> tuple[Restoring, bool]:
        """Returns the restore that a request asks for, and whether the caller must begin it.

        highest_incarnation: the highest incarnation of a worker of this run that the shard has heard of
        Raises OutOfOrder for a request from before the last restore, RunEnded for a request of an earlier run.
        """
        last = self.get(request.spec.name)
        if last is not None and last.request == request:
            return last, False
        if last is not None and request.run < last.request.run:
            raise RunEnded(f"run {request.run} of job {request.spec.name!r} has ended")
        is_same_run = last is not None and request.run == last.request.run
        if last is not None and is_same_run and request.last_incarnation <= last.request.last_incarnation:
            raise OutOfOrder(
                f"job {request.spec.name!r} was restored from checkpoint {last.request.checkpoint} with incarnation "
                f"{last.request.last_incarnation} after this call was made with {request.last_incarnation}"
            )
        if request.last_incarnation < highest_incarnation:
            raise OutOfOrder(
                f"job {request.spec.name!r} has had a worker of incarnation {highest_incarnation} since this call was "
                f"made with {request.last_incarnation}"
            )
        if last is not None:
            last.fail(TryLater(f"checkpoint {request.checkpoint} is restored in its place"))
        begun = self._last[request.spec.name] = Restoring(request)
        return begun, True

    def forget(self, job: str, run: str = "") -> None:
        """Ends the restore of a job that is dropped or made anew, and forgets it. run: only a restore of this run;
        empty: any
        """
        last = self._last.get(job)
        if last is not None and run in ("", last.request.run):
            del self._last[job]
            last.fail(TryLater(f"job {job!r} was dropped"))

    def stop(self) -> None:
        """Ends all restores under way: the shard stops."""
        for restoring in self._last.values():
            restoring.fail(TryLater("the shard is stopping"))


_SALT = secrets.randbits(62)  # salt of the tables' hash indices: nobody can choose ids that share slots


class TableBudgets:
    """Divides a shard's memory and files among the tables of a job.

    index: the index of the shard
    limit: bytes of memory for all tables of a job; None: half of the free memory
    files: makes files for rows that do not fit into memory; None if there are none
    """

    def __init__(self, index: int, limit: int | None = None, files: RowFiles | None = None) -> None:
        self._index, self._limit, self._files = index, limit, files

    def share(self, tables: int, shards: int, free: int) -> TableShare:
        """Returns the memory and disk that each of a job's tables may use on this shard.

        tables: the number of the job's tables
        shards: the number of shards that share each table
        free:   bytes of memory that are free
        """
        memory = max(0, free // 2 if self._limit is None else min(free, self._limit)) // max(1, tables)
        if self._files is None or not tables:
            return TableShare(self._index, shards, memory, _SALT)
        return TableShare(self._index, shards, memory, _SALT, self._files.free_bytes() // tables, self._files.open)


log = logging.getLogger("ps_server")

COLLECTED_BYTES = 16 * 2**20  # memory of dropped jobs that triggers a collection: see `_Leftovers`
_UNKNOWN_BYTES = 2**34  # assumed free memory, if the system does not report it


class HostedJobs:
    """The jobs of one shard, by name. Methods may be called from any thread.

    index:      the index of the shard
    limits:     of each job: the bytes that may be staged (None: derived from its size), and the L2 norm of a gradient
    principals: counts the bytes that each principal has staged in all jobs
    tables:     divides memory and files among a job's tables
    """

    def __init__(
        self,
        index: int,
        limits: tuple[int | None, float],
        principals: PrincipalBudget,
        threads: Threads,
        pulls: Pulls,
        metrics: ShardMetrics,
        tables: TableBudgets | None = None,
    ) -> None:
        self._tables = tables or TableBudgets(index)
        self._index, self._limits, self._principals = index, limits, principals
        self._threads, self._pulls, self._metrics = threads, pulls, metrics
        self.jobs: dict[str, HostedJob] = {}  # by name; changed under the lock, and read without it
        self._last: dict[str, LastWeights] = {}  # by name, the last weights of jobs that have ended
        self._leftovers = _Leftovers()
        self._ending: set[tuple[str, str]] = set()  # runs of jobs whose last weights are being copied
        self._restores = Restores()
        self._troubles = Troubles(log, "restore")
        self._lock = threading.Lock()
        self._made: set[HostedJob] = set()  # jobs that have memory, and are not in `jobs` yet: they are being restored
        self._making = threading.Lock()  # held while memory is checked and allocated; taken after `_lock`

    def stop(self) -> None:
        """Abandons the restores under way."""
        with self._lock:
            self._restores.stop()

    def create(self, spec: JobSpec, buckets: Sequence[int], run: str = "", shards: int = 1) -> None:
        """Allocates the buckets of a run of a job, in place of an earlier run. A job of this run stays as it is.

        shards: the number of shards that share the job's tables

        Raises RunEnded if the shard has a later run of the job, JobMismatch if it has this run with another spec,
        InvalidRequest for buckets that do not exist.
        """
        check_buckets(bucket_layout(spec.parameters, spec.bucket_bytes), buckets)
        with self._lock:
            known = self.jobs.get(spec.name)
            if known is not None and known.run < run:  # an earlier run, which its coordinator could not drop
                self._end(self.jobs.pop(spec.name), RunEnded(f"run {known.run} of job {spec.name!r} has ended"))
                gone, known = known.nbytes(), None
                self._leftovers.add(gone)
            if known is None:
                self._restores.forget(spec.name)
                job = self.jobs[spec.name] = self._make(spec, buckets, run, shards)
                self._made.discard(job)
                log.info("job %s: shard %d holds %s", spec.name, self._index, counted(len(buckets), "bucket"))
                return
        known.check_run(run)
        differs = difference(known.partition.spec, spec)
        if differs is not None:
            raise JobMismatch(f"job {spec.name!r} exists and differs: {differs}")

    def restore(self, store: CheckpointStore, request: RestoreRequest, seconds: float) -> RestoreProgress:
        """Restores a job from a checkpoint. The shard's present part of it is dropped.

        Waits up to `seconds`, and returns the progress. The caller repeats the same call until the restore is complete.
        Raises RunEnded or OutOfOrder for a call that a later one has overtaken, InvalidRequest for buckets that do not
        exist: these change nothing. Otherwise raises the error with which the restore failed.
        """
        name, run = request.spec.name, request.run
        store.path(name, request.checkpoint)
        check_buckets(bucket_layout(request.spec.parameters, request.spec.bucket_bytes), request.buckets)
        with self._lock:
            restoring, is_new = self._restores.ask(request, self._highest_incarnation(name, run))
        if is_new:
            self._threads.read(lambda: self._restore(store, restoring))
        return restoring.wait(seconds)

    def _highest_incarnation(self, name: str, run: str) -> int:
        """Returns the highest incarnation of a run on this shard; 0 if the shard does not have it. Raises RunEnded for
        an earlier run.

        A method of its own, so that a call that waits for its restore has no reference to the old job, which would keep
        the job's memory.
        """
        known = self.jobs.get(name)
        if known is not None and run < known.run:
            known.check_run(run)
        return known.highest_incarnation() if known is not None and known.run == run else 0

    def _restore(self, store: CheckpointStore, restoring: Restoring) -> None:
        name = restoring.request.spec.name
        try:
            self._read(store, restoring)
        except PSError as error:
            self._troubles.met(name, "job %s: cannot be restored: %s", name, error)
            restoring.fail(error)
        except Exception:
            self._troubles.met(name, "job %s: cannot be restored", name, level=logging.ERROR)
            note_error("restore")
            restoring.fail(PSError(f"job {name!r} cannot be restored on this shard; its log says why"))

    def _read(self, store: CheckpointStore, restoring: Restoring) -> None:
        request = restoring.request
        spec, checkpoint = request.spec, request.checkpoint
        files = RestoredFiles(store, request, self._index)
        restoring.begin(files.bytes)
        self._let_go(spec.name, restoring)
        job = self._make(spec, request.buckets, request.run, request.shards)
        job.timeline = request.last_incarnation

        def read(count: int) -> None:
            restoring.read(count)
            failpoint("restore-half-read")

        try:
            snapshots, tables = files.read(job, read)
            try:
                job.partition.execute(RestoreSnapshot(snapshots, request.last_incarnation, owned=True, tables=tables))
            except InvalidRequest as error:
                raise CheckpointDamaged(f"checkpoint {checkpoint}: {error}") from None
            _warn_of_evicted(job)
            failpoint("restore-read")
            with self._lock:
                restoring.read(0)  # raises if another restore has replaced this one
                self.jobs[spec.name] = job
                restoring.complete(job.partition.reached.extent())
        finally:
            self._made.discard(job)
        self._troubles.over(spec.name)
        log.info("job %s: %d buckets as of checkpoint %s", spec.name, len(job.buckets), request.checkpoint)

    def _let_go(self, name: str, restoring: Restoring) -> None:
        """Frees the memory of a job before its restore: there may be no room for two copies."""
        with self._lock:
            restoring.read(0)
            before = self.jobs.pop(name, None)
        if before is not None:
            gone = before.nbytes()
            self._end(before, UnknownWorker(f"job {name!r} was rolled back to a checkpoint: join again"))
            del before
            self._leftovers.add(gone)

    def drop(self, name: str, run: str = "", now: float = 0.0) -> None:
        """Drops a run of a job and frees its memory. run: empty: any; another run of the name stays

        If readers follow the job's weights, its last weights are kept for them for a while.
        """
        with self._lock:
            self._restores.forget(name, run)
            job = self.jobs.get(name)
            if job is None or run not in ("", job.run):
                return
            del self.jobs[name]
            ending = name, job.run
            self._ending.add(ending)
        reason = NotFound(f"job {name!r} ended")
        last, gone = None, job.nbytes()
        try:
            job.close(reason)
            last = last_weights(job, now)
        finally:
            with self._lock:
                if last is not None:  # before readers learn of the job's end, and ask for its last weights
                    self._last[name] = last
                self._ending.discard(ending)
        self._pulls.fail(job, reason)
        self._metrics.forget(name)
        del job
        self._leftovers.add(gone)
        log.info("job %s: shard %d has given its memory back", name, self._index)

    def freed(self, nbytes: int) -> None:
        """Counts memory of a dropped job that a feed of its last rows has held until now."""
        self._leftovers.add(nbytes)

    def last(self, name: str, run: str) -> LastWeights | None:
        """Returns the last weights of a run that has ended; None: the shard does not have them.

        Raises TryLater while they are being copied.
        """
        if (name, run) in self._ending:
            raise TryLater(f"job {name!r} has ended; its last weights are being copied")
        last = self._last.get(name)
        return last if last is not None and last.run == run else None

    def tick(self, now: float) -> None:
        """Drops the last weights of ended jobs that have no reader."""
        if self._last:
            with self._lock:
                self._last = {name: last for name, last in self._last.items() if last.is_wanted(now)}

    def _end(self, job: HostedJob, reason: PSError) -> None:
        """Ends the calls, feeds and snapshots of a job that was removed."""
        job.close(reason)
        self._pulls.fail(job, reason)

    def all(self) -> dict[str, HostedJob]:
        """Returns the jobs of this shard, by name."""
        with self._lock:
            return dict(self.jobs)

    def run_of(self, name: str) -> str:
        """Returns the run of a job on this shard; empty if there is none."""
        job = self.jobs.get(name)
        return job.run if job is not None else ""

    def get(self, name: str, run: str, of_worker: bool = False) -> HostedJob:
        """Returns a job. run: the caller's run; empty: any

        Raises NotFound if the shard does not have it, RunEnded for an earlier run, TryLater during its restore.

        of_worker: the caller is a worker. During a restore it gets UnknownWorker instead of TryLater: it must join
                   again
        """
        job = self.jobs.get(name)
        if job is None:
            restoring = self._restores.get(name)
            if restoring is not None:
                raise UnknownWorker(f"{restoring}: join again") if of_worker else TryLater(str(restoring))
            raise NotFound(f"this shard knows no job {name!r}")
        job.check_run(run)
        if job.failure is not None:
            raise anew(job.failure)
        return job

    def _make(self, spec: JobSpec, buckets: Sequence[int], run: str, shards: int) -> HostedJob:
        """Returns a job with the memory for its weights. It is in `_made` until the caller has stored it."""
        room = room_for(spec, buckets, self._limits[0])
        if self._last and room.total + self._promised() > (free_bytes() or _UNKNOWN_BYTES):
            self._last = {}  # a job's memory is worth more
        with self._making:
            promised = self._promised()
            with _making_room(spec.name, room, promised):
                free = (free_bytes() or _UNKNOWN_BYTES) - room.total - promised
                share = self._tables.share(len(spec.tables), shards, free)
                partition = JobPartition(spec, buckets, *self._limits, self._principals, share)
                job = HostedJob(spec, partition, run, room)
            self._made.add(job)
        return job

    def _promised(self) -> int:
        """Returns the bytes that the jobs of this shard were promised and have not allocated yet."""
        return sum(job.promised() for job in {*list(self.jobs.values()), *list(self._made)})


def _warn_of_evicted(job: HostedJob) -> None:
    """Logs which tables of a restored job have room for fewer rows than were saved."""
    for table in job.partition.tables.values():
        rows = table.weights
        if rows.counts.evicted:
            log.warning(
                "job %s: table %s has room for %d rows here, and %d were saved: those trained longest ago are "
                "forgotten",
                *(job.name, table.spec.rows.name, rows.capacity, len(rows) + rows.counts.evicted),
            )


@contextlib.contextmanager
def _making_room(name: str, room: JobRoom, promised: int) -> Iterator[None]:
    """Raises LimitExceeded if a new job needs more memory than is free, or if the `with` block runs out of memory.

    room:     the bytes that the new job will take
    promised: free bytes that the jobs of this shard were promised and have not allocated yet
    """
    free = free_bytes()
    if free is not None and room.total + promised > free:
        raise LimitExceeded(
            f"job {name!r} does not fit into this shard's memory: its weights here are {room.weights} bytes, its "
            f"optimizer's state comes to {room.optimizer}, what workers push ahead to {room.staged}, its buckets and "
            f"groups cost {room.objects}; {free} are free, of which other jobs here still take {promised}"
        )
    try:
        yield
    except (RuntimeError, MemoryError):  # torch raises these if it cannot allocate memory
        raise LimitExceeded(f"job {name!r} does not fit into this shard's memory") from None


class _Leftovers:
    """Jobs that are no longer on this shard, and whose memory only Python's collector of cycles frees.

    A job and its parts refer to each other, and so do errors and their frames. Weights are few objects, however large,
    so the collector by itself would look for them after many jobs only. It is called as soon as the jobs that have gone
    since its last turn took COLLECTED_BYTES. A turn walks through every object of the process while all other threads
    wait, some 10 to 40 ms: whoever makes and ends small jobs one after the other does not cause one each time.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Counts a job of `nbytes` bytes that was removed, and runs the collector if it is time."""
        self._bytes += nbytes
        if self._bytes >= COLLECTED_BYTES:
            self._bytes = 0
            gc.collect()
