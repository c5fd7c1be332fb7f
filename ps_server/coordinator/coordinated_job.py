"""A job on its coordinator. Everything that happens to a job is a method of CoordinatedJob.

    workers come and go:        join, leave, expire, finish
    while they train:           workers.heartbeat, data.lease_batches, rounds.gather_values, look_at_rounds,
                                save_worker_state, checkpoint
    a shard loses its part:     lost, recover
    the job ends:               end

A job is made of parts, each an object that guards itself: workers, leased data, rounds, checkpoints. No lock is held
over a call to a shard, and the job's lock is not held while a file is written. An operation that needs such calls has
three steps: decide under the lock; call; record under the lock what was done, unless something has made it void
meanwhile. A rollback and the job's end are phases (lifecycle.py). During a phase no worker joins, and no second phase
begins. Locks are taken in this order: the job's, its data's or its rounds', its workers', its removals'.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import (
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NoCheckpoints,
    PSError,
    TryLater,
    UnknownWorker,
)
from ps_protocol.job import JobSpec
from ps_protocol.messages.workers import Continued, JoinRequest
from ps_runtime.dates import described
from ps_runtime.quantities import ranks_text
from ps_runtime.troubles import Troubles
from ps_server.coordinator.cluster import Cluster, Registry, new_membership
from ps_server.coordinator.ended_jobs import FinishedJob
from ps_server.coordinator.heard import HeardFigures
from ps_server.coordinator.job_checkpoints import JobCheckpoints
from ps_server.coordinator.job_data import JobData
from ps_server.coordinator.job_script import JobScript
from ps_server.coordinator.job_value_rounds import JobValueRounds
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.coordinator.joins import JobJoins, described_join, log_join
from ps_server.coordinator.lifecycle import Lifecycle, Phase
from ps_server.coordinator.recovery import Recovery, Restored
from ps_server.coordinator.removals import Removal
from ps_server.coordinator.runs import began_at
from ps_server.coordinator.shards import RegisteredShard
from ps_server.coordinator.shared_room import Owner
from ps_server.coordinator.watchers import Watchers
from ps_server.core.accounting import StepAccounting
from ps_server.core.membership import JoinedWorker, LiveWorker, Membership, NamedProcess
from ps_server.core.placement import PlacedJob
from ps_server.core.statistics import JobStatistics, Wait
from ps_server.storage.manifest import Manifest

log = logging.getLogger("ps_server")


class CoordinatedJob:
    """One job. Methods may be called from any thread and raise PSError; so may those of its parts.

    workers, data, rounds, accounting, watchers, figures, script, life: its parts
    checkpoints:     makes the job's checkpoints; None if the servers make none
    placed:          the job, and which shard holds which bucket
    shard_processes: by shard, the process that held the job's part when it was made or restored. If another process
                     serves the shard now, the part is lost

    The other arguments are the state that an earlier coordinator, or a checkpoint, has left of the job. Their defaults
    are those of a new job.
    """

    def __init__(
        self,
        placed: PlacedJob,
        shard_processes: Mapping[int, int],
        cluster: Cluster,
        registry: Registry,
        membership: Membership | None = None,
        pending_removals: frozenset[Removal] = frozenset(),
        restore_count: int = 0,
        accounting: StepAccounting | None = None,
    ) -> None:
        spec = placed.spec
        self.owner = Owner()
        self.placed, self._shard_processes = placed, dict(shard_processes)
        self._cluster, self._registry = cluster, registry
        self.workers = JobWorkers(
            spec.name,
            placed.run,
            membership or new_membership(spec, cluster),
            cluster,
            pending_removals,
            restore_count,
        )
        self.accounting = accounting or StepAccounting(spec.consistency.goes_back_together)
        self.data = JobData(placed, self.workers, cluster)
        self.rounds = JobValueRounds(self.workers, cluster, registry.save_ahead, self.owner)
        checkpointing = cluster.checkpointing
        self.checkpoints = (
            JobCheckpoints(placed, self.workers, cluster, checkpointing, self.accounting.began, self.owner)
            if checkpointing is not None
            else None
        )
        self.watchers = Watchers(self.workers.announced, cluster.clock, registry.later)
        self.figures = HeardFigures()
        in_step = spec.consistency.one_clock
        self.script = JobScript(self.workers, in_step, self._saved_script, self.watchers.tell)
        self.life = Lifecycle(spec.name, cluster.clock)
        self._joins = JobJoins(self.workers, self.data, self.accounting, self.life, self.lost, registry, self._announce)
        self._troubles = Troubles(log, "rollback")

    # -- looks -------------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        """The job's spec."""
        return self.placed.spec

    @functools.cached_property
    def spec_data(self) -> dict[str, Any]:
        """The job's spec as plain data. It is made once: for a job of many parameters this takes long."""
        return job_spec_data(self.spec)

    @property
    def shard_processes(self) -> Mapping[int, int]:
        """By shard, the process that holds the job's part."""
        return self._shard_processes

    def lost(self, shards: Mapping[int, RegisteredShard] | None = None) -> list[int]:
        """Returns the shards whose process has changed since it got its part of the job: the part is lost."""
        shards = self._cluster.shards.known() if shards is None else shards
        return [index for index, shard in shards.items() if self._shard_processes.get(index) != shard.process]

    def statistics(self) -> JobStatistics:
        """Returns the job's statistics."""
        workers, (_, world_size, started) = self.workers.all(), self.workers.roster()
        local = self.spec.local
        return JobStatistics(
            name=self.spec.name,
            consistency=self.spec.consistency,
            world_size=world_size,
            started=started,
            parameter_bytes=self.placed.nbytes,
            buckets=len(self.placed.placement),
            imbalance=self.placed.imbalance,
            restore_count=self.workers.restore_count,
            lost_steps=self.accounting.lost_steps,
            redone_steps=self.accounting.redone_steps,
            rejoining=self.workers.rejoining(),
            absent=tuple(worker.rank for worker in self.absent_awaited()),
            rolling_back=self.life.is_rolling_back or bool(self.lost()),
            workers=tuple(workers),
            now=self._cluster.clock.now(),
            figures=self.figures.of({(worker.rank, worker.incarnation) for worker in workers}),
            loaders=self.data.progress(),
            checkpoints=self.checkpoints.statistics() if self.checkpoints is not None else None,
            run=self.placed.run,
            trained_bytes=self.placed.trained_bytes,
            group_size=self.spec.group_size,
            mode=self.spec.mode,
            local_steps=0 if local is None or local.seconds is not None else local.steps,
            local_seconds=0.0 if local is None else local.seconds or 0.0,
            local_fragments=0 if local is None or local.fragments is None else local.fragments.count,
        )

    def _announce(self) -> None:
        """Sends the roster to the watchers, and to the workers in a round."""
        self.script.workers_changed()
        self.watchers.tell()
        self.rounds.changed()

    # -- workers come and go -----------------------------------------------------------------------------------------

    def join(self, rank: int | None, request: JoinRequest) -> JoinedWorker:
        """Makes the caller a live worker; returns its membership and the clock it starts from.

        Raises JobInUse if live workers of another launch prevent the join; TryLater while it is unknown whether they
        live (Membership.rivals), if a shard does not answer, or if the coordinator's file cannot be written: a
        restarted coordinator would not know a worker that the shards count.
        """
        continued = self._continued(request)
        try:
            with self.life.deciding():
                self.life.check_open(self.lost())
                repeated = self.workers.repeated(request)
                reservation = self.workers.reserve(rank, request) if repeated is None else None
        except PSError as error:
            if not error.retryable:
                self._cluster.events.note(
                    "refused", self.spec.name, f"a worker at {request.host or 'an unknown host'} is refused: {error}"
                )
            raise
        if reservation is None:
            assert repeated is not None
            return self._result(repeated, request, continued)
        worker = self._joins.join(reservation, request)
        if continued is not None and worker.clock:  # the first line about the launch
            self._tell_of_continuing(worker, continued)
        log_join(self.spec.name, worker, reservation.older, request)
        self._tell_of_waits()
        for kind, text in described_join(worker, reservation.older, request):
            self._cluster.events.note(kind, self.spec.name, text)
        result = self._result(worker, request, continued)
        if self.checkpoints is not None:
            self.checkpoints.joined(worker.rank)
        return result

    def _tell_of_waits(self) -> None:
        """Logs once which ranks the job waits for, when a first worker comes back."""
        awaited = self.workers.newly_awaited()
        if awaited:
            ranks = ranks_text(awaited)
            log.warning("job %s: no worker was left: it waits for %s to join again", self.spec.name, ranks)
            self._cluster.events.note("lost", self.spec.name, f"no worker was left: the job waits for {ranks}")

    def _continued(self, request: JoinRequest) -> Continued | None:
        """Returns what earlier launches have trained, for the first worker of a new launch; otherwise None."""
        attendance = self.workers.attendance
        if request.previous is not None or not request.launch or request.launch in attendance.launches:
            return None
        placed, live = self.placed, len(self.workers.all())
        run = placed.continues[0] if placed.continues is not None else placed.run
        trained = self.checkpoints.last_made_at() if self.checkpoints is not None else None
        if live or attendance.has_been:
            silent = self.life.deserted_for(self.workers.empty(without_awaited=True))
            trained = self._cluster.clock.since_1970() - silent
        return Continued(began_at(run), trained, live)

    def _tell_of_continuing(self, worker: LiveWorker, continued: Continued) -> None:
        text = (
            f"a new launch continues the job at clock {worker.clock}: {described(continued.began, continued.trained)}"
        )
        log.log(logging.INFO if continued.live else logging.WARNING, "job %s: %s", self.spec.name, text)
        self._cluster.events.note("join", self.spec.name, text)

    def _result(self, worker: LiveWorker, request: JoinRequest, continued: Continued | None) -> JoinedWorker:
        is_new = request.previous is None
        state = self.checkpoints.state_of(worker.rank, is_new) if self.checkpoints is not None else None
        placed = self.placed
        restore_count = self.workers.restore_count
        if not worker.clock:
            continued = None
        return JoinedWorker(
            *(worker, worker.clock, list(placed.placement), restore_count, state, placed.run, continued)
        )

    def leave(
        self,
        rank: int,
        incarnation: int,
        key: bytes,
        state: tuple[int, bytes] | None = None,
        done: bool = False,
        of: int = 0,
    ) -> bool:
        """Removes a worker that leaves. Returns True if it was the last one and the job has ended.

        state: the worker's clock and own state, which the next checkpoints keep; None if it sends none
        done:  the worker's script has ended
        of:    the member of the worker's group that leaves. The group stays until each member has left with `done`, or
               one leaves without
        """
        has_begun = done or state is not None
        state = _if_small(self.spec.name, rank, state, self._cluster.limits.state_bytes)
        with self.life.deciding():  # no worker leaves between the decision and the bookkeeping of a rollback
            if self.spec.group_size > 1:
                stays, state = self._member_leaves((rank, incarnation, key), of, state, done)
                if stays:
                    return False
            left = self.workers.leave(rank, incarnation, key, done)
            if left is None:
                return self.life.has_ended
            worker, was_live = left
            self.accounting.give_up(rank)
            if self.checkpoints is not None and was_live:  # otherwise the state may be of steps that were rolled back
                self.checkpoints.left(rank, state)
        how = f"{', done' if done else ''}{'' if was_live else ', and does not join again'}"
        log.info("job %s: worker %d leaves%s", self.spec.name, rank, how)
        self._cluster.events.note("leave", self.spec.name, f"worker {rank} leaves{how}")
        # Also the last worker, and before the last checkpoint: staged contributions may wait for this worker's step.
        self._remove([worker])
        self._registry.save()
        self.workers.removals.tell()
        return self.finish(is_held=has_begun or worker.clock > 0)

    def _member_leaves(
        self, worker: tuple[int, int, bytes], of: int, state: tuple[int, bytes] | None, done: bool
    ) -> tuple[bool, tuple[int, bytes] | None]:
        """Records that a member of a group leaves. Returns whether the group stays, and the state that it leaves.

        A caller that is no live worker changes nothing: its state would belong to no worker. Raises Forbidden.
        """
        self.check_member(of)
        try:
            self.workers.check(*worker)
            stays = done and self.workers.member_leaves(*worker, of)
        except UnknownWorker:  # also for a fenced worker: `leave` raises its error
            return False, None
        if self.checkpoints is None:
            return stays, None
        return stays, self.checkpoints.member_left(worker[0], of, state if done else None)

    def absent_awaited(self) -> tuple[LiveWorker, ...]:
        """Returns the absent workers for which the job waits before it ends; none unless all others have left."""
        return self.workers.absent() if self.workers.attendance.waits else ()

    @property
    def ends_soon(self) -> bool:
        """Whether the job only waited for silent workers to come back, and the last one's time is over."""
        return self.workers.attendance.waits and not self.workers.absent()

    def finish(self, wait: bool = True, is_held: bool = True) -> bool:
        """Ends the job if its last worker has left; returns whether it has ended. Does nothing during a rollback, which
        calls this when it is over, nor where another job holds it: see Registry.holds.

        A worker that was removed as silent may still be alive, in the middle of its script. It must find the weights
        when it comes back. So the job waits for such workers: see Timing.absence.

        wait: False: the job ends without waiting for them; is_held: False: also where another job holds it
        """
        with self.life.deciding():
            has_left = self.workers.attendance.has_left and self.workers.empty()
            held = is_held and self._registry.holds(self.spec.name)
            if not has_left or held or not self.life.is_running or self._cluster.shards.charge.lost:
                return False
            absent = self.workers.absent()
            begins_to_wait = bool(absent) and wait and self.workers.attendance.wait()
            if not absent or not wait:
                self.life.begin(Phase.ENDING)
        if begins_to_wait:
            self._tell_wait(absent)
        if absent and wait:
            return False
        try:
            if self.checkpoints is not None:
                self.checkpoints.request_last(self._cluster.timing.last_checkpoint)
        finally:
            attendance, now = self.workers.attendance, self._cluster.clock.since_1970()
            self.end(finished=FinishedJob(self.placed.run, attendance.launches, now) if attendance.is_done else None)
        return True

    def _tell_wait(self, absent: tuple[LiveWorker, ...]) -> None:
        """Logs that the job waits for workers that may come back, and writes that to the state file."""
        seconds = max(worker.expires for worker in absent) - self._cluster.clock.now()
        who = ranks_text([worker.rank for worker in absent])
        were = "was" if len(absent) == 1 else "were"
        text = f"all others have left: it waits up to {seconds:.0f} s for {who}, which {were} silent and may come back"
        log.info("job %s: %s", self.spec.name, text)
        self._cluster.events.note("waits", self.spec.name, text)
        self._registry.save()

    def _remove(self, workers: Sequence[LiveWorker]) -> None:
        """Removes workers that left or were removed everywhere: from the shards, the data leases and the rounds."""
        with self.life.deciding():
            for worker in workers:
                self.accounting.gone(worker.rank, worker.clock)
        self.workers.removals.add(*((worker.rank, worker.incarnation) for worker in workers))
        for worker in workers:
            self.data.gone(worker.rank, worker.incarnation)
        self._announce()

    def expire(self, process: NamedProcess | None = None) -> list[int]:
        """Removes the workers whose lease has run out. Stops waiting for those that did not come back in time.

        process: a process that has ended, as its launcher reports: the leases of its workers end at once
        Returns the ranks of that process's workers.
        """
        late = self.workers.stop_waiting()
        if late:
            log.warning("job %s: continues without workers %s, which did not come back", self.spec.name, late)
            self._cluster.events.note(
                "lost", self.spec.name, f"the job goes on without {ranks_text(late)}, which did not come back"
            )
            with self.life.deciding():
                for rank in late:
                    self.accounting.give_up(rank)
            self._announce()
        self.workers.forget_absent()
        if self.workers.doubt_is_over():
            self._announce()
        expired, ended = self.workers.take_gone(process)
        silent = f"no sign of life for {self._cluster.lease:g} s"
        for worker, why in (*((each, silent) for each in expired), *((each, "its process ended") for each in ended)):
            who = self.spec.name, worker.rank, worker.pid, worker.host
            log.warning("job %s: worker %d (pid %d on %s) is gone: %s", *who, why)
            text = f"worker {worker.rank} on {worker.host} is gone: {why}"
            self._cluster.events.note("lost", self.spec.name, text)
        if expired or ended:
            self._remove([*expired, *ended])
            # Before any shard hears of it: a restarted coordinator must not count a worker that a shard has removed.
            self._registry.save()
        self.workers.removals.tell()
        return [worker.rank for worker in ended]

    def desert(self) -> None:
        """Ends a job that all workers left without ending it, after a last checkpoint, unless a worker has come."""
        seconds = self.life.deserted_for(self.workers.empty(without_awaited=True))
        with self.life.deciding():
            is_empty = self.workers.empty(without_awaited=True) and not self._registry.holds(self.spec.name)
            if not is_empty or not self.life.is_running or self._cluster.shards.charge.lost:
                return
            self.life.begin(Phase.ENDING)
        try:
            if self.checkpoints is not None and self.workers.ever_joined():
                self.checkpoints.request_last(self._cluster.timing.last_checkpoint)
        finally:
            self.end(f"it had no worker for {seconds:.0f} s")

    # -- while they train --------------------------------------------------------------------------------------------

    def look_at_rounds(self) -> None:
        """Sends workers in an open round the ranks that they wait for, and whether one of these waits for a step."""
        if self.rounds.waiting():
            self.rounds.look(self._waits(), self.spec.consistency.mixes_clocks)

    def _waits(self) -> list[Wait]:
        """Queries all shards for the workers that wait on them.

        Returns none if pulls never wait for workers in this mode, if no query is due, or if a shard does not answer.
        """
        if self.spec.consistency.max_staleness is None or not self.rounds.look_due():
            return []
        try:
            answers = self._cluster.shards.call_all(lambda shard: shard.api.statistics())
        except PSError:
            return []  # a shard does not answer: the next query comes soon
        hosted = [shard.jobs[self.spec.name] for shard in answers if self.spec.name in shard.jobs]
        return [wait for job in hosted for wait in job.waits]

    def check_member(self, of: int) -> None:
        """Raises InvalidRequest unless `of` is the number of a member of a worker's group."""
        if of >= self.spec.group_size:
            raise InvalidRequest(f"expected a member below {self.spec.group_size}, got {of}")

    def save_worker_state(self, rank: int, incarnation: int, key: bytes, clock: int, state: bytes, of: int = 0) -> None:
        """Keeps a live worker's state for the next checkpoint. Raises LimitExceeded if it, or all states together, are
        too large.

        clock: the worker's clock, to which the state belongs
        of:    the member of the worker's group whose state it is
        """
        limit = self._cluster.limits.state_bytes
        if len(state) > limit:
            raise LimitExceeded(f"max-state-bytes is {limit}, got a worker's state of {len(state)}")
        self.check_member(of)
        self.workers.check(rank, incarnation, key)
        if self.checkpoints is not None:
            self.checkpoints.save_state(rank, clock, state, of)

    def _saved_script(self, above: int) -> tuple[int, bytes] | None:
        return self.checkpoints.newest_state(above) if self.checkpoints is not None else None

    def checkpoint(self, seconds: float = math.inf) -> Manifest:
        """Makes a checkpoint now; see JobCheckpoints.request. Raises NoCheckpoints if the servers make none.

        seconds: the longest time that the caller waits
        """
        if self.checkpoints is None:
            raise NoCheckpoints("these servers were started without --checkpoint-dir")
        timing = self._cluster.timing
        return self.checkpoints.request(max(0.0, min(timing.asked_checkpoint, seconds - timing.fallback)))

    # -- a shard loses its part --------------------------------------------------------------------------------------

    def recover(self, recovery: Recovery | None) -> None:
        """Rolls the job back to its last checkpoint if a shard lost its part of it, and ends it if there is none."""
        with self.life.deciding():
            shards = self._cluster.shards.known()
            lost = self.lost(shards)
            if not lost or not self.life.may_roll_back:
                return
            if self.spec.consistency.goes_back_together and len(shards) < self._cluster.shards.count:
                return  # all shards go back together, and one has not registered yet
            if self._cluster.shards.are_awaited(self._cluster.timing.shard_awaited):
                return  # a shard that registers later may know steps of workers that have died: they are counted
            self.life.begin(Phase.ROLLING_BACK)
        reason = ""
        try:
            if recovery is None:
                raise NoCheckpoints("these servers were started without --checkpoint-dir")
            lost = recovery.without_part(self.placed, shards, lost)
            self._rollback(recovery, shards, lost)
        except (NoCheckpoints, JobMismatch) as error:
            names = ", ".join(map(str, lost))
            reason = f"shard {names} was started anew and lost its part of the job; {error}"
        except PSError as error:
            self._troubles.met("", "job %s: not rolled back yet: %s", self.spec.name, error)
            needs_help = not isinstance(error, TryLater)
            self.life.rollback_failed(str(error), self._cluster.timing.roll_back_again if needs_help else 0.0)
        else:
            self._troubles.over("")
            self.life.rolled_back()
        finally:
            self.life.done()
        if reason:
            self.end(reason)
        else:
            self.finish()

    def _rollback(self, recovery: Recovery, shards: Mapping[int, RegisteredShard], lost: list[int]) -> None:
        """Restores the job on the shards that go back. If this raises an error, nothing has changed for the workers, or
        all of them are fenced: the call may be repeated.
        """
        if self.checkpoints is not None:
            self.checkpoints.abandon()
        everywhere = self.spec.consistency.goes_back_together
        back = [shard for index, shard in shards.items() if everywhere or index in lost]
        heard, gone = self._heard([shard for shard in shards.values() if shard not in back])
        restored = recovery.restore(self.placed, back, self.workers.last_incarnation())
        with self.life.deciding():
            workers = self.workers.rollback(everywhere, restored.last_incarnation)
            self.accounting.rolled_back(restored.reached, heard, gone)
            for rank in heard.keys() - {worker.rank for worker in workers}:
                self.accounting.give_up(rank)  # the worker has left meanwhile
        self.continue_from(restored, back)
        if everywhere:
            self.script.forget()
        log.warning(
            "job %s: rolled back to checkpoint %s, clock %d; %d workers are to join again",
            *(self.spec.name, restored.manifest.name, restored.manifest.clock, len(workers)),
        )
        lost_shards = f"shard{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        text = f"{lost_shards} lost the job: it goes back to clock {restored.manifest.clock}"
        self._cluster.events.note("rollback", self.spec.name, f"{text}, checkpoint {restored.manifest.name}")
        self.workers.removals.tell()
        self._registry.save()
        self._announce()

    def _heard(self, shards: list[RegisteredShard]) -> tuple[dict[int, int], dict[int, int]]:
        """Returns two maps of clocks by rank: of live workers, and of workers that have left.

        A live worker's clock is the one that it reported last, or a higher one on a shard that keeps its part.
        """

        def clocks_of(shard: RegisteredShard) -> Mapping[int, int]:
            with contextlib.suppress(PSError):
                return shard.api.statistics().clocks(self.spec.name)
            return {}

        heard = {worker.rank: worker.clock for worker in self.workers.all(and_fenced=True)}
        gone: dict[int, int] = {}
        for clocks in self._cluster.shards.call(shards, clocks_of):
            for rank, clock in clocks.items():
                known = heard if rank in heard else gone
                known[rank] = max(clock, known.get(rank, 0))
        return heard, gone

    def continue_from(self, restored: Restored, shards: Iterable[RegisteredShard]) -> None:
        """Records that these shards have restored the job from a checkpoint."""
        self._shard_processes |= {shard.index: shard.process for shard in shards}
        self.data.rolled_back()
        if self.checkpoints is not None:
            self.checkpoints.rolled_back(restored.manifest)

    # -- the job ends ------------------------------------------------------------------------------------------------

    def end(self, why: str = "", finished: FinishedJob | None = None) -> None:
        """Ends the job, even while it has workers, and frees its memory on every shard that answers.

        finished: the record of the job that is kept, if its workers were done
        A shard that does not answer drops it later. No other run of the job's name waits for that.
        """
        name, run = self.spec.name, self.placed.run
        ended = self.life.end(why)
        if ended is None:
            return
        if self.checkpoints is not None:
            self.checkpoints.stop()
        self._registry.forget(name, why, finished)
        try:
            self._cluster.shards.call_all(lambda shard: shard.api.drop_job(name, run))
        except PSError as error:
            log.warning("job %s: ended, but not everywhere: %s", name, error)
        self.watchers.end()
        self.rounds.end(ended)
        log.info("%s", f"job {name!r} has finished" if finished is not None else ended)
        text = "the job has finished" if finished is not None else f"the job has ended{f': {why}' if why else ''}"
        self._cluster.events.note("end", self.spec.name, text)

    def stop(self) -> None:
        """Ends the streams of workers because the coordinator stops. The job itself continues."""
        if self.checkpoints is not None:
            self.checkpoints.stop()
        self.watchers.end()
        self.rounds.end(TryLater("the coordinator stops"))


def _if_small(name: str, rank: int, state: tuple[int, bytes] | None, limit: int) -> tuple[int, bytes] | None:
    """Returns a worker's state, or None if it is too large: the worker leaves without it."""
    if state is None or len(state[1]) <= limit:
        return state
    size = len(state[1])
    log.warning("job %s: worker %d leaves a state of %d bytes, and max-state-bytes is %d", name, rank, size, limit)
    return None
