"""What a coordinator keeps on disk, and what it makes of it when it comes back: checkpoints, and its own small file."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, PSError
from ps_protocol.job import JobSpec
from ps_server.coordinator import state_file
from ps_server.coordinator.checkpoints import JobCheckpoints, JobView
from ps_server.coordinator.job import CoordinatedJob, job_that_ran, make_job
from ps_server.coordinator.policy import CheckpointPolicy
from ps_server.coordinator.recovery import Recovery
from ps_server.coordinator.shards import Shards
from ps_server.core.limits import Limits
from ps_server.core.validation import check_job_spec
from ps_server.storage.checkpoints import CheckpointStore

log = logging.getLogger("ps_server")


class Keeping:
    """One coordinator's directory."""

    def __init__(
        self,
        policy: CheckpointPolicy,
        directory: Shards,
        lease: float,
        limits: Limits,
    ) -> None:
        self._policy, self._directory, self._lease, self._limits = policy, directory, lease, limits
        self._store = CheckpointStore(policy.directory)
        self.recovery = Recovery(self._store, directory)
        self._saving = threading.Lock()

    def checkpoints_of(self, job: CoordinatedJob) -> JobCheckpoints:
        """What makes a job's checkpoints, once started. Raises InvalidRequest for a name that is no directory's."""
        view = JobView(
            spec=job.spec,
            run=lambda: job.run,
            placement=lambda: job.placement,
            shards=self._directory,
            live=lambda: {member.rank: member.clock for member in job.members()},
            counts=job.counts,
        )
        return JobCheckpoints(view, self._store, self._policy)

    def go_on(self, spec: JobSpec, chosen: JobSpec) -> CoordinatedJob | None:
        """The job as the last checkpoint of its name has it; None where there is none, or nothing is to be gone on
        with. `chosen`: the same job, with the size of its buckets where `spec` leaves that open.

        Raises JobMismatch if it is another job, NoCheckpoints if not one of its checkpoints is whole.
        """
        if not self._policy.restore or not self._store.names(spec.name):
            return None
        spec = spec if spec.bucket_bytes else self._as_kept(chosen)
        shards = self._directory.known()
        job = make_job(spec, shards, self._directory.count, self._lease, secrets.token_hex(8))
        job.checkpoints = self.checkpoints_of(job)
        manifest = self.recovery.restore(job, shards, shards, any_run=True)
        job.run, job.restore_count = manifest.run, manifest.restore_count + 1
        job.checkpoints.start()
        return job

    def _as_kept(self, spec: JobSpec) -> JobSpec:
        """The job with buckets as large as its last checkpoint that can be read has them."""
        for name in reversed(self._store.names(spec.name)):
            with contextlib.suppress(CheckpointDamaged):
                kept = job_spec_from_data(self._store.manifest(spec.name, name).job)
                spec = replace(spec, bucket_bytes=kept.bucket_bytes)
                break
        check_job_spec(spec, self._limits)
        return spec

    def take_up(self) -> dict[str, CoordinatedJob]:
        """The jobs that ran when a coordinator with this directory ended, if they are to be gone on with."""
        found: dict[str, CoordinatedJob] = {}
        for name, kept in self._before().items():
            try:
                spec = job_spec_from_data(kept.spec)
                check_job_spec(spec, self._limits)
                job = job_that_ran(kept, spec, self._directory.count, self._lease, time.monotonic())
                job.checkpoints = self.checkpoints_of(job)
                job.checkpoints.start()
            except PSError as error:
                log.error("job %s: cannot be taken up again: %s", name, error)
                continue
            found[name] = job
            log.info("job %s: taken up again, with %d workers", name, len(job.members()))
        return found

    def _before(self) -> dict[str, state_file.SavedJob]:
        wanted = self._policy.restore or self._policy.resume
        return state_file.load(self._policy.directory) if wanted else {}

    def save(self, jobs: Mapping[str, CoordinatedJob]) -> None:
        """Keeps what a coordinator after this one needs. A disk that cannot take it is said in the log."""
        with self._saving:
            try:
                state_file.save(self._policy.directory, {name: job.durable() for name, job in jobs.items()})
            except OSError as error:
                log.error("%s cannot be written: %s", self._policy.directory / state_file.FILE, error.strerror)
