"""A cluster in virtual time, and its course: one seed each.

The servers are the real ones; around them are the hosts that they run on, the workers, and a user that starts processes
again where they have died and begins the next run where one has ended. Faults end after a while: then everybody has to
get on, and all that was acknowledged has to be in the weights exactly once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from ps_protocol.errors import Fenced, PSError
from ps_server.coordinator.policy import CheckpointPolicy
from tests.chaos.oracle import Life, Violation
from tests.simulation.binding import bound
from tests.simulation.disk import SimulatedDisk
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.processes import Host
from tests.simulation.promises import Promises
from tests.simulation.runs import RUNS, SHAPE, WORKERS, Run
from tests.simulation.servers import CoordinatorProcess, ShardProcess
from tests.simulation.worker import Place, Worker
from tests.simulation.world import World

MODES = ("sync", "ssp:0", "ssp:2", "async")
SHARDS = 2
LEASE = 3.0
FAULTY_SECONDS, SETTLE_SECONDS = 14.0, 120.0
AGREE_SECONDS = 30.0  # within which the servers must know who lives, once all hold
QUIET_SECONDS = 5.0  # after the last fault, before all are told to finish
GONE_FOR_GOOD = 0.2  # of the workers that die; the others are started again
LAST_STEPS = 5
TEMPORARY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Cluster:
    """A cluster. `violations`: the promises that were broken."""

    def __init__(self, mode: str, seed: int, tracing: bool = False) -> None:
        self.world = World(f"{mode} {seed}", tracing)
        self.mode, self.lease = mode, LEASE
        self.violations: list[Violation] = []
        self.network = Network(self.world)
        self.runs: list[Run] = []
        self.shards: list[ShardProcess] = []
        self.holders: dict[tuple[str, int, int], Worker] = {}  # by the servers' run, rank and incarnation
        self.lossy: dict[int, float] = {}  # by bucket, when its shard died first in this run
        self.placement: list[int] = []
        self.faults = Faults(self)
        self.promises = Promises(self)
        self.disks: list[SimulatedDisk] = []
        draw = self.world.random
        self._processes = 0
        self._life = 0
        self._step_mean = draw.choice([0.15, 0.4])
        self.world.preemption = draw.choice([0.0, 0.0, 0.001, 0.01])
        self.pace = {
            "contribution-added": draw.choice([0.0, 0.01]),
            "update-stepped": draw.choice([0.001, 0.05]),
            "restore-read": draw.choice([0.01, 1.0]),
            "shard-file-half-written": draw.choice([0.01, 0.3]),
            "manifest-half-written": draw.choice([0.0, 0.2]),
            "coordinator-file-unnamed": draw.choice([0.0, 0.02]),
            "worker-half-added": draw.choice([0.0, 0.05]),
        }
        self._keeps = draw.random() < 0.9  # checkpoints, and what a coordinator needs to come back
        self._steps, self._seconds = draw.choice([(5, None), (20, None), (None, 2.0), (None, 5.0)])

    # -- what its user does ------------------------------------------------------------------------------------------

    @property
    def this_run(self) -> Run:
        """The run of now."""
        return self.runs[-1]

    @property
    def keeps(self) -> bool:
        """Whether there are checkpoints."""
        return self._keeps

    def step_seconds(self) -> float:
        """Returns how long a worker computes."""
        draw = self.world.random
        return draw.uniform(0.1, 2.0) * self._step_mean * (10 if draw.random() < 0.02 else 1)

    def start_coordinator(self) -> None:
        """Starts the coordinator."""
        directory = self.disks[0].directory
        policy = CheckpointPolicy(directory, self._steps, self._seconds, keep=2, resume=True) if self._keeps else None
        self.coordinator = CoordinatorProcess(self.network, self.disks[0], SHARDS, LEASE, policy)

    def start_shard(self, index: int, address: str = "") -> None:
        """Starts a shard, in place of one that has died."""
        self._processes += 1
        disk, store = self.disks[1 + index], self.disks[0].directory if self._keeps else None
        address = address or f"10.0.1.{index}:{7000 + self._processes}"
        shard = ShardProcess(self.network, disk, index, address, self._processes, store)
        self.shards[index:] = [shard, *self.shards[index + 1 :]]

    def start_worker(self, run: Run, rank: int, launch: str) -> None:
        """Starts a worker."""
        life = Life(RUNS + self._life, rank)
        self._life += 1
        worker = Worker(self, run, rank, launch, life, run.row(life.number - RUNS, rank))
        self.network.connect(worker.host)
        run.lives.append(life)
        run.everybody.append(worker)
        run.workers[rank] = worker

    def begin_run(self) -> None:
        """Begins a run: a launch that starts all its workers."""
        self.runs.append(Run(len(self.runs), self.mode))
        run, draw = self.this_run, self.world.random
        self.lossy = {}
        self.world.trace(f"run {run.number} begins")
        for rank in range(WORKERS):
            start = partial(self.start_worker, run, rank, f"launch {run.number}")
            self.world.at(draw.uniform(0.0, 0.5), start)

    def kill_worker(self, worker: Worker) -> None:
        """kill -9 of a worker; mostly it is started again a little later."""
        worker.host.kill()
        self._restart(worker)

    def _restart(self, worker: Worker) -> None:
        run, rank, draw = worker.run, worker.rank, self.world.random
        if run.over or run.workers.get(rank) is not worker:
            return
        if rank and self._has_started() and draw.random() < GONE_FOR_GOOD:
            run.gone.add(rank)
            return
        # Its launcher starts it again, or somebody does, for whom that is a launch of its own.
        launch = worker.launch if draw.random() < 0.5 else f"process {self._life}"

        def start() -> None:
            if not run.over and run.workers.get(rank) is worker:
                self.start_worker(run, rank, launch)

        self.world.at(draw.uniform(0.2, 2 * LEASE), start)

    def _has_started(self) -> bool:
        job = self.promises.job()
        return job is not None and job.members._membership.started

    @property
    def has_room(self) -> bool:
        """Whether there are rows left for more lives."""
        return self._life < SHAPE.rows - RUNS - 2 * WORKERS

    # -- what its processes tell it ----------------------------------------------------------------------------------

    def violated(self, violation: Violation) -> None:
        """Notes that a promise is broken."""
        self.world.trace(f"BROKEN: {violation.kind}: {violation.said}")
        self.violations.append(violation)

    def took(self, worker: Worker, place: Place) -> None:
        """Notes that a worker has a place."""
        self.holders[place.run, worker.rank, place.incarnation] = worker
        self.placement, run = list(place.result.placement), worker.run
        run.identity = run.identity or place.run
        if place.run == run.identity or run.over:
            return
        if run.may_end:
            self._is_lost(run, "its place is in another run")
        else:
            self.violated(Violation("another run", f"{worker.host.name} is in run {place.run}, not {run.identity}", {}))

    def lost_place(self, worker: Worker, place: Place) -> None:
        """Notes that a worker heard that its place is lost."""
        self.promises.lost_place(worker, place)

    def ended(self, worker: Worker, error: PSError | None) -> None:
        """Notes that a worker's process ends: because it was told to, or with an error."""
        run = worker.run
        self.world.at(0.0, worker.host.kill)
        if error is None or run.over:
            return
        if isinstance(error, Fenced):
            self._restart(worker)
        elif run.may_end:
            self._is_lost(run, f"{run.may_end}: {error}")
        else:
            where = {"life": worker.life.number, "at": round(self.world.now - 1000, 3)}
            self.violated(Violation("gave up", f"{type(error).__name__}: {error}", where))
            self._is_lost(run, str(error))

    def _is_lost(self, run: Run, why: str) -> None:
        """The user hears that a job is lost, and begins the next run."""
        run.over = True
        self.world.trace(f"run {run.number} is lost: {why}")
        for worker in run.everybody:  # its launcher ends them all; one that hangs somewhere may wake up much later
            is_left = worker.host.stopped and worker.places and self.world.random.random() < 0.7
            if worker.host.alive and not is_left:
                worker.host.kill()
        if len(self.runs) < RUNS and run is self.this_run:
            self.world.at(self.world.random.uniform(0.0, 3.0), self.begin_run)

    # -- its course --------------------------------------------------------------------------------------------------

    def run(self) -> list[Violation]:
        """Runs the cluster. Returns the promises that were broken."""
        quiet = contextlib.nullcontext() if self.world.tracing else _silence()
        with quiet, tempfile.TemporaryDirectory(dir=TEMPORARY) as directory, bound(self.world, self.pace):
            self.disks = [SimulatedDisk(self.world, Path(directory)) for _ in range(1 + SHARDS)]
            try:
                for phase in self._course():
                    if self.violations:
                        break
                    self.world.trace(f"-- {phase}")
            finally:
                self.world.end()
        return self.violations

    def _course(self) -> Iterator[str]:
        draw = self.world.random
        self.start_coordinator()
        for index in range(SHARDS):
            self.start_shard(index)
        self.network.weather = self.faults.weather()
        self.promises.begin()
        self.begin_run()
        yield "faults"
        self.faults.begin()
        self._let_pass(FAULTY_SECONDS)
        yield "no more faults"
        self.faults.end()
        self._let_pass(QUIET_SECONDS)
        yield "all are to finish"
        self._finish()
        yield "all have finished"
        if draw.random() < 0.6 and len(self.runs) < RUNS:
            yield "all leave"
            self._leave()
            yield "the next launch"
            if not self._begin_next():
                return
            self._let_pass(draw.uniform(1.0, 6.0))
            self.faults.end()
            self._let_pass(QUIET_SECONDS)
            yield "the next run is to finish"
            self._finish()

    def _let_pass(self, seconds: float) -> None:
        self.world.run(lambda: bool(self.violations), seconds)

    def _finish(self) -> None:
        """Has the workers of now train to one clock, and judges what is there then."""
        until = self.world.now + SETTLE_SECONDS
        while not self._has_finished(self.this_run, until):
            run = self.this_run
            if self.violations or not self._waits(lambda run=run: self.this_run is not run, until):  # type: ignore[misc]
                return  # there were as many runs as there can be
        self._waits(self.promises.all_agree, self.world.now + AGREE_SECONDS)
        self._let_pass(1.0)
        if not self.violations:
            self.promises.check_finished(self.this_run)

    def _has_finished(self, run: Run, until: float) -> bool:
        """Returns True once all workers of a run hold at one clock; False if the run was lost, or a promise broken."""
        self._start_all(run)
        self._waits(lambda: run.over or self._is_training(run), until)
        run.target = run.furthest() + LAST_STEPS
        self._waits(lambda: run.over or self._all_hold(run), until)
        if run.over or self.violations:
            return False
        if not self._all_hold(run):
            where = {worker.host.name: (worker.clock, worker.holds) for worker in run.workers.values()}
            self.violated(Violation("stuck", f"not everybody reaches clock {run.target}: {where}", {}))
            return False
        return True

    def _waits(self, until: Callable[[], bool], deadline: float) -> bool:
        return self.world.run(lambda: bool(self.violations) or until(), max(10.0, deadline - self.world.now))

    def _start_all(self, run: Run) -> None:
        job = self.promises.job()
        if run.over:
            return
        if job is None or not job.members._membership.started:  # then every declared worker is needed
            for rank in sorted(run.gone):
                self.start_worker(run, rank, f"process {self._life}")
            run.gone.clear()

    def _staying(self, run: Run) -> list[Worker]:
        return [worker for rank, worker in run.workers.items() if rank not in run.gone]

    def _is_training(self, run: Run) -> bool:
        return len(run.workers) == WORKERS and all(worker.is_there for worker in self._staying(run))

    def _all_hold(self, run: Run) -> bool:
        holds = all(worker.holds and worker.host.alive for worker in self._staying(run))
        return len(run.workers) == WORKERS and holds

    def _leave(self) -> None:
        """Has all workers leave, while something goes wrong perhaps."""
        run, draw = self.this_run, self.world.random
        run.may_end = "all leave"
        self.faults.begin_of_an_end()
        workers = self._staying(run)
        for worker in workers:
            self.world.at(draw.uniform(0.0, 1.0), worker.leave)
        self.world.run(lambda: bool(self.violations) or all(w.left or not w.host.alive for w in workers), 60.0)

    def _begin_next(self) -> bool:
        """Begins a launch. Returns False if there can be none: nobody can say whether the job has ended."""
        run, draw = self.this_run, self.world.random
        ended = any(worker.ended for worker in run.everybody)
        self._let_pass(draw.choice([0.0, 0.5, 3.0]))
        if not ended:  # the last one's call was lost, perhaps: a launch then continues the job, if it is there
            self._let_pass(2 * LEASE)
            if not self.world.run(lambda: self.coordinator.is_serving, 30.0) or self.promises.job() is not None:
                return False
        run.over = True
        self.begin_run()
        return True

    def digest(self) -> str:
        """Returns what tells whether two runs of a simulation were the same."""
        lives = [
            (life.number, life.rank, life.attempted, sorted(life.done.items()))
            for run in self.runs
            for life in run.lives
        ]
        return hashlib.sha256(repr((lives, round(self.world.now, 9))).encode()).hexdigest()

    def servers(self) -> list[Host]:
        """Returns the processes that serve."""
        return [self.coordinator.host, *(shard.host for shard in self.shards)]

    def view(self) -> torch.Tensor:
        """Returns the weights as the shards have them: [buckets, rows, 1 + columns]."""
        view = torch.zeros(SHAPE.buckets, SHAPE.rows, 1 + SHAPE.columns)
        for process in self.shards:
            job = process.hosted("cells")
            for bucket in job.buckets.values() if job is not None else ():
                view[bucket.spec.index] = bucket.weights.flat[: view[0].numel()].view(view[0].shape)
        return view


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Has the servers log nothing: errors are what is simulated here."""
    log = logging.getLogger("ps_server")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
