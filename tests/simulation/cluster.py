"""A cluster in virtual time, and its course: one seed each.

The servers are the real ones; around them are the hosts that they run on, the workers, and a user that starts processes
again where they have died and begins the next run where one has ended. Faults end after a while: then everybody has to
get on, and all that was acknowledged has to be in the weights exactly once.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import Any

import torch

from ps_protocol.errors import Fenced, PSError
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.shard import pulls
from tests.chaos.oracle import Life, Violation
from tests.simulation.binding import bound
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.processes import Host
from tests.simulation.promises import Promises
from tests.simulation.readers import NEWEST_WITHIN, Readers, replacements
from tests.simulation.relays import Relays
from tests.simulation.rows import WORKERS, draw_tables
from tests.simulation.runs import NAME, RUNS, Comeback, Run, job_beside, job_under_test
from tests.simulation.sharing import Segments
from tests.simulation.supervision import DIRECTORY, Servers, Setup
from tests.simulation.worker import Place, Worker
from tests.simulation.world import World
from tests.tools.one_thread import one_thread

MODES = ("sync", "ssp:0", "ssp:2", "async")
QUORUM_MODES = ("sync quorum all-1", "sync quorum 2", "sync quorum all-1 grace 0.3")  # jobs without tables
NARROW_MODES = ("local:4", "sync int4", "local:4 int4", "local:4/2", "local:4/2 int4")  # likewise
LEASE = 3.0
FAULTY_SECONDS, SETTLE_SECONDS = 14.0, 120.0
AGREE_SECONDS = 30.0  # within which the servers must know who lives, once all hold
QUIET_SECONDS = 2.0  # after the last fault, before all are told to finish
GONE_FOR_GOOD = 0.2  # of the workers that die; the others are started again
LAST_STEPS = 3
# Of rows, in sync and otherwise: there, rows of one pull that come in several messages may be of several versions.
MESSAGE_BYTES = {True: 1500, False: 3000}
FETCHES, FETCH_SECONDS = 3, 10.0  # of whole tables by a worker, when all have finished


class Cluster:
    """A cluster. `violations`: the promises that were broken.

    faults: the kinds that there are, where not all are wanted: these are frequent then
    tables: its job has some; otherwise the seed says whether
    schedules: the scripts of jobs whose workers share a clock have schedules
    readers: how many processes follow its job
    relays: that some of these follow in place of the servers
    sharing: workers share memory with shards; otherwise the seed says whether
    members: of each worker: more than one where workers are groups, whose job has no tables
    """

    def __init__(
        self,
        mode: str,
        seed: int,
        tracing: bool = False,
        faults: Collection[str] | None = None,
        tables: bool = False,
        wholesale: bool = False,
        schedules: bool = False,
        readers: int = 0,
        members: int = 1,
        relays: int = 0,
        sharing: bool = False,
    ) -> None:
        self.world = World(f"{mode} {seed}", tracing)
        self.with_readers = readers
        drawn = (
            ()
            if members > 1 or schedules or mode in (*QUORUM_MODES, *NARROW_MODES)
            else draw_tables(mode, seed, tables)
        )
        self.with_schedules = schedules
        self.lease, self.job = LEASE, job_under_test(mode, drawn, members, bool(readers) and not drawn)
        self.violations: list[Violation] = []
        self.network = Network(self.world)
        self.segments = Segments(self.world, mode, seed, sharing)
        self.runs: list[Run] = []
        self.beside: Run | None = None
        self.holders: dict[tuple[str, int, int], Worker] = {}  # by the servers' run, rank and incarnation
        self.servers = Servers(self.network, self._setup(seed % 5 == 3), self._server_died)
        self.relays, self.readers = Relays(self, relays), Readers(self)
        self.faults = Faults(self, faults, wholesale)
        self.promises = Promises(self)
        self._lives = itertools.count()
        draw = self.world.random
        self._step_mean = draw.choice([0.15, 0.4])
        self.world.preemption = draw.choice([0.0, 0.0, 0.001, 0.01])
        self.pace = {
            "contribution-added": draw.choice([0.0, 0.01]),
            "update-stepped": draw.choice([0.001, 0.05]),
            "restore-read": draw.choice([0.01, 1.0, 4.0]),
            "shard-file-half-written": draw.choice([0.01, 0.3]),
            "manifest-half-written": draw.choice([0.0, 0.2]),
            "coordinator-file-unnamed": draw.choice([0.0, 0.02]),
            "worker-half-added": draw.choice([0.0, 0.05]),
        }

    def _setup(self, own_disks: bool) -> Setup:
        draw = self.world.random
        steps, seconds = draw.choice([(5, None), (20, None), (None, 2.0), (None, 5.0)])
        policy = CheckpointPolicy(DIRECTORY, steps, seconds, keep=2, resume=True, full_every=4)
        return Setup(draw.random() < 0.5, policy if draw.random() < 0.9 else None, self.lease, own_disks)

    # -- what its user does ------------------------------------------------------------------------------------------

    @property
    def this_run(self) -> Run:
        """The run of now."""
        return self.runs[-1]

    def running(self) -> list[Run]:
        """Returns the runs of now: of the job under test, and of the one beside it."""
        return [run for run in (*self.runs[-1:], self.beside) if run is not None and not run.over]

    def step_seconds(self) -> float:
        """Returns how long a worker computes."""
        draw = self.world.random
        return draw.uniform(0.1, 2.0) * self._step_mean * (10 if draw.random() < 0.02 else 1)

    def start_worker(self, run: Run, rank: int, launch: str) -> None:
        """Starts a worker."""
        number = len(run.lives) if run.is_beside else next(self._lives)
        life = Life(RUNS + number, rank)
        row = run.row(number, rank)
        worker = Worker(self, run, rank, launch, life, row)
        self.network.connect(worker.host)
        worker.host.on_death.append(lambda: run.look_for_anybody(self.world.now))
        run.lives.append(life)
        run.writers.setdefault(row, []).append(life)
        run.everybody.append(worker)
        run.workers[rank] = worker

    def begin_run(self) -> None:
        """Begins a run: a launch that starts all its workers."""
        run = Run(len(self.runs), self.job)
        self.runs.append(run)
        self.world.trace(f"run {run.number} begins")
        self._launch(run)

    def _begin_after(self, lost: Run) -> None:
        """Begins the run after one that was lost, unless another one was begun since."""
        if self.this_run is lost:
            self.begin_run()

    def _begin_beside(self) -> None:
        draw = self.world.random
        if draw.random() < 0.3:
            self.beside = Run(0, job_beside(draw.choice(MODES)))
            self._launch(self.beside)

    def _launch(self, run: Run) -> None:
        for rank in range(run.job.workers):
            start = partial(self.start_worker, run, rank, f"launch {run.number}")
            self.world.at(self.world.random.uniform(0.0, 0.5), start)

    def kill_worker(self, worker: Worker) -> None:
        """kill -9 of a worker; mostly it is started again a little later."""
        worker.host.kill()
        self._restart(worker)

    def kill_all_workers(self) -> None:
        """Ends a launch as its host's crash does. It is started again later, one worker after the other."""
        run, draw = self.this_run, self.world.random
        ranks = [rank for rank, worker in sorted(run.workers.items()) if rank not in run.gone]
        if run.over or not all(run.workers[rank].is_training for rank in ranks) or not self.has_room:
            return
        self.world.trace("all workers die")
        calm = not (run.comeback or self.network.weather.loss or self.faults.disturbed)
        run.comeback = Comeback(set(ranks), self.world.now, calm)
        for rank in ranks:
            run.workers[rank].host.kill()
        launch, after = f"launch {next(self.world.numbers)}", draw.uniform(0.2, 3 * LEASE)
        for rank in draw.sample(ranks, len(ranks)):
            self.world.at(after, partial(self._start_again, run, rank, launch, run.workers[rank]))
            after += draw.uniform(0.0, 2 * LEASE)

    def _start_again(self, run: Run, rank: int, launch: str, before: Worker) -> None:
        if not run.over and run.workers.get(rank) is before:
            self.start_worker(run, rank, launch)

    def _restart(self, worker: Worker) -> None:
        run, rank, draw = worker.run, worker.rank, self.world.random
        if run.over or run.workers.get(rank) is not worker:
            return
        if run.is_beside or (rank and self._has_started(run) and draw.random() < GONE_FOR_GOOD):
            run.gone.add(rank)
            return
        # Its launcher starts it again, or somebody does, for whom that is a launch of its own.
        launch = worker.launch if draw.random() < 0.5 else f"process {worker.life.number}"

        self.world.at(draw.uniform(0.2, 2 * LEASE), partial(self._start_again, run, rank, launch, worker))

    def _has_started(self, run: Run) -> bool:
        job = self.promises.job(run.name)
        runs = {worker.place.run for worker in run.everybody if worker.places}
        # A coordinator that came back with an old file may have the run before.
        return job is not None and job.placed.run in runs and job.workers._membership.started

    @property
    def has_room(self) -> bool:
        """Whether there are rows left for more lives."""
        return sum(len(run.lives) for run in self.runs) < self.job.shape.rows - RUNS - 2 * WORKERS

    # -- what its processes tell it ----------------------------------------------------------------------------------

    def violated(self, violation: Violation) -> None:
        """Notes that a promise is broken."""
        self.world.trace(f"BROKEN: {violation.kind}: {violation.said}")
        self.violations.append(violation)

    def took(self, worker: Worker, place: Place) -> None:
        """Notes that a worker has a place."""
        self.holders[place.run, worker.rank, place.incarnation] = worker
        run = worker.run
        if place.clock:
            run.look_for_anybody(self.world.now, but=worker)
        if run.comeback is not None:
            run.comeback.joined(worker.rank, self.world.now)
        run.placement = list(place.result.placement)[: len(run.buckets)]
        if not run.identity:
            run.identity = place.run
            for earlier in self.runs[: run.number] if not run.is_beside else ():
                if earlier.identity == place.run and (not earlier.has_ended or earlier.end_is_forgotten):
                    run.go_on_from(earlier)
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
        if isinstance(error, Fenced) and run.workers.get(worker.rank) is not worker:
            return  # another process has its place
        if run.may_end:
            self._is_lost(run, f"{run.may_end}: {error}")
        else:
            where = {"life": worker.life.number, "at": round(self.world.now - 1000, 3)}
            self.violated(Violation("gave up", f"{worker.host.name}: {type(error).__name__}: {error}", where))
            self._is_lost(run, str(error))

    def _is_lost(self, run: Run, why: str) -> None:
        """The user hears that a job is lost, and begins the next run."""
        run.over = True
        self.world.trace(f"run {run.number} of {run.name} is lost: {why}")
        for worker in run.everybody:  # its launcher ends them all; one that hangs somewhere may wake up much later
            is_left = worker.host.stopped and worker.places and self.world.random.random() < 0.7
            if worker.host.alive and not is_left:
                worker.host.kill()
        if len(self.runs) < RUNS and run is self.this_run:
            self.world.at(self.world.random.uniform(0.0, 3.0), partial(self._begin_after, run))

    def _server_died(self, host: Host, shard: int | None) -> None:
        self.faults.died(host)
        coordinator = self.servers.coordinator
        file = coordinator.coordinator._state_file if coordinator.coordinator is not None else None
        for run in [*self.runs, *([self.beside] if self.beside is not None else ())]:
            if shard is not None:  # also for one that seems over: the next launch may go on from it
                run.shard_died(shard, self.world.now)
            if host is coordinator.host and file is not None and file.is_behind and run.has_ended:
                run.end_is_forgotten = True
            if self.servers.setup.policy is None and host is self.servers.coordinator.host:
                run.may_end = run.may_end or "the coordinator came back without its file"

    # -- its course --------------------------------------------------------------------------------------------------

    def run(self) -> list[Violation]:
        """Runs the cluster. Returns the promises that were broken."""
        quiet = contextlib.nullcontext() if self.world.tracing else _silence()
        _freeze_what_is_imported()
        with (
            quiet,
            one_thread(),
            bound(self.world, self.pace, self._replacements()),
            self.readers.noting() if self.with_readers else contextlib.nullcontext(),
            _small_messages(MESSAGE_BYTES[self.job.rules().averaged]),
        ):
            try:
                for phase in self._course():
                    if self.violations:
                        break
                    self.world.trace(f"-- {phase}")
            finally:
                self.world.end()
        return self.violations

    def _replacements(self) -> list[tuple[Any, Any]]:
        return [*replacements(self.world, self.network, self.readers), *self.segments.replacements()]

    def _course(self) -> Iterator[str]:
        draw = self.world.random
        self.servers.start()
        self.network.weather = self.faults.weather()
        self.promises.begin()
        self.begin_run()
        self._begin_beside()
        self.relays.begin()
        self.readers.begin(self.with_readers)
        yield "faults"
        self.faults.begin()
        self._let_pass(FAULTY_SECONDS)
        yield "no more faults"
        self.faults.end()
        self._let_pass(QUIET_SECONDS)
        yield "all are to finish"
        self._finish()
        yield "all have finished"
        if draw.random() < self.faults.of_an_end and len(self.runs) < RUNS:
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
        for run in [self.beside] if self.beside is not None and not self.beside.over else []:
            self._has_finished(run, until)
        finished = None
        while (
            not self.violations and finished is not self.this_run
        ):  # it may be lost, and the next one begun, till then
            while not self._has_finished(self.this_run, until):
                run = self.this_run
                if self.violations or not self._waits(lambda run=run: self.this_run is not run, until):  # type: ignore[misc]
                    return  # there were as many runs as there can be
            finished = self.this_run
            while self._all_agree() and not self._all_hold():  # a shard that was lost has called in late
                for run in self.running():
                    self._holds(run, until)
            self._let_pass(1.0)
        for run in self.running() if not self.violations else []:
            if self._has_tables(run, until) and self._has_saved(run):
                if self.faults.last():  # a worker that is cut off still may have lost its place since they agreed
                    self._all_agree()
                self.promises.check_finished(run)
        self._readers_have_newest()

    def _readers_have_newest(self) -> None:
        """In quiet times each reader comes to have the newest weights."""
        run = self.this_run
        if not self.with_readers or self.violations or run.over:
            return
        if not self._waits(lambda: self.readers.have_newest(run), self.world.now + NEWEST_WITHIN):
            has = {each.host.name: each.subscription and each.subscription.version for each in self.readers.all}
            why = {each.host.name: each.subscription and each.subscription.trouble for each in self.readers.all}
            self.violated(Violation("not the newest", f"readers have {has} of {run.identity}: {why}", {}))

    def _has_tables(self, run: Run, until: float) -> bool:
        """Has a worker fetch the job's tables. Returns whether they have come, or there are none."""
        for _ in range(FETCHES if run.job.tables else 0):
            worker = run.staying()[0]
            worker.rows.fetch()
            if self._waits(lambda worker=worker: worker.rows.content is not None, self.world.now + FETCH_SECONDS):  # type: ignore[misc]
                break
            if not self._holds(run, until):  # it lost its place meanwhile
                return False
        else:
            if run.job.tables:
                self.violated(Violation("stuck", f"{worker.host.name} cannot fetch its tables", {}))
        return not self.violations

    def _has_saved(self, run: Run) -> bool:
        """Has rank 0 save, with the steps of all workers. Returns whether it could, and was right. With a quorum it may
        be in a step that others, which hold, do not end: it saves only where it holds, too."""
        saver = run.workers[0].saver
        if run.rules.late and not run.workers[0].holds:
            return True
        saver.is_due = True
        if not self._waits(lambda: not saver.is_due, self.world.now + FETCHES * FETCH_SECONDS):
            self.violated(Violation("stuck", "rank 0 cannot save", {}))
        return not self.violations

    def _all_agree(self) -> bool:
        return self._waits(self.promises.all_agree, self.world.now + AGREE_SECONDS) and not self.violations

    def _all_hold(self) -> bool:
        return all(run.all_hold() for run in self.running())

    def _has_finished(self, run: Run, until: float) -> bool:
        """Returns True once all workers of a run hold at one clock; False if the run was lost, or a promise broken."""
        self._start_all(run)
        self._waits(lambda: run.over or run.is_training(), until)
        run.target = run.furthest() + LAST_STEPS
        return self._holds(run, until)

    def _holds(self, run: Run, until: float) -> bool:
        self._waits(lambda: run.over or run.all_hold(), until)
        if run.over or self.violations:
            return False
        if not run.all_hold():
            where = {worker.host.name: (worker.clock, worker.holds) for worker in run.workers.values()}
            self.violated(Violation("stuck", f"not everybody reaches clock {run.target}: {where}", {}))
            return False
        return True

    def _waits(self, until: Callable[[], bool], deadline: float) -> bool:
        return self.world.run(lambda: bool(self.violations) or until(), max(10.0, deadline - self.world.now))

    def _start_all(self, run: Run) -> None:
        if run.over or self._has_started(run):
            return
        for rank in sorted(run.gone):  # every declared worker is needed
            self.start_worker(run, rank, f"process {rank}")
        run.gone.clear()

    def _leave(self) -> None:
        """Has all workers leave, while something goes wrong perhaps."""
        run, draw = self.this_run, self.world.random
        run.may_end = "all leave"
        self.faults.begin_of_an_end()
        workers = run.staying()
        for worker in workers:
            self.world.at(draw.uniform(0.0, 1.0), worker.leave)
        self.world.run(lambda: bool(self.violations) or all(w.left or not w.host.alive for w in workers), 60.0)

    def _begin_next(self) -> bool:
        """Begins a launch. Returns False if there can be none: nobody can say whether the job has ended."""
        run, draw = self.this_run, self.world.random
        ended = run.has_ended
        self._let_pass(draw.choice([0.0, 0.5, 3.0]))
        if not ended:  # the last one's call was lost, perhaps: a launch then continues the job, if it is there
            self._let_pass(2 * LEASE)
            if not self.world.run(lambda: self.servers.coordinator.is_serving, 30.0) or self.promises.job(NAME):
                return False
        if self.this_run is run:  # otherwise it was lost meanwhile, and another launch has begun
            run.over = True
            self.begin_run()
        return True

    def digest(self) -> str:
        """Returns what tells whether two runs of a simulation were the same."""
        lives = [
            (life.number, life.rank, life.attempted, sorted(life.done.items()))
            for run in (*self.runs, *([self.beside] if self.beside is not None else ()))
            for life in run.lives
        ]
        return hashlib.sha256(repr((lives, round(self.world.now, 9))).encode()).hexdigest()

    def view(self, run: Run) -> torch.Tensor:
        """Returns the weights as the shards have them: [buckets, rows, 1 + columns].

        With a quorum, as they are when what is staged has been applied: it may wait for workers that hold.
        """
        shape = run.job.shape
        view = torch.zeros(shape.buckets, shape.rows, 1 + shape.columns)
        for process in self.servers.shards:
            job = process.hosted().get(run.name)
            for bucket in job.buckets.values() if job is not None else ():
                if not bucket.unit.is_trained:
                    continue
                flat = bucket.unit.weights.flat
                if run.rules.late:
                    staged = [add.contribution.values for add in bucket.rule.waiting.values()]
                    flat = flat - sum(
                        each for each in [bucket.unit.weights._open.sum.total, *staged] if each is not None
                    )
                view[bucket.unit.spec.index] = flat[: view[0].numel()].view(view[0].shape)
        return view


@cache
def _freeze_what_is_imported() -> None:
    """Leaves out of collections what is there before the first run: a shard that lets go of a job collects.

    Once: what is frozen is never collected, not even a run that is over.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _small_messages(size: int) -> Iterator[None]:
    """Has shards send rows in messages of a few, as they send large tables."""
    before, pulls.MESSAGE_BYTES = pulls.MESSAGE_BYTES, size
    try:
        yield
    finally:
        pulls.MESSAGE_BYTES = before


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Has the servers log nothing: errors are what is simulated here."""
    logs = [logging.getLogger(name) for name in ("ps_server", "ps_feed", "ps_worker")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)
