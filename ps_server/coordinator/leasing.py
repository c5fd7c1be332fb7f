"""Leasing a job's data: what core.data_leases needs to hear from its membership and its shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ps_protocol.data import BatchLease, LeaseRequest
from ps_protocol.errors import InvalidRequest, NotFound, TryLater
from ps_server.coordinator.data import JobFace
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.shards import ShardDirectory
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import Who
from ps_server.core.limits import Limits
from ps_server.rpc.shard_client import call_all


def lease_data(
    job: CoordinatedJob,
    who: Who,
    key: bytes,
    ask: LeaseRequest,
    limits: Limits,
    shards: ShardDirectory,
    pool: ThreadPoolExecutor,
) -> BatchLease:
    """Gives a live worker batches of an elastic job's data; see DataLeases.lease."""
    name = job.spec.name
    if job.spec.world_size:
        raise InvalidRequest(f"job {name!r} has a world size: its workers divide the data by their ranks")

    def live() -> int:
        with job.guard:
            job.membership.check(*who, key)
            return len(job.membership.members)

    def ghosts() -> set[Who]:
        return {(rank, incarnation) for _, rank, incarnation in set(job.ghosts)}

    def committed() -> list[Committed]:
        try:
            found = call_all(pool, shards.clients(), lambda client: client.committed(name))
        except NotFound:
            raise TryLater(f"a shard was started anew: job {name!r} is being set back to a checkpoint") from None
        return [one for one in found if one is not None]

    return job.data.lease(who, ask, JobFace(limits, live, ghosts, committed))
