"""Checkpoints of one job, from the coordinator's side: when, at which clock, and what belongs to each.

In sync every bucket of every shard, and every worker, is caught at one clock, which has to lie ahead of all of them
when it is named: the shards are asked, and if one is past it already, a later one is named. In ssp and async there is
no common clock: each shard copies its buckets at once, and the manifest says how far each was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce

import torch

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import CheckpointFailed, NotFound, OutOfOrder, PSError, TryLater
from ps_protocol.job import JobSpec
from ps_server.coordinator.policy import CheckpointPolicy
from ps_server.coordinator.shards import Shards, call_all
from ps_server.core.snapshot import ShardSnapshot, VersionRange
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import CheckpointStore, Manifest, WorkerPart

log = logging.getLogger("ps_server")

LOOK_SECONDS = 0.25
BEGIN_SECONDS = 0.05
# Parts are on disk, and some worker has not sent its state: it may be evaluating. After this it is left out.
STATE_SECONDS = 60.0
# Without a common clock an older state will do: it is not waited for that long.
ANY_STATE_SECONDS = 10.0
LAST_SECONDS = 10.0
# Somebody waits for a checkpoint, and nothing moves: if all buckets are at one version, they are taken as they are.
STALL_SECONDS = 3.0


@dataclass(frozen=True)
class JobView:
    """What checkpoints need to know of a job while it runs.

    live: by rank, the clock of each live worker as last heard
    """

    spec: JobSpec
    run: Callable[[], str]
    placement: Callable[[], list[int]]
    shards: Shards
    live: Callable[[], Mapping[int, int]]
    counts: Callable[[], tuple[int, int]]  # last incarnation, restore count


class JobCheckpoints:
    """Makes the checkpoints of one job in a thread of its own, from its making to `stop`."""

    def __init__(
        self,
        job: JobView,
        store: CheckpointStore,
        policy: CheckpointPolicy,
    ) -> None:
        self.last: Manifest | None = None
        self.complete, self.failed = 0, 0
        self.last_seconds, self.last_held_up = 0.0, 0.0
        self.last_at = time.monotonic()
        self._job, self._store, self._policy = job, store, policy
        # Its calls wait for the shards' disks; those for one that was given up may be waiting still.
        self._pool = ThreadPoolExecutor(2 * job.shards.count, "checkpoints")
        self._aggregate = job.spec.consistency.aggregate
        self._number = int(store.next_name(job.spec.name)) - 1
        self._states: dict[int, tuple[int, bytes]] = {}  # by rank, what came last
        self._kept: dict[int, tuple[int, bytes]] = {}  # by rank, what the last checkpoint has
        self._reached = 0  # the highest version or clock known
        self._changed = threading.Condition()
        self._asked, self._answered = 0, 0  # checkpoints that somebody waits for
        self._error: PSError | None = None  # why the last one that was asked for failed
        self._generation = 0  # rises when the job is set back: what is being taken is void
        self._final = False
        self._committing = threading.Lock()  # held while a manifest is written: it is there, or never will be
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    @property
    def last_clock(self) -> int:
        """The clock of the last checkpoint; 0 before the first."""
        return self.last.clock if self.last is not None else 0

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Gives up what is being taken, and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=False)

    # -- what workers and others bring -------------------------------------------------------------------------------

    def save_state(self, rank: int, clock: int, state: bytes) -> None:
        """Takes a worker's own part."""
        with self._changed:
            self._states[rank] = clock, state
            self._changed.notify_all()

    def state_of(self, rank: int) -> tuple[int, bytes] | None:
        """What the last checkpoint has of a worker: its clock then, and the state."""
        with self._changed:
            return self._kept.get(rank)

    def give_up(self) -> None:
        """The job is about to be set back: what is being taken is void, and completed now or never."""
        with self._committing, self._changed:
            self._generation += 1

    def set_back(self, manifest: Manifest | None, states: Mapping[int, tuple[int, bytes]]) -> None:
        """The job goes on from a checkpoint: what is being taken is void, and the next one comes in its time."""
        with self._changed:
            self._generation += 1
            self.last, self._kept, self._states = manifest, dict(states), {}
            self._reached = manifest.clock if manifest is not None else 0
            self._changed.notify_all()

    def request(self, seconds: float, final: bool = False) -> Manifest:
        """Makes a checkpoint as soon as can be and waits for it. Raises CheckpointFailed, TryLater after `seconds`.

        final: nobody trains any more
        """
        with self._changed:
            self._final = final
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= mine or self._stopping, seconds)
            if self._answered < mine:
                raise TryLater(f"job {self._job.spec.name!r}: the checkpoint is not complete after {seconds:g} s")
            if self._error is not None:
                raise self._error
            assert self.last is not None
            return self.last

    def last_one(self, seconds: float = LAST_SECONDS, standing: bool = True) -> None:
        """Makes the last checkpoint before the job or its servers end, if training went on since the one before.

        standing: nobody trains any more
        """
        if self.last is not None and self._aggregate and self.last.clock == self._progress():
            return
        try:
            self.request(seconds, final=standing)
        except PSError as error:
            log.warning("job %s: ends without a last checkpoint: %s", self._job.spec.name, error)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._await_due()
            if self._stopping:
                return
            started, asked = time.monotonic(), self._asked
            error: PSError | None = None
            try:
                self._take()
                self.last_seconds, self.last_at = time.monotonic() - started, time.monotonic()
            except _Void:
                continue
            except PSError as found:
                error = found
                self.failed += 1
                log.warning("job %s: no checkpoint: %s", self._job.spec.name, found)
                self._pause(LOOK_SECONDS * 4)
            with self._changed:
                self._answered, self._error = max(self._answered, asked), error
                self._changed.notify_all()

    def _await_due(self) -> None:
        """Returns when a checkpoint is to be begun. One at a clock that lies ahead is begun long before that."""
        policy = self._policy
        while not self._stopping and self._asked == self._answered:
            if self.last is None and (policy.steps or policy.seconds):
                return  # the first at once: from then on, there is one to go back to
            if policy.steps and (self._aggregate or self._progress() >= self._reached + policy.steps):
                return
            if policy.seconds and time.monotonic() >= self.last_at + policy.seconds:
                return
            self._pause(LOOK_SECONDS)

    def _progress(self) -> int:
        """The highest version in sync, else the highest clock, on any shard that answers."""
        found = 0
        for shard in self._job.shards.all():
            with contextlib.suppress(PSError):
                found = max(found, shard.api.statistics().progress(self._job.spec.name, self._aggregate))
        return found

    def _pause(self, seconds: float) -> None:
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._stopping or self._asked > asked, seconds)

    def _take(self) -> None:
        """One checkpoint, from its beginning to its manifest."""
        generation = self._generation
        if self._final:
            self._take_where_it_stands(generation)
            return
        name, clock = self._begin(generation)
        parts = self._await_parts(name, clock, generation)
        if parts is None:
            self._take_where_it_stands(generation)
        else:
            states = self._await_states(clock, generation)
            self._commit(name, parts, states, generation)

    def _begin(self, generation: int) -> tuple[str, int | None]:
        """Names a clock that all shards can still meet; in ssp and async there is none to name."""
        attempt = 0
        name, clock = self._fresh_name(), self._next_clock(attempt) if self._aggregate else None
        while True:
            self._check_void(generation)
            try:
                # Asked for once more, because an answer was lost, it may be complete by now: what workers have sent for
                # it meanwhile stays.
                self._on_all(name, clock)
                return name, clock
            except OutOfOrder:
                attempt += 1
                self._look(generation)
                name, clock = self._fresh_name(), self._next_clock(attempt)
            except (TryLater, NotFound):
                self._pause(BEGIN_SECONDS)  # the job has no weights yet, or a shard is away

    def _fresh_name(self) -> str:
        with self._changed:
            self._states = {}
        return self._next_name()

    def _on_all(self, name: str, clock: int | None) -> None:
        job = self._job.spec.name
        call_all(self._pool, self._job.shards.all(), lambda shard: shard.api.begin_checkpoint(job, name, clock))

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._number:06d}"

    def _look(self, generation: int) -> None:
        """Finds out how far training is, unless the job is set back meanwhile: then it has been further."""
        found = self._progress()
        with self._changed:
            if self._generation == generation:
                self._reached = max(self._reached, found)

    def _next_clock(self, attempt: int) -> int:
        """The clock to try: further ahead at each attempt, because training goes on meanwhile."""
        ahead: int = 2**attempt
        if self.last is None or self._policy.steps is None or self._asked > self._answered:
            return self._reached + ahead
        return (self._reached // self._policy.steps + ahead) * self._policy.steps

    def _await_parts(self, name: str, clock: int | None, generation: int) -> list[ShardSnapshot] | None:
        """Every shard's part. None if somebody waits for the checkpoint and training stands still."""
        since, asked, wanted = time.monotonic(), self._asked, self._asked > self._answered
        reached = self._reached
        found: dict[int, ShardSnapshot] = {}
        waiting: dict[int, Future[ShardSnapshot]] = {}
        while True:
            self._check_void(generation)
            shards = self._job.shards.all()
            for shard in shards:
                if shard.index not in found.keys() | waiting.keys():
                    call = self._pool.submit(shard.api.await_checkpoint, self._job.spec.name, name)
                    waiting[shard.index] = call
            wait(waiting.values(), LOOK_SECONDS)  # and no longer: somebody may want something else meanwhile
            for index in [index for index, call in waiting.items() if call.done()]:
                try:
                    found[index] = waiting.pop(index).result()
                except TryLater:
                    self._pause(LOOK_SECONDS)
                except NotFound:
                    raise _Void from None
            if len(found) == len(shards):
                return [found[index] for index in sorted(found)]
            if self._asked > asked and not wanted:
                raise _Void  # somebody wants one now, and this one lies far ahead
            if wanted and clock is not None and time.monotonic() > since + STALL_SECONDS:
                since, before, reached = time.monotonic(), reached, self._progress()
                if reached == before < clock:
                    return None

    def _take_where_it_stands(self, generation: int) -> None:
        """Takes each bucket as it is, which will do in sync if all are at one version: then training stands still."""
        name = self._begin_now(generation)
        parts = self._await_parts(name, None, generation)
        assert parts is not None
        reached = _union(parts)
        if self._aggregate and reached.version_min != reached.version_max:
            self._store.discard(self._job.spec.name, name)
            raise TryLater(f"the shards are between two clocks, {reached.version_min} and {reached.version_max}")
        standing = reached.version_max if self._aggregate else None
        states = {rank: state for rank, state in self._states.items() if standing in (None, state[0])}
        self._commit(name, parts, states, generation)

    def _begin_now(self, generation: int) -> str:
        while True:
            self._check_void(generation)
            name = self._next_name()
            with contextlib.suppress(OutOfOrder):  # an earlier coordinator has begun one of that name
                self._on_all(name, None)
                return name

    def _await_states(self, clock: int | None, generation: int) -> dict[int, tuple[int, bytes]]:
        """What each live worker needs besides the weights; a worker that is gone, or sends nothing, is left out."""
        until = time.monotonic() + (STATE_SECONDS if self._aggregate else ANY_STATE_SECONDS)

        def come() -> dict[int, tuple[int, bytes]]:
            return {rank: state for rank, state in self._states.items() if clock in (None, state[0])}

        with self._changed:
            while self._job.live().keys() - come().keys() and time.monotonic() < until:
                self._check_void(generation)
                self._changed.wait(LOOK_SECONDS)
            self._check_void(generation)
            late = sorted(self._job.live().keys() - come().keys())
            if late:
                log.warning("job %s: the checkpoint is without the state of workers %s", self._job.spec.name, late)
            return come() if self._aggregate else {**self._kept, **come()}

    def _commit(
        self, name: str, parts: list[ShardSnapshot], states: Mapping[int, tuple[int, bytes]], generation: int
    ) -> None:
        job, store = self._job.spec.name, self._store
        try:
            workers = {
                rank: WorkerPart(store.write_worker(job, name, rank, state), clock)
                for rank, (clock, state) in states.items()
            }
            manifest = self._manifest(name, parts, workers)
            failpoint("manifest-missing")
            with self._committing:
                self._check_void(generation)
                store.commit(job, manifest)
                with self._changed:
                    self.last, self._kept = manifest, dict(states)
                    self._reached = max(self._reached, manifest.clock)
        except CheckpointFailed:
            store.discard(job, name)
            raise
        self.complete += 1
        self.last_held_up = max(captured.held_up for captured in parts)
        store.prune(job, self._policy.keep)
        log.info("job %s: checkpoint %s at clock %d, %d bytes", job, name, manifest.clock, manifest.bytes)

    def _manifest(self, name: str, parts: list[ShardSnapshot], workers: Mapping[int, WorkerPart]) -> Manifest:
        reached = _union(parts)
        return Manifest(
            name=name,
            job=job_spec_data(self._job.spec),
            run=self._job.run(),
            mode=str(self._job.spec.consistency),
            clock=reached.version_max if self._aggregate else max(reached.clocks.values(), default=0),
            placement=tuple(self._job.placement()),
            shards={index: captured.part for index, captured in enumerate(parts)},
            workers=workers,
            versions=(reached.version_min, reached.version_max),
            clocks=dict(reached.clocks),
            last_incarnation=self._job.counts()[0],
            restore_count=self._job.counts()[1],
            written_by={"torch": torch.__version__.split("+")[0]},
        )

    def _check_void(self, generation: int) -> None:
        if self._stopping or self._generation != generation:
            raise _Void


class _Void(Exception):
    """What was being taken is given up: the job was set back, or ends, or somebody wants one sooner."""


def _union(parts: list[ShardSnapshot]) -> VersionRange:
    found = [captured.extent for captured in parts if captured.extent.clocks]  # a shard may train no bucket at all
    return reduce(VersionRange.union, found, found[0]) if found else VersionRange()
