"""One checkpoint of a job under way: its clock, the shards' parts, the workers' states, and what it becomes.

1. name a clock that lies ahead of all shards, and have each take its part there
2. wait for the parts, and for the state of each live worker
3. write the workers' states and the manifest, and remove old checkpoints

In sync every bucket of every shard, and every worker, is captured at one clock. It has to lie ahead of all of them when
it is named: the shards are asked, and if one is past it already, a later one is named. In ssp and async there is no
common clock: each shard copies its buckets at once, and the manifest says how far each was. Where no worker trains any
more, buckets at one version are taken as they are.

The phases are generators, which yield the seconds that they wait for, or less if something changes meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import CheckpointFailed, NotFound, OutOfOrder, PSError, TryLater
from ps_server.coordinator.cluster import Checkpointing, Cluster
from ps_server.coordinator.members import JobMembers
from ps_server.coordinator.shards import answers_of
from ps_server.core.placement import PlacedJob
from ps_server.core.snapshot import ShardSnapshot, VersionRange, union
from ps_server.core.statistics import CheckpointStatistics
from ps_server.failpoints import failpoint
from ps_server.storage.checkpoints import Manifest, WorkerPart

log = logging.getLogger("ps_server")

T = TypeVar("T")
# What takes time: yields the seconds after which it looks again, or sooner if something changes.
Steps = Generator[float, None, T]
# By rank, the clock of a worker's state and the state.
States = Mapping[int, tuple[int, bytes]]


class Void(Exception):
    """The checkpoint is abandoned: the job was rolled back, or ends, or one is asked for sooner."""


class Requests:
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

    def pause(self, now: Callable[[], float], seconds: float) -> Steps[None]:
        """Waits, but no longer than until a checkpoint is asked for."""
        until, asked = now() + seconds, self.asked
        while self.asked == asked and (left := until - now()) > 0:
            yield left


class Progress:
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

    def statistics(self, now: float) -> CheckpointStatistics:
        """Returns how many checkpoints there were, and what the last one is."""
        last = self.last
        return CheckpointStatistics(
            complete=self.complete,
            failed=self.failed,
            name=last.name if last is not None else None,
            clock=last.clock if last is not None else 0,
            seconds=self.seconds,
            held_up_seconds=self.held_up,
            age_seconds=now - self.at,
        )


class WorkerStates:
    """The workers' own parts. kept: those in the last checkpoint. Thread-safe."""

    def __init__(self) -> None:
        self.kept: States = {}
        self._sent: dict[int, tuple[int, bytes]] = {}  # by rank, what came last
        self._lock = threading.Lock()

    def save(self, rank: int, clock: int, state: bytes) -> None:
        """Takes what a worker sends."""
        with self._lock:
            self._sent[rank] = clock, state

    def forget(self) -> None:
        """Drops what workers have sent so far."""
        with self._lock:
            self._sent = {}

    def at(self, clock: int | None) -> States:
        """Returns the states that workers sent at a clock, or at any."""
        with self._lock:
            return {rank: state for rank, state in self._sent.items() if clock in (None, state[0])}


@dataclass(frozen=True)
class CheckpointedJob:
    """What all checkpoints of one job share.

    pool:    what calls to shards run in
    names:   the names of checkpoints to come
    changed: is called when a shard has answered
    """

    placed: PlacedJob
    members: JobMembers
    cluster: Cluster
    checkpointing: Checkpointing
    pool: Executor
    names: Iterator[str]
    changed: Callable[[], None]
    requests: Requests
    progress: Progress
    states: WorkerStates

    def look(self) -> int:
        """Returns the highest version in sync, otherwise the highest clock, on any shard that answers."""
        spec, highest = self.placed.spec, 0
        for shard in self.cluster.shards.known().values():
            with contextlib.suppress(PSError):
                highest = max(highest, shard.api.statistics().progress(spec.name, spec.consistency.aggregate))
        return highest


class CheckpointAttempt:
    """One checkpoint under way. `make` is for one thread; `abandon` may be called from any."""

    def __init__(self, job: CheckpointedJob) -> None:
        self._job, self._spec = job, job.placed.spec
        self._shards, self._timing, self._now = job.cluster.shards, job.cluster.timing, job.cluster.clock.now
        self._store, self._aggregate = job.checkpointing.store, job.placed.spec.consistency.aggregate
        self._name = ""
        self._clock: int | None = None
        self._parts: dict[int, ShardSnapshot] = {}
        self._awaited: dict[int, Future[ShardSnapshot]] = {}  # by shard, the call that waits for its part
        self._void = False
        self._committing = threading.Lock()  # held while a manifest is written: it is there, or never will be

    def abandon(self) -> None:
        """Makes the checkpoint void: its manifest is there now, or never will be."""
        with self._committing:
            self._void = True

    def _check_void(self) -> None:
        if self._void:
            raise Void

    def make(self) -> Steps[None]:
        """Makes the checkpoint. Raises Void once it is abandoned, PSError where it fails."""
        if self._job.requests.standing:
            yield from self._make_standing()
            return
        yield from self._begin()
        if (yield from self._await_parts()):
            states = yield from self._await_states()
            self._commit(states)
        else:
            yield from self._make_standing()

    def _make_standing(self) -> Steps[None]:
        """Takes each bucket as it is, which will do in sync if all are at one version: then training stands still."""
        self._begin_standing()
        yield from self._await_parts()
        reached = self._reached()
        if self._aggregate and reached.version_min != reached.version_max:
            self._store.discard(self._spec.name, self._name)
            raise TryLater(f"the shards are between two clocks, {reached.version_min} and {reached.version_max}")
        self._commit(self._job.states.at(reached.version_max if self._aggregate else None))

    # -- 1. name a clock ---------------------------------------------------------------------------------------------

    def _begin(self) -> Steps[None]:
        """Names a clock that all shards can still meet; in ssp and async there is none to name."""
        ahead, progress = 1, self._job.progress
        self._rename(ahead)
        while True:
            self._check_void()
            try:
                # Asked for once more, because an answer was lost, it may be complete by now: what workers have sent for
                # it meanwhile stays.
                self._begin_on_shards()
                return
            except OutOfOrder:
                ahead *= 2  # further at each try, because training goes on meanwhile
                reached = self._job.look()
                with self._committing:
                    self._check_void()  # otherwise that was before a rollback
                    progress.reached = max(progress.reached, reached)
                self._store.discard(self._spec.name, self._name)
                self._rename(ahead)
            except (TryLater, NotFound):  # no weights yet, or a shard is away
                yield from self._job.requests.pause(self._now, self._timing.checkpoint_begin)

    def _rename(self, ahead: int) -> None:
        """Chooses another name, and a clock that lies so many steps, or multiples of the policy's, ahead."""
        self._job.states.forget()
        self._name = self._next_name()
        reached, steps = self._job.progress.reached, self._job.checkpointing.policy.steps
        if not self._aggregate:
            self._clock = None
        elif self._job.progress.last is None or steps is None or self._job.requests.open:
            self._clock = reached + ahead
        else:
            self._clock = (reached // steps + ahead) * steps

    def _next_name(self) -> str:
        """Returns the name of a checkpoint that was just begun: no other one, of any coordinator, has it."""
        return next(name for name in self._job.names if self._store.begin(self._spec.name, name))

    def _begin_standing(self) -> None:
        self._clock = None
        while True:
            self._check_void()
            self._name = self._next_name()
            with contextlib.suppress(OutOfOrder):  # an earlier coordinator has begun one of that name
                self._begin_on_shards()
                return

    def _begin_on_shards(self) -> None:
        job, name, clock, run = self._spec.name, self._name, self._clock, self._job.placed.run
        pool, shards = self._job.pool, self._shards.all()
        answers_of([pool.submit(shard.api.begin_snapshot, job, name, clock, run) for shard in shards])

    # -- 2. wait for parts and states --------------------------------------------------------------------------------

    def _await_parts(self) -> Steps[bool]:
        """Waits for every shard's part. Returns False if the checkpoint was asked for, and training stands still."""
        requests, self._parts, self._awaited = self._job.requests, {}, {}
        since, asked, wanted, reached = self._now(), requests.asked, requests.open, self._job.progress.reached
        while True:
            self._check_void()
            self._ask_shards()
            if not all(call.done() for call in self._awaited.values()):
                yield self._timing.checkpoint_look  # and no longer: another may be asked for meanwhile
            yield from self._take_answers()
            if len(self._parts) == self._shards.count:
                return True
            if requests.asked > asked and not wanted:
                raise Void  # one is asked for now, and this one lies far ahead
            if wanted and self._clock is not None and self._now() > since + self._timing.stall:
                since, before, reached = self._now(), reached, self._job.look()
                if reached == before < self._clock:
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
        """Returns the states of the live workers; a worker that is gone, or sends nothing, is left out."""
        until = self._now() + (self._timing.state if self._aggregate else self._timing.any_state)
        while True:
            self._check_void()
            states = self._job.states.at(self._clock)
            late = sorted({member.rank for member in self._job.members.all()} - states.keys())
            if not late or self._now() >= until:
                break
            yield self._timing.checkpoint_look
        if late:
            log.warning("job %s: the checkpoint is without the state of workers %s", self._spec.name, late)
        return states if self._aggregate else {**self._job.states.kept, **states}

    def _reached(self) -> VersionRange:
        """Returns how far the buckets are in all parts together."""
        # A shard may train no bucket at all.
        return union(part.extent for part in self._parts.values() if part.extent.clocks)

    # -- 3. write ----------------------------------------------------------------------------------------------------

    def _commit(self, states: States) -> None:
        job, store, name = self._spec.name, self._store, self._name
        try:
            workers = {
                rank: WorkerPart(store.write_worker(job, name, rank, state), clock)
                for rank, (clock, state) in states.items()
            }
            manifest = self._manifest(workers)
            failpoint("manifest-missing")
            with self._committing:
                self._check_void()
                store.commit(job, manifest)
                self._job.states.kept = states
                self._job.progress.committed(manifest, max(part.held_up for part in self._parts.values()))
        except CheckpointFailed:
            store.discard(job, name)
            raise
        store.prune(job, self._job.checkpointing.policy.keep)
        log.info("job %s: checkpoint %s at clock %d, %d bytes", job, name, manifest.clock, manifest.bytes)

    def _manifest(self, workers: Mapping[int, WorkerPart]) -> Manifest:
        reached = self._reached()
        return Manifest(
            name=self._name,
            job=job_spec_data(self._spec),
            run=self._job.placed.run,
            mode=str(self._spec.consistency),
            clock=reached.version_max if self._aggregate else max(reached.clocks.values(), default=0),
            placement=self._job.placed.placement,
            shards={index: snapshot.part for index, snapshot in sorted(self._parts.items())},
            workers=workers,
            versions=(reached.version_min, reached.version_max),
            clocks=dict(reached.clocks),
            last_incarnation=self._job.members.last_incarnation(),
            restore_count=self._job.members.restore_count,
            written_by={"torch": torch.__version__.split("+")[0]},
        )
