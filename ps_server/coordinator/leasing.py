"""Leasing a job's data: what core.data_leases needs to hear from its membership and its shards."""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest, NotFound, TryLater
from ps_server.coordinator.data import JobFace, LeaseRequest
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.shards import Shards
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import BatchLease, Who
from ps_server.core.limits import Limits


def lease_data(job: CoordinatedJob, ask: LeaseRequest, limits: Limits, shards: Shards) -> BatchLease:
    """Gives a live worker batches of an elastic job's data; see DataLeases.lease."""
    name = job.spec.name
    if job.spec.world_size:
        raise InvalidRequest(f"job {name!r} has a world size: its workers divide the data by their ranks")

    def live() -> int:
        with job.guard:
            job.membership.check(ask.rank, ask.incarnation, ask.key)
            return len(job.membership.members)

    def ghosts() -> set[Who]:
        return {(rank, incarnation) for _, rank, incarnation in set(job.ghosts)}

    def committed() -> list[Committed]:
        try:
            found = shards.call_all(lambda shard: shard.api.committed(name))
        except NotFound:
            raise TryLater(f"a shard was started anew: job {name!r} is being set back to a checkpoint") from None
        return [one for one in found if one is not None]

    return job.data.lease(ask, JobFace(limits, live, ghosts, committed))
