"""Ends leases that have run out, jobs that no longer wait for a worker, and jobs that all workers left without an end.

A coordinator that was suspended (its machine, or its process by a signal) has missed heartbeats. No lease ends because
of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ps_runtime.background import Background, guarded
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.coordinated_job import CoordinatedJob

# If more than this fraction of a lease passes between two looks, the coordinator was suspended. Workers send four
# heartbeats in a lease.
_STOOD_STILL = 0.5


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
        if stood_still > self._cluster.lease * _STOOD_STILL:
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
