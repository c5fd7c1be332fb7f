"""The coordinator: jobs, who takes part in them, and where their buckets are.

It is not on the data path: workers reach the shards by themselves once they have the shard map. It admits a worker in
two rounds over the shards, so that every shard counts the newcomer from the same clock:

    1. every shard counts the worker from its own frontier on, and says what that is: nothing that would need the
       newcomer completes from here on;
    2. the highest frontier becomes the clock at which the worker starts, everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ps_protocol.credentials import PLAINTEXT, Access
from ps_protocol.errors import (
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NoCheckpoints,
    NotFound,
    PSError,
    TryLater,
)
from ps_protocol.job import JobSpec, difference
from ps_server import durable
from ps_server.checkpointing import CheckpointPolicy, JobCheckpoints, JobView
from ps_server.checkpoints import CheckpointStore, Manifest
from ps_server.checks import check_address, check_host, check_job_spec
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import Grant
from ps_server.core.membership import Member, Newcomer, Seat, check_key
from ps_server.data_leases import JobFace, LeaseRequest
from ps_server.jobs import CoordinatedJob, Shard, Watcher, job_that_ran, make_job
from ps_server.limits import DEFAULTS, Limits
from ps_server.messages import job_spec_from_data
from ps_server.recovery import Recovery
from ps_server.shard_client import ShardClient, on_all

log = logging.getLogger("ps_server")

DEFAULT_LEASE_SECONDS = 10.0
LEASE_KEY_BYTES = 16
CHECKPOINT_SECONDS = 300.0
LAST_CHECKPOINT_SECONDS = 10.0
RECOVERY_LOOK_SECONDS = 0.25
REASONS_KEPT = 64
# A shard calls in every SHARD_CALL_SECONDS; one that was silent for SHARD_LOST_SECONDS may be replaced.
SHARD_CALL_SECONDS = 2.0
SHARD_LOST_SECONDS = 10.0


class Coordinator:
    """All jobs of a cluster. Methods may be called from any thread and raise PSError.

    lease:  seconds for which a worker counts as live without a heartbeat
    access: what the shards are called with
    policy: where checkpoints go and when they are made; None: there are none
    """

    def __init__(
        self,
        shard_count: int,
        lease: float = DEFAULT_LEASE_SECONDS,
        access: Access = PLAINTEXT,
        limits: Limits = DEFAULTS,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.shard_count = shard_count
        self.lease = lease
        self._access = access
        self._limits = limits
        self._shards: dict[int, Shard] = {}
        self._jobs: dict[str, CoordinatedJob] = {}
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._pool = ThreadPoolExecutor(max(4, shard_count), "shards")
        self._policy = policy
        self._store = CheckpointStore(policy.directory) if policy is not None else None
        self.recovery = Recovery(self._store, self._pool) if self._store is not None else None
        self._saving = threading.Lock()
        self._why_ended: dict[str, str] = {}  # of the last jobs that ended otherwise than by their workers' leaving
        self._draining = False
        self._stopping = threading.Event()
        if policy is not None and policy.restore:
            self._take_up(policy.directory)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("leases", self._sweep), ("recovery", self._watch_shards))
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
        self._pool.shutdown(wait=True)
        for shard in self._shards.values():
            shard.client.close()

    # -- shards ------------------------------------------------------------------------------------------------------

    def register_shard(self, index: int, address: str, metrics_address: str, pid: int, process: int) -> None:
        """Makes a shard known, or renews it."""
        if not 0 <= index < self.shard_count:
            raise InvalidRequest(f"shard index must be below {self.shard_count}, got {index}")
        check_address(address, "a shard's address")
        if metrics_address:
            check_address(metrics_address, "where metrics are served")
        now = time.monotonic()
        with self._lock:
            known = self._shards.get(index)
            # Nobody else can listen where a live process does: at the same address it is the shard, started again.
            if (
                known is not None
                and known.process != process
                and known.client.address != address
                and now - known.seen < SHARD_LOST_SECONDS
            ):
                raise TryLater(f"shard {index} is already served by process {known.pid} at {known.client.address}")
            if known is None or known.process != process:
                log.info("shard %d at %s", index, address)
                client = ShardClient(index, address, self._access)
            else:
                client = known.client
            self._shards[index] = Shard(client, metrics_address, pid, process, now)

    def shards(self) -> dict[int, Shard]:
        """The shards that have called in, by index."""
        with self._lock:
            return dict(self._shards)

    def _clients(self) -> list[ShardClient]:
        shards = self.shards()
        missing = [index for index in range(self.shard_count) if index not in shards]
        if missing:
            raise TryLater(f"waiting for shards {', '.join(map(str, missing))} of {self.shard_count} to start")
        return [shards[index].client for index in range(self.shard_count)]

    # -- jobs --------------------------------------------------------------------------------------------------------

    def register_job(self, spec: JobSpec) -> tuple[CoordinatedJob, bool]:
        """The job with this spec, and whether this call made it. Raises JobMismatch naming what differs."""
        check_job_spec(spec, self._limits)
        clients = self._clients()
        self._check_open()
        with self._registering:
            known = self._jobs.get(spec.name)
            if known is not None:
                found = difference(known.spec, spec)
                if found is not None:
                    raise JobMismatch(f"job {spec.name!r} exists and differs: {found}")
                return known, False
            if len(self._jobs) >= self._limits.jobs:
                raise LimitExceeded(f"there are {self._limits.jobs} jobs already: that is the limit max-jobs")
            job = self._restored_job(spec) or self._new_job(spec, clients)
            with self._lock:
                self._jobs[spec.name] = job
            self._why_ended.pop(spec.name, None)
            self._save()
        log.info("job %s: %s, %d bytes in %d buckets", spec.name, spec.consistency, job.bytes, len(job.placement))
        return job, True

    def _new_job(self, spec: JobSpec, clients: list[ShardClient]) -> CoordinatedJob:
        job = make_job(spec, self.shards(), self.shard_count, self.lease, secrets.token_hex(8))
        checkpoints = self._checkpoints_of(job)
        try:
            on_all(self._pool, clients, lambda client: client.create_job(spec, job.buckets_of(client.index)))
        except PSError:
            # All or none: what some shards made room for would be nobody's.
            with contextlib.suppress(PSError):
                on_all(self._pool, clients, lambda client: client.drop_job(spec.name))
            raise
        self._begin_checkpoints(job, checkpoints)
        return job

    def _restored_job(self, spec: JobSpec) -> CoordinatedJob | None:
        """The job as the last checkpoint of its name has it, where jobs are to go on from there and there is one."""
        if self._policy is None or not self._policy.restore or self._store is None or self.recovery is None:
            return None
        if not self._store.names(spec.name):
            return None
        job = make_job(spec, self.shards(), self.shard_count, self.lease, secrets.token_hex(8))
        job.checkpoints = self._checkpoints_of(job)
        manifest = self.recovery.restore(job, self.shards(), self.shards(), any_run=True)
        job.run, job.restore_count = manifest.run, manifest.restore_count + 1
        self._begin_checkpoints(job, job.checkpoints)
        return job

    def _checkpoints_of(self, job: CoordinatedJob) -> JobCheckpoints | None:
        """What will make the job's checkpoints. Raises InvalidRequest for a name that is no directory's."""
        if self._store is None or self._policy is None:
            return None
        view = JobView(
            spec=job.spec,
            run=lambda: job.run,
            placement=lambda: job.placement,
            clients=self._clients,
            live=lambda: {member.rank: member.clock for member in job.members()},
            counts=job.counts,
        )
        return JobCheckpoints(view, self._store, self._policy, self.shard_count)

    def _begin_checkpoints(self, job: CoordinatedJob, checkpoints: JobCheckpoints | None) -> None:
        job.checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.start()

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
        until = time.monotonic() + seconds
        checkpoints = [job.checkpoints for job in self.jobs().values() if job.checkpoints is not None]
        with ThreadPoolExecutor(max(1, len(checkpoints)), "drain") as pool:
            for done in [pool.submit(each.request, max(0.0, until - time.monotonic())) for each in checkpoints]:
                error = done.exception()
                if error is not None:
                    log.warning("stopping without a last checkpoint: %s", error)

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
            on_all(self._pool, self._clients(), lambda client: client.drop_job(job.spec.name))
        except PSError as error:
            log.warning("job %s: ended, but not everywhere: %s", job.spec.name, error)
        with self._lock:
            self._jobs.pop(job.spec.name, None)
        self._save()
        for watcher in job.watchers:
            watcher(None)
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

    def join(self, name: str, rank: int | None, newcomer: Newcomer) -> Seat:
        """Makes the caller a live worker; answers with its place and the clock it starts from."""
        check_host(newcomer.host)
        if newcomer.metrics_address:
            check_address(newcomer.metrics_address, "where metrics are served")
        self._check_open()
        job = self._job(name)
        clients = self._clients()
        with job.lock:
            if job.ended:
                self._job(name)
                raise NotFound(f"job {name!r} ended")
            self._check_whole(job)
            with job.guard:
                rank = job.membership.claim(rank, newcomer)
                others = len(job.membership.members.keys() - {rank})
                if others >= self._limits.workers:
                    raise LimitExceeded(f"job {name!r} has {others} workers already: that is the limit max-workers")
                incarnation, key = job.membership.next_incarnation(), secrets.token_bytes(LEASE_KEY_BYTES)
            try:
                frontiers = on_all(self._pool, clients, lambda c: c.admit(name, rank, incarnation, None, key))
                clock = max(frontiers)
                on_all(self._pool, clients, lambda c: c.admit(name, rank, incarnation, clock, key))
            except PSError:
                self._retire(job, rank, incarnation)
                raise
            where = newcomer.pid, newcomer.host, newcomer.metrics_address
            member = Member(rank, incarnation, time.monotonic() + self.lease, clock, *where, key)
            with job.guard:
                job.membership.join(member)
            job.data.gone(rank, incarnation - 1)
            job.account(rank, newcomer.clock)
            self._save()
            self._announce(job)
        log.info(
            "job %s: worker %d joins at clock %d (incarnation %d), metrics at %s",
            *(name, rank, clock, incarnation, newcomer.metrics_address or "no address"),
        )
        state = job.checkpoints.state_of(rank) if job.checkpoints is not None else None
        return Seat(member, clock, job.placement, job.restore_count, state)

    def heartbeat(self, name: str, rank: int, incarnation: int, clock: int, key: bytes = b"") -> int:
        """Renews a lease; answers with the number of live workers."""
        job = self._job(name)
        with job.guard:
            job.membership.heartbeat(rank, incarnation, clock, time.monotonic(), key)
            return len(job.membership.members)

    def lease_data(self, name: str, ask: LeaseRequest) -> Grant:
        """Gives a worker batches of an elastic job's data; see DataLeases.lease."""
        job = self._job(name)

        def ghosts() -> set[tuple[int, int]]:
            return {(rank, incarnation) for _, rank, incarnation in set(job.ghosts)}

        def live() -> int:
            with job.guard:
                job.membership.check(ask.rank, ask.incarnation, ask.key)
                return len(job.membership.members)

        if job.spec.world_size:
            raise InvalidRequest(f"job {name!r} has a world size: its workers divide the data by their ranks")
        return job.data.lease(ask, JobFace(self._limits, live, ghosts, lambda: self._committed(job)))

    def _committed(self, job: CoordinatedJob) -> list[Committed]:
        """What each shard that has a say has committed of a job's data."""
        self._check_whole(job)
        found = on_all(self._pool, self._clients(), lambda client: client.committed(job.spec.name))
        return [committed for committed in found if committed is not None]

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
                self._last_checkpoint(job)
                self._end(job)
                return True
            self._retire(job, rank, incarnation)
            self._save()
            self._announce(job)
        return False

    def _last_checkpoint(self, job: CoordinatedJob) -> None:
        """What the job ends with, for who wants to export it or to go on."""
        if job.checkpoints is not None:
            try:
                job.checkpoints.request(LAST_CHECKPOINT_SECONDS, final=True)
            except PSError as error:
                log.warning("job %s: ends without a last checkpoint: %s", job.spec.name, error)

    def watch(self, name: str, watcher: Watcher) -> Callable[[], None]:
        """Calls back with the roster now and after every change, and with None at the end. Returns how to stop it."""
        job = self._job(name)
        with job.lock:
            if job.ended:
                raise NotFound(f"job {name!r} ended")
            job.watchers.append(watcher)
            watcher(job.roster())

        def stop() -> None:
            with job.lock:
                if watcher in job.watchers:
                    job.watchers.remove(watcher)

        return stop

    def _announce(self, job: CoordinatedJob) -> None:
        for watcher in job.watchers:
            watcher(job.roster())

    def _retire(self, job: CoordinatedJob, rank: int, incarnation: int) -> None:
        """Has every shard stop counting a worker."""
        job.ghosts |= {(index, rank, incarnation) for index in self.shards()}
        self._retire_ghosts(job)
        job.data.gone(rank, incarnation)

    def _retire_ghosts(self, job: CoordinatedJob) -> None:
        """Tells the shards whom to retire, until each has heard: a ghost would be waited for for ever."""
        shards = self.shards()
        for ghost in sorted(job.ghosts):
            index, rank, incarnation = ghost
            try:
                shards[index].client.retire(job.spec.name, rank, incarnation)
            except NotFound:
                pass  # a new process, which has never heard of the worker
            except PSError as error:
                log.warning("job %s: worker %d is not retired yet: %s", job.spec.name, rank, error)
                continue
            job.ghosts.discard(ghost)

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
            self._announce(job)
        with job.guard:
            expired = job.membership.expired(time.monotonic())
            for member in expired:
                job.membership.leave(member.rank, member.incarnation)
        for member in expired:
            log.warning(
                "job %s: worker %d (pid %d on %s) is gone: no sign of life for %g s",
                *(job.spec.name, member.rank, member.pid, member.host, self.lease),
            )
            self._retire(job, member.rank, member.incarnation)
            self._announce(job)
        if job.ghosts and not expired:
            self._retire_ghosts(job)
        if expired:
            self._save()

    # -- coming back -------------------------------------------------------------------------------------------------

    def _take_up(self, directory: Path) -> None:
        """Takes the jobs up again that ran when a coordinator with this directory ended."""
        for name, kept in durable.load(directory).items():
            try:
                spec = job_spec_from_data(kept.spec)
                check_job_spec(spec, self._limits)
                job = job_that_ran(kept, spec, self.shard_count, self.lease, time.monotonic())
                self._begin_checkpoints(job, self._checkpoints_of(job))
            except PSError as error:
                log.error("job %s: cannot be taken up again: %s", name, error)
                continue
            self._jobs[name] = job
            log.info("job %s: taken up again, with %d workers", name, len(job.members()))

    def _save(self) -> None:
        """Keeps what a coordinator after this one needs."""
        if self._policy is None:
            return
        with self._saving:
            try:
                durable.save(self._policy.directory, {name: job.durable() for name, job in self.jobs().items()})
            except OSError as error:
                log.error("%s cannot be written: %s", self._policy.directory / durable.FILE, error.strerror)

    def _lost_shards(self, job: CoordinatedJob) -> list[int]:
        """The shards that are served by another process than the one that held their part of the job."""
        return [index for index, shard in self.shards().items() if job.held_by.get(index) != shard.process]

    def _check_whole(self, job: CoordinatedJob) -> None:
        lost = self._lost_shards(job)
        if lost:
            raise TryLater(f"job {job.spec.name!r} is being set back to a checkpoint: shard {lost[0]} was started anew")

    def _watch_shards(self) -> None:
        """Sets jobs back of which a shard lost its part, as soon as all shards are there."""
        while not self._stopping.wait(RECOVERY_LOOK_SECONDS):
            if len(self.shards()) == self.shard_count:
                for job in self.jobs().values():
                    lost = self._lost_shards(job)
                    if lost:
                        with job.lock:
                            self._set_back(job, lost)

    def _set_back(self, job: CoordinatedJob, lost: list[int]) -> None:
        shards = self.shards()
        try:
            if self.recovery is None:
                raise NoCheckpoints("these servers were started without --checkpoint-dir")
            self.recovery.restore(job, shards, lost, any_run=False)
        except (NoCheckpoints, JobMismatch) as error:
            names = ", ".join(map(str, lost))
            self._end(job, f"shard {names} was started anew and lost its part of the job; {error}")
            return
        except PSError as error:
            log.warning("job %s: not set back yet: %s", job.spec.name, error)
            return
        job.data.restored()
        self._retire_ghosts(job)
        self._save()
        self._announce(job)
