"""A job's buckets on shards: bad pushes change nothing, and thousands of simulated clusters keep every promise.

The simulator runs workers, shards and the coordinator's calls as seeded random interleavings, without a clock or a
socket. What it checks is read from the weights themselves: each incarnation of a worker counts in a cell of its own, so
that a pulled bucket tells whose steps are in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from ps_protocol.errors import Backlogged, Fenced, InvalidRequest, NonFiniteGradient, NotFound, PSError, UnknownWorker
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import parse_mode
from ps_protocol.tensors import bytes_of
from ps_server.core.bucket import Add, Step
from ps_server.core.shard_job import Push, PushKind, ShardJob

NAN, INF = float("nan"), float("inf")


def job_spec(mode: str = "sync", *, bucket_bytes: int = 128, non_finite: NonFinite = NonFinite.REFUSE) -> JobSpec:
    """Two trained tensors of 32 in a bucket each, and a buffer in a third; SGD with lr 1."""
    consistency = parse_mode(mode)
    assert consistency is not None
    return JobSpec(
        name="sums",
        parameters=(
            ParameterSpec("first", (32,), "float32", 0),
            ParameterSpec("second", (4, 8), "float32", 0),
            ParameterSpec("buffer", (2,), "int64", None),
        ),
        optimizer="SGD",
        groups=({"lr": 1.0},),
        consistency=consistency,
        bucket_bytes=bucket_bytes,
        world_size=0,
        non_finite=non_finite,
    )


TRAINED, HELD = (0, 1), 2


def payload(values: torch.Tensor | float, size: int = 32) -> bytes:
    flat = values if isinstance(values, torch.Tensor) else torch.full((size,), values)
    return bytes(bytes_of(flat))


def push(bucket: int = 0, clock: int = 1, rank: int = 0, incarnation: int = 1, **more: object) -> Push:
    """A gradient of ones for a bucket, but for what is said otherwise."""
    found: dict[str, object] = {"kind": PushKind.GRADIENT, "payload": payload(1.0), **more}
    return Push("sums", rank, incarnation, bucket, clock, **found)  # type: ignore[arg-type]


def initial(bucket: int, rank: int = 0, incarnation: int = 1) -> Push:
    data = payload(torch.zeros(2, dtype=torch.int64)) if bucket == HELD else payload(0.0)
    # Held tensors start on a 64-byte boundary like all others, and the bucket ends with that.
    padded = data + bytes(-len(data) % 64)
    return push(bucket, 0, rank, incarnation, kind=PushKind.INITIAL_VALUE, payload=padded)


def stage(job: ShardJob, one: Push) -> bool:
    """Checks and stages; True if it was a repeat."""
    return job.stage(one, job.check(one)).duplicate


def work(job: ShardJob, index: int) -> None:
    """Does everything there is to do on one bucket."""
    bucket = job.buckets[index]
    while (item := bucket.protocol.next()) is not None:
        if isinstance(item, Add):
            bucket.weights.add(item.contribution)
        else:
            bucket.weights.step()
        bucket.protocol.done(item)


def running(mode: str = "sync", workers: int = 1, **more: object) -> ShardJob:
    """A job on one shard, with its initial weights, and workers 0 .. workers - 1 with incarnations from 1."""
    job = ShardJob(job_spec(mode, **more), [0, 1, 2])  # type: ignore[arg-type]
    for rank in range(workers):
        job.admit(rank, rank + 1, 0)
    for index in job.buckets:
        stage(job, initial(index))
    return job


def image(job: ShardJob) -> list[object]:
    """Everything a push could change."""
    found: list[object] = [dict(job.roster), job.staged_bytes, job.optimizer_bytes]
    for bucket in job.buckets.values():
        p = bucket.protocol
        found += [p.version, p.initialised, dict(p.staged), dict(p.applied), list(p.waiting), list(p.added)]
        found.append(bucket.weights.flat.tolist())
    return found


# -- bad pushes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (push(bucket=7), NotFound, "no bucket 7"),
        (push(bucket=HELD), InvalidRequest, "holds what no optimizer steps"),
        (push(payload=payload(1.0)[:-1]), InvalidRequest, "expected 128 bytes .32 x float32., got 127"),
        (push(payload=b""), InvalidRequest, "expected 128 bytes .32 x float32., got 0"),
        (push(kind=PushKind.SKIP), InvalidRequest, "expected 0 bytes"),
        (push(absent=frozenset({1})), InvalidRequest, "has 1 segments, got segment 1"),
        (push(groups={1: {"lr": 0.1}}), InvalidRequest, "expected a group below 1, got 1"),
        (push(groups={0: {"lr": -1.0}}), InvalidRequest, "SGD refuses"),
        (push(groups={0: {"betas": (0.9, 0.999)}}), InvalidRequest, "SGD takes lr, .* got 'betas'"),
        (push(payload=payload(NAN)), NonFiniteGradient, "gradient of second from worker 0 is not finite"),
        (push(payload=payload(-INF)), NonFiniteGradient, "gradient of second from worker 0 is not finite"),
        (push(rank=5), UnknownWorker, "worker 5 is not a live member"),
        (push(incarnation=99), Fenced, "incarnation 1 is live, the call came from 99"),
        (push(clock=3), PSError, "worker 0 pushed clock 3 where 2 comes next"),
        (initial(0, rank=1, incarnation=2), InvalidRequest, "initial values are rank 0's to send"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_push_is_refused_with_one_clear_error_and_changes_nothing(
    bad: Push, error: type[PSError], said: str
) -> None:
    job = running(workers=2)
    stage(job, push(0))
    before = image(job)
    with pytest.raises(error, match=said):
        stage(job, bad)
    assert image(job) == before


def test_a_gradient_before_the_initial_weights_is_refused() -> None:
    job = ShardJob(job_spec(), [0])
    job.admit(0, 1, 0)
    with pytest.raises(InvalidRequest, match="has no initial value yet"):
        stage(job, push(0))


def test_the_first_initial_value_counts_and_later_ones_are_acknowledged() -> None:
    job = running()
    stage(job, push(0))
    work(job, 0)
    assert stage(job, initial(0))
    assert job.buckets[0].weights.flat.tolist() == [-1.0] * 32


@pytest.mark.parametrize("kind", ["staged", "applied"])
def test_a_repeated_push_is_acknowledged_and_not_applied_again(kind: str) -> None:
    job = running("async")
    assert not stage(job, push(0))
    if kind == "applied":
        work(job, 0)
    assert stage(job, push(0))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [-1.0] * 32
    assert job.buckets[0].protocol.version == 1


def test_a_non_finite_gradient_can_be_declared_to_be_skipped() -> None:
    job = running("async", non_finite=NonFinite.SKIP)
    bad = push(0, payload=payload(INF))
    assert job.stage(bad, job.check(bad)).skipped
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32
    assert job.clocks() == {0: 0}  # bucket 1 has not had this clock yet
    stage(job, push(1))
    work(job, 1)
    assert job.clocks() == {0: 1}, "the clock counts on"


def test_what_is_not_finite_in_a_segment_without_a_gradient_is_ignored() -> None:
    job = running("async")
    stage(job, push(0, payload=payload(NAN), absent=frozenset({0})))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32


def test_a_gradient_whose_sum_overflows_is_still_finite() -> None:
    job = running("async")
    big = torch.full((32,), 3.0e38)
    stage(job, push(0, payload=payload(big)))
    work(job, 0)
    assert torch.equal(job.buckets[0].weights.flat, -big)


# -- who takes part --------------------------------------------------------------------------------------------------


def test_a_newer_incarnation_fences_the_older_one_at_once() -> None:
    job = running("async")
    job.admit(0, 5, None)
    with pytest.raises(Fenced):
        stage(job, push(0))
    with pytest.raises(Fenced):
        job.admit(0, 1, None)
    assert not stage(job, push(0, incarnation=5))


def test_admitting_twice_changes_nothing() -> None:
    job = running("async")
    stage(job, push(0))
    before = image(job)
    job.admit(0, 1, None)
    job.admit(0, 1, 0)
    assert image(job) == before


def test_retiring_leaves_a_newer_incarnation_alone() -> None:
    job = running("async")
    job.admit(0, 5, 0)
    job.retire(0, 1)
    assert job.roster[0].incarnation == 5


def test_a_call_that_comes_late_does_not_bring_the_dead_back() -> None:
    """A join that the coordinator gave up on is retired; its AdmitWorker may reach the shard after that."""
    job = running("sync")
    job.retire(3, 7)
    for clock in (None, 0):
        with pytest.raises(Fenced):
            job.admit(3, 7, clock)
    job.admit(3, 8, None)
    assert set(job.roster) == {0, 3}


@pytest.mark.parametrize("end", ["retired", "replaced"])
def test_what_a_lost_worker_lent_is_copied_before_it_may_write_there_again(end: str) -> None:
    job = running("sync", workers=2)
    lent = bytearray(payload(3.0))
    stage(job, push(0, rank=1, incarnation=2, payload=lent, borrowed=True))
    if end == "retired":
        job.retire(1, 2)
    else:
        job.admit(1, 9, None)
    lent[:] = payload(100.0)
    stage(job, push(0))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [-2.0] * 32


def test_the_frontier_is_the_highest_clock_of_any_bucket_that_trains() -> None:
    job = running("ssp:3", workers=2)
    for clock in (1, 2):
        stage(job, push(1, clock))
        work(job, 1)
    assert job.admit(2, 9, None) == 2
    assert job.roster[2].start == 2


def test_a_buffer_is_sent_at_any_clock_once_it_is_there() -> None:
    job = ShardJob(job_spec("sync"), [0, HELD])
    job.admit(0, 1, 0)
    assert not job.admits(HELD, 0, 4).admitted
    stage(job, initial(HELD))
    assert job.admits(HELD, 0, 4).admitted
    assert job.versions() == (0, 0)


def test_sizes_are_counted_in_bytes() -> None:
    job = running("sync", workers=2)
    stage(job, push(0, rank=1, incarnation=2))
    assert job.parameter_bytes == 2 * 128 + 64
    assert job.staged_bytes == 128, "held back for worker 0"
    assert job.optimizer_bytes == 0


# -- simulated clusters ----------------------------------------------------------------------------------------------

CELLS = 32  # one for each incarnation: a simulation ends before it has had more
WHOLE = 60  # divisible by every number of workers up to 6, so that all means are whole numbers and every sum is exact
RANKS = 4


@dataclass
class Worker:
    """A worker that follows the protocol: pull, push every bucket, pull every bucket, and so on."""

    rank: int
    incarnation: int
    start: int = 0
    clock: int = 0
    to_push: set[int] = field(default_factory=set)
    to_pull: set[int] = field(default_factory=set)
    sent: list[Push] = field(default_factory=list)

    def next_step(self) -> None:
        if not self.to_push and not self.to_pull:
            self.clock += 1
            self.to_push = set(TRAINED)
            self.to_pull = set(TRAINED)


class Simulation:
    """Two shards with a bucket each, and up to four workers that come, die and come back."""

    def __init__(self, mode: str, seed: int) -> None:
        self.random = random.Random(seed)
        # Some clusters apply slowly, some join slowly, in some everybody dies.
        self.pace = {"worker": 40, "repeat": 4, "haunt": 2}
        self.pace |= {"apply": self.random.choice([4, 40]), "coordinate": self.random.choice([4, 20])}
        self.pace |= {"die": self.random.choice([1, 4]), "join": self.random.choice([1, 4])}
        self.spec = job_spec(mode)
        self.bound = self.spec.consistency.max_staleness
        self.shards = [ShardJob(self.spec, [0, HELD]), ShardJob(self.spec, [1])]
        self.home = {index: shard for shard in self.shards for index in shard.buckets}
        self.incarnations = 0
        self.live: dict[int, Worker] = {}
        self.dead: list[Worker] = []
        self.joining: Worker | None = None
        self.calls: list[object] = []  # what the coordinator still has to ask of shards, in order
        self.expected = {index: torch.zeros(CELLS) for index in TRAINED}
        self.counts: dict[tuple[int, int], int] = {}  # (bucket, incarnation) -> updates that hold its gradient
        for rank in range(self.random.randint(1, 3)):
            self.join(rank)
            while self.calls:
                self.coordinate()

    # -- the coordinator: one thing at a time, a call to each shard

    def join(self, rank: int) -> None:
        """Two rounds over the shards, each in any order; see Coordinator.join."""
        self.incarnations += 1
        newcomer = Worker(rank, self.incarnations)
        older = self.live.pop(rank, None)
        if older is not None:
            self.dead.append(older)
        self.joining = newcomer
        frontiers: list[int] = []

        def first(shard: ShardJob) -> None:
            frontiers.append(shard.admit(rank, newcomer.incarnation, None))

        def second(shard: ShardJob) -> None:
            shard.admit(rank, newcomer.incarnation, max(frontiers))

        def joined(_: object) -> None:
            newcomer.start = newcomer.clock = max(frontiers)
            newcomer.to_pull = set(TRAINED)
            self.live[rank] = newcomer
            self.joining = None
            if rank == 0:
                for index, shard in self.home.items():
                    stage(shard, initial(index, incarnation=newcomer.incarnation))

        for round_ in (first, second):
            shards = self.random.sample(self.shards, len(self.shards))
            self.calls += [lambda shard=shard, round_=round_: round_(shard) for shard in shards]
        self.calls.append(lambda: joined(None))

    def retire(self, worker: Worker) -> None:
        for shard in self.random.sample(self.shards, len(self.shards)):
            self.calls.append(lambda shard=shard: shard.retire(worker.rank, worker.incarnation))

    def coordinate(self) -> bool:
        if not self.calls:
            return False
        self.calls.pop(0)()  # type: ignore[operator]
        return True

    # -- what can happen

    def push(self, worker: Worker, index: int) -> bool:
        gradient = torch.zeros(CELLS)
        gradient[worker.incarnation] = -WHOLE
        one = push(index, worker.clock, worker.rank, worker.incarnation, payload=payload(gradient))
        try:
            assert not stage(self.home[index], one)
        except Backlogged:
            return False
        worker.sent.append(one)
        worker.to_push.discard(index)
        return True

    def repeat(self, worker: Worker) -> None:
        if worker.sent:
            one = self.random.choice(worker.sent)
            assert stage(self.home[one.bucket], one), "a repeat is acknowledged"

    def haunt(self, ghost: Worker) -> None:
        """A push of an incarnation that was replaced or retired comes late."""
        shard = self.home[0]
        live = shard.roster.get(ghost.rank)
        if ghost.sent and (live is None or live.incarnation != ghost.incarnation):
            before = image(shard)
            with pytest.raises(UnknownWorker):
                stage(shard, push(0, ghost.clock + 1, ghost.rank, ghost.incarnation))
            assert image(shard) == before

    def pull(self, worker: Worker, index: int) -> bool:
        shard = self.home[index]
        if not shard.admits(index, worker.rank, worker.clock).admitted:
            return False
        self.check_pulled(worker, index, shard)
        worker.to_pull.discard(index)
        return True

    def check_pulled(self, worker: Worker, index: int, shard: ShardJob) -> None:
        """What the data says: the worker's own steps are in, and those of all live workers up to the bound."""
        cells = shard.buckets[index].weights.flat
        assert torch.equal(cells, self.expected[index])
        needed = {worker.incarnation: worker.clock - worker.start}
        if self.bound is not None:
            for other in self.live.values():
                if other is not worker:
                    start = shard.roster[other.rank].start
                    needed[other.incarnation] = max(0, worker.clock - self.bound - start)
        for incarnation, steps in needed.items():
            assert self.counts.get((index, incarnation), 0) >= steps
            if not self.spec.consistency.aggregate:
                assert cells[incarnation] >= WHOLE * steps

    def apply(self, index: int) -> bool:
        bucket = self.home[index].buckets[index]
        item = bucket.protocol.next()
        if isinstance(item, Add):
            bucket.weights.add(item.contribution)
            values = item.contribution.values
            assert values is not None
            self.open(index).append(int(values.nonzero().item()))
        elif isinstance(item, Step):
            bucket.weights.step()
            who = self.open(index)
            assert len(who) == len(item.ranks)
            for incarnation in who:
                self.expected[index][incarnation] += WHOLE / len(who)
                self.counts[index, incarnation] = self.counts.get((index, incarnation), 0) + 1
            who.clear()
        if item is not None:
            bucket.protocol.done(item)
        return item is not None

    def open(self, index: int) -> list[int]:
        """Incarnations whose gradients are in the open update of a bucket."""
        return self.__dict__.setdefault(f"open_{index}", [])  # type: ignore[no-any-return]

    # -- runs

    def advance(self, worker: Worker) -> bool:
        """One thing that this worker can do now; False if it can do nothing but wait."""
        worker.next_step()
        moves = [lambda i=i: self.push(worker, i) for i in sorted(worker.to_push)]
        moves += [lambda i=i: self.pull(worker, i) for i in sorted(worker.to_pull)]
        self.random.shuffle(moves)
        return any(move() for move in moves)

    def event(self) -> None:
        kind = self.random.choices(list(self.pace), list(self.pace.values()))[0]
        worker = self.random.choice(sorted(self.live.values(), key=lambda w: w.rank)) if self.live else None
        if kind == "worker" and worker is not None:
            self.advance(worker)
        elif kind == "apply":
            self.apply(self.random.choice(TRAINED))
        elif kind == "coordinate":
            self.coordinate()
        elif kind == "repeat" and worker is not None:
            self.repeat(worker)
        elif kind == "haunt" and self.dead:
            self.haunt(self.random.choice(self.dead))
        elif kind == "die" and worker is not None:
            self.dead.append(self.live.pop(worker.rank))
            if self.random.random() < 0.7:  # else it comes back, maybe, before anyone has missed it
                self.retire(worker)
        elif kind == "join" and self.joining is None and self.incarnations < CELLS - 2:
            self.join(self.random.randrange(RANKS))

    def settle(self) -> None:
        """Nobody dies any more, the dead are retired: whoever lives must get on, to the same clock and for ever."""
        while self.coordinate():
            pass
        if 0 not in self.live:
            self.join(0)
        for worker in self.dead:
            self.retire(worker)
        while self.coordinate():
            pass
        target = max(worker.clock for worker in self.live.values()) + 3
        while any(worker.clock < target or worker.to_pull for worker in self.live.values()):
            moved = [self.apply(index) for index in TRAINED]
            moved += [
                self.advance(worker)
                for worker in self.live.values()
                if worker.clock < target or worker.to_push or worker.to_pull
            ]
            assert any(moved), f"stuck: {[self.home[i].buckets[i].protocol for i in TRAINED]}"


MODES = ["sync", "ssp:0", "ssp:2", "async"]


@pytest.mark.parametrize("mode", MODES)
def test_no_interleaving_breaks_a_promise_or_stops_the_living(mode: str) -> None:
    for seed in range(40):
        print(f"seed {seed}")  # the last one is shown when the test fails
        simulation = Simulation(mode, seed)
        for _ in range(200):
            simulation.event()
        simulation.settle()
        for index in TRAINED:
            bucket = simulation.home[index].buckets[index]
            assert not bucket.protocol.waiting, "nothing staged is left behind"
            assert torch.equal(bucket.weights.flat, simulation.expected[index])


def test_counting_workers_count_exactly() -> None:
    """Three workers, 50 steps, ssp:2: at the end each cell holds exactly its worker's steps."""
    simulation = Simulation("ssp:2", 0)
    for rank in range(3):
        if rank not in simulation.live:
            simulation.join(rank)
            while simulation.coordinate():
                pass
    while any(worker.clock < 50 or worker.to_push or worker.to_pull for worker in simulation.live.values()):
        for worker in simulation.live.values():
            if worker.clock < 50 or worker.to_push or worker.to_pull:
                simulation.advance(worker)
        for index in TRAINED:
            simulation.apply(index)
    while any([simulation.apply(index) for index in TRAINED]):
        pass
    for index in TRAINED:
        counted = simulation.home[index].buckets[index].weights.flat / WHOLE
        for worker in simulation.live.values():
            assert counted[worker.incarnation] == 50 - worker.start
        assert counted.sum() == simulation.home[index].buckets[index].protocol.version


def test_the_layout_of_the_simulated_job_is_what_the_tests_say() -> None:
    spec = job_spec()
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    assert [(bucket.held, bucket.nbytes) for bucket in buckets] == [(False, 128), (False, 128), (True, 64)]
