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
