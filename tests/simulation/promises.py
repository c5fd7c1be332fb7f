"""What must hold, whatever goes wrong: each promise is a method here, and says so in its first line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ps_protocol.messages.workers import group_state
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.state_file import StateFile
from ps_server.storage.checkpoints import MANIFEST, CheckpointStore
from ps_server.storage.manifest import Manifest
from tests.chaos.oracle import Violation
from tests.simulation.processes import Host
from tests.simulation.runs import NAME, Run
from tests.simulation.schedules import is_state_of
from tests.simulation.servers import ShardProcess
from tests.simulation.supervision import DIRECTORY

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.worker import Place, Worker

LOOK_SECONDS = 0.5
REMOVED_WITHIN = 3.0  # after a lease is over, on every healthy shard
CALM_SECONDS = 15.0
BESIDE_SECONDS = 5.0  # and a lease: in which a job makes a step that has nothing to do with what goes wrong
SETTLED_SECONDS = 5.0  # after which a worker that joined is in the checkpoints that are written


class Promises:
    """Looks at a cluster while it runs, and when all have finished."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._dead_since: dict[tuple[str, int, int, int], float] = {}  # by job, shard process, rank, incarnation
        # Of the job beside: when its worker 0 ended its last step, since when it should end one, on which shard.
        self._beside: tuple[float, float, ShardProcess | None] = 0.0, 0.0, None
        self._store = CheckpointStore(DIRECTORY, cluster.servers.disks[0])
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Looks from now on."""
        for disk in self._cluster.servers.disks:
            disk.on_rename = self._renamed
        self._look()

    def _look(self) -> None:
        self._world.at(LOOK_SECONDS, self._look)
        for run in self._cluster.running():
            run.saved = run.saved or self._has_checkpoint(run)
        self.no_thread_dies()
        self.no_call_fails_unexpectedly()
        self.the_dead_are_waited_for_no_longer_than_a_lease()
        self.a_job_beside_goes_on()

    def _broken(self, kind: str, said: str, **where: Any) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._cluster.violated(Violation(kind, said, {**where, "at": round(self._world.now - 1000, 3)}))

    # -- at any time -------------------------------------------------------------------------------------------------

    def no_thread_dies(self) -> None:
        """A thread of a server runs until it is told to end, and each round of a background thread gets to its end."""
        for host, name, error in self._world.dead_threads:
            self._broken("thread died", f"{host.name}: {name}: {type(error).__name__}: {error}")
        for host, name, error in self._world.failed_rounds:
            self._broken("round failed", f"{host.name}: {name}: {type(error).__name__}: {error}")

    def no_call_fails_unexpectedly(self) -> None:
        """A call ends with an answer or an error that is meant."""
        for call, error in self._cluster.network.unexpected:
            self._broken("internal error", f"{call}: {type(error).__name__}: {error}")
        for process in self._cluster.servers.shards:
            for job in process.hosted().values():
                if job.failure is not None:
                    self._broken("internal error", f"{process.host.name}: {job.failure}")

    def the_dead_are_waited_for_no_longer_than_a_lease(self) -> None:
        """A worker that is dead is off each healthy shard soon after its lease, also while another shard hangs."""
        cluster, since = self._cluster, dict[tuple[str, int, int, int], float]()
        coordinator = cluster.servers.coordinator.host
        # The coordinator writes a removal to its disk before it tells the shards.
        is_slow = cluster.servers.disks[0].is_disturbed
        if is_slow or cluster.network.weather.loss or not self._is_healthy(coordinator, 2 * cluster.lease):
            self._dead_since = {}
            return
        for process in cluster.servers.shards:
            if not self._is_healthy(process.host, 3.0):
                continue
            for name, job in process.hosted().items():
                if self.job(name) is None:
                    continue
                for rank, live in job.partition.roster.items():
                    if self._is_dead(job.run, rank, live.incarnation):
                        key = name, process.process, rank, live.incarnation
                        since[key] = self._dead_since.get(key, self._world.now)
        self._dead_since = since
        limit = cluster.lease + REMOVED_WITHIN
        for (name, process_number, rank, incarnation), at in since.items():
            if self._world.now - at > limit:
                seconds = self._world.now - at
                said = f"{name}: worker {rank}, incarnation {incarnation}, is dead for {seconds:.1f} s, and counted"
                self._broken("waits for the dead", said, process=process_number)

    def a_job_beside_goes_on(self) -> None:
        """A job with nothing on a shard that hangs, or dies, goes on: its steps come, as fast as its workers compute.
        What takes a call to every shard, a join or its return to a checkpoint, may wait for that one."""
        cluster, run = self._cluster, self._cluster.beside
        worker = run.workers.get(0) if run is not None else None
        servers, now = cluster.servers, self._world.now
        stepped, since, process = self._beside
        if run is None or run.over or run.may_end or worker is None or not worker.is_training:
            self._beside = stepped, now, process
            return
        steps = worker.stepped != stepped
        hosts = [worker.host, servers.coordinator.host, servers.shards[0].host]
        waits_for_a_worker = worker.holds or self._computes(run, worker)
        disturbed = cluster.network.weather.loss or process is not servers.shards[0] or self._returns(run)
        if steps or waits_for_a_worker or disturbed or not all(self._is_healthy(h, 2 * LOOK_SECONDS) for h in hosts):
            since = now
        # The death of its own shard is its own matter until it has made a step there: with a place that it has taken
        # since. A step that ended just before the death may be seen only when the next process is there.
        is_there = steps and worker.stepped >= worker.place.since >= servers.shards[0].host.since
        self._beside = worker.stepped, since, servers.shards[0] if is_there else process
        if now - since > cluster.lease + BESIDE_SECONDS:
            said = f"{worker.host.name} is at clock {worker.clock}, with nothing wrong for {now - since:.1f} s"
            self._broken("another job waits", said)

    def _computes(self, run: Run, worker: Worker) -> bool:
        """Whether a worker computes, or one does that it may have to wait for."""
        return worker.computes or (run.rules.bound is not None and any(w.computes for w in run.workers.values()))

    def _returns(self, run: Run) -> bool:
        """Whether a job has to go back to a checkpoint, or one of its workers has to join again."""
        job = self.job(run.name)
        return job is None or bool(job.lost()) or self._members(run) != _living(run)

    def _is_healthy(self, host: Host, seconds: float) -> bool:
        """Whether a server has lived undisturbed for some time."""
        quiet = self._world.now - max(host.since, host.stopped_until, self._cluster.faults.disturbed.get(host, 0.0))
        return bool(host.alive and quiet > seconds)

    def _is_dead(self, run: str, rank: int, incarnation: int) -> bool:
        holder = self._cluster.holders.get((run, rank, incarnation))
        if holder is None:  # a join whose answer was lost, perhaps: its worker asks again
            return False
        return not holder.host.alive or (holder.place.incarnation != incarnation and not holder.host.stopped)

    def steps(self, worker: Worker) -> None:
        """After all workers have died, none trains before the others are back: what these would train is left out."""
        run, now = worker.run, self._world.now
        comeback, coordinator = run.comeback, self._cluster.servers.coordinator.host
        if comeback is None or not comeback.waits(now, self._cluster.lease):
            return
        disturbed = max([self._cluster.faults.disturbed.get(host, 0.0) for host in self._world.hosts], default=0.0)
        missing = comeback.missing - run.gone
        if missing and disturbed <= comeback.died and coordinator.since <= comeback.died:
            said = f"{worker.host.name} trains, and workers {sorted(missing)} are not back since all died"
            self._broken("trains alone", said, clock=worker.clock)

    def lost_place(self, worker: Worker, place: Place) -> None:
        """A worker whose heartbeats can come keeps its place, unless the job is rolled back."""
        cluster, faults = self._cluster, self._cluster.faults
        coordinator = cluster.servers.coordinator.host
        ends = [faults.disturbed.get(host, 0.0) for host in (worker.host, coordinator)]
        calm = self._world.now - max(coordinator.since, *ends)
        # A shard that was started again brings a rollback when it has called in, which may take long.
        shards = cluster.servers.shards
        rolled_back = any(shard.known_since > place.since - LOOK_SECONDS for shard in shards)
        if calm > CALM_SECONDS and not rolled_back and not cluster.network.weather.loss and not worker.run.over:
            self._broken("lost its place", f"{worker.host.name}, with nothing wrong for {calm:.1f} s")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _renamed(self, path: Path) -> None:
        if path.name == MANIFEST:
            self._written(self._store.manifest(path.parent.parent.name, path.parent.name))

    def _written(self, manifest: Manifest) -> None:
        """A checkpoint says whose states it has: in sync as of its clock, of all workers, or it says of which not.

        Of a worker that is gone it has the newest there is.
        """
        name, disk = manifest.job["name"], self._cluster.servers.disks[0]
        has_one_clock = manifest.mode == "sync" or manifest.mode.startswith("local:")
        job = self.job(name)
        live = self._settled(job, manifest.run) if job is not None else set()
        members = self._cluster.job.members if name == NAME else 1
        for rank, worker in manifest.workers.items():
            state = self._store.read_worker(name, manifest.name, worker.part)
            if not self._is_of(state, rank, worker.clock, members):
                self._broken("wrong state", f"{manifest.name} has {state!r} of worker {rank}, clock {worker.clock}")
            is_of_its_clock = worker.clock == manifest.clock or (rank not in live and worker.clock < manifest.clock)
            if has_one_clock and not is_of_its_clock:
                said = f"{manifest.name}, clock {manifest.clock}, has worker {rank} as of clock {worker.clock}"
                self._broken("wrong state", said)
        if job is None or not has_one_clock or disk.is_disturbed:
            return
        for rank in sorted(live - manifest.workers.keys() - set(manifest.without)):
            self._broken("state missing", f"{manifest.name} says nothing of worker {rank}")

    def _settled(self, job: CoordinatedJob, run: str) -> set[int]:
        """The ranks of live workers that have had their places for a while."""
        holders, live = self._cluster.holders, set()
        for rank, member in job.workers._membership.workers.items():
            holder = holders.get((run, rank, member.incarnation))
            if holder is not None and holder.place.since < self._world.now - SETTLED_SECONDS:
                live.add(rank)
        return live

    def joined(self, worker: Worker, place: Place) -> None:
        """A worker goes on from a state of its rank, which in sync is not ahead of the weights."""
        state = place.result.state
        if state is None:
            return
        clock, content = state
        is_ahead = worker.run.rules.averaged and clock > place.result.clock
        if not self._is_of(content, worker.rank, clock, worker.run.job.members) or is_ahead:
            said = f"{worker.host.name} joins at clock {place.result.clock} and gets {content!r} of clock {clock}"
            self._broken("wrong state", said)

    # -- when all have finished --------------------------------------------------------------------------------------

    def check_finished(self, run: Run) -> None:
        """All that was acknowledged is in the weights once, and nobody is counted that is not there."""
        content = run.staying()[0].rows.content or {}
        for violation in run.judge(self._cluster.view(run), content):
            self._cluster.violated(violation)
        self.shards_count_those_that_live(run)

    def shards_count_those_that_live(self, run: Run) -> None:
        """Each shard, and the coordinator, counts the workers that live, and no other."""
        if self.job(run.name) is None:
            self._broken("no job", "the coordinator knows no job, and its workers train")
            return
        living, members = _living(run), self._members(run)
        if members != living:
            self._broken("wrong members", f"the coordinator has {members}, and {living} live")
        for name, roster in self._rosters(run).items():
            if roster != living:
                self._broken("wrong roster", f"{name} counts {roster}, and {living} live")

    def all_agree(self) -> bool:
        """Whether the coordinator and the shards count the workers that live."""
        return all(
            counted == _living(run)
            for run in self._cluster.running()
            for counted in [self._members(run), *self._rosters(run).values()]
        )

    def _members(self, run: Run) -> dict[int, int]:
        job = self.job(run.name)
        members = job.workers._membership.workers.values() if job is not None else ()
        return {member.rank: member.incarnation for member in members}

    def _rosters(self, run: Run) -> dict[str, dict[int, int]]:
        rosters = {}
        for process in self._cluster.servers.shards:
            hosted = process.hosted().get(run.name)
            roster = hosted.partition.roster if hosted is not None else {}
            rosters[f"shard {process.index}"] = {rank: live.incarnation for rank, live in roster.items()}
        return rosters

    def in_state_file(self) -> dict[str, str]:
        """Returns the run of each job that the coordinator's file has now, by name."""
        jobs, _ = StateFile(DIRECTORY, self._cluster.servers.disks[0]).load()
        return {name: job.run for name, job in jobs.items()}

    def was_set_back(self, run: Run) -> None:
        """A job goes on if the directory, as it was once, has the job and a checkpoint of it."""
        has_it = self.in_state_file().get(run.name) == run.identity
        names = self._store.names(run.name) if has_it else []
        run.saved = any(self._store.manifest(run.name, name).run == run.identity for name in names)
        if not run.saved:
            run.may_end = run.may_end or "the directory is that of before its first checkpoint"

    # -- looks -------------------------------------------------------------------------------------------------------

    def job(self, name: str) -> CoordinatedJob | None:
        """Returns a job as the coordinator of now has it."""
        coordinator = self._cluster.servers.coordinator.coordinator
        return coordinator._jobs.get(name) if coordinator is not None else None

    def _is_of(self, state: bytes, rank: int, clock: int, members: int) -> bool:
        """Whether a worker's state is of a rank, at a clock; of a group that of each member."""
        if members > 1:
            return state == group_state([b"%d %d" % (rank, clock)] * members)
        return state == b"%d %d" % (rank, clock) or (self._cluster.with_schedules and is_state_of(state, rank, clock))

    def _has_checkpoint(self, run: Run) -> bool:
        job = self.job(run.name)
        if job is None or job.checkpoints is None or job.placed.run != run.identity:
            return False
        return job.checkpoints._progress.last is not None


def _living(run: Run) -> dict[int, int]:
    return {rank: worker.place.incarnation for rank, worker in run.workers.items() if worker.is_there}
