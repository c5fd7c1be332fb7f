"""The checkpoints of one job: when one is made, the requests for one, and the content of the last one.

A checkpoint is due after a number of steps or of seconds, or on request. checkpoint_attempt.py makes it. All
of this is one generator, which yields the seconds that it waits for. In a server a thread runs it (`run`); a test or a
simulation takes one step at a time (`advance`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping

from ps_protocol.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    LimitExceeded,
    PSError,
    TryLater,
    VersionMismatch,
    anew,
)
from ps_runtime.background import note_error
from ps_runtime.troubles import Troubles
from ps_server.coordinator.checkpoint_attempt import (
    CheckpointAttempt,
    CheckpointedJob,
    CheckpointProgress,
    Requests,
    Steps,
    Void,
)
from ps_server.coordinator.cluster import Checkpointing, Cluster
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.coordinator.shared_room import Owner
from ps_server.coordinator.worker_states import StatesOnDisk, WorkerStates
from ps_server.core.placement import PlacedJob
from ps_server.core.statistics import CheckpointStatistics
from ps_server.storage.manifest import Manifest

log = logging.getLogger("ps_server")

MANY_SECONDS = 3600.0  # `advance` returns this once `stop` was called


class JobCheckpoints:
    """Makes the checkpoints of one job, until `stop`. Methods may be called from any thread, `advance` from one.

    began: by rank, the clock at which a worker of that rank first joined. The caller adds ranks to it as they join
    owner: the principal to whom the workers' states are accounted
    """

    def __init__(
        self,
        placed: PlacedJob,
        workers: JobWorkers,
        cluster: Cluster,
        checkpointing: Checkpointing,
        began: Mapping[int, int],
        owner: Owner | None = None,
    ) -> None:
        self._spec, self._timing, self._clock = placed.spec, cluster.timing, cluster.clock
        self._policy = checkpointing.policy
        self._progress, self._requests = CheckpointProgress(cluster.clock.now()), Requests()
        self._states = WorkerStates(checkpointing.room, owner, placed.spec.group_size, cluster.limits.state_bytes)
        self._changed = threading.Condition()
        self._changes = 0  # rises with every notice
        self._stopping, self._running = False, False
        self._final: Manifest | PSError | None = None  # what `request_final` has made, or why it has made none
        # Two threads for each shard: a call waits for the shard's disk, and that of an abandoned checkpoint may still
        # wait when the next checkpoint begins.
        pool = cluster.make_executor(2 * cluster.shards.count, "checkpoints")
        first = int(checkpointing.store.next_name(placed.spec.name))
        names = (f"{number:06d}" for number in itertools.count(first))
        troubles = Troubles(log, None)  # ps_checkpoints_failed_total and others count them
        shared = self._requests, self._progress, self._states, troubles, began
        self._job = CheckpointedJob(placed, workers, cluster, checkpointing, pool, names, self._notify, *shared)
        self._attempt = CheckpointAttempt(self._job)
        self._work = self._make_all()
        self._job.spare_earlier_run()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Makes checkpoints until `stop`. A thread calls this."""
        with self._changed:
            self._running = True
        try:
            while not self._stopping:
                seen = self._changes
                seconds = self.advance()
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._changes != seen, seconds)  # noqa: B023
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def advance(self) -> float:
        """Advances the work as far as possible now. Returns the seconds until the next call, if nothing changes."""
        return next(self._work)

    def stop(self) -> None:
        """Abandons the checkpoint that is being made, and waits until `run` has returned."""
        with self._changed:
            self._stopping = True
            self._notify()
        self.abandon()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._job.pool.shutdown(wait=False)
        self._job.remove_unfinished()
        self._states.close()

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _make_all(self) -> Steps[None]:
        """Makes one checkpoint after the other, when it is due or requested, and answers the requests."""
        while True:
            yield from self._await_due()
            started, asked = self._clock.now(), self._requests.asked
            error: PSError | None = None
            self._job.cluster.events.notify("checkpoint begun", self._spec.name, "a checkpoint is begun")
            try:
                yield from self._next_attempt().make()
                self._progress.seconds, self._progress.at = self._clock.now() - started, self._clock.now()
                self._note_made()
                self._job.troubles.over("made")
            except Void:
                if self._stopping:
                    yield MANY_SECONDS
                continue
            except PSError as failure:
                error = anew(failure)  # without the traceback, whose frames hold the workers' states
                self._job.troubles.met("made", "job %s: no checkpoint: %s", self._spec.name, failure)
            except Exception:
                error = CheckpointFailed("the coordinator met an error; its log says more")
                note_error("checkpoints")
            if error is not None:
                self._job.cluster.events.note(
                    "checkpoint", self._spec.name, f"no checkpoint: {error}", "checkpoint failed"
                )
                self._progress.failed += 1
                yield from self._requests.pause(self._clock.now, self._timing.checkpoint_look * 4)
            with self._changed:
                self._requests.answer(asked, error)
                self._notify()

    def _note_made(self) -> None:
        last = self._progress.last
        if last is not None:
            missing = f", without the state of workers {list(last.without)}" if last.without else ""
            text = f"checkpoint {last.name} at clock {last.clock} is complete{missing}"
            self._job.cluster.events.note("checkpoint", self._spec.name, text)

    def _await_due(self) -> Steps[None]:
        """Waits until a checkpoint must be begun. A checkpoint at a clock ahead is begun well before that clock."""
        policy, progress = self._policy, self._progress
        while not self._requests.open:
            if progress.last is None and (policy.steps or policy.seconds):
                return  # the first checkpoint is made at once, so that there is one to roll back to
            if policy.steps and (
                self._spec.consistency.one_clock or self._job.look() >= progress.reached + policy.steps
            ):
                return
            if policy.seconds and self._clock.now() >= progress.at + policy.seconds:
                return
            yield self._timing.checkpoint_look

    def _next_attempt(self) -> CheckpointAttempt:
        with self._changed:
            self._attempt = CheckpointAttempt(self._job)
            if self._stopping:
                self._attempt.abandon()
            return self._attempt

    # -- changes of the job and its workers --------------------------------------------------------------------------

    def save_state(self, rank: int, clock: int, state: bytes, of: int = 0) -> None:
        """Keeps the state of a worker, or of a member of its group. Raises LimitExceeded if there is no room."""
        self._states.save(rank, clock, state, of)
        self._notify()

    def member_left(self, rank: int, of: int, state: tuple[int, bytes] | None) -> tuple[int, bytes] | None:
        """Keeps the state that a member of a group leaves behind. Returns the group's state once each member has left
        one.

        state: the member's clock and state; None if it sends none. Returns None, too, if there is no room for it
        """
        try:
            return self._states.member_left(rank, of, state)
        except LimitExceeded as error:
            log.warning("job %s: worker %d leaves no state: %s", self._spec.name, rank, error)
            return None

    def left(self, rank: int, state: tuple[int, bytes] | None) -> None:
        """Records that a worker has left. state: its clock and its own state, if it has sent them"""
        try:
            self._states.leave(rank, state)
        except LimitExceeded as error:
            log.warning("job %s: worker %d leaves no state: %s", self._spec.name, rank, error)

    def joined(self, rank: int, has_place: bool = False) -> None:
        """Records that a worker of this rank is live. has_place: the worker knows it: see WorkerStates.joined"""
        self._states.joined(rank, has_place)

    def state_of(self, rank: int, is_new: bool) -> tuple[int, bytes] | None:
        """Returns the clock and state from which a joining worker of a rank continues; None if there is no usable one.

        It is the one that an earlier worker of the rank left behind, or the one in the last checkpoint.

        is_new: the worker's process has no state of its own. A process that was cut off while a checkpoint was made in
                sync has a newer state than the checkpoint, and keeps it
        """
        last = self._progress.last
        part = None if last is None or not self._spec.consistency.one_clock else last.workers.get(rank)
        if not is_new and last is not None and part is not None and part.clock < last.clock:
            return None
        try:
            return self._states.of(rank)
        except CheckpointDamaged as error:
            log.error("job %s: worker %d goes on without its state: %s", self._spec.name, rank, error)
            return None

    def newest_state(self, above: int) -> tuple[int, bytes] | None:
        """Returns the newest clock and state that a worker of any rank has left behind, or that the last checkpoint
        has.

        Returns None if no state is of a clock above `above`, or if it is damaged.
        """
        try:
            return self._states.newest(above)
        except CheckpointDamaged as error:
            log.error("job %s: a worker that joins late goes on without the job's schedule: %s", self._spec.name, error)
            return None

    def abandon(self) -> None:
        """Makes the checkpoint under way void, unless its manifest is written already."""
        with self._changed:
            attempt = self._attempt
        attempt.abandon()

    def rolled_back(self, manifest: Manifest) -> None:
        """Records that the job continues from a checkpoint. A checkpoint under way is void, and the next one is made as
        scheduled.
        """
        with self._changed:  # no attempt may begin in between: its clock would be from before the rollback
            self.abandon()
            self._states.rolled_back(StatesOnDisk(self._job.checkpointing.store, manifest, self._spec))
            self._progress.last, self._progress.reached = manifest, manifest.clock
            with contextlib.suppress(TryLater):  # the one that was known stays: the shards are restored already
                self._progress.whole = self._whole(manifest)
            self._notify()
        if manifest.without:
            log.warning(
                "job %s: checkpoint %s has no state of workers %s: they go on with their data from where they are, and "
                "new processes from the beginning",
                *(self._spec.name, manifest.name, list(manifest.without)),
            )

    def resume(self) -> None:
        """Continues after a restart of the coordinator from the last checkpoint of the run on disk: the next is due as
        planned.
        """
        name, store = self._spec.name, self._job.checkpointing.store
        for manifest in self._manifests():
            with contextlib.suppress(CheckpointDamaged):
                age = max(0.0, self._clock.since_1970() - store.made_at(name, manifest.name))
                self._progress.resumed(manifest)
                self._progress.at = self._clock.now() - age
                self._progress.whole = self._whole(manifest)
                self._states.kept = StatesOnDisk(store, manifest, self._spec)
                return

    def _manifests(self, before: str | None = None) -> Iterator[Manifest]:
        """Yields the checkpoints of this run that can be read, the last one first."""
        name, store = self._spec.name, self._job.checkpointing.store
        for checkpoint in reversed(store.names(name)):
            if before is not None and checkpoint >= before:
                continue
            try:
                manifest = store.manifest(name, checkpoint)
            except (CheckpointDamaged, VersionMismatch) as error:
                what = "job %s: checkpoint %s cannot be used: %s"
                self._job.troubles.met(checkpoint, what, name, checkpoint, error, level=logging.ERROR)
                continue
            if self._job.placed.owns(manifest.run, checkpoint):
                yield manifest

    def _whole(self, last: Manifest) -> str | None:
        """Returns the name of the last checkpoint up to this one that has the states of all workers. Raises TryLater if
        the store does not answer now.
        """
        if not last.without:
            return last.name
        return next((manifest.name for manifest in self._manifests(last.name) if not manifest.without), None)

    # -- requests and statistics ---------------------------------------------------------------------------------------

    def request(
        self, seconds: float, standing: bool = False, last: bool = False, fallback: float | None = None
    ) -> Manifest:
        """Requests a checkpoint, waits for it, and returns its manifest. Raises CheckpointFailed; TryLater after a
        timeout.

        seconds:  the time for live workers to reach the checkpoint's clock. After it, buckets are copied as they are,
                  without the states of workers that are late
        standing: whether no worker trains any more
        last:     whether the servers end after it: then shards refuse pushes that come too late for it
        fallback: how much longer the caller waits; None: as Timing says
        """
        with self._changed:
            number = self._requests.ask(self._clock.now() + seconds, standing, last)
            self._notify()
            most = seconds + (self._timing.fallback if fallback is None else fallback)
            self._clock.wait(self._changed, lambda: self._requests.answered >= number or self._stopping, most)
            if self._requests.answered < number:
                raise TryLater(f"job {self._spec.name!r}: the checkpoint is not complete after {most:g} s")
            if self._requests.error is not None:
                raise anew(self._requests.error)
            assert self._progress.last is not None
            return self._progress.last

    def request_last(self, seconds: float) -> None:
        """Makes the last checkpoint of a job that ends, if there were steps since the one before. seconds: see
        `request`
        """
        if not self._is_up_to_date():
            self._request_last(seconds, standing=True)

    def request_final(self, seconds: float) -> None:
        """Makes the last checkpoint before the servers end. All pushes that shards acknowledge are in it. Takes no
        longer than `seconds` and Timing.fallback, after which a shard that ends waits no more.

        seconds: the time in which workers can end their current steps
        """
        if self._is_up_to_date():
            self._final = self._progress.last
            return
        until, fallback = self._clock.now() + seconds, self._timing.fallback
        if not self._spec.consistency.one_clock:
            # The workers send their states for a first checkpoint while shards still accept pushes. A second one then
            # has all acknowledged pushes, with the same states: each worker skips the data of the steps that it made in
            # between.
            self._request_last(seconds / 2, fallback=min(fallback, (seconds + fallback) / 2))
        left = until - self._clock.now()
        self._final = self._request_last(max(0.0, left), last=True, fallback=max(0.0, min(fallback, left + fallback)))

    def final(self) -> Manifest:
        """Returns the last checkpoint before the servers end, after `request_final`. Raises an error if that failed."""
        if isinstance(self._final, PSError):
            raise anew(self._final)
        if self._final is None:
            raise CheckpointFailed(f"job {self._spec.name!r} has no last checkpoint")
        return self._final

    def _is_up_to_date(self) -> bool:
        last = self._progress.last
        return last is not None and self._spec.consistency.one_clock and last.clock == self._job.look()

    def _request_last(
        self, seconds: float, standing: bool = False, last: bool = False, fallback: float | None = None
    ) -> Manifest | PSError:
        try:
            return self.request(seconds, standing, last, fallback)
        except PSError as error:
            log.warning("job %s: ends without a last checkpoint: %s", self._spec.name, error)
            return anew(error)

    def last_made_at(self) -> float | None:
        """Returns when the last checkpoint was complete, in seconds since 1970; None if there is none or the disk
        cannot be read.
        """
        last = self._progress.last
        with contextlib.suppress(PSError, OSError):
            return None if last is None else self._job.checkpointing.store.made_at(self._spec.name, last.name)
        return None

    def statistics(self) -> CheckpointStatistics:
        """Returns the counts of checkpoints, and the last one."""
        return self._progress.statistics(self._clock.now())
