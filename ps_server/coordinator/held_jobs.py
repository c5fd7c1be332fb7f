"""Finds jobs that only the shards or only the coordinator has, and ends them.

A shard may hold a job that the coordinator does not know, because a CreateJob may arrive after the DropJob that was
sent later. The coordinator makes the shard drop such an orphan.

The coordinator may know a job that no shard holds. Such a job ended while the disk with the coordinator's file was
full, and the next coordinator has read the file from before the end. A shard whose process keeps running drops a job
only at the job's end. So the coordinator ends the job, too, once none of the workers in that file is live or awaited.
Otherwise workers would wait to join it until it is deserted for so long that it ends (Timing).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ps_protocol.errors import PSError
from ps_runtime.background import Background, guarded
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.lifecycle import Phase
from ps_server.coordinator.shards import RegisteredShard, Shards

log = logging.getLogger("ps_server")

Run = tuple[str, str]  # the name of a job, and its run


@dataclass(frozen=True)
class _Look:
    """The result of one query of a shard."""

    orphans: set[Run] = field(default_factory=set)
    dropped: set[Run] = field(default_factory=set)


class HeldJobs:
    """Compares the coordinator's jobs with those that shards hold.

    A difference counts only if two queries in a row find it: a job that begins or ends may be on its shards shortly
    before, or after, the coordinator lists it. For one thread.

    jobs:  returns the coordinator's jobs, by name
    known: returns the runs of these jobs, and those of jobs that are being made
    """

    def __init__(
        self,
        shards: Shards,
        jobs: Callable[[], Mapping[str, CoordinatedJob]],
        known: Callable[[], Collection[Run]],
    ) -> None:
        self._shards, self._jobs, self._known = shards, jobs, known
        self._last: dict[int, _Look] = {}  # by shard

    def compare(self) -> None:
        """Tells shards to drop the jobs that the coordinator does not know. Ends the jobs that shards have dropped."""
        if self._shards.charge.lost:
            return
        dropped: set[Run] = set()
        for index, shard in self._shards.known().items():
            expected = {(name, job.placed.run) for name, job in self._jobs().items() if _is_held(job, shard)}
            with contextlib.suppress(PSError):  # the shard is queried again soon
                held = {(name, job.run) for name, job in shard.api.statistics().jobs.items()}
                look = _Look(held - set(self._known()), expected - held)
                before, self._last[index] = self._last.get(index, _Look()), look
                dropped |= look.dropped & before.dropped
                for name, run in sorted(look.orphans & before.orphans):
                    shard.api.drop_job(name, run)
                    log.warning("job %s: run %s is orphaned on shard %d: dropped", name, run, index)
        for name, job in self._jobs().items():
            if (name, job.placed.run) in dropped:
                _end(job)


def _is_held(job: CoordinatedJob, shard: RegisteredShard) -> bool:
    """Whether a shard must hold its part of a job now."""
    return job.life.is_running and not job.lost() and job.shard_processes.get(shard.index) == shard.process


def _end(job: CoordinatedJob) -> None:
    with job.life.deciding():
        if not job.life.is_running or job.lost() or not job.workers.empty():
            return
        job.life.begin(Phase.ENDING)
    job.end("its shards have dropped it, as they do when a job ends; the coordinator's file did not say so")


# -- leases that have run out ------------------------------------------------------------------------------------------

# Ends leases that have run out, jobs that no longer wait for a worker, and jobs whose workers have left without ending
# them. A coordinator that was suspended (its machine, or its process by a signal) has missed heartbeats. No lease ends
# because of those.


# If more than this fraction of a lease passes between two looks, the coordinator was suspended. Workers send four
# heartbeats in a lease.
STOOD_STILL = 0.5


class Expiry:
    """Ends leases that have run out, and jobs without workers.

    jobs:       returns the coordinator's jobs, by name
    background: runs the end of a job, which takes a last checkpoint
    """

    def __init__(
        self, jobs: Callable[[], Mapping[str, CoordinatedJob]], cluster: Cluster, background: Background
    ) -> None:
        self._jobs, self._cluster, self._background = jobs, cluster, background
        self._looked: float | None = None  # when the last regular look ended

    def look_regularly(self) -> None:
        """Calls `look`. A thread calls this at least four times a lease.

        If this process was suspended between two calls, all workers first get that much more time.
        """
        clock, before = self._cluster.clock, self._looked
        stood_still = clock.now() - before if before is not None else 0.0
        if stood_still > self._cluster.lease * STOOD_STILL:
            for job in self._jobs().values():
                job.workers.postpone(stood_still)
        self.look()
        self._looked = clock.now()

    def look(self) -> None:
        """Removes the workers whose lease ran out, and ends the jobs that have had no worker for too long."""
        if self._cluster.shards.charge.lost:
            return  # the workers send their heartbeats to another coordinator
        for name, job in self._jobs().items():
            guarded("leases", job.expire)
            if job.ends_soon:
                self._background.apart("finished", name, job.finish)
            timing = self._cluster.timing
            limit = timing.deserted if job.workers.ever_joined() else timing.unjoined
            if job.life.deserted_for(job.workers.empty(without_awaited=True)) > limit:
                self._background.apart("deserted", name, job.desert)
