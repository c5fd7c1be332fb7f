"""A job, as its coordinator knows it. All that happens to it is a method here, under the job's own lock.

    workers come and go:        join, leave, expire
    while they train:           members.heartbeat, data.lease, rounds.gather_values, look_at_rounds, save_worker_state
                                checkpoint
    a shard loses its part:     lost, recover
    the job ends:               end

A job is made of parts, each an object that guards itself: members, leased data, rounds, checkpoints. The job's lock
serialises what takes round trips to the shards: joins, departures and rollbacks. Heartbeats, leases and rounds do not
wait for it. Locks are taken in this order: the job's, its data's or its rounds', its members'.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from ps_protocol.errors import JobMismatch, LimitExceeded, NoCheckpoints, NotFound, PSError, TryLater
from ps_protocol.job import JobSpec
from ps_server.coordinator.checkpoints import JobCheckpoints
from ps_server.coordinator.cluster import Cluster, Registry
from ps_server.coordinator.data import JobData
from ps_server.coordinator.members import JobMembers, Removal, Reservation, Roster
from ps_server.coordinator.recovery import Recovery, Restored
from ps_server.coordinator.rounds import JobRounds
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.accounting import StepAccounting
from ps_server.core.membership import JoinRequest, JoinResult, Member, Membership
from ps_server.core.placement import PlacedJob
from ps_server.core.statistics import JobStatistics, Wait
from ps_server.storage.checkpoints import Manifest

log = logging.getLogger("ps_server")

Watcher = Callable[[Roster | None], None]


class CoordinatedJob:
    """One job. Methods may be called from any thread and raise PSError; so may those of its parts.

    members, data, rounds, accounting: its parts
    checkpoints: what makes them; None where there are none
    placed:    the job, and which shard holds which bucket
    shard_processes: by shard, the process that holds the job's part: where another one serves the shard now, it is lost
    The others are what an earlier coordinator, or a checkpoint, has left of the job; by default it is new.
    """

    def __init__(
        self,
        placed: PlacedJob,
        shard_processes: Mapping[int, int],
        cluster: Cluster,
        registry: Registry,
        membership: Membership | None = None,
        pending_removals: frozenset[Removal] = frozenset(),
        restore_count: int = 0,
        accounting: StepAccounting | None = None,
    ) -> None:
        spec = placed.spec
        self.placed, self._shard_processes = placed, dict(shard_processes)
        self._cluster, self._registry = cluster, registry
        self.members = JobMembers(
            spec.name,
            placed.run,
            membership or Membership(spec.world_size, cluster.lease),
            cluster,
            pending_removals,
            restore_count,
        )
        self.accounting = accounting or StepAccounting(spec.consistency.aggregate)
        self.data = JobData(placed, self.members, cluster)
        self.rounds = JobRounds(self.members, cluster, registry.save)
        checkpointing = cluster.checkpointing
        self.checkpoints = (
            JobCheckpoints(placed, self.members, cluster, checkpointing) if checkpointing is not None else None
        )
        self._lock = threading.RLock()
        self._watchers: list[Watcher] = []
        self._ended: NotFound | None = None

    # -- looks -------------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        """What the job is."""
        return self.placed.spec

    @property
    def shard_processes(self) -> Mapping[int, int]:
        """By shard, the process that holds the job's part."""
        return self._shard_processes

    def lost(self) -> list[int]:
        """Returns the shards that are served by another process than the one that held their part of the job."""
        shards = self._cluster.shards.known()
        return [index for index, shard in shards.items() if self._shard_processes.get(index) != shard.process]

    def statistics(self) -> JobStatistics:
        """Returns how the job is."""
        _, world_size, started = self.members.roster()
        return JobStatistics(
            name=self.spec.name,
            consistency=self.spec.consistency,
            world_size=world_size,
            started=started,
            parameter_bytes=self.placed.nbytes,
            buckets=len(self.placed.placement),
            imbalance=self.placed.imbalance,
            restore_count=self.members.restore_count,
            lost_steps=self.accounting.lost_steps,
            redone_steps=self.accounting.redone_steps,
            rejoining=self.members.rejoining(),
            workers=tuple(self.members.all()),
            now=self._cluster.clock.now(),
            loaders=self.data.progress(),
            checkpoints=self.checkpoints.statistics() if self.checkpoints is not None else None,
            run=self.placed.run,
        )

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Calls back with the roster now and after every change, and with None at the end. Returns how to stop it."""
        with self._lock:
            self._check_not_ended()
            self._watchers.append(watcher)
            watcher(self.members.roster())

        def stop() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

        return stop

    def _announce(self) -> None:
        """Tells the watchers, and the workers in a round, which workers are live now."""
        for watcher in self._watchers:
            watcher(self.members.roster())
        self.rounds.changed()

    def _check_not_ended(self) -> None:
        if self._ended is not None:
            raise NotFound(str(self._ended))  # a new one: an error that is raised holds on to its frames

    # -- workers come and go -----------------------------------------------------------------------------------------

    def join(self, rank: int | None, request: JoinRequest) -> JoinResult:
        """Makes the caller a live worker; returns its place and the clock it starts from.

        Raises JobInUse where live workers of another launch are in the way, TryLater while it is not clear whether they
        are still live; see Membership.rivals.
        """
        with self._lock:
            self._check_not_ended()
            lost = self.lost()
            if lost:
                raise TryLater(
                    f"job {self.spec.name!r} is being rolled back to a checkpoint: shard {lost[0]} was started anew"
                )
            repeated = self.members.repeated(request)
            if repeated is not None:
                return self._result(repeated)
            reservation = self.members.reserve(rank, request)
            self._registry.save()
            member = self._add(reservation, request)
            before = None if request.previous is None else request.clock
            self.accounting.joined(member.rank, member.clock, before)
            self._registry.save()
            self._announce()
        self._log_join(member, reservation.older, request)
        return self._result(member)

    def _add(self, reservation: Reservation, request: JoinRequest) -> Member:
        try:
            member = self.members.add(reservation, request)
        except PSError:
            self.members.abort_join(reservation)
            self.data.gone(reservation.rank, reservation.incarnation)
            self._registry.save()
            if reservation.older is not None:
                self._announce()
            raise
        self.data.gone(member.rank, member.incarnation - 1)
        return member

    def _log_join(self, member: Member, older: Member | None, request: JoinRequest) -> None:
        name, rank = self.spec.name, member.rank
        if older is not None and request.take_over and older.launch != request.launch:
            log.warning(
                "job %s: worker %d (pid %d on %s) is replaced: another launch takes over",
                *(name, rank, older.pid, older.host),
            )
        log.info(
            "job %s: worker %d joins at clock %d (incarnation %d), metrics at %s",
            *(name, rank, member.clock, member.incarnation, request.metrics_address or "no address"),
        )

    def _result(self, member: Member) -> JoinResult:
        state = self.checkpoints.state_of(member.rank) if self.checkpoints is not None else None
        placed = self.placed
        return JoinResult(member, member.clock, list(placed.placement), self.members.restore_count, state, placed.run)

    def leave(self, rank: int, incarnation: int, key: bytes) -> bool:
        """Takes a worker off. Returns True when it was the last one and the job ended."""
        with self._lock:
            if not self.members.leave(rank, incarnation, key):
                return self._ended is not None
            log.info("job %s: worker %d leaves", self.spec.name, rank)
            if self.members.empty():
                if self.checkpoints is not None:
                    self.checkpoints.request_last(self._cluster.timing.last_checkpoint)
                self.end()
                return True
            self._remove(rank, incarnation)
            self._registry.save()
        return False

    def _remove(self, rank: int, incarnation: int) -> None:
        self.members.remove(rank, incarnation)
        self.data.gone(rank, incarnation)
        self._announce()

    def expire(self) -> None:
        """Takes off the workers whose lease ran out, and stops waiting for those that did not come back in time.

        Does nothing in the middle of a join: one job must not keep the others waiting.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            late = self.members.stop_waiting()
            if late:
                log.warning("job %s: continues without workers %s, which did not come back", self.spec.name, late)
                for rank in late:
                    self.accounting.give_up(rank)
                self._announce()
            expired = self.members.take_expired()
            for member in expired:
                log.warning(
                    "job %s: worker %d (pid %d on %s) is gone: no sign of life for %g s",
                    *(self.spec.name, member.rank, member.pid, member.host, self._cluster.lease),
                )
                self._remove(member.rank, member.incarnation)
            if expired:
                self._registry.save()
            else:
                self.members.retry_removals()
        finally:
            self._lock.release()

    # -- while they train --------------------------------------------------------------------------------------------

    def look_at_rounds(self) -> None:
        """Tells workers in a round which others it waits for, and whether one of those waits for their steps."""
        if self.rounds.waiting():
            self.rounds.look(self._waits())

    def _waits(self) -> list[Wait]:
        """Returns the workers that wait on a shard, where there may be some and it is time to look."""
        if self.spec.consistency.max_staleness is None or not self.rounds.look_due():
            return []
        try:
            answers = self._cluster.shards.call_all(lambda shard: shard.api.statistics())
        except PSError:
            return []  # a shard is away: the next look is soon
        hosted = [shard.jobs[self.spec.name] for shard in answers if self.spec.name in shard.jobs]
        return [wait for job in hosted for wait in job.waits]

    def save_worker_state(self, rank: int, incarnation: int, key: bytes, clock: int, state: bytes) -> None:
        """Keeps a live worker's own part of a checkpoint. Raises LimitExceeded if it is too large."""
        limit = self._cluster.limits.state_bytes
        if len(state) > limit:
            raise LimitExceeded(f"max-state-bytes is {limit}, got a worker's state of {len(state)}")
        self.members.check(rank, incarnation, key)
        if self.checkpoints is not None:
            self.checkpoints.save_state(rank, clock, state)

    def checkpoint(self) -> Manifest:
        """Makes a checkpoint now; see JobCheckpoints.request. Raises NoCheckpoints where there are none."""
        if self.checkpoints is None:
            raise NoCheckpoints("these servers were started without --checkpoint-dir")
        return self.checkpoints.request(self._cluster.timing.asked_checkpoint)

    # -- a shard loses its part --------------------------------------------------------------------------------------

    def recover(self, recovery: Recovery | None) -> None:
        """Rolls the job back to its last checkpoint if a shard lost its part of it, and ends it if there is none."""
        if not self.lost():
            return
        with self._lock:
            lost = self.lost()
            if not lost or self._ended is not None:
                return
            try:
                if recovery is None:
                    raise NoCheckpoints("these servers were started without --checkpoint-dir")
                self._rollback(recovery, lost)
            except (NoCheckpoints, JobMismatch) as error:
                names = ", ".join(map(str, lost))
                self.end(f"shard {names} was started anew and lost its part of the job; {error}")
            except PSError as error:
                log.warning("job %s: not rolled back yet: %s", self.spec.name, error)
            else:
                self.members.retry_removals()
                self._registry.save()
                self._announce()

    def _rollback(self, recovery: Recovery, lost: list[int]) -> None:
        """Changes nothing for workers if it raises, or all are fenced: the same call may be made again."""
        if self.checkpoints is not None:
            self.checkpoints.abandon()
        everywhere, shards = self.spec.consistency.aggregate, self._cluster.shards.known()
        keep = [] if everywhere else [shard for index, shard in shards.items() if index not in lost]
        heard = self._heard(keep)
        back = [shard for shard in shards.values() if shard not in keep]
        restored = recovery.restore(self.placed, back, self.members.last_incarnation())
        members = self.members.rollback(everywhere, restored.last_incarnation)
        self.accounting.rolled_back(restored.reached, heard)
        self.continue_from(restored, shards)
        log.warning(
            "job %s: rolled back to checkpoint %s, clock %d; %d workers are to join again",
            *(self.spec.name, restored.manifest.name, restored.manifest.clock, len(members)),
        )

    def _heard(self, shards: list[RegisteredShard]) -> dict[int, int]:
        """Returns, by rank, how far each live worker is: as it said last, or as shards that keep theirs know better."""
        heard = {member.rank: member.clock for member in self.members.all()}
        for shard in shards:
            with contextlib.suppress(PSError):
                clocks = shard.api.statistics().clocks(self.spec.name)
                heard = {rank: max(clock, clocks.get(rank, 0)) for rank, clock in heard.items()}
        return heard

    def continue_from(self, restored: Restored, shards: Mapping[int, RegisteredShard]) -> None:
        """Notes that shards hold the job as a checkpoint has it."""
        self._shard_processes = {index: shard.process for index, shard in shards.items()}
        self.data.rolled_back()
        if self.checkpoints is not None:
            self.checkpoints.rolled_back(restored.manifest, restored.states)

    # -- the job ends ------------------------------------------------------------------------------------------------

    def end(self, why: str = "") -> None:
        """Ends the job, also if workers take part, and gives its memory back on every shard."""
        name = self.spec.name
        reason = f": {why}" if why else ""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = NotFound(f"job {name!r} ended{reason}")
            if self.checkpoints is not None:
                self.checkpoints.stop()
            try:
                self._cluster.shards.call_all(lambda shard: shard.api.drop_job(name, self.placed.run))
            except PSError as error:
                log.warning("job %s: ended, but not everywhere: %s", name, error)
            self._registry.forget(name, why)
            for watcher in self._watchers:
                watcher(None)
            self.rounds.end(self._ended)
        log.info("job %s: ended%s", name, reason)

    def stop(self) -> None:
        """Ends the streams of workers: the coordinator stops, and the job goes on."""
        if self.checkpoints is not None:
            self.checkpoints.stop()
        for watcher in list(self._watchers):
            watcher(None)
        self.rounds.end(TryLater("the coordinator stops"))
