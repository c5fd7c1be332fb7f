"""The coordinator: jobs, who takes part in them, and where their buckets are.

It is not on the data path: workers reach the shards by themselves once they have the shard map.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ps_protocol.errors import JobMismatch, LimitExceeded, NoCheckpoints, NotFound, PSError, TryLater
from ps_protocol.job import JobSpec, difference
from ps_runtime.channel import MAX_BUCKET_BYTES
from ps_server.coordinator.admitting import admit
from ps_server.coordinator.data import LeaseRequest
from ps_server.coordinator.job import CoordinatedJob, Watcher, make_job
from ps_server.coordinator.keeping import Keeping
from ps_server.coordinator.launches import refusal
from ps_server.coordinator.leasing import lease_data
from ps_server.coordinator.policy import CheckpointPolicy
from ps_server.coordinator.retiring import retire, retire_ghosts
from ps_server.coordinator.rounds import LOOK_SECONDS, ExchangeRequest, Listener, Terms, Wait
from ps_server.coordinator.shards import Connect, RegisteredShard, Shards
from ps_server.core.bucket_sizes import sized
from ps_server.core.data_leases import BatchLease
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.core.membership import JoinRequest, JoinResult, Member, check_key
from ps_server.core.validation import check_address, check_host, check_job_spec, check_launch
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import Manifest

log = logging.getLogger("ps_server")

DEFAULT_LEASE_SECONDS = 10.0
LEASE_KEY_BYTES = 16
CHECKPOINT_SECONDS = 300.0
RECOVERY_LOOK_SECONDS = 0.25
ORPHANS_LOOK_SECONDS = 5.0
REASONS_KEPT = 64


class Coordinator:
    """All jobs of a cluster. Methods may be called from any thread and raise PSError.

    connect: makes the ShardApi of a shard from its index and address
    lease:  seconds for which a worker counts as live without a heartbeat
    policy: where checkpoints go and when they are made; None: there are none
    """

    def __init__(
        self,
        shard_count: int,
        connect: Connect,
        lease: float = DEFAULT_LEASE_SECONDS,
        limits: Limits = DEFAULTS,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.shard_count = shard_count
        self.lease = lease
        self._limits = limits
        self._jobs: dict[str, CoordinatedJob] = {}
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._pool = ThreadPoolExecutor(max(4, shard_count), "shards")
        self._directory = Shards(shard_count, connect, self._pool)
        self.keeping = Keeping(policy, self._directory, lease, limits) if policy is not None else None
        self._why_ended: dict[str, str] = {}  # of the last jobs that ended otherwise than by their workers' leaving
        self._draining = False
        self._stopping = threading.Event()
        if self.keeping is not None:
            self._jobs = self.keeping.take_up()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (
                ("leases", self._sweep),
                ("recovery", self._watch_shards),
                ("orphans", self._drop_orphaned_jobs),
                ("rounds", self._watch_rounds),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends the threads and tells watchers that nothing more comes."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for job in self.jobs().values():
            if job.checkpoints is not None:
                job.checkpoints.stop()
            for watcher in list(job.watchers):
                watcher(None)
            job.rounds.end(TryLater("the coordinator stops"))
        self._pool.shutdown(wait=True)
        self._directory.close()

    # -- shards ------------------------------------------------------------------------------------------------------

    def register_shard(self, index: int, address: str, metrics_address: str, pid: int, process: int) -> None:
        """Makes a shard known, or renews it."""
        self._directory.register(index, address, metrics_address, pid, process)

    def shards(self) -> dict[int, RegisteredShard]:
        """The shards that have called in, by index."""
        return self._directory.known()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def register_job(self, spec: JobSpec) -> tuple[CoordinatedJob, bool]:
        """The job with this spec, and whether this call made it. Raises JobMismatch naming what differs.

        Where the spec leaves the size of buckets open, it is that of the job, of its checkpoint, or chosen here.
        """
        check_job_spec(replace(spec, bucket_bytes=spec.bucket_bytes or MAX_BUCKET_BYTES), self._limits)
        self._directory.all()  # or it is too early
        chosen = sized(spec, self._directory.on_one_machine(), self._limits.buckets)
        self._check_open()
        with self._registering:
            known = self._jobs.get(spec.name)
            if known is not None:
                spec = spec if spec.bucket_bytes else replace(spec, bucket_bytes=known.spec.bucket_bytes)
                found = difference(known.spec, spec)
                if found is not None:
                    raise JobMismatch(f"job {spec.name!r} exists and differs: {found}")
                return known, False
            if len(self._jobs) >= self._limits.jobs:
                raise LimitExceeded(f"there are {self._limits.jobs} jobs already: that is the limit max-jobs")
            job = self.keeping.go_on(spec, chosen) if self.keeping is not None else None
            job = job or self._new_job(chosen)
            with self._lock:
                self._jobs[spec.name] = job
            self._why_ended.pop(spec.name, None)
            self._save()
        log.info("job %s: %s, %d bytes in %d buckets", spec.name, spec.consistency, job.bytes, len(job.placement))
        return job, True

    def _new_job(self, spec: JobSpec) -> CoordinatedJob:
        check_job_spec(spec, self._limits)  # with as many buckets as it has now
        job = make_job(spec, self.shards(), self.shard_count, self.lease, secrets.token_hex(8))
        checkpoints = self.keeping.checkpoints_of(job) if self.keeping is not None else None
        try:
            self._directory.call_all(lambda shard: shard.api.create_job(spec, job.buckets_of(shard.index)))
        except PSError:
            # All or none: what some shards made room for would be nobody's.
            with contextlib.suppress(PSError):
                self._directory.call_all(lambda shard: shard.api.drop_job(spec.name))
            raise
        if checkpoints is not None:
            job.checkpoints = checkpoints
            checkpoints.start()
        return job

    def end_job(self, name: str) -> None:
        """Ends a job whoever takes part, and gives its memory back on every shard."""
        job = self._job(name)
        with job.lock:
            self._end(job)

    def checkpoint_job(self, name: str) -> Manifest:
        """Makes a checkpoint now; see JobCheckpoints.request."""
        checkpoints = self._job(name).checkpoints
        if checkpoints is None:
            raise NoCheckpoints("these servers were started without --checkpoint-dir")
        return checkpoints.request(CHECKPOINT_SECONDS)

    def save_worker_state(self, name: str, rank: int, incarnation: int, key: bytes, clock: int, state: bytes) -> None:
        """Keeps a live worker's own part of a checkpoint."""
        job = self._job(name)
        if len(state) > self._limits.state_bytes:
            raise LimitExceeded(f"max-state-bytes is {self._limits.state_bytes}, got a worker's state of {len(state)}")
        with job.guard:
            job.membership.check(rank, incarnation, key)
        if job.checkpoints is not None:
            job.checkpoints.save_state(rank, clock, state)

    def drain(self, seconds: float) -> None:
        """Admits no job and no worker any more, and makes a last checkpoint of each job."""
        self._draining = True
        failpoint("drain-begun")
        checkpoints = [job.checkpoints for job in self.jobs().values() if job.checkpoints is not None]
        with ThreadPoolExecutor(max(1, len(checkpoints)), "drain") as pool:
            for each in checkpoints:
                pool.submit(each.last_one, seconds, standing=False)

    def _check_open(self) -> None:
        if self._draining:
            raise TryLater("the cluster is stopping")

    def _end(self, job: CoordinatedJob, why: str = "") -> None:
        if job.ended:
            return
        job.ended = True
        if job.checkpoints is not None:
            job.checkpoints.stop()
        if why:
            self._why_ended[job.spec.name] = why
            while len(self._why_ended) > REASONS_KEPT:
                del self._why_ended[next(iter(self._why_ended))]
        try:
            self._directory.call_all(lambda shard: shard.api.drop_job(job.spec.name))
        except PSError as error:
            log.warning("job %s: ended, but not everywhere: %s", job.spec.name, error)
        with self._lock:
            self._jobs.pop(job.spec.name, None)
        self._save()
        for watcher in job.watchers:
            watcher(None)
        job.rounds.end(NotFound(f"job {job.spec.name!r} ended{f': {why}' if why else ''}"))
        log.info("job %s: ended%s", job.spec.name, f": {why}" if why else "")

    def jobs(self) -> dict[str, CoordinatedJob]:
        """The jobs, by name."""
        with self._lock:
            return dict(self._jobs)

    def _job(self, name: str) -> CoordinatedJob:
        job = self._jobs.get(name)
        if job is None:
            why = self._why_ended.get(name)
            raise NotFound(f"job {name!r} ended: {why}" if why else f"no job {name!r} here")
        return job

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, name: str, rank: int | None, newcomer: JoinRequest) -> JoinResult:
        """Makes the caller a live worker; answers with its place and the clock it starts from.

        Raises JobInUse where live workers of another launch are in the way, TryLater while it is not clear whether they
        are still live; see Membership.rivals.
        """
        check_host(newcomer.host)
        check_launch(newcomer.launch)
        if newcomer.metrics_address:
            check_address(newcomer.metrics_address, "where metrics are served")
        self._check_open()
        job = self._job(name)
        self._directory.all()  # all are there, or it is too early
        with job.lock:
            if job.ended:
                self._job(name)
                raise NotFound(f"job {name!r} ended")
            self._check_whole(job)
            with job.guard:
                seated = job.membership.seated(newcomer.attempt, time.monotonic())
            if seated is not None:  # a repeat: the answer to the first call was lost, or is on its way
                return self._seat(job, seated)
            with job.guard:
                rank = job.membership.claim(rank, newcomer)
                rivals = job.membership.rivals(rank, newcomer, time.monotonic())
                if rivals is not None:
                    raise refusal(name, rivals, newcomer, self.lease)
                older = job.membership.members.get(rank)
                # Shards remember every rank that there ever was, so that a repeat is known: there must be a last one.
                if rank >= self._limits.workers:
                    raise LimitExceeded(f"a rank must be below max-workers, {self._limits.workers}, got {rank}")
                others = len(job.membership.members.keys() - {rank})
                if others >= self._limits.workers:
                    raise LimitExceeded(f"job {name!r} has {others} workers already: that is the limit max-workers")
                incarnation, key = job.membership.next_incarnation(), secrets.token_bytes(LEASE_KEY_BYTES)
            job.joining = rank, incarnation  # the shards may count it from now on, whoever coordinates then
            self._save()
            clock = admit(job, rank, incarnation, key, self._directory)
            where = newcomer.pid, newcomer.host, newcomer.metrics_address
            known = rank, incarnation, time.monotonic() + self.lease, clock, *where, key, newcomer.attempt
            member = Member(*known, launch=newcomer.launch, since=time.time())
            with job.guard:
                job.membership.join(member)
            job.data.gone(rank, incarnation - 1)
            job.joining = None
            job.joined(rank, clock, None if newcomer.previous is None else newcomer.clock)
            self._save()
            job.announce()
        if older is not None and newcomer.take_over and older.launch != newcomer.launch:
            log.warning(
                "job %s: worker %d (pid %d on %s) is replaced: another launch takes over",
                name,
                rank,
                older.pid,
                older.host,
            )
        log.info(
            "job %s: worker %d joins at clock %d (incarnation %d), metrics at %s",
            *(name, rank, clock, incarnation, newcomer.metrics_address or "no address"),
        )
        return self._seat(job, member)

    def _seat(self, job: CoordinatedJob, member: Member) -> JoinResult:
        state = job.checkpoints.state_of(member.rank) if job.checkpoints is not None else None
        return JoinResult(member, member.clock, job.placement, job.restore_count, state)

    def heartbeat(self, name: str, rank: int, incarnation: int, clock: int, key: bytes = b"") -> int:
        """Renews a lease; answers with the number of live workers."""
        job = self._job(name)
        with job.guard:
            job.membership.heartbeat(rank, incarnation, clock, time.monotonic(), key)
            return len(job.membership.members)

    def lease_data(self, name: str, ask: LeaseRequest) -> BatchLease:
        """Gives a worker batches of an elastic job's data; see DataLeases.lease."""
        return lease_data(self._job(name), ask, self._limits, self._directory)

    def exchange(self, name: str, ask: ExchangeRequest, listener: Listener) -> Callable[[], None]:
        """Takes a worker's value for a round; see JobRounds.exchange."""
        job = self._job(name)

        def check() -> None:
            with job.guard:
                job.membership.check(ask.rank, ask.incarnation, ask.key)
            if job.ended:
                raise NotFound(f"job {name!r} ended")

        return job.rounds.exchange(ask, Terms(self._limits.round_bytes, check, self._save), listener)

    def leave(self, name: str, rank: int, incarnation: int, key: bytes = b"") -> bool:
        """Takes a worker off; True when it was the last one and the job ended."""
        job = self._jobs.get(name)
        if job is None:
            return True
        with job.lock:
            with job.guard:
                member = job.membership.members.get(rank)
                if member is not None and member.incarnation == incarnation:
                    check_key(rank, key, member.key)
                left = job.membership.leave(rank, incarnation)
                empty = not job.membership.members and not job.membership.awaited
            if not left:
                return job.ended
            log.info("job %s: worker %d leaves", name, rank)
            if empty:
                if job.checkpoints is not None:
                    job.checkpoints.last_one()
                self._end(job)
                return True
            retire(job, rank, incarnation, self.shards())
            self._save()
            job.announce()
        return False

    def watch(self, name: str, watcher: Watcher) -> Callable[[], None]:
        """Calls back with the roster now and after every change, and with None at the end. Returns how to stop it."""
        job = self._job(name)
        with job.lock:
            if job.ended:
                raise NotFound(f"job {name!r} ended")
            return job.watch(watcher)

    def _sweep(self) -> None:
        """Retires workers whose lease ran out: nobody waits for the dead."""
        while not self._stopping.wait(min(0.5, self.lease / 10)):
            for job in self.jobs().values():
                # A job in the middle of a join is looked at next time: it must not keep the others waiting.
                if job.lock.acquire(blocking=False):
                    try:
                        self._retire_expired(job)
                    finally:
                        job.lock.release()

    def _retire_expired(self, job: CoordinatedJob) -> None:
        with job.guard:
            late = job.membership.give_up(time.monotonic())
        if late:
            log.warning("job %s: goes on without workers %s, which did not come back", job.spec.name, late)
            for rank in late:
                job.give_up(rank)
            job.announce()
        with job.guard:
            expired = job.membership.expired(time.monotonic())
            for member in expired:
                job.membership.leave(member.rank, member.incarnation)
        for member in expired:
            log.warning(
                "job %s: worker %d (pid %d on %s) is gone: no sign of life for %g s",
                *(job.spec.name, member.rank, member.pid, member.host, self.lease),
            )
            retire(job, member.rank, member.incarnation, self.shards())
            job.announce()
        if job.ghosts and not expired:
            retire_ghosts(job, self.shards())
        if expired:
            self._save()

    def _watch_rounds(self) -> None:
        """Tells workers in a round whom it waits for, and whether one of those waits for their steps."""
        while not self._stopping.wait(LOOK_SECONDS):
            for job in self.jobs().values():
                if job.rounds.waiting():
                    job.rounds.look(self._waits(job))

    def _waits(self, job: CoordinatedJob) -> list[Wait]:
        """The workers of a job that wait on a shard, where there may be some and it is time to look."""
        if job.spec.consistency.max_staleness is None or not job.rounds.look_due():
            return []
        try:
            answers = self._directory.call_all(lambda shard: shard.api.statistics())
        except PSError:
            return []  # a shard is away: the next look is soon
        hosted = [shard.jobs[job.spec.name] for shard in answers if job.spec.name in shard.jobs]
        return [Wait(wait.rank, wait.clock, frozenset(wait.waiting_for)) for each in hosted for wait in each.waits]

    def _drop_orphaned_jobs(self) -> None:
        while not self._stopping.wait(ORPHANS_LOOK_SECONDS):
            self._directory.drop_orphaned_jobs(self.jobs, self._registering)

    # -- coming back -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.keeping is not None:
            self.keeping.save(self.jobs())

    def _check_whole(self, job: CoordinatedJob) -> None:
        lost = job.lost(self.shards())
        if lost:
            raise TryLater(f"job {job.spec.name!r} is being set back to a checkpoint: shard {lost[0]} was started anew")

    def _watch_shards(self) -> None:
        """Sets jobs back of which a shard lost its part, as soon as all shards are there."""
        while not self._stopping.wait(RECOVERY_LOOK_SECONDS):
            if len(self.shards()) == self.shard_count:
                for job in self.jobs().values():
                    lost = job.lost(self.shards())
                    if lost:
                        with job.lock:
                            self._set_back(job, lost)

    def _set_back(self, job: CoordinatedJob, lost: list[int]) -> None:
        shards = self.shards()
        try:
            if self.keeping is None:
                raise NoCheckpoints("these servers were started without --checkpoint-dir")
            self.keeping.recovery.restore(job, shards, lost, any_run=False)
        except (NoCheckpoints, JobMismatch) as error:
            names = ", ".join(map(str, lost))
            self._end(job, f"shard {names} was started anew and lost its part of the job; {error}")
            return
        except PSError as error:
            log.warning("job %s: not set back yet: %s", job.spec.name, error)
            return
        retire_ghosts(job, self.shards())
        self._save()
        job.announce()
