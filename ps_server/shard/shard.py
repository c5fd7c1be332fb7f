"""The shard at work: locks, threads and waiting pulls around the pure rules of `core`.

RPC threads      check a push, stage it, and return: they never wait for another worker
apply threads    do what the protocol says comes next: add contributions, step optimizers, admit waiting pulls
sender threads   write buckets to the streams of admitted pulls
one ticker       tells pulls that wait that their pushes are staged, and whom they wait for
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ps_protocol.errors import (
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NoCheckpoints,
    NotFound,
    PSError,
    TryLater,
    UnknownWorker,
)
from ps_protocol.job import JobSpec, difference
from ps_protocol.layout import bucket_layout
from ps_protocol.tensors import bytes_of
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_server.core.commands import Commit, PullCall, Push, PushKind, SharedPush, Staged
from ps_server.core.consistency import Add, Step
from ps_server.core.data_commits import Committed
from ps_server.core.dense import Gradient
from ps_server.core.snapshot import BucketSnapshot, Part, ShardSnapshot, VersionRange
from ps_server.failpoints import failpoint
from ps_server.rpc.streams import Outbox
from ps_server.shard.apply import ApplyThreads
from ps_server.shard.job import Attached, HostedBucket, HostedJob
from ps_server.shard.ledger import Ledger
from ps_server.shard.memory import free_bytes
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import NOTICE_AFTER_SECONDS, STAGED_AFTER_SECONDS, Pulls, Writers
from ps_server.shard.segments import attach
from ps_server.shard.snapshots import SnapshotTask
from ps_server.storage.checkpoints import CheckpointStore

log = logging.getLogger("ps_server")

# Writes one kind of one bucket's optimizer state: (bucket, version, name, positions that have none, payload).
WriteState = Callable[[int, int, str, frozenset[int], memoryview], bytes]


class Shard:
    """Everything one shard holds and does. All methods may be called from any thread; none waits for a worker.

    writers:       how a pull's messages are written
    apply_threads: threads that add gradients and step optimizers; buckets go in parallel, one bucket in order
    shared_directory: where workers on this host leave segments that are files
    staged_limit: bytes of a job that may be staged; None: derived from its size
    checkpoints: where checkpoints are; None: there are none
    index:       of this shard: its part of a checkpoint is called after it
    caller_limit: bytes that one caller may have staged, over all its workers
    norm_limit: the L2 norm that the gradient in one push may have
    """

    def __init__(
        self,
        metrics: ShardMetrics,
        writers: Writers,
        apply_threads: int = 1,
        shared_directory: Path = DEFAULT_SHARED_DIRECTORY,
        staged_limit: int | None = None,
        checkpoints: CheckpointStore | None = None,
        index: int = 0,
        norm_limit: float = math.inf,
        caller_limit: int = 2**63,
    ) -> None:
        self._ledger = Ledger(caller_limit)
        self._staged_limit = staged_limit
        self._checkpoints = checkpoints
        self._index = index
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._norm_limit = norm_limit
        self._metrics = metrics
        self._pulls = Pulls(metrics, writers)
        self._shared_directory = shared_directory
        self._jobs: dict[str, HostedJob] = {}
        self._lock = threading.Lock()
        self._apply = ApplyThreads(apply_threads)
        self._stopping = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="notices", daemon=True)
        self._ticker.start()

    def stop(self) -> None:
        """Finishes what is staged and ends the threads. Waiting pulls are told to come back later."""
        self._stopping.set()
        self._ticker.join()
        self._apply.stop()
        self._writer.shutdown(wait=True)
        for name in list(self._jobs):
            self._pulls.fail(self._jobs[name], TryLater("the shard is stopping"))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def create_job(self, spec: JobSpec, buckets: Sequence[int]) -> None:
        """Makes room for a job's buckets. An equal job that is there already stays as it is."""
        with self._lock:
            known = self._jobs.get(spec.name)
            if known is None:
                with self._making_room(spec, buckets):
                    self._jobs[spec.name] = HostedJob(spec, buckets, self._staged_limit, self._norm_limit)
                log.info("job %s: %d buckets", spec.name, len(self._jobs[spec.name].buckets))
                return
        found = difference(known.state.spec, spec)
        if found is not None:
            raise JobMismatch(f"job {spec.name!r} exists and differs: {found}")

    @contextlib.contextmanager
    def _making_room(self, spec: JobSpec, buckets: Sequence[int]) -> Iterator[None]:
        layout, free = bucket_layout(spec.parameters, spec.bucket_bytes).buckets, free_bytes()
        needed = sum(layout[index].nbytes for index in buckets if 0 <= index < len(layout))
        if free is not None and needed > free:
            raise LimitExceeded(
                f"job {spec.name!r} does not fit into this shard's memory: its weights here are {needed} bytes, "
                f"and {free} are free"
            )
        try:
            yield
        except (RuntimeError, MemoryError):  # what torch raises where there is no memory
            raise LimitExceeded(f"job {spec.name!r} does not fit into this shard's memory") from None

    def drop_job(self, name: str) -> None:
        """Forgets a job and gives its memory back."""
        with self._lock:
            job = self._jobs.pop(name, None)
        if job is not None:
            self._pulls.fail(job, NotFound(f"job {name!r} ended"))
            self._metrics.forget(name)
            log.info("job %s: dropped", name)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def begin_checkpoint(self, name: str, checkpoint: str, clock: int | None) -> None:
        """Takes a checkpoint of a job: of each bucket when it has applied `clock` updates, or now. Returns at once."""
        job, store = self._job(name), self._store()
        store.path(name, checkpoint)

        def write(checkpoint: str, images: list[BucketSnapshot]) -> Part:
            return store.write_shard(name, checkpoint, self._index, images)

        capture = SnapshotTask(checkpoint, clock, job, write, self._writer)
        with job.lock:
            if job.capture is not None and job.capture.is_at_least(capture):
                return
            capture.check(job.buckets.values())
            before, job.capture = job.capture, capture
        if before is not None:
            before.abandon()
        capture.begin()
        for bucket in job.buckets.values():
            with bucket.tensors:
                capture.look(bucket)

    def await_checkpoint(self, name: str, checkpoint: str, seconds: float) -> ShardSnapshot:
        """This shard's part of a checkpoint, once it is on disk; see SnapshotTask.wait."""
        capture = self._job(name).capture
        if capture is None or capture.name != checkpoint:
            raise NotFound(f"no checkpoint {checkpoint} of job {name!r} was begun here, or another took its place")
        return capture.wait(seconds)

    def restore_job(
        self, spec: JobSpec, buckets: Sequence[int], checkpoint: str, last_incarnation: int
    ) -> VersionRange:
        """Holds the job as a checkpoint has it, in place of what was here. Changes nothing if it raises."""
        store = self._store()
        manifest = store.manifest(spec.name, checkpoint)
        with self._making_room(spec, buckets):
            job = HostedJob(spec, buckets, self._staged_limit, self._norm_limit)
        layouts = [bucket.layout for bucket in job.state.buckets.values()]
        job.state.restore(store.read_buckets(spec.name, manifest, layouts), last_incarnation)
        failpoint("restore-read")
        with self._lock:
            before = self._jobs.get(spec.name)
            self._jobs[spec.name] = job
        if before is not None:
            if before.capture is not None:
                before.capture.abandon()
            self._pulls.fail(before, UnknownWorker(f"job {spec.name!r} was set back to a checkpoint: join again"))
        log.info("job %s: %d buckets as of checkpoint %s", spec.name, len(job.buckets), checkpoint)
        return job.state.extent()

    def _store(self) -> CheckpointStore:
        if self._checkpoints is None:
            raise NoCheckpoints("this shard was started without --checkpoint-dir")
        return self._checkpoints

    # -- who takes part ----------------------------------------------------------------------------------------------

    def admit(self, name: str, rank: int, incarnation: int, clock: int | None, key: bytes = b"") -> int:
        """Counts a worker as live; see JobPartition.admit."""
        job = self._job(name)
        with job.lock:
            frontier = job.state.admit(rank, incarnation, clock, key)
        self._detach(job, rank, incarnation)
        self._roster_changed(job)
        return frontier

    def retire(self, name: str, rank: int, incarnation: int) -> None:
        """Stops counting a worker as live; whoever waited for it goes on."""
        job = self._job(name)
        with job.lock:
            job.state.retire(rank, incarnation)
        self._detach(job, rank, incarnation + 1)
        self._roster_changed(job)

    def committed(self, name: str) -> tuple[Committed, bool]:
        """The leased data that every bucket that trains here has had, and whether there is such a bucket."""
        job = self._job(name)
        with job.lock:
            return job.state.data.whole(), job.state.data.has_say

    def jobs(self) -> dict[str, HostedJob]:
        """The jobs here, by name."""
        with self._lock:
            return dict(self._jobs)

    def _job(self, name: str) -> HostedJob:
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"this shard knows no job {name!r}")
        if job.failure is not None:
            raise job.failure
        return job

    def _detach(self, job: HostedJob, rank: int, before: int) -> None:
        """Lets go of the segment of a worker of an incarnation before this one, and of what updates borrowed of it."""
        with job.lock:
            attached = job.segments.get(rank)
            if attached is None or attached.incarnation >= before:
                return
            del job.segments[rank]
        for bucket in job.buckets.values():
            with bucket.tensors:
                bucket.state.weights.own()

    def _roster_changed(self, job: HostedJob) -> None:
        for index, bucket in job.buckets.items():
            self._pulls.admit(job, bucket)
            self._schedule(job, index)

    # -- pushes ------------------------------------------------------------------------------------------------------

    def push(self, push: Push) -> Staged:
        """Checks and stages one push, and has it applied as soon as the protocol lets it."""
        return self._push_all(self._job(push.job), [push])[0]

    def _push_all(self, job: HostedJob, pushes: list[Push]) -> list[Staged]:
        found: list[Staged] = []
        try:
            self._stage_all(job, pushes, found)
        finally:
            # Also what was staged before another was refused: when that one is sent again, these are repeats.
            for push, staged in zip(pushes, found, strict=False):
                if not (staged.duplicate or staged.kept):
                    self._schedule(job, push.bucket)
        return found

    def _stage_all(self, job: HostedJob, pushes: list[Push], found: list[Staged]) -> None:
        """Checks all, then stages each into `found`: one that is refused for what it holds leaves none behind."""
        name = job.state.spec.name
        try:
            with job.lock:
                for push in pushes[:1]:  # all come from one worker
                    job.state.check_worker(push.rank, push.incarnation, push.key)
            gradients = [job.state.check(push) for push in pushes]
            for push, checked in zip(pushes, gradients, strict=True):
                gradient = self._booked(push, checked)
                failpoint("push-checked")
                with job.lock:
                    staged = job.state.stage(push, gradient)
                found.append(staged)
                failpoint("push-staged")
                self._metrics.pushed(name, len(push.payload), staged)
                self._was_staged(job, push.bucket, staged)
        except PSError as error:
            self._metrics.refused(name, error)
            raise

    def _was_staged(self, job: HostedJob, index: int, staged: Staged) -> None:
        if not (staged.duplicate or staged.kept):
            self._pulls.admit(job, job.buckets[index])  # or they learn whom they wait for now

    def _commit(self, job: HostedJob, call: PullCall, commit: Commit) -> None:
        """Makes count what a worker's step consists of, besides what it pushes in full."""
        name, fresh = job.state.spec.name, []
        try:
            with job.lock:
                job.state.check_worker(call.rank, call.incarnation, call.key)
            job.state.check_commit(commit)
            for one in commit.buckets:
                with job.lock:
                    staged = job.state.commit(call.rank, call.incarnation, call.key, call.clock, one, commit)
                if not (staged.duplicate or staged.kept):
                    fresh.append(one.index)
                failpoint("push-staged")
                self._metrics.pushed(name, 0, staged)
                self._was_staged(job, one.index, staged)
        except PSError as error:
            self._metrics.refused(name, error)
            raise
        finally:
            for index in fresh:
                self._schedule(job, index)

    def _booked(self, push: Push, gradient: Gradient) -> Gradient:
        """The gradient with its bytes booked on who pushes it."""
        if gradient.values is None:
            return gradient
        ticket = self._ledger.take(push.caller, gradient.values.nbytes)
        return replace(gradient, ticket=ticket, within=ticket.within)

    def attach(self, name: str, rank: int, incarnation: int, location: str, nonce: bytes, key: bytes = b"") -> None:
        """Maps the segment that a live worker made. Raises NotShared if it is not to be seen from here."""
        job = self._job(name)
        with job.lock:
            job.state.check_worker(rank, incarnation, key)
        segment = attach(location, nonce, job.plan, self._shared_directory)
        with job.lock:
            job.state.check_worker(rank, incarnation, key)
            job.segments[rank] = Attached(incarnation, segment)

    def push_shared(self, push: SharedPush) -> int:
        """As `push`, for buckets whose gradients lie in the worker's segment; answers how many were repeats."""
        job = self._job(push.job)
        return sum(staged.duplicate for staged in self._push_all(job, self._pushes(job, push)))

    def push_pull_shared(self, push: SharedPush, call: PullCall, outbox: Outbox) -> None:
        """As `push_shared`, then `pull`, of one worker at one clock; the calling thread applies what can be applied."""
        job = self._job(push.job)
        asked = self._pulls.check(job, call, outbox, shared=True)
        asked.with_pushes = True
        found: list[Staged] = []
        try:
            self._stage_all(job, self._pushes(job, push), found)
            self._pulls.ask(job, asked, call.buckets)
        finally:
            fresh = [one.index for one, staged in zip(push.buckets, found, strict=False) if not staged.duplicate]
            self._apply.lend([task for index in fresh if (task := self._due(job, index)) is not None])

    @staticmethod
    def _pushes(job: HostedJob, push: SharedPush) -> list[Push]:
        segment = job.segment(push.rank, push.incarnation, push.key)
        return [
            Push(
                job=push.job,
                rank=push.rank,
                incarnation=push.incarnation,
                bucket=bucket.index,
                clock=push.clock,
                kind=PushKind.SKIP if bucket.skip else PushKind.GRADIENT,
                payload=b"" if bucket.skip else bytes_of(segment.gradient(job.state.trained(bucket.index))),
                absent=bucket.absent,
                groups=push.groups,
                borrowed=True,
                key=push.key,
                ranges=push.ranges,
                caller=push.caller,
                finite=bucket.finite,
            )
            for bucket in push.buckets
        ]

    def _schedule(self, job: HostedJob, index: int) -> None:
        """Has an apply thread do what comes next on a bucket, unless one is at it already."""
        task = self._due(job, index)
        if task is not None:
            self._apply.submit(task)

    def _due(self, job: HostedJob, index: int) -> Callable[[], None] | None:
        """What comes next on a bucket, to be run by the caller; None where nothing does, or a thread is at it."""
        bucket = job.buckets[index]
        with job.lock:
            if bucket.busy or self._stopping.is_set() or bucket.state.protocol.next() is None:
                return None
            bucket.busy = True
        return lambda: self._work(job, bucket)

    def _work(self, job: HostedJob, bucket: HostedBucket) -> None:
        """Does what the protocol says comes next on one bucket, until nothing does."""
        protocol, weights = bucket.state.protocol, bucket.state.weights
        try:
            while True:
                with job.lock:
                    work = protocol.next()
                    if work is None:
                        bucket.busy = False
                        return
                with bucket.tensors:
                    started = time.perf_counter()
                    if isinstance(work, Add):
                        weights.add(work.contribution)
                        failpoint("contribution-added")
                    else:
                        weights.step()
                        failpoint("update-stepped")
                    self._metrics.applied(job.state.spec.name, work, time.perf_counter() - started)
                    with job.lock:
                        protocol.done(work)
                    if job.capture is not None and isinstance(work, Step):
                        job.capture.look(bucket)
                if isinstance(work, Step):
                    self._pulls.admit(job, bucket)
        except Exception:
            log.exception("job %s: bucket %d cannot be applied", job.state.spec.name, bucket.state.layout.index)
            job.failure = PSError(f"job {job.state.spec.name!r} failed on this shard; its log says why")
            self._pulls.fail(job, job.failure)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, call: PullCall, outbox: Outbox, shared: bool = False) -> None:
        """Stages the commit that the pull carries, then sends buckets on the outbox as they are admitted; see Pulls."""
        job = self._job(call.job)
        asked = self._pulls.check(job, call, outbox, shared)
        if call.commit is not None:
            self._commit(job, call, call.commit)
        self._pulls.ask(job, asked, call.buckets)

    def pull_state(self, call: PullCall, write: WriteState, outbox: Outbox) -> None:
        """Sends the optimizer state of buckets as it is now on the outbox, and ends it. Returns at once."""
        job = self._job(call.job)
        with job.lock:
            job.state.check_worker(call.rank, call.incarnation, call.key)
        if len(set(call.buckets)) != len(call.buckets):
            raise InvalidRequest("a pull names each bucket at most once")
        buckets = [job.buckets[job.state.trained(index).index] for index in call.buckets]

        def read(bucket: HostedBucket, name: str) -> bytes:
            with bucket.tensors:
                values, absent = bucket.state.weights.read_state(name)
                version = bucket.state.protocol.version
            return write(bucket.state.layout.index, version, name, absent, bytes_of(values))

        for bucket in buckets:
            with bucket.tensors:
                names = bucket.state.weights.state_names()
            for name in names:
                outbox.put(lambda bucket=bucket, name=name: read(bucket, name))  # type: ignore[misc]
        outbox.finish()

    def _tick(self) -> None:
        due = time.monotonic() + NOTICE_AFTER_SECONDS
        while not self._stopping.wait(STAGED_AFTER_SECONDS):
            now = time.monotonic()
            self._pulls.say_staged(now)
            if now >= due:
                due = now + NOTICE_AFTER_SECONDS
                for job in self.jobs().values():
                    self._pulls.notify(job, now)
