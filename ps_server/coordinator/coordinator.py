"""The coordinator: its jobs, from beginning to end.

The coordinator is not on the data path: once workers have the shard map, they call the shards directly.

    a cluster comes up:       shard_directory, shards
    a job begins:             register_job: made, or continued from a checkpoint
    what happens to a job:    coordinated_job.py; `job` finds a job by its name
    in the background:        expire_workers, recover_jobs, look_at_rounds, held_jobs.compare
    it ends, and is followed: drain, stop; the next one resumes the jobs from the state file

Only `start` starts threads. Without it, tests and simulations call the background work themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import JobMismatch, NotFound, PSError, RunEnded, TryLater
from ps_protocol.job import MAX_BUCKET_BYTES, JobSpec, difference, is_added_to
from ps_protocol.messages.workers import JoinRequest, ShardMap
from ps_protocol.optimizers import with_defaults
from ps_runtime.background import Background, guarded
from ps_runtime.pools import Pool
from ps_runtime.quantities import counted
from ps_runtime.troubles import Troubles
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.cluster import Checkpointing, Cluster
from ps_server.coordinator.coalesced import Together
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.drain import Drain
from ps_server.coordinator.ended_jobs import EndedJobs, FinishedJob, has_finished
from ps_server.coordinator.events import EventLog
from ps_server.coordinator.expiry import Expiry
from ps_server.coordinator.held_jobs import HeldJobs, Run
from ps_server.coordinator.new_jobs import NewJobs
from ps_server.coordinator.recovery import Recovery
from ps_server.coordinator.refusals import try_soon
from ps_server.coordinator.shards import Connect, MakeExecutor, RegisteredShard, Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.state_file import StateFile, resumed, saved
from ps_server.coordinator.timing import DEFAULT_LEASE_SECONDS, DEFAULT_TIMING, Clock, Timing
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.core.membership import JoinedWorker
from ps_server.core.placement import sized
from ps_server.core.statistics import CoordinatorStatistics
from ps_server.core.validation import check_address, check_host, check_job_spec, check_launch, check_memory_place
from ps_server.failpoints import failpoint
from ps_server.storage.files import Files, files_of

log = logging.getLogger("ps_server")

SAVES_TOGETHER = 1024  # most callers whose changes one write of the state file saves


class Coordinator:
    """All jobs of a cluster. Methods may be called from any thread and raise PSError.

    connect:  makes the ShardApi of a shard from its index and address
    lease:    seconds for which a worker counts as live without a heartbeat
    policy:   where checkpoints go and when they are made; None: none are made
    make_executor: makes the executors that run calls to shards
    disk:     reads and writes all files; None: that of the checkpoint directory, a file system or an object store
    charge:   whether this coordinator is in charge; `connect` may share it
    events:   the log of recent events
    ended:    the jobs that are over
    held_jobs: compares the coordinator's jobs with those that the shards hold
    ending:   whether the coordinator is told to stop
    """

    def __init__(
        self,
        shard_count: int,
        connect: Connect,
        lease: float = DEFAULT_LEASE_SECONDS,
        limits: Limits = DEFAULTS,
        policy: CheckpointPolicy | None = None,
        timing: Timing = DEFAULT_TIMING,
        clock: Clock | None = None,
        make_executor: MakeExecutor = Pool,
        disk: Files | None = None,
        charge: Charge | None = None,
    ) -> None:
        self.lease = lease
        clock, self.charge = clock or Clock(), charge or Charge()
        shards = Shards(shard_count, connect, make_executor, timing, clock, self.charge)
        self._state_file, checkpointing = None, None
        if policy is not None:
            disk = disk or files_of(policy.directory)
            self._state_file = StateFile(policy.directory, disk)
            checkpointing = Checkpointing.open(policy, disk, clock.since_1970(), limits)
            self.charge.begin(self._state_file)
        self.events = EventLog(clock)
        values = SharedRoom(limits.all_round_bytes, "max-all-round-bytes", "values that workers exchange")
        self._cluster = Cluster(shards, lease, limits, checkpointing, timing, clock, make_executor, self.events, values)
        self._recovery = Recovery(checkpointing, shards) if checkpointing is not None else None
        self.held_jobs = HeldJobs(shards, self.jobs, self._known_runs)
        self._new_jobs = NewJobs(self._cluster, self, self._recovery)
        self._jobs: dict[str, CoordinatedJob] = {}
        self._lock = threading.Lock()
        self.ended = EndedJobs()
        self.ending = Drain(timing.stops_together)
        self._saves: Together[None, None] = Together(self._save_for_all, SAVES_TOGETHER)
        self._troubles = Troubles(log, "state_file")
        self._background = Background()
        self._expiry = Expiry(self.jobs, self._cluster, self._background)
        if policy is not None and (policy.restore or policy.resume):
            try:
                self._resume_jobs()
            except BaseException:
                self.stop()
                raise

    # -- background work ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads for the background work."""
        timing, lease = self._cluster.timing, self._cluster.lease
        self._background.start()
        self._background.repeat("leases", min(0.5, lease / 10), self._expiry.look_regularly)
        self._background.repeat("recovery", timing.recovery_look, self.recover_jobs)
        self._background.repeat("rounds", timing.round_look, self.look_at_rounds)
        self._background.repeat("held-jobs", timing.held_jobs_look, self.held_jobs.compare)
        self._background.repeat("state", timing.save_again, self.save_again)
        for job in self.jobs().values():
            self._run_checkpoints(job)

    def stop(self) -> None:
        """Ends the threads and the streams of watchers."""
        self._background.stop()
        _at_once(self._cluster, "stop", [job.stop for job in self.jobs().values()])
        self._cluster.shards.close()
        if self._cluster.checkpointing is not None:
            self._cluster.checkpointing.release()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._background.stopping

    def _run_checkpoints(self, job: CoordinatedJob) -> None:
        if job.checkpoints is not None:
            self._background.run("checkpoints", job.checkpoints.run)

    def expire_workers(self) -> None:
        """Removes workers whose lease ran out, so that no worker waits for them."""
        self._expiry.look()

    def recover_jobs(self) -> None:
        """Rolls back the jobs of which a shard lost its part, each in a thread of its own."""
        if self.charge.lost:
            return
        for name, job in self.jobs().items():
            if job.lost():
                self._background.apart("recovery", name, partial(job.recover, self._recovery))

    def look_at_rounds(self) -> None:
        """Tells workers in rounds which ranks they wait for."""
        for name, job in self.jobs().items():
            if job.rounds.waiting():
                self._background.apart("rounds", name, job.look_at_rounds)

    def _known_runs(self) -> set[Run]:
        # Read before the jobs: if a job is complete in between, it is in `jobs`. In the other order both could lack it.
        being_made = self._new_jobs.runs.being_made()
        return being_made | {(name, job.placed.run) for name, job in self.jobs().items()}

    def make_checkpoints(self) -> None:
        """Advances the checkpoints of all jobs as far as possible now. After `start`, each job has a thread for
        this.
        """
        for job in self.jobs().values():
            if job.checkpoints is not None:
                job.checkpoints.advance()

    # -- shards ------------------------------------------------------------------------------------------------------

    @property
    def shard_directory(self) -> Shards:
        """The registered shards."""
        return self._cluster.shards

    def shards(self) -> dict[int, RegisteredShard]:
        """Returns the registered shards, by index."""
        return self._cluster.shards.known()

    def shard_map(self, placement: Sequence[int]) -> ShardMap:
        """Returns the addresses of the shards, and the placement of buckets. placement: the shard of each bucket"""
        return ShardMap({index: shard.address for index, shard in self.shards().items()}, tuple(placement))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self) -> dict[str, CoordinatedJob]:
        """Returns the jobs, by name."""
        with self._lock:
            return dict(self._jobs)

    def job(self, name: str, run: str = "") -> CoordinatedJob:
        """Returns a job. Raises NotFound, with the reason of the job's end if it is known; FinishedWithout if the run
        has finished; RunEnded if another run has the name now.

        run: the caller's run; empty: any
        """
        job = self._jobs.get(name)
        if job is None:
            raise self.ended.error(name, run) or NotFound(f"no job {name!r} here")
        if run and run != job.placed.run:
            raise RunEnded(f"run {run} of job {name!r} has ended: run {job.placed.run} has its name now")
        return job

    def statistics(self) -> CoordinatorStatistics:
        """Returns the statistics of all jobs."""
        return CoordinatorStatistics(
            shards=len(self.shards()),
            jobs={name: job.statistics() for name, job in self.jobs().items()},
            recovery=self._recovery.statistics() if self._recovery is not None else None,
        )

    def register_job(
        self, spec: JobSpec, launch: str = "", memory_place: str = "", caller: str = ""
    ) -> tuple[CoordinatedJob, bool]:
        """Returns the job with this spec, and whether this call made it. Raises JobMismatch naming what differs.

        If the spec has no bucket size, it gets that of the running job, of its checkpoint, or one chosen here. Missing
        hyper-parameters get their defaults.

        launch:       the caller's launch. JobFinished is raised if the job has finished for it; empty: the job may
                      begin anew
        memory_place: names the memory that the worker can share with shards on its machine; empty: none
        caller:       the principal to whom the job's memory is accounted, if this call makes the job, or if it comes
                      from an earlier coordinator
        """
        limits, shards = self._cluster.limits, self._cluster.shards
        self.charge.check()
        check_job_spec(replace(spec, bucket_bytes=spec.bucket_bytes or MAX_BUCKET_BYTES), limits)
        check_memory_place(memory_place)
        spec = with_defaults(spec)
        shards.all()  # raises TryLater while a shard has not registered
        chosen = sized(spec, shards.on_one_machine(memory_place), limits.buckets)
        self.ending.check()
        check_launch(launch)
        with self._lock:
            self.ended.check(spec.name, launch)
            known = self._jobs.get(spec.name)
            if known is None:
                owners = [job.owner.name for job in self._jobs.values()]
                self._new_jobs.begin(spec.name, owners, caller)
            else:
                self._new_jobs.check(spec.name)  # a job that is not on disk yet may still fail
        if known is not None:
            spec = spec if spec.bucket_bytes else replace(spec, bucket_bytes=known.spec.bucket_bytes)
            differs = difference(known.spec, spec)
            if differs is not None:
                raise JobMismatch(f"job {spec.name!r} exists and differs: {differs}")
            self._check_not_waiting(known, launch)
            if known.life.has_ended:
                raise try_soon(f"job {spec.name!r} ends at this moment")
            known.owner.name = known.owner.name or caller
            return known, False
        try:
            job = self._new_jobs.make(spec, chosen)
            job.owner.name = caller
            with self._lock:
                self._jobs[spec.name] = job
                self.ended.begun(spec.name, launch)
            try:
                self._run_checkpoints(job)
                self.save_ahead()
            except BaseException as error:
                job.end(str(error))
                raise
        finally:
            self._new_jobs.done(spec.name)
        size, buckets = job.placed.nbytes, counted(len(job.placed.placement), "bucket")
        log.info("job %s: %s, %d bytes in %s", spec.name, spec.mode, size, buckets)
        self.events.note("started", spec.name, f"the job begins: {spec.mode}, {size} bytes in {buckets}")
        return job, True

    def _check_not_waiting(self, job: CoordinatedJob, launch: str) -> None:
        """Raises an error if a job only waits for workers that may come back.

        That is JobFinished for a launch that took part and whose last worker was done, and TryLater for another launch,
        which begins the job anew.

        A worker process that rejoins does not register the job.
        """
        attendance, name = job.workers.attendance, job.spec.name
        if not job.absent_awaited():
            return
        if launch not in attendance.launches:
            self._background.apart("finished", name, partial(job.finish, wait=False))
            raise try_soon(f"job {name!r} ends at this moment")
        if attendance.is_done:
            raise has_finished(name, attendance.left_at)

    def _resume_jobs(self) -> None:
        """Resumes the jobs that ran when a coordinator with this directory ended."""
        assert self._state_file is not None
        jobs, finished = self._state_file.load()
        self.ended.resume(finished)
        for name, left in jobs.items():
            try:
                spec = job_spec_from_data(left.spec)
                check_job_spec(spec, self._cluster.limits)
                spec = with_defaults(spec)  # a server of version 1 stored the registered values without defaults
                job = self._jobs[name] = resumed(left, spec, self._cluster, self)
            except TryLater:
                raise  # the store does not answer now. Without the job, this coordinator would make shards drop it
            except PSError as error:
                log.error("job %s: cannot be resumed: %s", name, error)
            else:
                log.info("job %s: resumed, with %d workers", name, len(job.workers.all()))
                self.events.note("started", name, "the job goes on with a coordinator that was started again")

    def drain(self, seconds: float) -> None:
        """Refuses new jobs and workers, and makes a last checkpoint of each job.

        seconds: the time in which workers can end their current steps
        """
        with self.ending.begin():
            self._make_last_checkpoints(seconds)

    def _make_last_checkpoints(self, seconds: float) -> None:
        text = "stopping"
        if any(not job.workers.empty() for job in self.jobs().values()):
            text += f": workers have {seconds:g} s (--drain-seconds) to end their steps for the last checkpoints"
        log.info("%s", text)
        failpoint("drain-begun")
        for job in self.jobs().values():
            job.workers.close()
        jobs = [job.checkpoints for job in self.jobs().values() if job.checkpoints is not None]
        _at_once(self._cluster, "drain", [partial(checkpoints.request_final, seconds) for checkpoints in jobs])

    # -- calls of jobs: coordinator.cluster.Registry ------------------------------------------------------------------

    def save_ahead(self) -> None:
        """Writes the state file, for a later coordinator. Raises TryLater if the write fails."""
        if self._state_file is not None:
            self._saves.do(None)

    def _save_for_all(self, callers: Sequence[None]) -> Sequence[None]:
        """Writes the file once, with the changes of all callers."""
        assert self._state_file is not None
        self._state_file.save(lambda: {name: saved(job) for name, job in self.jobs().items()}, self.ended.finished)
        return callers

    def save(self) -> None:
        """Writes the state file. If the write fails, `save_again` repeats it later."""
        try:
            self.save_ahead()
        except PSError as error:
            self._troubles.met("", "%s; trying again", error, level=logging.ERROR)
        else:
            self._troubles.over("")

    def save_again(self) -> None:
        """Writes the state file if an earlier write has failed."""
        if self._state_file is not None and self._state_file.is_behind:
            self.save()

    def later(self, seconds: float, work: Callable[[], None]) -> bool:
        """Calls `work` after `seconds`. Returns False if there is no thread for it. Watchers use it to send rosters
        together.
        """
        return self._background.later("rosters", seconds, work)

    def holds(self, name: str) -> bool:
        """Whether a job has parameters that were added to another job, which has not ended."""
        first = name.rpartition(".added")[0]
        job = self._jobs.get(first) if is_added_to(first, name) else None
        return job is not None and not job.life.has_ended

    def forget(self, name: str, why: str, finished: FinishedJob | None = None) -> None:
        """Drops a job that has ended, and frees its name. The jobs that it held finish before."""
        for other, held in self.jobs().items():
            if is_added_to(name, other):
                guarded("finished", partial(held.finish, wait=False))
                guarded("deserted", held.desert)  # after a restart of the coordinator it is unknown how workers left
        with self._lock:  # so that the job is always either listed or among the ended ones
            if self._recovery is not None:
                self._recovery.forget(name)  # before another job can have the name
            self._jobs.pop(name, None)
            self.ended.ended(name, why, finished)
        self.save()

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, name: str, rank: int | None, request: JoinRequest) -> JoinedWorker:
        """Makes the caller a live worker of a job; see CoordinatedJob.join."""
        check_host(request.host)
        check_launch(request.launch)
        if request.metrics_address:
            check_address(request.metrics_address, "where metrics are served")
        self.ending.check()
        self.charge.check()
        job = self.job(name, request.run)
        self._cluster.shards.all()  # raises TryLater while a shard has not registered
        rolling_back = self._recovery.progress(name) if self._recovery is not None else None
        if rolling_back is not None:
            raise rolling_back
        joined = job.join(rank, request)
        self.ended.joined(name, request.launch)
        return joined

    def leave(
        self,
        name: str,
        rank: int,
        incarnation: int,
        key: bytes = b"",
        run: str = "",
        state: tuple[int, bytes] | None = None,
        done: bool = False,
        of: int = 0,
    ) -> bool:
        """Removes a worker that leaves. Returns True if the job has ended: now, because it was the last one, or
        earlier.

        state: the worker's clock and own state; None if it sends none
        done:  the worker's script has run to its end
        of:    the member of the worker's group that leaves
        """
        self.charge.check()
        job = self._jobs.get(name)
        return job is None or run not in ("", job.placed.run) or job.leave(rank, incarnation, key, state, done, of)


def _at_once(cluster: Cluster, name: str, works: Sequence[Callable[[], object]]) -> None:
    """Calls functions in parallel, one for each job: one of them may have to wait for a hung shard."""
    with cluster.make_executor(max(1, len(works)), name) as pool:
        for work in works:
            pool.submit(guarded, name, work)
