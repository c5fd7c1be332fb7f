"""Ends leases that have run out, and jobs that wait for no worker any more, or that their workers have deserted.

A coordinator that stood still itself (its machine was suspended, its process stopped) has heard no heartbeat meanwhile:
that ends no lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ps_runtime.background import Background, guarded
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.job import CoordinatedJob

# Of a lease: a coordinator that wakes up later by this has stood still. Four heartbeats come in a lease.
STOOD_STILL = 0.5


class Expiry:
    """Looks after all jobs of a coordinator.

    jobs:       returns them, by name
    background: where a job is ended, which takes a last checkpoint
    """

    def __init__(
        self, jobs: Callable[[], Mapping[str, CoordinatedJob]], cluster: Cluster, background: Background
    ) -> None:
        self._jobs, self._cluster, self._background = jobs, cluster, background
        self._looked: float | None = None  # when the last regular look ended

    def look_regularly(self) -> None:
        """Does as `look`, for a thread that calls this at least four times a lease."""
        clock, before = self._cluster.clock, self._looked
        stood_still = clock.now() - before if before is not None else 0.0
        if stood_still > self._cluster.lease * STOOD_STILL:
            for job in self._jobs().values():
                job.members.postpone(stood_still)
        self.look()
        self._looked = clock.now()

    def look(self) -> None:
        """Takes off the workers whose lease ran out, and ends the jobs that have had no worker for too long."""
        if self._cluster.shards.charge.lost:
            return  # their heartbeats go to another coordinator
        for name, job in self._jobs().items():
            guarded("leases", job.expire)
            if job.ends_soon:
                self._background.apart("finished", name, job.finish)
            timing = self._cluster.timing
            limit = timing.deserted if job.members.ever_joined() else timing.unjoined
            if job.life.deserted_for(job.members.empty(without_awaited=True)) > limit:
                self._background.apart("deserted", name, job.desert)
