"""A whole cluster in virtual time: workers, shards and a coordinator on hosts that die, over links that fail.

The shards' rules are the real ones (ps_server.core); the calls around them do what their real namesakes do. The
training is the counting oracle's, so that whatever breaks a promise is read from the weights. Faults end after a while:
then everybody has to get on, and all that was acknowledged has to be in exactly once.

    make simulate SEEDS=1000                # says how to replay a seed that fails:
    make simulate SEED=17 MODE=ssp:2
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ps_protocol.errors import Fenced, JobInUse, NotFound, OutOfOrder, PSError, TryLater, UnknownWorker
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import parse_mode
from ps_protocol.tensors import bytes_of, tensor_from
from ps_server.core.commands import AddWorker, RemoveWorker, RestoreSnapshot
from ps_server.core.consistency import Add
from ps_server.core.membership import JoinRequest, Member, Membership
from ps_server.core.partition import JobPartition
from ps_server.core.requests import Push, PushKind
from ps_server.core.snapshot import BucketSnapshot
from tests.chaos.oracle import Cells, Life, Rules, Shape, Violation, Witness, judge, too_stale
from tests.simulation.virtual_time import Host, Steps, Then, Weather, World

MODES = ("sync", "ssp:0", "ssp:2", "async")
WORKERS, SHARDS = 3, 2
SHAPE = Shape(buckets=3, rows=48, columns=7)
LEASE = 3.0
FAULTY_SECONDS, SETTLE_SECONDS = 16.0, 60.0
GONE_FOR_GOOD = 0.3  # of the workers that die; the others are started again
LAST_STEPS = 5


def job_of(mode: str) -> JobSpec:
    """A job whose model is the oracle's."""
    consistency = parse_mode(mode)
    assert consistency is not None
    size = SHAPE.rows, 1 + SHAPE.columns
    parameters = tuple(ParameterSpec(f"bucket{index}", size, "float32", 0) for index in range(SHAPE.buckets))
    return JobSpec("cells", parameters, "SGD", ({"lr": 1.0},), consistency, SHAPE.bucket_bytes, WORKERS)


@dataclass
class Disk:
    """What is durable: checkpoints, and what a coordinator needs to come back."""

    checkpoints: list[dict[int, BucketSnapshot]] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    last_incarnation: int = 0
    started: bool = False
    held_by: dict[int, int] = field(default_factory=dict)
    awaited: list[int] = field(default_factory=list)
    ghosts: set[tuple[int, int, int]] = field(default_factory=set)


# -- shards ----------------------------------------------------------------------------------------------------------


class Shard(Host):
    """A shard's process: it answers calls, and applies what is staged a little later."""

    def __init__(self, cluster: Cluster, index: int, process: int) -> None:
        super().__init__(cluster.world, f"shard {index}")
        self.cluster = cluster
        self.index = index
        self.process = process
        self.job: JobPartition | None = None
        self._waiting: list[tuple[int, int, int, int, Then]] = []  # (bucket, rank, incarnation, clock, answer)
        self._busy: set[int] = set()
        self._catch: tuple[int, dict[int, BucketSnapshot]] | None = None  # the clock to keep, and what is kept of it
        self.spawn(self._register())

    def _register(self) -> Steps:
        while True:
            self.call(self.cluster.coordinator, "register", self.index, self.process)
            yield 1.0

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Then) -> None:
        """Handles a call."""
        try:
            if self.job is None and method not in ("create", "restore"):
                raise NotFound("this shard knows no such job")
            if method == "pull":
                self._pull(*arguments, answer)
            else:
                answer(getattr(self, "on_" + method)(*arguments), None)
        except PSError as error:
            answer(None, error)

    def on_create(self, spec: JobSpec, buckets: list[int]) -> None:
        self.job = self.job or JobPartition(spec, buckets)

    def on_restore(self, spec: JobSpec, images: dict[int, BucketSnapshot], last_incarnation: int) -> None:
        self.job = JobPartition(spec, list(images))
        self.job.execute(RestoreSnapshot(images, last_incarnation))
        self._busy, self._catch = set(), None
        waiting, self._waiting = self._waiting, []
        for *_, answer in waiting:
            answer(None, NotFound("the job was rolled back"))

    def on_admit(self, rank: int, incarnation: int, clock: int | None) -> int:
        assert self.job is not None
        frontier = self.job.execute(AddWorker(rank, incarnation, clock))
        self._changed()
        return frontier

    def on_retire(self, rank: int, incarnation: int) -> None:
        assert self.job is not None
        self.job.execute(RemoveWorker(rank, incarnation))
        self._changed()

    def on_push(self, push: Push) -> bool:
        assert self.job is not None
        staged = self.job.execute(self.job.checker.check(push))
        self._changed()
        return staged.duplicate

    def on_versions(self) -> int:
        assert self.job is not None
        return self.job.buckets.versions()[1]

    def on_keep(self, clock: int | None) -> None:
        """Keeps every bucket at this version, or as it is now."""
        assert self.job is not None
        if not all(bucket.rule.initialised for bucket in self.job.buckets.values()):
            raise TryLater("no weights yet")
        if clock is not None and self.job.buckets.versions()[1] >= clock:
            raise OutOfOrder("past that clock")
        now = {} if clock is not None else {i: bucket.snapshot() for i, bucket in self.job.buckets.items()}
        self._catch = -1 if clock is None else clock, now

    def on_kept(self, clock: int | None) -> dict[int, BucketSnapshot]:
        """What was kept, once it is all there."""
        assert self.job is not None
        wanted = -1 if clock is None else clock
        if self._catch is None or self._catch[0] != wanted:
            raise NotFound("another checkpoint took its place")
        if len(self._catch[1]) < len(self.job.buckets):
            raise TryLater("not all buckets are at that clock yet")
        return self._catch[1]

    def _pull(self, bucket: int, rank: int, incarnation: int, clock: int, answer: Then) -> None:
        self._waiting.append((bucket, rank, incarnation, clock, answer))
        self._admit()

    def _admit(self) -> None:
        assert self.job is not None
        still = []
        for one in self._waiting:
            bucket, rank, incarnation, clock, answer = one
            try:
                self.job.check_worker(rank, incarnation)
            except PSError as error:
                answer(None, error)
                continue
            if self.job.admits(bucket, rank, clock).admitted:
                answer(self.job.buckets[bucket].weights.flat.clone(), None)
            else:
                still.append(one)
        self._waiting = still

    def _changed(self) -> None:
        """Something was staged, or the roster is another one."""
        assert self.job is not None
        self._admit()
        for index, bucket in self.job.buckets.items():
            if index not in self._busy and bucket.rule.next() is not None:
                self._busy.add(index)
                self.spawn(self._apply(self.job, index))

    def _apply(self, job: JobPartition, index: int) -> Steps:
        bucket = job.buckets[index]
        while True:
            yield self.world.random.expovariate(1 / self.cluster.apply_seconds)
            work = bucket.rule.next()
            if job is not self.job or work is None:
                self._busy.discard(index)
                return
            if isinstance(work, Add):
                bucket.weights.add(work.contribution)
            else:
                bucket.weights.step()
            job.done(index, work)
            if self._catch is not None and self._catch[0] == bucket.rule.version and not isinstance(work, Add):
                self._catch[1][index] = bucket.snapshot()
            self._admit()


# -- the coordinator -------------------------------------------------------------------------------------------------


class Coordinator(Host):
    """The coordinator's process: who takes part, leases, checkpoints, set-backs."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.world, "coordinator")
        self.cluster = cluster
        disk = cluster.disk
        self.members = Membership(WORKERS, LEASE, last_incarnation=disk.last_incarnation)
        for member in disk.members:
            self.members.join(dataclasses.replace(member, expires=self.world.now + 2 * LEASE, heard=-math.inf))
        self.members.started = disk.started
        self.members.rejoining = dict.fromkeys(disk.awaited, self.world.now + 2 * LEASE)
        self._shards: dict[int, int] = {}
        self._ghosts = set(disk.ghosts)
        self._joining: set[tuple[int, int, int]] = set()
        self._locked = False
        for steps in (self._sweep(), self._watch_shards(), self._make_checkpoints()):
            self.spawn(steps)

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Then) -> None:
        """Handles a call."""
        if method == "join":
            self.spawn(self._join(*arguments)).wait(answer)
            return
        try:
            answer(getattr(self, "on_" + method)(*arguments), None)
        except PSError as error:
            answer(None, error)

    def on_register(self, index: int, process: int) -> None:
        self._shards[index] = process

    def on_heartbeat(self, rank: int, incarnation: int, clock: int) -> None:
        self.members.heartbeat(rank, incarnation, clock, self.world.now)

    def on_started(self) -> bool:
        return self.members.started

    def _lock(self) -> Steps:
        while self._locked:
            yield 0.01
        self._locked = True

    def _on_all(self, method: str, *arguments: Any) -> Steps:
        calls = [self.call(shard, method, *arguments) for shard in self.cluster.shards]
        found = []
        for call in calls:
            found.append((yield call))
        return found

    def _join(self, rank: int, newcomer: JoinRequest) -> Steps:
        yield from self._lock()
        try:
            repeated = self.members.repeated(newcomer.attempt, self.world.now)
            if repeated is not None:
                return repeated
            if len(self._shards) < SHARDS or self._lost():
                raise TryLater("not all shards are there, or the job is being rolled back")
            self.members.claim(rank, newcomer)
            rivals = self.members.rivals(rank, newcomer, self.world.now)
            if rivals is not None:
                if rivals.live:
                    raise JobInUse("another launch")
                later = TryLater("perhaps another launch")
                later.retry_after = 0.1
                raise later
            incarnation = self.members.next_incarnation()
            self._joining = {(index, rank, incarnation) for index in range(SHARDS)}
            self._save()
            try:
                frontiers = yield from self._on_all("admit", rank, incarnation, None)
                yield from self._on_all("admit", rank, incarnation, max(frontiers))
            except PSError as error:
                self._joining = set()
                older = self.members.members.get(rank)
                if older is not None:
                    self.members.leave(rank, older.incarnation)
                self._retire(rank, incarnation)
                if isinstance(error, NotFound):
                    raise TryLater("a shard was started anew, and has not said so yet") from None
                raise
            now, known = self.world.now, {"attempt": newcomer.attempt, "launch": newcomer.launch}
            member = Member(rank, incarnation, now + LEASE, max(frontiers), newcomer.pid, **known)
            self.members.join(member)
            self._joining = set()
            self._save()
            return member
        finally:
            self._locked = False

    def _retire(self, rank: int, incarnation: int) -> None:
        self._ghosts |= {(index, rank, incarnation) for index in range(SHARDS)}

    def _sweep(self) -> Steps:
        while True:
            yield LEASE / 10
            self.members.stop_waiting(self.world.now)
            for member in self.members.expired(self.world.now):
                self.members.leave(member.rank, member.incarnation)
                self._retire(member.rank, member.incarnation)
                self._save()
            for ghost in sorted(self._ghosts):
                index, rank, incarnation = ghost
                try:
                    yield self.call(self.cluster.shards[index], "retire", rank, incarnation)
                except NotFound:
                    pass
                except PSError:
                    continue
                self._ghosts.discard(ghost)

    def _save(self) -> None:
        disk, members = self.cluster.disk, self.members
        disk.members, disk.last_incarnation = list(members.members.values()), members.last_incarnation
        disk.started, disk.awaited = members.started, list(members.rejoining)
        disk.ghosts = self._ghosts | self._joining

    # -- checkpoints and set-backs

    def _make_checkpoints(self) -> Steps:
        while True:
            yield self.world.random.uniform(1.0, 3.0)
            try:
                clock = None
                if self.cluster.rules.averaged:
                    clock = max((yield from self._on_all("versions"))) + 3
                yield from self._on_all("keep", clock)
                images: dict[int, BucketSnapshot] = {}
                for _ in range(20):
                    try:
                        found = yield from self._on_all("kept", clock)
                    except TryLater:
                        yield 0.2
                        continue
                    images = {index: image for part in found for index, image in part.items()}
                    break
                if images and not self._lost():
                    self.cluster.disk.checkpoints.append(images)
            except PSError:
                continue

    def _lost(self) -> list[int]:
        held_by = self.cluster.disk.held_by
        return [index for index, process in self._shards.items() if held_by.get(index) != process]

    def _watch_shards(self) -> Steps:
        while True:
            yield 0.25
            if len(self._shards) < SHARDS or not self._lost():
                continue
            yield from self._lock()
            try:
                if self.cluster.disk.checkpoints:
                    yield from self._set_back(self._lost())
                else:
                    for index in range(SHARDS):
                        shard = self.cluster.shards[index]
                        yield self.call(shard, "create", self.cluster.spec, self.cluster.placement(index))
                    self.cluster.disk.held_by = dict(self._shards)
            except PSError:
                continue
            finally:
                self._locked = False

    def _set_back(self, lost: list[int]) -> Steps:
        images, processes = self.cluster.disk.checkpoints[-1], dict(self._shards)
        averaged, last = self.cluster.rules.averaged, self.members.last_incarnation
        for index in range(SHARDS) if averaged else lost:
            mine = {bucket: images[bucket] for bucket in self.cluster.placement(index)}
            yield self.call(self.cluster.shards[index], "restore", self.cluster.spec, mine, last, timeout=3.0)
        before = self.members.rollback(self.world.now)
        self._ghosts.clear()
        if not averaged:
            for member in before:
                self._retire(member.rank, member.incarnation)
        self.cluster.disk.held_by = processes
        self._save()


# -- workers ---------------------------------------------------------------------------------------------------------


class Worker(Host):
    """One life of a worker's process."""

    def __init__(self, cluster: Cluster, rank: int, number: int) -> None:
        super().__init__(cluster.world, f"worker {rank}")
        self.cluster = cluster
        self.rank = rank
        self.life = Life(number, rank)
        self.clock = 0
        self.holds = False
        self._place: Member | None = None
        self._error: PSError | None = None
        self._witness = Witness(cluster.rules, rank if cluster.rules.averaged else number)
        self._counts = torch.zeros(SHAPE.buckets, SHAPE.rows)
        self.spawn(self._train())

    def _until(self, bucket: int | None, method: str, *arguments: Any, timeout: float = 1.0) -> Steps:
        """A call to a bucket's shard or the coordinator (None), repeated while it fails for a reason that passes."""
        pause = 0.02
        while True:
            callee = self.cluster.coordinator if bucket is None else self.cluster.home(bucket)  # the process of now
            try:
                return (yield self.call(callee, method, *arguments, timeout=timeout))
            except PSError as error:
                if not error.retryable:
                    raise
            yield pause * self.world.random.uniform(0.5, 1.0)
            pause = min(2 * pause, 0.5)

    def _ask(self, previous: int | None) -> Steps:
        attempt, since, pause = self.world.random.getrandbits(60), math.inf, 0.02
        # Nothing starts it again that could name its launch: a new process is a launch of its own.
        newcomer = JoinRequest(
            *(self.life.number, "", "", previous, self.clock, attempt), launch=f"process {self.life.number}"
        )

        while True:
            asks = dataclasses.replace(newcomer, waited=max(0.0, self.world.now - since))
            try:
                return (yield self.call(self.cluster.coordinator, "join", self.rank, asks, timeout=4.0))
            except PSError as error:
                if not error.retryable:
                    raise
                if error.retry_after is not None:
                    since = min(since, self.world.now)
            yield pause * self.world.random.uniform(0.5, 1.0)
            pause = min(2 * pause, 0.5)

    def _beat(self) -> Steps:
        while True:
            yield LEASE / 4
            place = self._place
            assert place is not None
            try:
                yield self.call(self.cluster.coordinator, "heartbeat", self.rank, place.incarnation, self.clock)
            except Fenced as error:
                self._error = error
                return
            except UnknownWorker:
                try:
                    self._place = yield from self._ask(place.incarnation)
                except PSError as error:
                    self._error = error
                    return
            except PSError:
                continue

    def _train(self) -> Steps:
        try:
            self._place = yield from self._ask(None)
            self.spawn(self._beat())
            yield from self._take()
            step = 0
            while True:
                yield self.world.random.uniform(0.02, 0.2) * (5 if self.world.random.random() < 0.05 else 1)
                if self.cluster.target is not None and self.clock >= self.cluster.target:
                    self.holds = True
                    continue
                self.holds = False
                step += 1
                yield from self._step(self.clock + 1 if self.cluster.rules.averaged else step)
        except Fenced:
            self.cluster.ended(self)
        except PSError as error:
            said = f"{type(error).__name__}: {error}"
            self.cluster.violations.append(Violation("gave up", said, {"life": self.life.number}))

    def _take(self) -> Steps:
        """Goes on from the place of now: weights at its clock, when all who were there have joined again."""
        while True:
            place = self._place
            assert place is not None
            self._mine, self.clock = place, place.clock
            self._witness.lost_track()
            try:
                if self.rank == 0:
                    for index in range(SHAPE.buckets):
                        initial = Push("cells", 0, place.incarnation, index, 0, PushKind.INITIAL_VALUE, ZEROS)
                        yield from self._until(index, "push", initial)
                yield from self._pull_all()
                while not (yield from self._until(None, "started")):
                    yield 0.1
                if self._place is place:
                    return
            except (UnknownWorker, NotFound):
                yield from self._renewed()

    def _renewed(self) -> Steps:
        """Waits for another place than the one that was lost."""
        while self._place is self._mine:
            if self._error is not None:
                raise Fenced(str(self._error))
            yield 0.05

    def _step(self, number: int) -> Steps:
        self.life.attempted.append(number)
        if self._place is not self._mine:
            yield from self._take()
            return
        model = Cells(SHAPE)
        self._witness.mark(model, number)
        steps = [self._exchange(index, bucket.grad) for index, bucket in enumerate(model.buckets)]
        exchanges = [self.spawn(one) for one in steps]
        try:
            for exchange in exchanges:
                yield exchange
        except (UnknownWorker, NotFound):
            for exchange in exchanges:
                exchange.kill()
            yield from self._renewed()
            yield from self._take()
            return
        self.clock += 1
        self._acknowledged(number)

    def _exchange(self, index: int, gradient: torch.Tensor | None) -> Steps:
        assert gradient is not None
        clock, incarnation = self.clock + 1, self._mine.incarnation
        data = bytes(bytes_of(gradient.flatten()))
        push = Push("cells", self.rank, incarnation, index, clock, PushKind.GRADIENT, data)
        yield from self._until(index, "push", push)
        yield from self._pull(index, clock)

    def _pull(self, index: int, clock: int) -> Steps:
        arguments = index, self.rank, self._mine.incarnation, clock
        values = yield from self._until(index, "pull", *arguments, timeout=5.0)
        self.cluster.views.setdefault(self.life.number, torch.zeros(SHAPE.buckets, SHAPE.rows, 1 + SHAPE.columns))
        self.cluster.views[self.life.number][index] = tensor_from(bytes(bytes_of(values)), "float32").view(
            SHAPE.rows, 1 + SHAPE.columns
        )

    def _pull_all(self) -> Steps:
        for pull in [self.spawn(self._pull(index, self.clock)) for index in range(SHAPE.buckets)]:
            _ = yield pull

    def _acknowledged(self, number: int) -> None:
        view = self.cluster.views[self.life.number].clone()
        self.life.done[number], self.life.at[number] = self.clock, self.world.now
        for violation in self._witness.check(view, number):
            where = {**violation.where, "life": self.life.number, "at": round(self.world.now, 3)}
            self.cluster.violations.append(Violation(violation.kind, violation.said, where))
        if not self.cluster.rules.averaged:
            changed = (view[:, :, 0] != self._counts).any(dim=0).nonzero().flatten().tolist()
            self._counts = view[:, :, 0]
            counts = {row: [int(count) for count in self._counts[:, row].tolist()] for row in changed}
            self.life.seen.append((self.clock, counts, self.world.now))


ZEROS = bytes(4 * SHAPE.rows * (1 + SHAPE.columns))


# -- all together ----------------------------------------------------------------------------------------------------


class Cluster:
    """A cluster, and what is done to it."""

    def __init__(self, mode: str, seed: int) -> None:
        self.world = World(f"{mode} {seed}")
        draw = self.world.random
        self.spec = job_of(mode)
        self.rules = Rules.of(mode, WORKERS, SHAPE)
        self.disk = Disk()
        self.target: int | None = None  # the clock at which all stop
        self.violations: list[Violation] = []
        self.views: dict[int, torch.Tensor] = {}
        self.apply_seconds = draw.choice([0.001, 0.05])
        self._processes = itertools.count(1)
        self._gone: set[int] = set()  # ranks that nobody has any more
        self._died: dict[int, float] = {}  # by shard, when it did first
        self.coordinator = Coordinator(self)
        self.shards = [Shard(self, index, next(self._processes)) for index in range(SHARDS)]
        self.lives: list[Life] = []
        self.workers = [self._worker(rank) for rank in range(WORKERS)]
        bad = Weather(loss=draw.choice([0, 0.05, 0.2]), repeat=draw.choice([0, 0.2]), mean=0.02, longest=1.5)
        self.world.weather = draw.choice([Weather(), bad])
        self._faults = {"kill": 4, "stop": 3, "cut": 3, "shard": 1, "coordinator": 1, "stop server": 1}
        self._faults = {kind: weight * draw.choice([0, 1, 3]) for kind, weight in self._faults.items()}

    def placement(self, shard: int) -> list[int]:
        """The buckets of a shard."""
        return [bucket for bucket in range(SHAPE.buckets) if bucket % SHARDS == shard]

    def home(self, bucket: int) -> Shard:
        """The shard of a bucket."""
        return self.shards[bucket % SHARDS]

    def _worker(self, rank: int) -> Worker:
        worker = Worker(self, rank, len(self.lives))
        self.lives.append(worker.life)
        return worker

    def ended(self, worker: Worker) -> None:
        """A worker's process is over: mostly another takes its rank a little later."""
        worker.die()
        if worker.rank and self.disk.started and self.world.random.random() < GONE_FOR_GOOD:
            self._gone.add(worker.rank)
            return
        delay = self.world.random.uniform(0.2, 2 * LEASE)

        def start() -> None:
            self.workers[worker.rank] = self._worker(worker.rank)

        self.world.at(delay, start)

    def run(self) -> list[Violation]:
        """What the oracle finds, and whether everybody gets on once nothing fails any more."""
        world = self.world
        world.at(world.random.expovariate(1.0), self._fault)
        world.run(lambda: False, FAULTY_SECONDS)
        self._faults = dict.fromkeys(self._faults, 0)
        world.weather = Weather()

        def clocks() -> Iterable[int]:
            return (worker.clock for worker in self.workers if worker.alive)

        world.run(lambda: False, world.now + 3 * LEASE)  # stops, cuts and restarts are over
        self.target = max(clocks(), default=0) + LAST_STEPS
        if not self.coordinator.members.started:  # all had to begin anew: then every declared worker is needed
            for rank in sorted(self._gone):
                self.workers[rank] = self._worker(rank)
            self._gone.clear()
        staying = [rank for rank in range(WORKERS) if rank not in self._gone]
        if not world.run(lambda: all(self.workers[rank].holds for rank in staying), world.now + SETTLE_SECONDS):
            where = {worker.name: worker.clock for worker in self.workers if worker.rank in staying}
            shards = [[b.rule for b in s.job.buckets.values()] if s.job else None for s in self.shards]
            said = f"not everybody reaches clock {self.target}: {where}; {shards}"
            return [*self.violations, Violation("stuck", said, {})]
        world.run(lambda: False, world.now + 1.0)
        return [*self.violations, *self._judge()]

    def _judge(self) -> list[Violation]:
        view = torch.zeros(SHAPE.buckets, SHAPE.rows, 1 + SHAPE.columns)
        for shard in self.shards:
            assert shard.job is not None
            for bucket in shard.job.buckets.values():
                view[bucket.spec.slices[0].parameter] = bucket.weights.flat[: view[0].numel()].view(view[0].shape)
        # Which parameter a bucket is: they are laid out in another order.
        layout = self.shards[0].job.layout.buckets if self.shards[0].job else ()
        until = {b.slices[0].parameter: self._died.get(b.index % SHARDS) for b in layout}
        lossy = frozenset(parameter for parameter, at in until.items() if at is not None and not self.rules.averaged)
        return [*judge(view, self.lives, self.rules, lossy), *too_stale(self.lives, self.rules, until)]

    def digest(self) -> str:
        """A number that tells whether two runs were the same."""
        said = [(life.number, life.rank, life.attempted, sorted(life.done.items())) for life in self.lives]
        return hashlib.sha256(repr((said, round(self.world.now, 9))).encode()).hexdigest()

    # -- what goes wrong

    def _fault(self) -> None:
        world, draw = self.world, self.world.random
        kinds = [kind for kind, weight in self._faults.items() if weight]
        if not kinds or world.now > FAULTY_SECONDS:
            return
        world.at(draw.expovariate(1.0), self._fault)
        kind = draw.choices(kinds, [self._faults[kind] for kind in kinds])[0]
        worker = draw.choice(self.workers)
        seconds = LEASE * draw.choice([0.3, 1.5])
        if kind == "kill" and worker.alive and len(self.lives) < SHAPE.rows - WORKERS:
            self.ended(worker)
        elif kind == "stop":
            worker.stopped_until = world.now + seconds
        elif kind == "cut":
            for server in draw.choice(
                [[self.coordinator], self.shards, self.shards[:1], [self.coordinator, *self.shards]]
            ):
                world.cut(worker, server, seconds)
        elif kind == "shard" and self.disk.checkpoints:
            self._kill_shard(draw.randrange(SHARDS))
        elif kind == "coordinator" and self.coordinator.alive and self.disk.held_by:
            self.coordinator.die()
            world.at(draw.uniform(0.5, LEASE), self._start_coordinator)
        elif kind == "stop server":
            draw.choice([self.coordinator, *self.shards]).stopped_until = world.now + seconds

    def _start_coordinator(self) -> None:
        self.coordinator = Coordinator(self)

    def _kill_shard(self, index: int) -> None:
        if not self.shards[index].alive:
            return
        self.shards[index].die()
        self._died.setdefault(index, self.world.now)

        def start() -> None:
            self.shards[index] = Shard(self, index, next(self._processes))

        self.world.at(self.world.random.uniform(0.5, LEASE), start)


def main() -> None:
    """Runs seeds until one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help="only this one (all)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--seeds", type=int, default=200, help="from 0 on (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.seeds) if arguments.seed is None else [arguments.seed]
    for seed in seeds:
        for mode in [arguments.mode] if arguments.mode else MODES:
            found = Cluster(mode, seed).run()
            if found:
                for violation in found[:10]:
                    print(f"{violation.kind}: {violation.said} {dict(violation.where)}")
                sys.exit(f"replay: make simulate SEED={seed} MODE={mode}")
    print(f"{len(seeds)} seeds: no promise is broken")


if __name__ == "__main__":
    main()
