"""Having the shards count a worker that joins, in two rounds, so that each counts it from the same clock on.

1. every shard counts the worker from its own frontier on, and says what that is: nothing that would need the
   newcomer completes from here on;
2. the highest frontier becomes the clock at which the worker starts, everywhere.
"""

from __future__ import annotations

from ps_protocol.errors import NotFound, PSError, TryLater
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.retiring import lose_place
from ps_server.coordinator.shards import RegisteredShard, Shards
from ps_server.failpoints import failpoint


def admit(job: CoordinatedJob, rank: int, incarnation: int, key: bytes, shards: Shards) -> int:
    """The clock at which the worker starts. The caller holds the job's lock.

    Raises PSError if a shard does not answer: then it has lost the place again.
    """
    everywhere, name = shards.all(), job.spec.name

    def count(shard: RegisteredShard, clock: int | None) -> int:
        frontier = shard.api.add_worker(name, rank, incarnation, clock, key)
        failpoint("worker-half-admitted")
        return frontier

    try:
        clock = max(shards.call(everywhere, lambda shard: count(shard, None)))
        shards.call(everywhere, lambda shard: count(shard, clock))
    except PSError as error:
        job.joining = None
        lose_place(job, rank, incarnation, shards.known())
        if isinstance(error, NotFound):  # a shard was started anew, and has not said so yet
            raise TryLater(f"job {name!r}: {error}") from None
        raise
    return clock
