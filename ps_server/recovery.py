"""Setting a job back to its last checkpoint, after a shard lost what it held.

In sync every shard goes back to the one clock that the checkpoint has, so that the job ends with the weights that it
would have had. In ssp and async the shard that lost its part goes back alone: the others keep what they have, and what
is missing on that shard is counted. Either way every worker is fenced, so that nothing of before arrives later, and
joins again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ps_protocol.errors import CheckpointDamaged, JobMismatch, NoCheckpoints
from ps_protocol.job import difference
from ps_server.checkpoints import CheckpointStore, Manifest
from ps_server.jobs import CoordinatedJob, Shard
from ps_server.messages import job_spec_from_data
from ps_server.shard_client import ShardClient, on_all

log = logging.getLogger("ps_server")

States = Mapping[int, tuple[int, bytes]]


class Recovery:
    """Sets jobs back. `damaged` counts checkpoints that could not be used, `restored` those that were."""

    def __init__(self, store: CheckpointStore, pool: ThreadPoolExecutor) -> None:
        self.damaged = 0
        self.restored = 0
        self._store = store
        self._pool = pool

    def restore(
        self,
        job: CoordinatedJob,
        shards: Mapping[int, Shard],
        lost: Iterable[int],
        any_run: bool = False,
    ) -> Manifest:
        """Sets a job back to its last checkpoint that is whole. The caller holds the job's lock.

        lost:    the shards that hold nothing of it
        any_run: a checkpoint of an earlier job of its name will do, if it is the same job
        Raises JobMismatch if it is not, naming the difference.

        Raises NoCheckpoints if there is none, TryLater if a shard does not answer; then nothing has changed for
        workers, or all are fenced: the same call may be made again.
        """
        everything = job.spec.consistency.aggregate
        back = [shard.client for index, shard in shards.items() if everything or index in set(lost)]
        last = job.membership.last_incarnation
        for manifest in self._candidates(job, any_run):
            incarnation = max(last, manifest.last_incarnation)

            try:
                self._go_back(job, back, manifest.name, incarnation)
                states = self._states(job, manifest)
            except CheckpointDamaged as error:
                self._say(job, manifest.name, error)
                continue
            self._set_back(job, shards, manifest, states, incarnation)
            return manifest
        raise NoCheckpoints(f"job {job.spec.name!r}: there is no checkpoint that can be used")

    def _go_back(self, job: CoordinatedJob, shards: list[ShardClient], name: str, incarnation: int) -> None:
        def one(shard: ShardClient) -> object:
            return shard.restore_job(job.spec, job.buckets_of(shard.index), name, incarnation)

        on_all(self._pool, shards, one)

    def _candidates(self, job: CoordinatedJob, any_run: bool) -> Iterable[Manifest]:
        for name in reversed(self._store.names(job.spec.name)):
            try:
                manifest = self._store.manifest(job.spec.name, name)
            except CheckpointDamaged as error:
                self._say(job, name, error)
                continue
            if not any_run and manifest.run != job.run:
                continue
            found = difference(job_spec_from_data(manifest.job), job.spec)
            if found is not None:
                raise JobMismatch(f"job {job.spec.name!r} differs from its checkpoint {name}: {found}")
            yield manifest

    def _say(self, job: CoordinatedJob, name: str, error: CheckpointDamaged) -> None:
        self.damaged += 1
        log.error("job %s: checkpoint %s cannot be used, trying the one before: %s", job.spec.name, name, error)

    def _states(self, job: CoordinatedJob, manifest: Manifest) -> States:
        return {
            rank: (worker.clock, self._store.read_worker(job.spec.name, manifest.name, worker.part))
            for rank, worker in manifest.workers.items()
        }

    def _set_back(
        self,
        job: CoordinatedJob,
        shards: Mapping[int, Shard],
        manifest: Manifest,
        states: States,
        incarnation: int,
    ) -> None:
        self.restored += 1
        with job.guard:
            members = job.membership.set_back(time.monotonic())
            job.membership.last_incarnation = incarnation
        for member in members:
            job.account(member.rank, member.clock)  # of an earlier time: it never came back
            restored = min(manifest.clocks.get(member.rank, 0), manifest.clock)
            job.unaccounted[member.rank] = restored, member.clock
        if job.spec.consistency.aggregate:
            job.restore_count += 1
            job.ghosts.clear()
        else:  # the shards that kept theirs still count them
            job.ghosts |= {(index, member.rank, member.incarnation) for index in shards for member in members}
        job.data.restored()
        job.held_by = {index: shard.process for index, shard in shards.items()}
        if job.checkpoints is not None:
            job.checkpoints.set_back(manifest, states)
        log.warning(
            "job %s: set back to checkpoint %s, clock %d; %d workers are to join again",
            *(job.spec.name, manifest.name, manifest.clock, len(members)),
        )
