"""An attempt at one checkpoint of a job: its clock, the shards' parts, the workers' states, and its manifest.

1. choose a clock ahead of all shards, and begin the part of each shard at this clock
2. wait for the parts, and for the state of each live worker: as long as the request permits, however slow a step is
3. write the workers' states and the manifest, and remove old checkpoints

In sync every bucket of every shard, and every worker, is captured at one clock. When the clock is chosen, it must lie
ahead of all of them. So the shards are queried, and if one has passed the clock already, a later one is chosen. In ssp
and async there is no common clock: each shard copies its buckets at once, and the manifest has the versions and clocks
of each.

If no worker trains any more, or the time of a request is over, buckets at one version are copied as they are. The
manifest names the workers whose states are missing.

The phases are generators, which yield the seconds that they wait for, or less if something changes meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    NotFound,
    OutOfOrder,
    PSError,
    TryLater,
    VersionMismatch,
)
from ps_runtime.troubles import Troubles
from ps_server.coordinator.cluster import Checkpointing, Cluster
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.coordinator.shards import answers_of
from ps_server.coordinator.worker_states import States, StatesOnDisk, WorkerStates
from ps_server.core.placement import PlacedJob
from ps_server.core.snapshot import ShardSnapshot, SnapshotRequest, StoredFile, VersionRange, union
from ps_server.core.statistics import CheckpointStatistics
from ps_server.failpoints import failpoint
from ps_server.storage.manifest import Manifest, WorkerFile

log = logging.getLogger("ps_server")

T = TypeVar("T")
# A generator that yields the seconds until it must be resumed; it may be resumed sooner if something changes.
Steps = Generator[float, None, T]


class Void(Exception):
    """This attempt at a checkpoint is abandoned: the job is rolled back or ends, or a caller needs a
    checkpoint sooner.
    """


class Requests:
    """The requests for checkpoints, which are numbered, and the result of the last one.

    asked:    the number of the last request
    answered: the number of the last request that is answered
    error:    why the last request failed; None if it succeeded
    standing: as of the last request, no worker trains any more
    last:     the servers end after the checkpoint
    until:    the time until which live workers may take to reach the checkpoint's clock; after it, it is made without
              them
    """

    def __init__(self) -> None:
        self.asked, self.answered = 0, 0
        self.standing = self.last = False
        self.until = math.inf
        self.error: PSError | None = None

    @property
    def open(self) -> bool:
        """Whether a request is not answered yet."""
        return self.asked > self.answered

    def ask(self, until: float, standing: bool, last: bool) -> int:
        """Adds a request, and returns its number. The arguments are those in the class's description.

        If other requests are open, the earliest `until` of them counts.
        """
        self.until = min(until, self.until) if self.open else until
        self.standing = standing
        self.last = last or self.last  # once True, it stays True: a shard that ends may still request a checkpoint
        self.asked += 1
        return self.asked

    def answer(self, number: int, error: PSError | None) -> None:
        """Marks all requests up to `number` as answered. error: why they failed; None if the checkpoint is complete"""
        self.answered, self.error = max(self.answered, number), error

    def pause(self, now: Callable[[], float], seconds: float) -> Steps[None]:
        """Waits for `seconds`, or until the next request comes. Yields the seconds that are left."""
        until, asked = now() + seconds, self.asked
        while self.asked == asked and (left := until - now()) > 0:
            yield left


class CheckpointProgress:
    """Which checkpoints a job has, and how many were made.

    last:       the manifest of the last complete checkpoint; None if there is none
    at:         when that one was complete, on the coordinator's clock
    base:       the checkpoint on which the parts of the one under way may build; None if they have all rows
    whole:      the name of the last checkpoint that has the states of all workers
    of_earlier_run: the name of an earlier run's last checkpoint, from which this run has not continued. It is kept
    reached:    the highest known version (in sync) or clock (otherwise) of the job
    complete, failed, incomplete: how many checkpoints were completed; failed; were completed without some workers'
    states
    seconds:    how long the last checkpoint took
    held_up:    for how many seconds it stopped updates, on the shard where this took longest
    """

    def __init__(self, now: float) -> None:
        self.last: Manifest | None = None
        self.base: Manifest | None = None
        self.whole: str | None = None
        self.of_earlier_run: str | None = None
        self.at = now
        self.reached = 0
        self.complete, self.failed, self.incomplete = 0, 0, 0
        self.seconds, self.held_up = 0.0, 0.0

    def committed(self, manifest: Manifest, held_up: float) -> None:
        """Records a complete checkpoint. held_up: seconds, see the class's description"""
        self.resumed(manifest)
        self.held_up = held_up
        self.complete += 1
        self.incomplete += bool(manifest.without)

    def resumed(self, manifest: Manifest) -> None:
        """Records the checkpoint with which the job was resumed."""
        self.last = manifest
        self.whole = self.whole if manifest.without else manifest.name
        self.reached = max(self.reached, manifest.clock)

    def statistics(self, now: float) -> CheckpointStatistics:
        """Returns the counts of checkpoints, and the last one."""
        last = self.last
        return CheckpointStatistics(
            complete=self.complete,
            failed=self.failed,
            incomplete=self.incomplete,
            name=last.name if last is not None else None,
            clock=last.clock if last is not None else 0,
            seconds=self.seconds,
            held_up_seconds=self.held_up,
            age_seconds=now - self.at,
            without=last.without if last is not None else (),
        )


@dataclass(frozen=True)
class CheckpointedJob:
    """The state that all checkpoints of one job share.

    pool:     runs the calls to shards
    names:    yields names for further checkpoints
    changed:  called when a shard has answered
    troubles: logs what checkpoints lack, such as a worker's state: once, and not for each checkpoint
    began:    by rank, the clock at which a worker of that rank first joined
    """

    placed: PlacedJob
    workers: JobWorkers
    cluster: Cluster
    checkpointing: Checkpointing
    pool: Executor
    names: Iterator[str]
    changed: Callable[[], None]
    requests: Requests
    progress: CheckpointProgress
    states: WorkerStates
    troubles: Troubles
    began: Mapping[int, int]

    def look(self) -> int:
        """Queries the shards; returns the job's highest version (in sync) or clock (otherwise). Shards that do not
        answer do not count.
        """
        spec, highest = self.placed.spec, 0
        for shard in self.cluster.shards.known().values():
            with contextlib.suppress(PSError):
                highest = max(highest, shard.api.statistics().progress(spec.name, spec.consistency.one_clock))
        return highest

    def have_stepped(self, ranks: Iterable[int], clocks: Mapping[int, int]) -> bool:
        """Whether a worker of one of `ranks` has made a step. One that has only joined has made none.

        clocks: the clock that each rank has reached
        """
        return any(clocks.get(rank, 0) > self.began.get(rank, 0) for rank in ranks)

    def kept(self) -> tuple[str, ...]:
        """Returns the names of the checkpoints whose parts the shards must keep, if shards have disks of their own.

        `prune` removes old checkpoints from the coordinator's directory only. Shards with disks of their own remove the
        others. Returns an empty tuple if all parts are in that directory.
        """
        last = self.progress.last
        if last is None or not any(part.disk for part in last.shards.values()):
            return ()
        return tuple(self.checkpointing.store.names(self.placed.spec.name))

    def base(self) -> Manifest | None:
        """Returns the last checkpoint if the next one may be incremental; None if the next one must have all rows.

        An incremental checkpoint has only those rows of tables that changed since the one before: see
        CheckpointPolicy.full_every. A job without tables has no incremental checkpoints.
        """
        last, every = self.progress.last, self.checkpointing.policy.full_every
        if last is None or not self.placed.spec.tables:
            return None
        since_full = 1 + max((len(chain) for chain in last.bases.values()), default=0)
        name, store = self.placed.spec.name, self.checkpointing.store
        return last if since_full < every and store.is_complete(name, last.name) else None

    def spare_earlier_run(self) -> None:
        """Keeps the last checkpoint of an earlier run from being pruned, unless this run has continued from a
        checkpoint.

        It is another result, and its user may have forgotten --restore.
        """
        name, store = self.placed.spec.name, self.checkpointing.store
        for checkpoint in reversed(store.names(name) if self.placed.continues is None else []):
            with contextlib.suppress(CheckpointDamaged, VersionMismatch):
                manifest = store.manifest(name, checkpoint)
                if not self.placed.owns(manifest.run, checkpoint):
                    self.progress.of_earlier_run = checkpoint
                    log.warning(
                        "job %s: begins anew beside the checkpoints of an earlier run, of which the last one, %s at "
                        "clock %d, stays; --restore continues from there",
                        *(name, checkpoint, manifest.clock),
                    )
                    return

    def remove_unfinished(self) -> None:
        """Removes checkpoints that were begun after the last complete one. The next restore would warn of them."""
        name, store = self.placed.spec.name, self.checkpointing.store
        with contextlib.suppress(PSError, OSError):  # the disk may have failed
            complete = store.names(name)
            for begun in store.unfinished(name, complete[-1] if complete else ""):
                store.discard(name, begun)


class CheckpointAttempt:
    """One checkpoint under way. `make` is for one thread; `abandon` may be called from any."""

    def __init__(self, job: CheckpointedJob) -> None:
        self._job, self._spec = job, job.placed.spec
        self._shards, self._timing, self._now = job.cluster.shards, job.cluster.timing, job.cluster.clock.now
        self._store, self._one_clock = job.checkpointing.store, job.placed.spec.consistency.one_clock
        self._name = ""
        self._clock: int | None = None
        self._parts: dict[int, ShardSnapshot] = {}
        self._awaited: dict[int, Future[ShardSnapshot]] = {}  # by shard, the call that waits for its part
        self._last = False  # the servers end after it
        self._void = False
        # Held while a manifest is written, so that `abandon` is certain whether it exists
        self._committing = threading.Lock()

    def abandon(self) -> None:
        """Makes the checkpoint void, unless its manifest is written already. No manifest is written after
        this returns.
        """
        with self._committing:
            self._void = True

    def _check_void(self) -> None:
        if self._void:
            raise Void

    def make(self) -> Steps[None]:
        """Makes the checkpoint. Raises Void once it is abandoned, PSError if it fails."""
        self._last = self._job.requests.last
        if self._job.requests.standing or (self._job.requests.open and self._stands_still()):
            yield from self._make_standing()
            return
        yield from self._begin()
        if (yield from self._await_parts()):
            self._job.troubles.over("late")
            self._commit((yield from self._await_states()))
            return
        last = self._job.progress.last
        if last is not None and last.clock == self._job.look():
            self._store.discard(self._spec.name, self._name)
            self._job.troubles.met(
                "late",
                "job %s: no live worker has come to clock %d in time; checkpoint %s has clock %d, which the job is at",
                *(self._spec.name, self._clock, last.name, last.clock),
            )
            return
        late = [worker.rank for worker in self._job.workers.all()]
        if late:
            what = "job %s: workers %s did not come to clock %d in time"
            self._job.troubles.met("late", what, self._spec.name, late, self._clock, detail=tuple(late))
        yield from self._make_standing()

    def _stands_still(self) -> bool:
        """Whether no worker can be in a step: there is none, or training has not begun. A worker that evaluates may
        still step.
        """
        return self._job.workers.stand_still()

    def _make_standing(self) -> Steps[None]:
        """Copies each bucket as it is. In sync the copies are a checkpoint only if all buckets have one version, as is
        the case when no worker trains.
        """
        until = self._job.requests.until + self._timing.fallback
        while self._job.workers.removals.pending() and self._now() < until:
            self._check_void()
            yield self._timing.checkpoint_begin  # staged contributions of a worker that has left wait for its removal
        while True:
            self._begin_standing()
            yield from self._await_parts()
            reached = self._reached()
            if not self._one_clock or reached.version_min == reached.version_max:
                break
            self._store.discard(self._spec.name, self._name)
            if self._now() >= until:
                low, high = reached.version_min, reached.version_max
                raise TryLater(f"the shards are between two clocks, {low} and {high}")
            yield self._timing.checkpoint_begin
        self._commit(self._states_now(reached.version_max if self._one_clock else None))

    # -- 1. choose a clock -------------------------------------------------------------------------------------------

    def _begin(self) -> Steps[None]:
        """Chooses a clock that all shards can still meet. In ssp and async there is no such clock."""
        ahead = 1
        if self._one_clock and self._job.requests.open:
            self._look()  # each step that the clock lies needlessly ahead delays the checkpoint by a step
        self._rename(ahead)
        while True:
            self._check_void()
            try:
                # A repeated call, whose first answer was lost, may find the part complete. The states that workers have
                # sent for it stay.
                self._begin_on_shards()
                return
            except OutOfOrder:
                ahead *= 2  # further ahead at each attempt, because training continues meanwhile
                self._look()
                self._store.discard(self._spec.name, self._name)
                self._rename(ahead)
            except (TryLater, NotFound):  # no weights yet, or a shard is away
                yield from self._job.requests.pause(self._now, self._timing.checkpoint_begin)

    def _look(self) -> None:
        """Queries the shards for the clocks that the job has reached."""
        reached, progress = self._job.look(), self._job.progress
        with self._committing:
            self._check_void()  # after a rollback, `reached` may be a clock from before it
            progress.reached = max(progress.reached, reached)

    def _rename(self, ahead: int) -> None:
        """Chooses another name, and a clock `ahead` steps, or multiples of the policy's steps, ahead."""
        self._job.states.forget()
        self._name = self._next_name()
        reached, steps = self._job.progress.reached, self._job.checkpointing.policy.steps
        if not self._one_clock:
            self._clock = None
        elif self._job.progress.last is None or steps is None or self._job.requests.open:
            self._clock = reached + ahead
        else:
            self._clock = (reached // steps + ahead) * steps

    def _next_name(self) -> str:
        """Begins a checkpoint on disk under a new name, and returns the name. No coordinator has used it before."""
        self._job.progress.base = self._job.base()
        return next(name for name in self._job.names if self._store.begin(self._spec.name, name))

    def _begin_standing(self) -> None:
        """Begins a part on each shard that copies the buckets as they are, whatever their versions."""
        self._clock = None
        while True:
            self._check_void()
            self._name = self._next_name()
            with contextlib.suppress(OutOfOrder):  # an earlier coordinator has begun a checkpoint of that name
                self._begin_on_shards()
                return

    def _begin_on_shards(self) -> None:
        pool, refusal = self._job.pool, self._refusal()
        parts = self._job.progress.base.shards if self._job.progress.base is not None else {}
        on = {index: part.sha256 for index, part in parts.items()}
        run, last, kept = self._job.placed.run, self._job.workers.last_incarnation(), tuple(self._job.kept())
        wanted = SnapshotRequest(self._spec.name, self._name, self._clock, run, refusal, last, kept)
        requests = [(shard.api, replace(wanted, built_on=on.get(shard.index, ""))) for shard in self._shards.all()]
        answers_of([pool.submit(api.begin_snapshot, request) for api, request in requests])

    def _refusal(self) -> float:
        """Returns for how many seconds shards refuse pushes that come too late for the checkpoint; 0: they
        refuse none.
        """
        requests = self._job.requests
        if not (self._last or requests.standing):
            return 0.0
        return max(0.0, requests.until - self._now()) + self._timing.refusal

    # -- 2. wait for parts and states --------------------------------------------------------------------------------

    def _await_parts(self) -> Steps[bool]:
        """Waits for every shard's part.

        Returns False for a requested checkpoint if no worker trains, or if live workers have not reached its clock in
        time.
        """
        requests, self._parts, self._awaited = self._job.requests, {}, {}
        asked, wanted = requests.asked, requests.open
        while True:
            self._check_void()
            self._ask_shards()
            if not all(call.done() for call in self._awaited.values()):
                yield self._timing.checkpoint_look  # no longer, because a checkpoint may be requested meanwhile
            yield from self._take_answers()
            if len(self._parts) == self._shards.count:
                return True
            if requests.asked > asked and (not wanted or requests.last > self._last):
                # A checkpoint was requested. This one is a scheduled one, whose clock may lie far ahead, or it does not
                # make the shards refuse pushes.
                raise Void
            if wanted and self._clock is not None and (self._now() >= requests.until or self._stands_still()):
                return False

    def _ask_shards(self) -> None:
        for shard in self._shards.all():
            if shard.index not in self._parts.keys() | self._awaited.keys():
                wanted = self._spec.name, self._name, self._job.placed.run
                call = self._job.pool.submit(shard.api.await_snapshot, *wanted)
                self._awaited[shard.index] = call
                call.add_done_callback(lambda _: self._job.changed())

    def _take_answers(self) -> Steps[None]:
        for index in [index for index, call in self._awaited.items() if call.done()]:
            try:
                self._parts[index] = self._awaited.pop(index).result()
            except TryLater:
                yield from self._job.requests.pause(self._now, self._timing.checkpoint_look)
            except NotFound:
                raise Void from None

    def _await_states(self) -> Steps[States]:
        """Returns the states of the workers; a live worker that sends nothing in time is left out."""
        clock = self._reached().version_max if self._one_clock else None
        until, requests = self._states_until(), self._job.requests
        while True:
            self._check_void()
            late = {worker.rank for worker in self._job.workers.all()} - self._job.states.at(clock).keys()
            # A request that came meanwhile has a time of its own.
            if not late or self._now() >= min(until, requests.until if requests.open else math.inf):
                return self._states_now(clock)
            yield self._timing.checkpoint_look

    def _states_until(self) -> float:
        """Returns until when live workers must send their states. In sync a state of another clock is of no use."""
        if not self._one_clock:
            # For the last checkpoint the shards refuse pushes: no worker passes the clock, so waiting brings no states.
            return self._now() + (0.0 if self._last else self._timing.any_state)
        return math.inf if self._job.requests.open else self._now() + self._timing.state

    def _states_now(self, clock: int | None) -> States:
        """Returns the states that belong to a clock; without one, the newest of each worker.

        The newest state of a worker that died is in the last checkpoint. A new process of its rank continues from that
        state, with the data of the job's present clock.
        """
        states = self._job.states
        if clock is not None:
            newer = {**states.left(clock), **states.at(clock)}
            known = states.left_at().keys() | {worker.rank for worker in self._job.workers.all()}
            return {**self._kept(states.kept.keys() - newer.keys() - known), **newer}
        newer = {**states.left(max(self._reached().clocks.values(), default=0)), **states.at(None)}
        return {**self._kept(states.kept.keys() - newer.keys()), **newer}

    def _kept(self, ranks: Set[int]) -> dict[int, tuple[int, bytes]]:
        """Returns the states of these ranks in the last checkpoint, without those that are damaged, or cannot be read
        now: a job's last checkpoint is made without them, too.
        """
        kept = {}
        for rank in ranks:
            try:
                kept[rank] = self._job.states.kept[rank]
            except (CheckpointDamaged, TryLater) as error:
                what = "job %s: the state of worker %d is lost: %s"
                self._job.troubles.met(rank, what, self._spec.name, rank, error, level=logging.ERROR)
        return kept

    def _without(self, states: States) -> tuple[int, ...]:
        """Returns the ranks of live workers, and of those that have left, whose states are missing."""
        left = self._job.states.left_at()
        return tuple(sorted(({worker.rank for worker in self._job.workers.all()} | left.keys()) - states.keys()))

    def _reached(self) -> VersionRange:
        """Returns the versions and clocks of the buckets in all parts."""
        # Without the parts of shards that train no bucket: these have no clocks, and version 0.
        return union(part.extent for part in self._parts.values() if part.extent.clocks)

    # -- 3. write ----------------------------------------------------------------------------------------------------

    def _commit(self, states: States) -> None:
        """Writes the workers' states, then the manifest; then removes old checkpoints."""
        job, store, name = self._spec.name, self._store, self._name
        try:
            workers = {
                rank: WorkerFile(store.write_worker(job, name, rank, state), clock)
                for rank, (clock, state) in states.items()
            }
            manifest = self._manifest(workers, self._without(states))
            failpoint("manifest-missing")
            with self._committing:
                self._check_void()
                store.commit(job, manifest)
                self._job.states.kept = StatesOnDisk(store, manifest)
                self._job.progress.committed(manifest, max(part.held_up for part in self._parts.values()))
        except CheckpointFailed:
            store.discard(job, name)
            raise
        progress = self._job.progress
        with contextlib.suppress(TryLater):  # the next one removes them
            store.prune(job, self._job.checkpointing.policy.keep, (progress.whole, progress.of_earlier_run))
        log.info("job %s: checkpoint %s at clock %d, %d bytes", job, name, manifest.clock, manifest.bytes)
        self._log_states(manifest)

    def _log_states(self, manifest: Manifest) -> None:
        """Logs which workers' states are missing, or are older than the checkpoint's clock."""
        job, left, troubles = self._spec.name, self._job.states.left_at(), self._job.troubles
        if not manifest.without:
            troubles.over("without")
        elif self._job.have_stepped(manifest.without, manifest.clocks):
            what = (
                "job %s: checkpoint %s is without the state of workers %s: after a return to it, they go on with their "
                "data from where they are, and new processes from the beginning"
            )
            missing = list(manifest.without)
            troubles.met("without", what, job, manifest.name, missing, detail=manifest.without)
        else:  # these workers have joined, and not made a step yet
            log.info(
                "job %s: checkpoint %s has no state of workers %s yet: no step of theirs is in it",
                *(job, manifest.name, list(manifest.without)),
            )
        behind = {rank: clock for rank, clock in left.items() if clock is not None and clock < manifest.clock}
        if behind and self._one_clock:
            what = (
                "job %s: checkpoint %s is of clock %d, and workers had left before, by rank at clock %s: they go on "
                "with the data from there"
            )
            troubles.met("behind", what, job, manifest.name, manifest.clock, behind, detail=str(behind))
        else:
            troubles.over("behind")

    def _manifest(self, workers: Mapping[int, WorkerFile], without: tuple[int, ...]) -> Manifest:
        reached = self._reached()
        return Manifest(
            name=self._name,
            job=job_spec_data(self._spec),
            run=self._job.placed.run,
            mode=self._spec.mode,
            clock=reached.version_max if self._one_clock else max(reached.clocks.values(), default=0),
            placement=self._job.placed.placement,
            shards={index: snapshot.part for index, snapshot in sorted(self._parts.items())},
            workers=workers,
            versions=(reached.version_min, reached.version_max),
            clocks=dict(reached.clocks),
            last_incarnation=self._job.workers.last_incarnation(),
            restore_count=self._job.workers.restore_count,
            written_by={"torch": torch.__version__.split("+")[0]},
            without=without,
            bases=_bases(self._job.progress.base, self._parts),
        )


def _bases(base: Manifest | None, parts: Mapping[int, ShardSnapshot]) -> dict[int, tuple[StoredFile, ...]]:
    """Returns, by shard, the files that its part builds on, oldest first. base: the checkpoint that the parts may build
    on
    """
    if base is None:
        return {}
    return {
        index: (*base.bases.get(index, ()), StoredFile(base.name, base.shards[index]))
        for index, snapshot in sorted(parts.items())
        if snapshot.changes_only
    }
