"""Makes a job on all shards: a new one, or one restored from the last checkpoint of its name."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

from ps_protocol.errors import JobMismatch, LimitExceeded, PSError, RunEnded, TryLater
from ps_protocol.job import JobSpec
from ps_server.coordinator.cluster import Cluster, Registry, new_membership
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.recovery import Recovery
from ps_server.coordinator.refusals import try_soon
from ps_server.coordinator.runs import Runs
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.limits import share
from ps_server.core.placement import place_job
from ps_server.core.validation import check_job_spec

log = logging.getLogger("ps_server")


class NewJobs:
    """Makes jobs, one run after the other.

    registry: the coordinator, to which the jobs belong
    recovery: restores a job from a checkpoint; None if the servers make none
    """

    def __init__(self, cluster: Cluster, registry: Registry, recovery: Recovery | None) -> None:
        self._cluster, self._registry, self._recovery = cluster, registry, recovery
        self._making: dict[str, str] = {}  # by name of each job that is being made, the principal that began it
        self._lock = threading.Lock()
        self.runs = Runs(cluster.clock)

    def begin(self, name: str, owners: Sequence[str], caller: str) -> None:
        """Reserves the name of a job that is about to be made, until `done`.

        owners: the principals that began the existing jobs; empty: unknown
        caller: the principal that begins this job; empty: unknown

        Raises TryLater while a job of that name is being made, with the progress of its restore if there is one;
        LimitExceeded if there are too many jobs.
        """
        with self._lock:
            self._check(name)
            limit, all_owners = self._cluster.limits.jobs, [*owners, *self._making.values()]
            if len(all_owners) >= limit:
                raise LimitExceeded(f"there are {limit} jobs already: that is the limit max-jobs")
            if caller and all_owners.count(caller) >= share(limit):
                text = f"{caller} has {share(limit)} jobs: that is its share, half of max-jobs, which is {limit}"
                raise LimitExceeded(text)
            self._making[name] = caller

    def check(self, name: str) -> None:
        """Raises TryLater while a job of this name is being made or saved: see `begin`."""
        with self._lock:
            self._check(name)

    def _check(self, name: str) -> None:
        if name in self._making:
            restoring = self._recovery.progress(name) if self._recovery is not None else None
            raise restoring or try_soon(f"job {name!r} is being registered at this moment")

    def done(self, name: str) -> None:
        """Records that the job is made, or that making it failed."""
        with self._lock:
            self._making.pop(name, None)
        self.runs.made(name)

    def make(self, spec: JobSpec, chosen: JobSpec) -> CoordinatedJob:
        """Makes a job on all shards, new or restored from the last checkpoint of its name, and returns it.

        spec:   the spec as it was registered; may be without a bucket size
        chosen: the same spec with a bucket size

        Raises JobMismatch if the checkpoint is of another job, NoCheckpoints if none of its checkpoints is complete,
        TryLater if a shard does not answer.
        """
        try:
            return self._made(spec, chosen)
        except RunEnded:  # a shard holds a run of an earlier coordinator whose clock was ahead
            self.runs.follow(max(self._cluster.shards.runs_of(spec.name)))
            return self._made(spec, chosen)

    def _made(self, spec: JobSpec, chosen: JobSpec) -> CoordinatedJob:
        if self._recovery is not None and self._recovery.restorable(spec):
            return self._restored(self._recovery, spec, chosen)
        return self._new(chosen)

    def _new(self, spec: JobSpec) -> CoordinatedJob:
        check_job_spec(spec, self._cluster.limits)  # once more: with the bucket size, the number of buckets is known
        shards = self._cluster.shards
        placed = place_job(spec, shards.count, self.runs.new())
        processes = {index: shard.process for index, shard in shards.known().items()}
        job = CoordinatedJob(placed, processes, self._cluster, self._registry)
        self.runs.making(spec.name, placed.run)

        def create(shard: RegisteredShard) -> None:
            shard.api.create_job(spec, placed.buckets_of(shard.index), placed.run, shards.count)
            # If a new process has created the part, the part would count as lost once that process registers. The job
            # has no checkpoint yet to which it could be rolled back.
            if shard.api.process() != processes.get(shard.index):
                raise TryLater(f"shard {shard.index} was started anew, and has not called in yet")

        try:
            shards.call_all(create)
        except PSError:
            # All or none: otherwise some shards would hold buckets of no job.
            with contextlib.suppress(PSError):
                shards.call_all(lambda shard: shard.api.drop_job(spec.name, placed.run))
            raise
        return job

    def _restored(self, recovery: Recovery, spec: JobSpec, chosen: JobSpec) -> CoordinatedJob:
        if not spec.bucket_bytes:
            spec = replace(chosen, bucket_bytes=recovery.last_bucket_bytes(spec) or chosen.bucket_bytes)
            check_job_spec(spec, self._cluster.limits)
        shards = self._cluster.shards.known()
        placed = place_job(spec, self._cluster.shards.count, self.runs.new())
        self.runs.making(spec.name, placed.run)
        try:
            restored = recovery.restore(placed, list(shards.values()), last_incarnation=0, any_run=True)
        except JobMismatch:  # one shard cannot cut its buckets anew; others may have restored theirs already
            with contextlib.suppress(PSError):
                self._cluster.shards.call_all(lambda shard: shard.api.drop_job(spec.name, placed.run))
            raise
        manifest = restored.manifest
        job = CoordinatedJob(
            replace(placed, continues=(manifest.run, manifest.name)),
            {},
            self._cluster,
            self._registry,
            new_membership(spec, self._cluster, restored.last_incarnation),
            restore_count=manifest.restore_count + 1,
        )
        job.continue_from(restored, shards.values())
        log.warning("job %s: continues from checkpoint %s, clock %d", spec.name, manifest.name, manifest.clock)
        return job
