"""What must hold, whatever goes wrong: each promise is a method here, and says so in its first line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ps_server.coordinator.job import CoordinatedJob
from tests.chaos.oracle import Violation
from tests.simulation.runs import Run

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.worker import Place, Worker

LOOK_SECONDS = 0.5
REMOVED_WITHIN = 3.0  # after a lease is over, on every healthy shard
CALM_SECONDS = 15.0


class Promises:
    """Looks at a cluster while it runs, and when all have finished."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._dead_since: dict[tuple[int, int, int], float] = {}  # by shard process, rank, incarnation
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Looks from now on."""
        self._look()

    def _look(self) -> None:
        self._world.at(LOOK_SECONDS, self._look)
        self.no_thread_dies()
        self.no_call_fails_unexpectedly()
        self.the_dead_are_waited_for_no_longer_than_a_lease()

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
        for process in self._cluster.shards:
            job = process.hosted("cells")
            if job is not None and job.failure is not None:
                self._broken("internal error", f"{process.host.name}: {job.failure}")

    def the_dead_are_waited_for_no_longer_than_a_lease(self) -> None:
        """A worker that is dead is off each healthy shard soon after its lease, also while another shard hangs."""
        cluster, since = self._cluster, dict[tuple[int, int, int], float]()
        coordinator = cluster.coordinator.host
        if cluster.network.weather.loss or not self._is_healthy(coordinator, 2 * cluster.lease):
            self._dead_since = {}
            return
        for process in cluster.shards:
            job = process.hosted("cells")
            if job is None or not self._is_healthy(process.host, 3.0) or self.job() is None:
                continue
            for rank, live in job.state.roster.items():
                if self._is_dead(job.run, rank, live.incarnation):
                    key = process.process, rank, live.incarnation
                    since[key] = self._dead_since.get(key, self._world.now)
        self._dead_since = since
        limit = cluster.lease + REMOVED_WITHIN
        for (process_number, rank, incarnation), at in since.items():
            if self._world.now - at > limit:
                said = (
                    f"worker {rank}, incarnation {incarnation}, is dead for {self._world.now - at:.1f} s, and counted"
                )
                self._broken("waits for the dead", said, process=process_number)

    def _is_healthy(self, host: Any, seconds: float) -> bool:
        """Whether a server has lived undisturbed for some time."""
        quiet = self._world.now - max(host.since, host.stopped_until, self._cluster.faults.disturbed.get(host, 0.0))
        return bool(host.alive and quiet > seconds)

    def _is_dead(self, run: str, rank: int, incarnation: int) -> bool:
        holder = self._cluster.holders.get((run, rank, incarnation))
        if holder is None:  # a join whose answer was lost, perhaps: its worker asks again
            return False
        return not holder.host.alive or (holder.place.incarnation != incarnation and not holder.host.stopped)

    def lost_place(self, worker: Worker, place: Place) -> None:
        """A worker whose heartbeats can come keeps its place, unless the job is rolled back."""
        cluster, faults = self._cluster, self._cluster.faults
        coordinator = cluster.coordinator.host
        ends = [faults.disturbed.get(host, 0.0) for host in (worker.host, coordinator)]
        calm = self._world.now - max(coordinator.since, *ends)
        rolled_back = faults.shard_died > place.since
        if calm > CALM_SECONDS and not rolled_back and not cluster.network.weather.loss and not worker.run.over:
            self._broken("lost its place", f"{worker.host.name}, with nothing wrong for {calm:.1f} s")

    # -- when all have finished --------------------------------------------------------------------------------------

    def check_finished(self, run: Run) -> None:
        """All that was acknowledged is in the weights once, and nobody is counted that is not there."""
        for violation in run.judge(self._cluster.view(), self._cluster.lossy):
            self._cluster.violated(violation)
        self.shards_count_those_that_live()

    def shards_count_those_that_live(self) -> None:
        """Each shard, and the coordinator, counts the workers that live, and no other."""
        if self.job() is None:
            self._broken("no job", "the coordinator knows no job, and its workers train")
            return
        living, members = self._living(), self._members()
        if members != living:
            self._broken("wrong members", f"the coordinator has {members}, and {living} live")
        for name, roster in self._rosters().items():
            if roster != living:
                self._broken("wrong roster", f"{name} counts {roster}, and {living} live")

    def all_agree(self) -> bool:
        """Whether the coordinator and the shards count the workers that live."""
        return all(counted == self._living() for counted in [self._members(), *self._rosters().values()])

    def _living(self) -> dict[int, int]:
        workers = self._cluster.this_run.workers
        return {rank: worker.place.incarnation for rank, worker in workers.items() if worker.is_there}

    def _members(self) -> dict[int, int]:
        job = self.job()
        members = job.members._membership.members.values() if job is not None else ()
        return {member.rank: member.incarnation for member in members}

    def _rosters(self) -> dict[str, dict[int, int]]:
        rosters = {}
        for process in self._cluster.shards:
            hosted = process.hosted("cells")
            roster = hosted.state.roster if hosted is not None else {}
            rosters[process.host.name] = {rank: live.incarnation for rank, live in roster.items()}
        return rosters

    # -- looks -------------------------------------------------------------------------------------------------------

    def job(self) -> CoordinatedJob | None:
        """Returns the job as the coordinator of now has it."""
        coordinator = self._cluster.coordinator.coordinator
        return coordinator._jobs.get("cells") if coordinator is not None else None

    def has_checkpoint(self, run: Run) -> bool:
        """Whether a run has a checkpoint to go back to."""
        job = self.job()
        return job is not None and job.checkpoints is not None and job.checkpoints._progress.last is not None
