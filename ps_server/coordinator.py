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
from dataclasses import dataclass, field

from ps_protocol.credentials import PLAINTEXT, Access
from ps_protocol.errors import InvalidRequest, JobMismatch, LimitExceeded, NotFound, PSError, TryLater
from ps_protocol.job import JobSpec, difference
from ps_protocol.layout import bucket_layout
from ps_server.checks import check_address, check_host, check_job_spec
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import Grant
from ps_server.core.membership import Member, Membership, check_key
from ps_server.core.placement import imbalance, place
from ps_server.data_leases import JobData, LeaseRequest
from ps_server.limits import DEFAULTS, Limits
from ps_server.shard_client import ShardClient, on_all

log = logging.getLogger("ps_server")

DEFAULT_LEASE_SECONDS = 10.0
LEASE_KEY_BYTES = 16
# A shard calls in every SHARD_CALL_SECONDS; one that was silent for SHARD_LOST_SECONDS may be replaced.
SHARD_CALL_SECONDS = 2.0
SHARD_LOST_SECONDS = 10.0

Roster = tuple[list[int], int, bool]
Watcher = Callable[[Roster | None], None]


@dataclass(frozen=True)
class Shard:
    """A shard that has called in."""

    client: ShardClient
    metrics_address: str
    pid: int
    process: int
    seen: float


@dataclass
class CoordinatedJob:
    """A job, as the coordinator holds it.

    lock:  serialises joins and departures, which take round trips to the shards
    guard: guards `membership` for the moment of a look or a change, so that heartbeats never wait for a join
    """

    spec: JobSpec
    placement: list[int]
    bytes: int
    imbalance: float
    membership: Membership
    data: JobData
    lock: threading.RLock = field(default_factory=threading.RLock)
    guard: threading.Lock = field(default_factory=threading.Lock)
    ghosts: set[tuple[int, int, int]] = field(default_factory=set)  # (shard, rank, incarnation) still to be retired
    watchers: list[Watcher] = field(default_factory=list)
    ended: bool = False

    def roster(self) -> Roster:
        """Live ranks, declared world size, whether training has started."""
        with self.guard:
            return sorted(self.membership.members), self.spec.world_size, self.membership.started

    def members(self) -> list[Member]:
        """The live workers, by rank."""
        with self.guard:
            return sorted(self.membership.members.values(), key=lambda member: member.rank)


class Coordinator:
    """All jobs of a cluster. Methods may be called from any thread and raise PSError.

    lease:  seconds for which a worker counts as live without a heartbeat
    access: what the shards are called with
    """

    def __init__(
        self,
        shard_count: int,
        lease: float = DEFAULT_LEASE_SECONDS,
        access: Access = PLAINTEXT,
        limits: Limits = DEFAULTS,
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
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="leases", daemon=True)
        self._sweeper.start()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends the threads and tells watchers that nothing more comes."""
        self._stopping.set()
        self._sweeper.join()
        for job in self.jobs().values():
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
            if known is not None and known.process != process and now - known.seen < SHARD_LOST_SECONDS:
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
        with self._registering:
            known = self._jobs.get(spec.name)
            if known is not None:
                found = difference(known.spec, spec)
                if found is not None:
                    raise JobMismatch(f"job {spec.name!r} exists and differs: {found}")
                return known, False
            if len(self._jobs) >= self._limits.jobs:
                raise LimitExceeded(f"there are {self._limits.jobs} jobs already: that is the limit max-jobs")
            job = self._make_job(spec, clients)
            with self._lock:
                self._jobs[spec.name] = job
        log.info("job %s: %s, %d bytes in %d buckets", spec.name, spec.consistency, job.bytes, len(job.placement))
        return job, True

    def _make_job(self, spec: JobSpec, clients: list[ShardClient]) -> CoordinatedJob:
        layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        sizes = [bucket.nbytes for bucket in layout.buckets]
        placement = place(sizes, self.shard_count)
        mine = {shard: [b for b, s in enumerate(placement) if s == shard] for shard in range(self.shard_count)}
        try:
            on_all(self._pool, clients, lambda client: client.create_job(spec, mine[client.index]))
        except PSError:
            # All or none: what some shards made room for would be nobody's.
            with contextlib.suppress(PSError):
                on_all(self._pool, clients, lambda client: client.drop_job(spec.name))
            raise
        membership = Membership(spec.world_size, self.lease)
        data = JobData(spec.name, self._limits, lambda: self._committed(spec.name))
        uneven = imbalance(sizes, placement, self.shard_count)
        return CoordinatedJob(spec, placement, layout.nbytes, uneven, membership, data)

    def end_job(self, name: str) -> None:
        """Ends a job whoever takes part, and gives its memory back on every shard."""
        job = self._job(name)
        with job.lock:
            self._end(job)

    def _end(self, job: CoordinatedJob) -> None:
        if job.ended:
            return
        job.ended = True
        try:
            on_all(self._pool, self._clients(), lambda client: client.drop_job(job.spec.name))
        except PSError as error:
            log.warning("job %s: ended, but not everywhere: %s", job.spec.name, error)
        with self._lock:
            self._jobs.pop(job.spec.name, None)
        for watcher in job.watchers:
            watcher(None)
        log.info("job %s: ended", job.spec.name)

    def jobs(self) -> dict[str, CoordinatedJob]:
        """The jobs, by name."""
        with self._lock:
            return dict(self._jobs)

    def _job(self, name: str) -> CoordinatedJob:
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"no job {name!r} here")
        return job

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, name: str, rank: int | None, pid: int, host: str, metrics_address: str) -> tuple[Member, int]:
        """Makes the caller a live worker; answers with its place and the clock it starts from."""
        check_host(host)
        if metrics_address:
            check_address(metrics_address, "where metrics are served")
        job = self._job(name)
        clients = self._clients()
        with job.lock:
            if job.ended:
                raise NotFound(f"job {name!r} ended")
            with job.guard:
                rank = job.membership.claim(rank)
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
            expires = time.monotonic() + self.lease
            member = Member(rank, incarnation, expires, clock, pid, host, metrics_address, key)
            with job.guard:
                job.membership.join(member)
            job.data.gone(rank, incarnation - 1)
            self._announce(job)
        log.info(
            "job %s: worker %d joins at clock %d (incarnation %d), metrics at %s",
            *(name, rank, clock, incarnation, metrics_address or "no address"),
        )
        return member, clock

    def heartbeat(self, name: str, rank: int, incarnation: int, clock: int, key: bytes = b"") -> int:
        """Renews a lease; answers with the number of live workers."""
        job = self._job(name)
        with job.guard:
            job.membership.heartbeat(rank, incarnation, clock, time.monotonic(), key)
            return len(job.membership.members)

    def lease_data(self, name: str, ask: LeaseRequest) -> Grant:
        """Gives a worker batches of an elastic job's data; see DataLeases.lease."""
        job = self._job(name)

        def live() -> int:
            with job.guard:
                job.membership.check(ask.rank, ask.incarnation, ask.key)
                return len(job.membership.members)

        if job.spec.world_size:
            raise InvalidRequest(f"job {name!r} has a world size: its workers divide the data by their ranks")
        return job.data.lease(ask, live, {(rank, incarnation) for _, rank, incarnation in set(job.ghosts)})

    def _committed(self, name: str) -> list[Committed]:
        """What each shard that has a say has committed of a job's data."""
        found = on_all(self._pool, self._clients(), lambda client: client.committed(name))
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
                left, empty = job.membership.leave(rank, incarnation), not job.membership.members
            if not left:
                return job.ended
            log.info("job %s: worker %d leaves", name, rank)
            if empty:
                self._end(job)
                return True
            self._retire(job, rank, incarnation)
            self._announce(job)
        return False

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
