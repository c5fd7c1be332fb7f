"""Having the shards stop counting a worker, however long one of them takes to hear it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ps_protocol.errors import NotFound, PSError
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.shards import RegisteredShard

log = logging.getLogger("ps_server")


def retire(job: CoordinatedJob, rank: int, incarnation: int, shards: Mapping[int, RegisteredShard]) -> None:
    """Has every shard stop counting a worker. The caller holds the job's lock."""
    job.ghosts |= {(index, rank, incarnation) for index in shards}
    retire_ghosts(job, shards)
    job.data.gone(rank, incarnation)


def lose_place(job: CoordinatedJob, rank: int, incarnation: int, shards: Mapping[int, RegisteredShard]) -> None:
    """A join failed half way: on some shards it has fenced whoever held the rank, who has to learn of it."""
    with job.guard:
        older = job.membership.members.get(rank)
        if older is not None:
            job.membership.leave(rank, older.incarnation)
    retire(job, rank, incarnation, shards)
    if older is not None:
        job.announce()


def retire_ghosts(job: CoordinatedJob, shards: Mapping[int, RegisteredShard]) -> None:
    """Tells the shards whom to retire, until each has heard: a ghost would be waited for for ever."""
    for ghost in sorted(job.ghosts):
        index, rank, incarnation = ghost
        try:
            shards[index].api.remove_worker(job.spec.name, rank, incarnation)
        except NotFound:
            pass  # a new process, which has never heard of the worker
        except PSError as error:
            log.warning("job %s: worker %d is not retired yet: %s", job.spec.name, rank, error)
            continue
        job.ghosts.discard(ghost)
