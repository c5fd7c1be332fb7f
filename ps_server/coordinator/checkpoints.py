"""The checkpoints of one job: when one is made, at which clock, and what belongs to it.

1. wait until one is due: by steps, by seconds, or because somebody asks
2. name a clock that lies ahead of all shards, and have each take its part there
3. wait for the parts, and for the state of each live worker
4. write the workers' states and the manifest, and remove old checkpoints

In sync every bucket of every shard, and every worker, is captured at one clock. It has to lie ahead of all of them when
it is named: the shards are asked, and if one is past it already, a later one is named. In ssp and async there is no
common clock: each shard copies its buckets at once, and the manifest says how far each was.

The phases are written as one generator, which yields the seconds that it waits for: a thread runs it in a server
(`run`), and a test or a simulation takes its steps by `advance`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from functools import reduce
from typing import TypeVar

import torch

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import CheckpointFailed, NotFound, OutOfOrder, PSError, TryLater
from ps_server.coordinator.cluster import Checkpointing, Cluster
from ps_server.coordinator.members import JobMembers
from ps_server.coordinator.shards import call_all
from ps_server.core.placement import PlacedJob
from ps_server.core.snapshot import ShardSnapshot, VersionRange
from ps_server.core.statistics import CheckpointStatistics
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import Manifest, WorkerPart

log = logging.getLogger("ps_server")

T = TypeVar("T")
# What takes time: yields the seconds after which it looks again, or sooner if something changes.
Steps = Generator[float, None, T]
# By rank, the clock of a worker's state and the state.
States = Mapping[int, tuple[int, bytes]]

MANY_SECONDS = 3600.0


class JobCheckpoints:
    """Makes the checkpoints of one job, until `stop`. Methods may be called from any thread, `advance` from one."""

    def __init__(self, placed: PlacedJob, members: JobMembers, cluster: Cluster, checkpointing: Checkpointing) -> None:
        self._placed, self._spec, self._members = placed, placed.spec, members
        self._shards, self._timing, self._clock = cluster.shards, cluster.timing, cluster.clock
        self._store, self._policy = checkpointing.store, checkpointing.policy
        # Its calls wait for the shards' disks, and those for an abandoned checkpoint may be waiting still.
        self._pool = cluster.make_executor(2 * cluster.shards.count, "checkpoints")
        self._aggregate = placed.spec.consistency.aggregate
        self._number = int(self._store.next_name(placed.spec.name)) - 1
        self._progress = _Progress(self._clock.now())
        self._states: dict[int, tuple[int, bytes]] = {}  # by rank, what came last
        self._kept: dict[int, tuple[int, bytes]] = {}  # by rank, what the last checkpoint has
        self._changed = threading.Condition()
        self._changes = 0  # rises with every notice
        self._requests = _Requests()
        self._generation = 0  # rises with a rollback: what is being made then is void
        self._committing = threading.Lock()  # held while a manifest is written: it is there, or never will be
        self._stopping, self._running = False, False
        self._work = self._make_all()

    # -- what makes it work ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Makes checkpoints until `stop`: what a thread calls."""
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
        """Does what can be done now; returns the seconds until there may be more to do, if nothing changes."""
        return next(self._work)

    def stop(self) -> None:
        """Abandons the checkpoint that is being made, and waits until `run` has returned."""
        with self._changed:
            self._stopping = True
            self._notify()
            self._changed.wait_for(lambda: not self._running)
        self._pool.shutdown(wait=False)

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    # -- what workers and others bring -------------------------------------------------------------------------------

    def save_state(self, rank: int, clock: int, state: bytes) -> None:
        """Takes a worker's own part."""
        with self._changed:
            self._states[rank] = clock, state
            self._notify()

    def state_of(self, rank: int) -> tuple[int, bytes] | None:
        """Returns what the last checkpoint has of a worker: its clock then, and the state."""
        with self._changed:
            return self._kept.get(rank)

    def abandon(self) -> None:
        """Makes void what is being made: its manifest is written now or never."""
        with self._committing, self._changed:
            self._generation += 1

    def rolled_back(self, manifest: Manifest, states: States) -> None:
        """Notes that the job continues from a checkpoint: what is being made is void, the next one comes in time."""
        with self._changed:
            self._generation += 1
            self._kept, self._states = dict(states), {}
            self._progress.last, self._progress.reached = manifest, manifest.clock
            self._notify()

    def request(self, seconds: float, standing: bool = False) -> Manifest:
        """Has a checkpoint made as soon as can be, and waits for it. Raises CheckpointFailed, TryLater after `seconds`.

        standing: no worker trains any more
        """
        with self._changed:
            number = self._requests.ask(standing)
            self._notify()
            self._clock.wait(self._changed, lambda: self._requests.answered >= number or self._stopping, seconds)
            if self._requests.answered < number:
                raise TryLater(f"job {self._spec.name!r}: the checkpoint is not complete after {seconds:g} s")
            if self._requests.error is not None:
                raise self._requests.error
            assert self._progress.last is not None
            return self._progress.last

    def request_last(self, seconds: float, standing: bool = True) -> None:
        """Has the last checkpoint made before the job or its servers end, if training went on since the one before.

        standing: no worker trains any more
        """
        last = self._progress.last
        if last is not None and self._aggregate and last.clock == self._look():
            return
        try:
            self.request(seconds, standing)
        except PSError as error:
            log.warning("job %s: ends without a last checkpoint: %s", self._spec.name, error)

    def statistics(self) -> CheckpointStatistics:
        """Returns how many checkpoints there were, and what the last one is."""
        with self._changed:
            progress, last = self._progress, self._progress.last
            return CheckpointStatistics(
                complete=progress.complete,
                failed=progress.failed,
                name=last.name if last is not None else None,
                clock=last.clock if last is not None else 0,
                seconds=progress.seconds,
                held_up_seconds=progress.held_up,
                age_seconds=self._clock.now() - progress.at,
            )

    # -- 1. wait until one is due ------------------------------------------------------------------------------------

    def _make_all(self) -> Generator[float, None, None]:
        while True:
            yield from self._await_due()
            started, asked = self._clock.now(), self._requests.asked
            error: PSError | None = None
            try:
                yield from self._make()
                self._progress.seconds, self._progress.at = self._clock.now() - started, self._clock.now()
            except _Void:
                if self._stopping:
                    yield MANY_SECONDS
                continue
            except PSError as failure:
                error = failure
                self._progress.failed += 1
                log.warning("job %s: no checkpoint: %s", self._spec.name, failure)
                yield from self._pause(self._timing.checkpoint_look * 4)
            with self._changed:
                self._requests.answer(asked, error)
                self._notify()

    def _await_due(self) -> Steps[None]:
        """Ends when a checkpoint is to be begun. One at a clock that lies ahead is begun long before that."""
        policy = self._policy
        while not self._requests.open:
            if self._progress.last is None and (policy.steps or policy.seconds):
                return  # the first at once: from then on, there is one to go back to
            if policy.steps and (self._aggregate or self._look() >= self._progress.reached + policy.steps):
                return
            if policy.seconds and self._clock.now() >= self._progress.at + policy.seconds:
                return
            yield self._timing.checkpoint_look

    def _pause(self, seconds: float) -> Steps[None]:
        """Waits, but no longer than until a checkpoint is asked for."""
        until, asked = self._clock.now() + seconds, self._requests.asked
        while not self._stopping and self._requests.asked == asked and (left := until - self._clock.now()) > 0:
            yield left

    def _look(self) -> int:
        """Returns the highest version in sync, otherwise the highest clock, on any shard that answers."""
        highest = 0
        for shard in self._shards.all():
            with contextlib.suppress(PSError):
                highest = max(highest, shard.api.statistics().progress(self._spec.name, self._aggregate))
        return highest

    # -- 2. name a clock ---------------------------------------------------------------------------------------------

    def _make(self) -> Steps[None]:
        """Makes one checkpoint."""
        generation = self._generation
        if self._requests.standing:
            yield from self._make_standing(generation)
            return
        name, clock = yield from self._begin(generation)
        parts = yield from self._await_parts(name, clock, generation)
        if parts is None:
            yield from self._make_standing(generation)
        else:
            states = yield from self._await_states(clock, generation)
            self._commit(name, parts, states, generation)

    def _make_standing(self, generation: int) -> Steps[None]:
        """Takes each bucket as it is, which will do in sync if all are at one version: then training stands still."""
        name = self._begin_now(generation)
        parts = yield from self._await_parts(name, None, generation)
        assert parts is not None
        reached = _union(parts)
        if self._aggregate and reached.version_min != reached.version_max:
            self._store.discard(self._spec.name, name)
            raise TryLater(f"the shards are between two clocks, {reached.version_min} and {reached.version_max}")
        standing = reached.version_max if self._aggregate else None
        self._commit(name, parts, self._states_at(standing), generation)

    def _begin(self, generation: int) -> Steps[tuple[str, int | None]]:
        """Names a clock that all shards can still meet; in ssp and async there is none to name."""
        attempt = 0
        name, clock = self._fresh_name(), self._next_clock(attempt) if self._aggregate else None
        while True:
            self._check_void(generation)
            try:
                # Asked for once more, because an answer was lost, it may be complete by now: what workers have sent for
                # it meanwhile stays.
                self._begin_on_shards(name, clock)
                return name, clock
            except OutOfOrder:
                attempt += 1
                reached = self._look()
                with self._changed:
                    if self._generation == generation:  # otherwise that was before a rollback
                        self._progress.reached = max(self._progress.reached, reached)
                name, clock = self._fresh_name(), self._next_clock(attempt)
            except (TryLater, NotFound):
                yield from self._pause(self._timing.checkpoint_begin)  # no weights yet, or a shard is away

    def _begin_now(self, generation: int) -> str:
        while True:
            self._check_void(generation)
            name = self._next_name()
            with contextlib.suppress(OutOfOrder):  # an earlier coordinator has begun one of that name
                self._begin_on_shards(name, None)
                return name

    def _begin_on_shards(self, name: str, clock: int | None) -> None:
        job = self._spec.name
        call_all(self._pool, self._shards.all(), lambda shard: shard.api.begin_checkpoint(job, name, clock))

    def _fresh_name(self) -> str:
        with self._changed:
            self._states = {}
        return self._next_name()

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._number:06d}"

    def _next_clock(self, attempt: int) -> int:
        """Returns the clock to try: further ahead at each attempt, because training goes on meanwhile."""
        ahead: int = 2**attempt
        reached, steps = self._progress.reached, self._policy.steps
        if self._progress.last is None or steps is None or self._requests.open:
            return reached + ahead
        return (reached // steps + ahead) * steps

    # -- 3. wait for parts and states --------------------------------------------------------------------------------

    def _await_parts(self, name: str, clock: int | None, generation: int) -> Steps[list[ShardSnapshot] | None]:
        """Returns every shard's part; None if the checkpoint was asked for, and training stands still."""
        since, asked, wanted = self._clock.now(), self._requests.asked, self._requests.open
        reached = self._progress.reached
        parts: dict[int, ShardSnapshot] = {}
        waiting: dict[int, Future[ShardSnapshot]] = {}
        while True:
            self._check_void(generation)
            shards = self._shards.all()
            for shard in shards:
                if shard.index not in parts.keys() | waiting.keys():
                    call = self._pool.submit(shard.api.await_checkpoint, self._spec.name, name)
                    waiting[shard.index] = call
                    call.add_done_callback(lambda _: self._notify())
            if not all(call.done() for call in waiting.values()):
                yield self._timing.checkpoint_look  # and no longer: another may be asked for meanwhile
            for index in [index for index, call in waiting.items() if call.done()]:
                try:
                    parts[index] = waiting.pop(index).result()
                except TryLater:
                    yield from self._pause(self._timing.checkpoint_look)
                except NotFound:
                    raise _Void from None
            if len(parts) == len(shards):
                return [parts[index] for index in sorted(parts)]
            if self._requests.asked > asked and not wanted:
                raise _Void  # one is asked for now, and this one lies far ahead
            if wanted and clock is not None and self._clock.now() > since + self._timing.stall:
                since, before, reached = self._clock.now(), reached, self._look()
                if reached == before < clock:
                    return None

    def _await_states(self, clock: int | None, generation: int) -> Steps[States]:
        """Returns the states of the live workers; a worker that is gone, or sends nothing, is left out."""
        until = self._clock.now() + (self._timing.state if self._aggregate else self._timing.any_state)
        while True:
            self._check_void(generation)
            states = self._states_at(clock)
            late = sorted({member.rank for member in self._members.all()} - states.keys())
            if not late or self._clock.now() >= until:
                break
            yield self._timing.checkpoint_look
        if late:
            log.warning("job %s: the checkpoint is without the state of workers %s", self._spec.name, late)
        return states if self._aggregate else {**self._kept, **states}

    def _states_at(self, clock: int | None) -> States:
        """Returns the states that workers sent at a clock, or at any."""
        with self._changed:
            return {rank: state for rank, state in self._states.items() if clock in (None, state[0])}

    # -- 4. write ----------------------------------------------------------------------------------------------------

    def _commit(self, name: str, parts: list[ShardSnapshot], states: States, generation: int) -> None:
        job, store = self._spec.name, self._store
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
                    self._kept = dict(states)
                    self._progress.committed(manifest, max(part.held_up for part in parts))
        except CheckpointFailed:
            store.discard(job, name)
            raise
        store.prune(job, self._policy.keep)
        log.info("job %s: checkpoint %s at clock %d, %d bytes", job, name, manifest.clock, manifest.bytes)

    def _manifest(self, name: str, parts: list[ShardSnapshot], workers: Mapping[int, WorkerPart]) -> Manifest:
        reached = _union(parts)
        return Manifest(
            name=name,
            job=job_spec_data(self._spec),
            run=self._placed.run,
            mode=str(self._spec.consistency),
            clock=reached.version_max if self._aggregate else max(reached.clocks.values(), default=0),
            placement=self._placed.placement,
            shards={index: snapshot.part for index, snapshot in enumerate(parts)},
            workers=workers,
            versions=(reached.version_min, reached.version_max),
            clocks=dict(reached.clocks),
            last_incarnation=self._members.last_incarnation(),
            restore_count=self._members.restore_count,
            written_by={"torch": torch.__version__.split("+")[0]},
        )

    def _check_void(self, generation: int) -> None:
        if self._stopping or self._generation != generation:
            raise _Void


class _Progress:
    """How far the checkpoints of a job are.

    last:    the manifest of the last one; at: when it was complete
    reached: the highest version or clock known of the job
    seconds, held_up: how long the last one took, and for how long it held up the shard that it held up most
    """

    def __init__(self, now: float) -> None:
        self.last: Manifest | None = None
        self.at = now
        self.reached = 0
        self.complete, self.failed = 0, 0
        self.seconds, self.held_up = 0.0, 0.0

    def committed(self, manifest: Manifest, held_up: float) -> None:
        """Notes a checkpoint that is complete."""
        self.last, self.held_up = manifest, held_up
        self.reached = max(self.reached, manifest.clock)
        self.complete += 1


class _Requests:
    """The checkpoints that were asked for, by number, and how the last one ended. standing: no worker trains."""

    def __init__(self) -> None:
        self.asked, self.answered = 0, 0
        self.standing = False
        self.error: PSError | None = None

    @property
    def open(self) -> bool:
        """Whether a caller waits for one."""
        return self.asked > self.answered

    def ask(self, standing: bool) -> int:
        """Returns the number of a new request."""
        self.standing = standing
        self.asked += 1
        return self.asked

    def answer(self, number: int, error: PSError | None) -> None:
        """Answers all requests up to a number."""
        self.answered, self.error = max(self.answered, number), error


class _Void(Exception):
    """The checkpoint is abandoned: the job was rolled back, or ends, or one is asked for sooner."""


def _union(parts: list[ShardSnapshot]) -> VersionRange:
    ranges = [snapshot.extent for snapshot in parts if snapshot.extent.clocks]  # a shard may train no bucket at all
    return reduce(VersionRange.union, ranges, ranges[0]) if ranges else VersionRange()
