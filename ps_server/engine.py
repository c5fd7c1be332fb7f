"""The shard at work: locks, threads and waiting pulls around the pure rules of `core`.

    RPC threads      check a push, stage it, and return: they never wait for another worker
    apply threads    do what the protocol says comes next: add contributions, step optimizers, admit waiting pulls
    sender threads   write buckets to the streams of admitted pulls
    one ticker       tells pulls that wait long whom they wait for

Locks: a job's `lock` guards its protocol state and is held for microseconds. A bucket's `tensors` lock guards its
weights while they are stepped or copied out. Where both are needed, `tensors` is taken first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.errors import InvalidRequest, JobMismatch, NotFound, NotShared, PSError, TryLater, UnknownWorker
from ps_protocol.job import JobSpec, difference, travels_as
from ps_protocol.segments import DEFAULT_SHARED_DIRECTORY, SegmentMap, segment_plan
from ps_protocol.tensors import TORCH_DTYPES, bytes_of
from ps_server.core.bucket import Add, Step, Verdict
from ps_server.core.shard_job import Push, PushKind, ShardBucket, ShardJob, SharedPush, Staged
from ps_server.metrics import ShardMetrics
from ps_server.segments import attach
from ps_server.streams import Outbox

log = logging.getLogger("ps_server")

NOTICE_AFTER_SECONDS = 1.0
NOTICE_EVERY_SECONDS = 5.0

# Writes one message of a pull stream: (bucket, version, seconds waited, notice, payload). Without payload, and without
# notice, the bucket is in the worker's segment.
WritePull = Callable[[int, int, float, Verdict | None, memoryview | None], bytes]


@dataclass(frozen=True)
class Attached:
    """The segment of one incarnation of a worker."""

    incarnation: int
    segment: SegmentMap


@dataclass
class Pull:
    """One Pull call: who asks, how many of its buckets are still to be sent, and where to if not over the network."""

    rank: int
    incarnation: int
    clock: int
    outbox: Outbox
    left: int
    since: float
    segment: SegmentMap | None = None
    notified: float = 0.0


@dataclass
class Waiter:
    """One bucket of a pull that is not admitted: why, since when for that reason, and how long for others so far."""

    pull: Pull
    verdict: Verdict
    since: float
    waited: float = 0.0


@dataclass
class RunningBucket:
    """A bucket with its lock, its waiting pulls, and whether an apply thread is at it."""

    state: ShardBucket
    tensors: threading.Lock = field(default_factory=threading.Lock)
    waiters: list[Waiter] = field(default_factory=list)
    busy: bool = False


class RunningJob:
    """A job on this shard."""

    def __init__(self, spec: JobSpec, buckets: Iterable[int]) -> None:
        self.state = ShardJob(spec, buckets)
        self.mode = str(spec.consistency)
        self.lock = threading.Lock()
        self.buckets = {index: RunningBucket(state) for index, state in self.state.buckets.items()}
        self.segments: dict[int, Attached] = {}
        self.plan = segment_plan(spec, self.state.layout)
        self.failure: PSError | None = None


class Engine:
    """Everything one shard holds and does. All methods may be called from any thread; none waits for a worker.

    write_pull, write_shared: how a pull's messages are written, over the network and by way of a segment
    apply_threads: threads that add gradients and step optimizers; buckets go in parallel, one bucket in order
    shared_directory: where workers on this host leave segments that are files
    """

    def __init__(
        self,
        metrics: ShardMetrics,
        write_pull: WritePull,
        write_shared: WritePull,
        apply_threads: int = 1,
        shared_directory: Path = DEFAULT_SHARED_DIRECTORY,
    ) -> None:
        self._metrics = metrics
        self._write_pull = write_pull
        self._write_shared = write_shared
        self._shared_directory = shared_directory
        self._jobs: dict[str, RunningJob] = {}
        self._lock = threading.Lock()
        self._apply = ThreadPoolExecutor(apply_threads, "apply")
        self._stopping = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="notices", daemon=True)
        self._ticker.start()

    def stop(self) -> None:
        """Finishes what is staged and ends the threads. Waiting pulls are told to come back later."""
        self._stopping.set()
        self._ticker.join()
        self._apply.shutdown(wait=True)
        for name in list(self._jobs):
            self._fail_waiters(self._jobs[name], TryLater("the shard is stopping"))

    # -- jobs and who takes part -------------------------------------------------------------------------------------

    def create_job(self, spec: JobSpec, buckets: Iterable[int]) -> None:
        """Makes room for a job's buckets. An equal job that is there already stays as it is."""
        with self._lock:
            known = self._jobs.get(spec.name)
            if known is None:
                self._jobs[spec.name] = RunningJob(spec, buckets)
                log.info("job %s: %d buckets", spec.name, len(self._jobs[spec.name].buckets))
                return
        found = difference(known.state.spec, spec)
        if found is not None:
            raise JobMismatch(f"job {spec.name!r} exists and differs: {found}")

    def drop_job(self, name: str) -> None:
        """Forgets a job and gives its memory back."""
        with self._lock:
            job = self._jobs.pop(name, None)
        if job is not None:
            self._fail_waiters(job, NotFound(f"job {name!r} ended"))
            self._metrics.forget(name)
            log.info("job %s: dropped", name)

    def admit(self, name: str, rank: int, incarnation: int, clock: int | None) -> int:
        """Counts a worker as live; see ShardJob.admit."""
        job = self._job(name)
        with job.lock:
            frontier = job.state.admit(rank, incarnation, clock)
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

    def jobs(self) -> dict[str, RunningJob]:
        """The jobs here, by name."""
        with self._lock:
            return dict(self._jobs)

    def _job(self, name: str) -> RunningJob:
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"this shard knows no job {name!r}")
        if job.failure is not None:
            raise job.failure
        return job

    def _detach(self, job: RunningJob, rank: int, before: int) -> None:
        """Lets go of the segment of a worker of an incarnation before this one, and of what updates borrowed of it."""
        with job.lock:
            attached = job.segments.get(rank)
            if attached is None or attached.incarnation >= before:
                return
            del job.segments[rank]
        for bucket in job.buckets.values():
            with bucket.tensors:
                bucket.state.weights.own()

    def _roster_changed(self, job: RunningJob) -> None:
        for index, bucket in job.buckets.items():
            self._admit_waiters(job, bucket)
            self._schedule(job, index)

    # -- pushes ------------------------------------------------------------------------------------------------------

    def push(self, push: Push) -> Staged:
        """Checks and stages one push, and has it applied as soon as the protocol lets it."""
        return self._push_all(self._job(push.job), [push])[0]

    def _push_all(self, job: RunningJob, pushes: list[Push]) -> list[Staged]:
        """Checks all, then stages each: a push that is refused for what it holds leaves none of them behind."""
        name, found = job.state.spec.name, []
        try:
            gradients = [job.state.check(push) for push in pushes]
            for push, gradient in zip(pushes, gradients, strict=True):
                with job.lock:
                    staged = job.state.stage(push, gradient)
                found.append(staged)
                self._metrics.pushed(name, len(push.payload), staged)
                if not staged.duplicate:
                    self._admit_waiters(job, job.buckets[push.bucket])  # or they learn whom they wait for now
                    self._schedule(job, push.bucket)
        except PSError as error:
            self._metrics.refused(name, error)
            raise
        return found

    def attach(self, name: str, rank: int, incarnation: int, location: str, nonce: bytes) -> None:
        """Maps the segment that a live worker made. Raises NotShared if it is not to be seen from here."""
        job = self._job(name)
        with job.lock:
            job.state.check_worker(rank, incarnation)
        segment = attach(location, nonce, job.plan, self._shared_directory)
        with job.lock:
            job.state.check_worker(rank, incarnation)
            job.segments[rank] = Attached(incarnation, segment)

    def push_shared(self, push: SharedPush) -> int:
        """As `push`, for buckets whose gradients lie in the worker's segment; answers how many were repeats."""
        job = self._job(push.job)
        segment = self._segment(job, push.rank, push.incarnation)
        pushes = [
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
            )
            for bucket in push.buckets
        ]
        return sum(staged.duplicate for staged in self._push_all(job, pushes))

    def _segment(self, job: RunningJob, rank: int, incarnation: int) -> SegmentMap:
        with job.lock:
            job.state.check_worker(rank, incarnation)
            attached = job.segments.get(rank)
        if attached is None or attached.incarnation != incarnation:
            raise NotShared(f"worker {rank} has attached no segment here")
        return attached.segment

    def _schedule(self, job: RunningJob, index: int) -> None:
        """Has an apply thread do what comes next on a bucket, unless one is at it already."""
        bucket = job.buckets[index]
        with job.lock:
            if bucket.busy or self._stopping.is_set() or bucket.state.protocol.next() is None:
                return
            bucket.busy = True
        self._apply.submit(self._work, job, bucket)

    def _work(self, job: RunningJob, bucket: RunningBucket) -> None:
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
                    else:
                        weights.step()
                    self._metrics.applied(job.state.spec.name, work, time.perf_counter() - started)
                    with job.lock:
                        protocol.done(work)
                if isinstance(work, Step):
                    self._admit_waiters(job, bucket)
        except Exception:
            log.exception("job %s: bucket %d cannot be applied", job.state.spec.name, bucket.state.layout.index)
            job.failure = PSError(f"job {job.state.spec.name!r} failed on this shard; its log says why")
            self._fail_waiters(job, job.failure)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(
        self,
        name: str,
        rank: int,
        incarnation: int,
        clock: int,
        indices: list[int],
        outbox: Outbox,
        shared: bool = False,
    ) -> None:
        """Sends each bucket on the outbox as soon as it is admitted, then ends the stream. Returns at once.

        shared: the buckets go into the worker's segment, and only the word of it on the outbox
        """
        job = self._job(name)
        segment = self._segment(job, rank, incarnation) if shared else None
        if len(set(indices)) != len(indices):
            raise InvalidRequest("a pull names each bucket at most once")
        now = time.monotonic()
        pull = Pull(rank, incarnation, clock, outbox, len(indices), now, segment)
        if shared:
            for index in indices:
                job.state.trained(index)
        with job.lock:
            job.state.check_worker(rank, incarnation)
            verdicts = {index: job.state.admits(index, rank, clock) for index in indices}
            for index, verdict in verdicts.items():
                if not verdict.admitted:
                    job.buckets[index].waiters.append(Waiter(pull, verdict, now))
        outbox.on_close(lambda: self._forget(job, pull))
        if not indices:
            outbox.finish()
        for index, verdict in verdicts.items():
            if verdict.admitted:
                self._send(job, job.buckets[index], pull, 0.0)

    def _send(self, job: RunningJob, bucket: RunningBucket, pull: Pull, waited: float) -> None:
        layout, weights = bucket.state.layout, bucket.state.weights
        if pull.segment is not None:
            # Written here and now, by the thread that stepped the bucket: it is still in the cache.
            target = pull.segment.weight(layout)
            with bucket.tensors:
                version = bucket.state.protocol.version
                target.copy_(weights.flat)
            self._metrics.pulled(job.state.spec.name, target.nbytes)
            message = self._write_shared(layout.index, version, waited, None, None)
            pull.outbox.put(lambda: message)
        else:
            pull.outbox.put(lambda: self._read_out(job, bucket, waited))
        with job.lock:
            pull.left -= 1
            last = pull.left == 0
        if last:
            pull.outbox.finish()

    def _read_out(self, job: RunningJob, bucket: RunningBucket, waited: float) -> bytes:
        """One bucket as a message, in the wire format of the job's weights."""
        layout = bucket.state.layout
        wire = layout.dtype if layout.held else travels_as(layout.dtype, job.state.spec.weight_wire)
        with bucket.tensors:
            payload = bytes_of(bucket.state.weights.flat.to(TORCH_DTYPES[wire]))
            message = self._write_pull(layout.index, bucket.state.protocol.version, waited, None, payload)
        self._metrics.pulled(job.state.spec.name, len(payload))
        return message

    def _admit_waiters(self, job: RunningJob, bucket: RunningBucket) -> None:
        """Sends the bucket to every waiting pull that is admitted now, and ends those whose worker lost its place."""
        admitted: list[Waiter] = []
        lost: list[tuple[Pull, UnknownWorker]] = []
        index, now = bucket.state.layout.index, time.monotonic()
        with job.lock:
            staying: list[Waiter] = []
            for waiter in bucket.waiters:
                pull = waiter.pull
                try:
                    job.state.check_worker(pull.rank, pull.incarnation)
                except UnknownWorker as error:
                    lost.append((pull, error))
                    continue
                verdict = job.state.admits(index, pull.rank, pull.clock)
                self._account(job, waiter, verdict, now)
                (admitted if verdict.admitted else staying).append(waiter)
            bucket.waiters = staying
        for waiter in admitted:
            self._send(job, bucket, waiter.pull, waiter.waited)
        for pull, reason in lost:
            pull.outbox.fail(reason)

    def _account(self, job: RunningJob, waiter: Waiter, verdict: Verdict, now: float) -> None:
        """Books the time that a pull waited on whom it waited for; called whenever its verdict may have changed."""
        blamed = waiter.verdict.waiting_for
        if verdict.waiting_for != blamed or verdict.admitted:
            if blamed and blamed != (waiter.pull.rank,):  # the time until its own push is nobody's
                waiter.waited += now - waiter.since
                self._metrics.waited_for(job.state.spec.name, now - waiter.since, blamed)
            waiter.since = now
        if verdict.admitted and waiter.waited:
            self._metrics.waited(job.state.spec.name, job.mode, waiter.waited)
        waiter.verdict = verdict

    def _forget(self, job: RunningJob, pull: Pull) -> None:
        with job.lock:
            for bucket in job.buckets.values():
                bucket.waiters = [waiter for waiter in bucket.waiters if waiter.pull is not pull]

    def _fail_waiters(self, job: RunningJob, error: PSError) -> None:
        with job.lock:
            pulls = {id(waiter.pull): waiter.pull for bucket in job.buckets.values() for waiter in bucket.waiters}
            for bucket in job.buckets.values():
                bucket.waiters = []
        for pull in pulls.values():
            pull.outbox.fail(error)

    def _tick(self) -> None:
        while not self._stopping.wait(NOTICE_AFTER_SECONDS):
            now = time.monotonic()
            for job in self.jobs().values():
                with job.lock:
                    due = {
                        id(waiter.pull): (waiter, bucket.state.layout.index)
                        for bucket in job.buckets.values()
                        for waiter in bucket.waiters
                        if now - waiter.pull.since >= NOTICE_AFTER_SECONDS
                        and now - waiter.pull.notified >= NOTICE_EVERY_SECONDS
                    }
                    for waiter, _ in due.values():
                        waiter.pull.notified = now
                for waiter, index in due.values():
                    write = self._write_pull if waiter.pull.segment is None else self._write_shared
                    message = write(index, 0, 0.0, waiter.verdict, None)
                    waiter.pull.outbox.put(lambda message=message: message)  # type: ignore[misc]
