"""Rolling a job back to its last checkpoint, after a shard lost what it held.

In sync every shard goes back to the one clock that the checkpoint has, so that the job ends with the weights that it
would have had. In ssp and async the shard that lost its part goes back alone: the others keep what they have, and what
is missing on that shard is counted. Either way every worker is fenced, so that nothing of before arrives later, and
joins again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, JobMismatch, NoCheckpoints
from ps_protocol.job import JobSpec, difference
from ps_server.coordinator.cluster import Checkpointing
from ps_server.coordinator.shards import RegisteredShard, Shards
from ps_server.core.placement import PlacedJob
from ps_server.core.snapshot import VersionRange
from ps_server.core.statistics import RecoveryStatistics
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import Manifest

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class Restored:
    """What shards hold after a rollback.

    states:           by rank, the clock of a worker in the checkpoint and its state
    reached:          of each shard that went back, how far its buckets are
    last_incarnation: the highest that any worker of the job may have had
    """

    manifest: Manifest
    states: Mapping[int, tuple[int, bytes]]
    reached: list[VersionRange]
    last_incarnation: int


class Recovery:
    """Restores jobs from checkpoints, and counts these."""

    def __init__(self, checkpointing: Checkpointing, shards: Shards) -> None:
        self._store, self._policy, self._shards = checkpointing.store, checkpointing.policy, shards
        self._counts = RecoveryStatistics()

    def statistics(self) -> RecoveryStatistics:
        """Returns how many checkpoints were restored, and how many passed over."""
        return self._counts

    def restorable(self, spec: JobSpec) -> bool:
        """Whether a job that is registered is to continue from a checkpoint of its name."""
        return self._policy.restore and bool(self._store.names(spec.name))

    def last_bucket_bytes(self, spec: JobSpec) -> int | None:
        """Returns the size of buckets in the job's last checkpoint that can be read; None if there is none."""
        for name in reversed(self._store.names(spec.name)):
            with contextlib.suppress(CheckpointDamaged):
                return job_spec_from_data(self._store.manifest(spec.name, name).job).bucket_bytes
        return None

    def restore(
        self, job: PlacedJob, shards: list[RegisteredShard], last_incarnation: int, any_run: bool = False
    ) -> Restored:
        """Has shards hold a job as its last checkpoint has it that is whole.

        any_run: a checkpoint of an earlier job of its name will do, if it is the same job
        Raises JobMismatch if it is not, naming the difference; NoCheckpoints if there is none; TryLater if a shard does
        not answer: the same call may be made again.
        """
        name = job.spec.name
        for manifest in self._candidates(job, any_run):
            incarnation = max(last_incarnation, manifest.last_incarnation)
            try:
                reached = self._restore_shards(job, shards, manifest.name, incarnation)
                states = {
                    rank: (worker.clock, self._store.read_worker(name, manifest.name, worker.part))
                    for rank, worker in manifest.workers.items()
                }
                failpoint("restore-half-done")
            except CheckpointDamaged as error:
                self._pass_over(name, manifest.name, error)
                continue
            for unfinished in self._store.unfinished(name, manifest.name):
                self._counts = replace(self._counts, unfinished=self._counts.unfinished + 1)
                log.warning("job %s: checkpoint %s was not completed: it has no manifest", name, unfinished)
            self._counts = replace(self._counts, restored=self._counts.restored + 1)
            return Restored(manifest, states, reached, incarnation)
        raise NoCheckpoints(f"job {name!r}: there is no checkpoint that can be used")

    def _restore_shards(
        self, job: PlacedJob, shards: list[RegisteredShard], name: str, incarnation: int
    ) -> list[VersionRange]:
        def restore(shard: RegisteredShard) -> VersionRange:
            return shard.api.restore_job(job.spec, job.buckets_of(shard.index), name, incarnation, job.run)

        return self._shards.call(shards, restore)

    def _candidates(self, job: PlacedJob, any_run: bool) -> Iterator[Manifest]:
        """Yields the job's checkpoints, the last one first."""
        for name in reversed(self._store.names(job.spec.name)):
            try:
                manifest = self._store.manifest(job.spec.name, name)
            except CheckpointDamaged as error:
                self._pass_over(job.spec.name, name, error)
                continue
            if not any_run and not job.owns(manifest.run, name):
                continue
            differs = difference(job_spec_from_data(manifest.job), job.spec)
            if differs is not None:
                raise JobMismatch(f"job {job.spec.name!r} differs from its checkpoint {name}: {differs}")
            yield manifest

    def _pass_over(self, job: str, name: str, error: CheckpointDamaged) -> None:
        self._counts = replace(self._counts, damaged=self._counts.damaged + 1)
        log.error("job %s: checkpoint %s cannot be used, trying the one before: %s", job, name, error)
