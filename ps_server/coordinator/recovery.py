"""Setting a job back to its last checkpoint, after a shard lost what it held.

In sync every shard goes back to the one clock that the checkpoint has, so that the job ends with the weights that it
would have had. In ssp and async the shard that lost its part goes back alone: the others keep what they have, and what
is missing on that shard is counted. Either way every worker is fenced, so that nothing of before arrives later, and
joins again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, JobMismatch, NoCheckpoints, PSError
from ps_protocol.job import difference
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.shards import RegisteredShard, Shards
from ps_server.core.snapshot import VersionRange
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import CheckpointStore, Manifest

log = logging.getLogger("ps_server")

States = Mapping[int, tuple[int, bytes]]


class Recovery:
    """Sets jobs back.

    Counts checkpoints: `restored`, those gone back to; `damaged`, those that could not be used; `unfinished`, those
    that were begun after the one gone back to, and whose writing was cut short.
    """

    def __init__(self, store: CheckpointStore, shards: Shards) -> None:
        self.damaged = 0
        self.restored = 0
        self.unfinished = 0
        self._store = store
        self._shards = shards

    def restore(
        self,
        job: CoordinatedJob,
        shards: Mapping[int, RegisteredShard],
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
        if job.checkpoints is not None:
            job.checkpoints.give_up()
        everything = job.spec.consistency.aggregate
        back = [shard for index, shard in shards.items() if everything or index in set(lost)]
        last = job.membership.last_incarnation
        for manifest in self._candidates(job, any_run):
            incarnation = max(last, manifest.last_incarnation)

            try:
                heard = self._heard(job, shards, lost)
                reached = self._go_back(job, back, manifest.name, incarnation)
                states = self._states(job, manifest)
                failpoint("restore-half-done")
            except CheckpointDamaged as error:
                self._say(job, manifest.name, error)
                continue
            for name in self._store.unfinished(job.spec.name, manifest.name):
                self.unfinished += 1
                log.warning("job %s: checkpoint %s was not completed: it has no manifest", job.spec.name, name)
            self._set_back(job, shards, manifest, states, incarnation)
            self._book(job, reached, heard)
            return manifest
        raise NoCheckpoints(f"job {job.spec.name!r}: there is no checkpoint that can be used")

    def _go_back(
        self, job: CoordinatedJob, shards: list[RegisteredShard], name: str, incarnation: int
    ) -> list[VersionRange]:
        def one(shard: RegisteredShard) -> VersionRange:
            return shard.api.restore_job(job.spec, job.buckets_of(shard.index), name, incarnation)

        return self._shards.call(shards, one)

    def _heard(self, job: CoordinatedJob, shards: Mapping[int, RegisteredShard], lost: Iterable[int]) -> dict[int, int]:
        """By rank, how far each live worker is: as it said last, or as the shards that keep theirs know better."""
        heard = {member.rank: member.clock for member in job.members()}
        for index in set() if job.spec.consistency.aggregate else shards.keys() - set(lost):
            with contextlib.suppress(PSError):
                clocks = shards[index].api.statistics().clocks(job.spec.name)
                heard = {rank: max(clock, clocks.get(rank, 0)) for rank, clock in heard.items()}
        return heard

    def _book(self, job: CoordinatedJob, reached: list[VersionRange], heard: Mapping[int, int]) -> None:
        """Keeps in mind, of each worker, how far it was and how far the shards that were set back are now."""
        reached = [extent for extent in reached if extent.clocks]  # a shard that trains no bucket has nothing to lose
        for rank in heard.keys() | job.unaccounted.keys() if reached else ():
            known = [extent.clocks[rank] for extent in reached if rank in extent.clocks]
            restored = min(known, default=job.began.get(rank, 0))
            before, clock = (restored, heard[rank]) if rank in heard else job.unaccounted[rank]
            if rank in heard or before < clock:  # else it did not come back the time before, and that is booked
                job.unaccounted[rank] = min(before, restored), clock

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
        shards: Mapping[int, RegisteredShard],
        manifest: Manifest,
        states: States,
        incarnation: int,
    ) -> None:
        self.restored += 1
        with job.guard:
            members = job.membership.set_back(time.monotonic())
            job.membership.last_incarnation = incarnation
        for member in members:
            job.account(member.rank)  # of an earlier time: it never came back
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
