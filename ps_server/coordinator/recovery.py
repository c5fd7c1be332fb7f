"""Rolls a job back to its last checkpoint, after a shard lost its part of the job.

In sync every shard goes back to the checkpoint's clock, so the job ends with the same weights as without the loss. In
ssp and async the shard that lost its part goes back alone: the others keep their weights, and the steps that are
missing on that shard are counted. Either way every worker is fenced, so that no push from before the rollback counts
after it. Then the workers join again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, JobMismatch, NoCheckpoints, PSError, TryLater, VersionMismatch
from ps_protocol.job import JobSpec, are_cut_alike, difference_of_uncut
from ps_protocol.optimizers import with_defaults
from ps_runtime.troubles import Troubles
from ps_server.coordinator.cluster import Checkpointing
from ps_server.coordinator.shards import RegisteredShard, Shards
from ps_server.core.placement import PlacedJob
from ps_server.core.snapshot import RestoreProgress, RestoreRequest, StoredFile, VersionRange
from ps_server.core.statistics import RecoveryStatistics
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import PASSED_OVER, last_whole
from ps_server.storage.manifest import Manifest

log = logging.getLogger("ps_server")

# After so many answers of a restoring shard without progress the rollback is interrupted: other jobs have their turn.
ANSWERS_WITHOUT_PROGRESS = 30
MOST_AGAIN = 3  # so often a shard may begin a restore again before that counts as no progress


@dataclass(frozen=True)
class Restored:
    """The result of a rollback.

    manifest:         the checkpoint's
    reached:          the versions and clocks of the buckets, for each shard that was rolled back
    last_incarnation: the highest incarnation that any worker of the job may have had
    """

    manifest: Manifest
    reached: list[VersionRange]
    last_incarnation: int


class Rollback:
    """A rollback under way to one checkpoint, with the progress of each shard. Methods may be called from any thread.

    incarnation: shards fence all workers up to this one; higher than in every other rollback of the job
    """

    def __init__(self, job: str, run: str, checkpoint: str, incarnation: int) -> None:
        self.job, self.run, self.checkpoint, self.incarnation = job, run, checkpoint, incarnation
        self._shards: dict[int, RestoreProgress] = {}
        self._most = 0  # bytes that were read, at most, since a shard last began again
        self._again = 0  # how often one did; counted up to MOST_AGAIN

    def note(self, shard: int, progress: RestoreProgress) -> bool:
        """Records the progress of a shard's restore. Returns whether it has advanced."""
        before, self._shards[shard] = self._shards.get(shard), progress
        if before is not None and progress.done < before.done and self._again < MOST_AGAIN:
            self._most, self._again = 0, self._again + 1
        return progress != before

    def __str__(self) -> str:
        reading = "; ".join(
            f"shard {shard} has read {progress.done / 1e9:.1f} of {progress.total / 1e9:.1f} GB"
            for shard, progress in sorted(self._shards.copy().items())
            if progress.extent is None and progress.total
        )
        text = f"job {self.job!r} is being rolled back to checkpoint {self.checkpoint}"
        return f"{text}: {reading}" if reading else text

    def progress(self) -> str:
        """Returns a text that changes as long as the restore gets on: the most bytes that all shards have read. A shard
        that begins again and again makes no progress until it is as far as before.
        """
        self._most = max(self._most, sum(progress.done for progress in self._shards.copy().values()))
        return f"{self.checkpoint}:{self._again}:{self._most}"


class Recovery:
    """Restores jobs from checkpoints, and counts the restores."""

    def __init__(self, checkpointing: Checkpointing, shards: Shards) -> None:
        self._store, self._policy, self._shards = checkpointing.store, checkpointing.policy, shards
        self._counts = RecoveryStatistics()
        self._troubles = Troubles(log, None)  # ps_restores_total counts them
        self._lock = threading.Lock()  # guards the fields below: jobs may be restored at the same time
        self._last: dict[str, Rollback] = {}  # by job
        self._under_way: dict[str, Rollback] = {}

    def progress(self, job: str) -> TryLater | None:
        """Returns the error for a worker that asks for a job that is being rolled back, with the progress; None for
        other jobs.

        May be called from any thread.
        """
        rollback = self._under_way.get(job)
        if rollback is None:
            return None
        error = TryLater(str(rollback))
        error.progress = rollback.progress()
        return error

    def statistics(self) -> RecoveryStatistics:
        """Returns how many checkpoints were restored, and how many were skipped."""
        return self._counts

    def restorable(self, spec: JobSpec) -> bool:
        """Whether a newly registered job continues from a checkpoint of its name."""
        return self._policy.restore and bool(self._store.names(spec.name))

    def last_bucket_bytes(self, spec: JobSpec) -> int | None:
        """Returns the size of buckets in the job's last checkpoint that can be read; None if there is none."""
        for name in reversed(self._store.names(spec.name)):
            with contextlib.suppress(CheckpointDamaged, VersionMismatch):
                return job_spec_from_data(self._store.manifest(spec.name, name).job).bucket_bytes
        return None

    def without_part(self, job: PlacedJob, shards: Mapping[int, RegisteredShard], lost: list[int]) -> list[int]:
        """Returns the shards that hold no part of a job: `lost`, and those that dropped the job when it ended.

        The second kind exists if the coordinator's state file is from before that end. Raises PSError if a shard does
        not answer.
        """

        def has_none(shard: RegisteredShard) -> bool:
            held = shard.api.statistics().jobs.get(job.spec.name)
            return held is None or held.run != job.run

        others = [shard for index, shard in shards.items() if index not in lost]
        dropped = self._shards.call(others, has_none)
        return sorted([*lost, *(shard.index for shard, is_gone in zip(others, dropped, strict=True) if is_gone)])

    def restore(
        self, job: PlacedJob, shards: list[RegisteredShard], last_incarnation: int, any_run: bool = False
    ) -> Restored:
        """Restores a job on `shards` from its last complete checkpoint. The call may be repeated.

        last_incarnation: the highest incarnation of a worker of the job that is known
        any_run: accept a checkpoint of an earlier run of the job's name, if its spec is the same

        Raises JobMismatch if the spec is not the same, naming the difference; VersionMismatch if a newer version of
        this program made the last checkpoint; NoCheckpoints if there is none; TryLater if a shard does not answer, or
        if a shard lacks the disk with its files.
        """
        name = job.spec.name

        def take(checkpoint: str) -> Restored | None:
            manifest = self._candidate(job, checkpoint, any_run)
            if manifest is None:
                return None
            rollback = self._next(name, job.run, checkpoint, max(last_incarnation, manifest.last_incarnation))
            own = {shard.index: _own_files(job, manifest, shard.index) for shard in shards}
            reached = self._restore_shards(job, shards, rollback, own)
            self._store.check_workers(name, manifest)  # only checks the states: each is read when its worker joins
            failpoint("restore-half-done")
            return Restored(manifest, reached, rollback.incarnation)

        found = last_whole(self._store.names(name), take, lambda *damaged: self._pass_over(name, *damaged))
        if found is None:
            raise NoCheckpoints(f"job {name!r}: there is no checkpoint that can be used")
        self._tell_of_unfinished(name, found.manifest.name)
        self._count(RecoveryStatistics(restored=1))
        return found

    def _tell_of_unfinished(self, job: str, restored: str) -> None:
        """Counts and logs the checkpoints that were begun after the one that was restored."""
        try:
            unfinished = self._store.unfinished(job, restored)
        # Not raised: the shards are restored, and the caller would restore them again
        except (OSError, PSError) as error:
            log.warning("job %s: whether checkpoints after %s were begun is not known: %s", job, restored, error)
            return
        self._count(RecoveryStatistics(unfinished=len(unfinished)))
        for name in unfinished:
            log.warning("job %s: checkpoint %s was not completed: it has no manifest", job, name)

    def _next(self, job: str, run: str, checkpoint: str, last_incarnation: int) -> Rollback:
        """Returns the rollback to a checkpoint: the last one again, if it was to the same checkpoint and no worker has
        come since.

        A new rollback has a higher incarnation, by which shards recognise the later call.
        """
        with self._lock:
            last = self._last.get(job)
            if last is not None and last.run == run and last_incarnation <= last.incarnation:
                if last.checkpoint == checkpoint:
                    return last
                last_incarnation = last.incarnation + 1
            rollback = self._last[job] = Rollback(job, run, checkpoint, last_incarnation)
        return rollback

    def forget(self, job: str) -> None:
        """Drops the last rollback of a job that has ended."""
        with self._lock:
            self._last.pop(job, None)

    def _restore_shards(
        self, job: PlacedJob, shards: list[RegisteredShard], rollback: Rollback, own: Mapping[int, Sequence[StoredFile]]
    ) -> list[VersionRange]:
        def restore(shard: RegisteredShard) -> VersionRange:
            buckets, files, unchanged = tuple(job.buckets_of(shard.index)), tuple(own[shard.index]), 0
            at = rollback.checkpoint, rollback.incarnation, job.run
            request = RestoreRequest(job.spec, buckets, *at, files, self._shards.count)
            while unchanged < ANSWERS_WITHOUT_PROGRESS:
                progress = shard.api.restore_job(request)
                unchanged = 0 if rollback.note(shard.index, progress) else unchanged + 1
                if progress.extent is not None:
                    return progress.extent
                if self._shards.is_closing:
                    raise TryLater("the coordinator is stopping")
            raise TryLater(f"shard {shard.index} reads nothing of checkpoint {rollback.checkpoint}")

        self._under_way[job.spec.name] = rollback
        try:
            return self._shards.call(shards, restore)
        finally:
            del self._under_way[job.spec.name]

    def _candidate(self, job: PlacedJob, name: str, any_run: bool) -> Manifest | None:
        """Returns a checkpoint of the job's directory; None if it is not one of this run."""
        try:
            manifest = self._store.manifest(job.spec.name, name)
        except VersionMismatch:
            if any_run:
                raise  # a run that continued from an older checkpoint would supersede this one
            return None
        if not any_run and not job.owns(manifest.run, name):
            return None
        before = with_defaults(job_spec_from_data(manifest.job))
        differs = difference_of_uncut(before, job.spec)
        if differs is not None:
            raise JobMismatch(
                f"job {job.spec.name!r} differs from its checkpoint {name}: {differs} (the registered one is the "
                "checkpoint's). Without --restore, or under another name, the job begins anew"
            )
        if not are_cut_alike(before, job.spec):
            _check_other_cut(before, job.spec, manifest)
        return manifest

    def _count(self, more: RecoveryStatistics) -> None:
        with self._lock:
            self._counts += more

    def _pass_over(self, job: str, name: str, error: CheckpointDamaged) -> None:
        self._count(RecoveryStatistics(damaged=1))
        self._troubles.met((job, name), PASSED_OVER, job, name, error, level=logging.ERROR)


def _check_other_cut(before: JobSpec, spec: JobSpec, manifest: Manifest) -> None:
    """Raises JobMismatch if a checkpoint with another cut cannot be cut anew, because its files are on several shards'
    own disks.

    before: the job of the checkpoint
    """
    were, are = (f"groups of {n}" if n > 1 else "workers of one process" for n in (before.group_size, spec.group_size))
    if any(part.disk for part in manifest.shards.values()):
        raise JobMismatch(
            f"job {spec.name!r}: its checkpoint {manifest.name} is of {were}, and this one has {are}, cut otherwise: "
            "each shard then reads what others have, and they keep it on disks of their own. Train with "
            "groups that cut the model as before, or export the checkpoint"
        )
    log.info("job %s: checkpoint %s of %s is cut anew for %s", spec.name, manifest.name, were, are)
    if 0 not in manifest.workers:
        what = "job %s: checkpoint %s has no state of worker 0: buffers and schedules are %s"
        others = "those of another worker" if manifest.workers else "as the job began"
        log.warning(what, spec.name, manifest.name, others)


def _own_files(job: PlacedJob, manifest: Manifest, shard: int) -> tuple[StoredFile, ...]:
    """Returns a shard's files of a checkpoint on its own disk: the files that the last one builds on, then the last
    one.

    Empty if all servers share one directory. Raises TryLater if other shards' disks have some of its buckets: the
    number of shards has changed, and nothing is lost if the operator restores it.
    """
    part = manifest.shards.get(shard)
    is_own = part is not None and part.disk
    own = (*manifest.bases.get(shard, ()), StoredFile(manifest.name, part)) if part is not None and is_own else ()
    holders = {manifest.placement[bucket] for bucket in job.buckets_of(shard) if bucket < len(manifest.placement)}
    if not any(manifest.shards[holder].disk for holder in holders if holder in manifest.shards):
        return own
    if holders != {shard}:
        raise TryLater(
            f"job {job.spec.name!r}: checkpoint {manifest.name} is on the own disks of {len(manifest.shards)} shards, "
            f"and shard {shard} cannot read the others': start {len(manifest.shards)} shards"
        )
    return own
