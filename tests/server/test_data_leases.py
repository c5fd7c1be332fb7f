"""Every sample exactly once per pass: the rules, without sockets, for whatever workers, shards and calls may do."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.batches import MAX_PUSH_RANGES, BatchLease, DataRange, LeaseReport, LoaderSpec
from ps_protocol.errors import Fenced, InvalidRequest, JobMismatch, LimitExceeded, UnknownWorker
from ps_protocol.messages.data import PushKind
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.data_commits import Committed, DataCommits, Intervals, common
from ps_server.core.data_leases import DataLeases
from tests.tools.partitions import check, image, push, running, stage, work, work_once

NUMBERS = st.integers(0, 30)
CHANGES = st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), max_size=20)


@given(CHANGES, CHANGES, NUMBERS, NUMBERS)
def test_intervals_are_sets_of_numbers(
    ours: list[tuple[bool, int, int]], others: list[tuple[bool, int, int]], start: int, stop: int
) -> None:
    made: list[tuple[Intervals, set[int]]] = []
    for changes in (ours, others):
        intervals, numbers = Intervals(), set()
        for add, low, high in changes:
            (intervals.add if add else intervals.remove)(low, high)
            numbers = numbers | set(range(low, high)) if add else numbers - set(range(low, high))
            assert [n for a, b in intervals.spans() for n in range(a, b)] == sorted(numbers)
            assert intervals.total == len(numbers)
        assert len(intervals) == sum(n - 1 not in numbers for n in numbers), "as few as there can be"
        made.append((intervals, numbers))
    (a, mine), (b, theirs) = made
    assert a.count(start, stop) == len(mine & set(range(start, stop)))
    assert a.common(b) == Intervals((n, n + 1) for n in mine & theirs)
    assert a.without(b) == Intervals((n, n + 1) for n in mine - theirs)


# -- what a bucket has had -------------------------------------------------------------------------------------------


def one(start: int, stop: int, number: int = 0, loader: int = 0) -> DataRange:
    return DataRange(loader, number, start, stop)


def spans(lease: BatchLease) -> tuple[tuple[int, int], ...]:
    return tuple(each.span for each in lease.ranges)


def test_what_a_partly_spent_push_leaves_out_is_counted() -> None:
    data = DataCommits([0])
    data.use(0, [one(0, 4)])
    use = data.use(0, [one(0, 4), one(4, 8), one(8, 10)])
    assert (use.spent, use.lost) == (True, 6)
    assert data.whole() == {0: (0, [(0, 10)])}, "and none of it is used again"


def test_a_pass_that_is_over_is_spent() -> None:
    data = DataCommits([0])
    data.use(0, [one(0, 4, number=1)])
    assert data.use(0, [one(4, 8, number=0)]).spent
    assert not data.use(0, [one(0, 4, number=0, loader=3)]).spent, "each loader is for itself"
    assert data.whole() == {0: (1, [(0, 4)]), 3: (0, [(0, 4)])}
    assert common([{0: (1, [])}, {0: (0, [(2, 6)])}], 0, 0, 10) == Intervals([(2, 6)]), "a shard behind has less"


def test_a_snapshot_has_no_sample_that_is_not_in_the_weights_yet() -> None:
    job = running("sync")
    stage(job, push(0, 1, ranges=(one(0, 4),)))
    work(job, 0)
    stage(job, push(0, 2, ranges=(one(4, 8),)))
    for _ in ("add", "step"):
        assert job.units[0].committed() == {0: (0, [(0, 4)])}
        assert work_once(job, 0)
    assert job.units[0].committed() == {0: (0, [(0, 8)])}


def test_a_repeat_or_a_fenced_worker_commits_nothing() -> None:
    job = running("async")
    stage(job, push(0, 1, ranges=(one(0, 4),)))
    before = job.data.of(0)
    assert stage(job, push(0, 1, ranges=(one(4, 8),))), "a repeat, whatever it names"
    job.execute(AddWorker(0, 2, 1))
    with pytest.raises(Fenced):
        stage(job, push(0, 2, ranges=(one(4, 8),)))
    job.execute(RemoveWorker(0, 2))
    with pytest.raises(UnknownWorker):
        stage(job, push(0, 2, incarnation=2, ranges=(one(4, 8),)))
    assert job.data.of(0) == before


@pytest.mark.parametrize("kind", [PushKind.GRADIENT, PushKind.SKIP])
def test_a_spent_push_counts_for_the_clock_and_brings_no_gradient(kind: PushKind) -> None:
    job = running("async")
    job.data.use(0, [one(0, 4)])
    found = push(0, 1, kind=kind, ranges=(one(0, 4),), **({"payload": b""} if kind is PushKind.SKIP else {}))
    staged = job.execute(check(job, found))
    assert (staged.use.spent, staged.skipped) == (True, True)
    waiting = job.buckets[0].rule.waiting[0]
    assert (waiting.clock, waiting.contribution.values) == (1, None)
    assert waiting.contribution.absent == frozenset(), "left out of the mean, not a term of zeros in it"


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([one(4, 4)], "ends after it starts"),
        ([one(0, 4, loader=64)], "a loader below 64"),
        ([one(0, 4)] * 2, "at most once"),
        ([one(i, i + 1) for i in range(MAX_PUSH_RANGES + 1)], f"at most {MAX_PUSH_RANGES} ranges"),
    ],
)
def test_odd_ranges_are_refused_and_change_nothing(ranges: list[DataRange], expected: str) -> None:
    job = running("async")
    before = image(job), job.data.whole()
    with pytest.raises(InvalidRequest, match=expected):
        stage(job, push(0, 1, ranges=tuple(ranges)))
    assert (image(job), job.data.whole()) == before


def test_the_pieces_that_a_pass_is_in_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.core.data_commits.MAX_FRAGMENTS", 8)
    job = running("async")
    for number in range(8):
        job.data.use(0, [one(2 * number, 2 * number + 1)])
    before = image(job), job.data.of(0)
    with pytest.raises(LimitExceeded, match="lies in 8 pieces"):
        stage(job, push(0, 1, ranges=(one(100, 101),)))
    assert (image(job), job.data.of(0)) == before


# -- what the coordinator gives out ----------------------------------------------------------------------------------


def fresh(size: int = 10, batch_size: int = 4, **more: bool) -> DataLeases:
    leases = DataLeases(LoaderSpec(0, size, batch_size, **more))
    leases.settle([{}])
    return leases


def test_what_comes_back_is_given_out_first_and_as_the_same_batches() -> None:
    leases = fresh(20, 4)
    assert spans(leases.lease_batches((0, 1), 0, 2)) == ((0, 4), (4, 8))
    assert spans(leases.lease_batches((1, 2), 0, 1)) == ((8, 12),)
    leases.gone(0, 1)
    assert spans(leases.lease_batches((1, 2), 0, 1, report=LeaseReport(leased=[one(8, 12)]))) == ((12, 16),), (
        "it is in doubt"
    )
    leases.settle([{0: (0, [(0, 4)])}, {0: (0, [(0, 8)])}], gone={(0, 1)})
    held = [one(8, 12), one(12, 16)]
    assert spans(leases.lease_batches((1, 2), 0, 1, report=LeaseReport(leased=held))) == ((4, 8),), (
        "one shard did not have it"
    )
    assert leases.progress.returned == 4


def test_fewer_are_given_the_fewer_are_left() -> None:
    leases = fresh(64, 1)
    assert [len(leases.lease_batches((rank, 1), 0, 100, workers=4).ranges) for rank in range(4)] == [8, 7, 6, 5]


def test_with_drop_last_what_is_behind_the_last_full_batch_is_no_part_of_a_pass() -> None:
    leases = fresh(10, 4, drop_last=True)
    assert [spans(leases.lease_batches((r, 1), 0, 1)) for r in range(3)] == [((0, 4),), ((4, 8),), ()]
    none = fresh(3, 4, drop_last=True)
    assert [none.lease_batches((0, 1), number, 1).complete for number in range(3)] == [True] * 3, "there is no batch"


def test_a_pass_begins_when_the_shards_have_all_of_the_one_before() -> None:
    leases = fresh(4, 4)
    leases.lease_batches((0, 1), 0, 1)
    pushed = LeaseReport(committed=[one(0, 4)])
    assert not leases.lease_batches((0, 1), 1, 1, report=pushed).complete, "a worker's word is not enough"
    leases.settle([{0: (0, [(0, 4)])}])
    assert leases.lease_batches((1, 2), 0, 1).complete
    assert leases.lease_batches((1, 2), 1, 1) == leases.lease_batches((1, 2), 1, 1)
    assert leases.number == 1


def test_what_a_shard_lost_is_given_out_again() -> None:
    leases = fresh(8, 4)
    leases.lease_batches((0, 1), 0, 2)
    leases.lease_batches((0, 1), 0, 0, report=LeaseReport(leased=[one(4, 8)], committed=[one(0, 4)]))
    leases.settle([{}, {0: (0, [(0, 4)])}])
    assert spans(leases.lease_batches((0, 1), 0, 1, report=LeaseReport(leased=[one(4, 8)]))) == ((0, 4),)


def test_a_worker_that_came_back_keeps_what_it_says_it_holds() -> None:
    leases = fresh(8, 4)
    leases.lease_batches((0, 1), 0, 1)
    leases.gone(0, 1)
    assert spans(leases.lease_batches((0, 2), 0, 1, report=LeaseReport(leased=[one(0, 4)]))) == ((4, 8),)
    leases.lease_batches((2, 9), 0, 0, report=LeaseReport(leased=[one(0, 4)]))  # which is not so
    leases.gone(2, 9)
    leases.settle([{}], gone=leases.doubtful)
    assert spans(leases.lease_batches((1, 3), 0, 1)) == ()


def test_a_worker_is_not_believed_to_have_pushed_what_it_was_never_leased() -> None:
    """But for some batches that a coordinator before this one may have leased to it."""
    leases = DataLeases(LoaderSpec(0, 1000, 1, 7), limit=3)
    assert spans(leases.lease_batches((0, 1), 0, 1)) == ((0, 1),)
    leases.lease_batches((1, 1), 0, 0, report=LeaseReport(committed=[one(0, 1)]))
    assert leases.progress.committed == 0, "another worker's"
    for start in range(1, 100, 2):
        leases.lease_batches((1, start), 0, 0, report=LeaseReport(committed=[one(start, start + 1)]))
    assert leases.progress.committed == 3
    leases.lease_batches((0, 1), 0, 0, report=LeaseReport(committed=[one(0, 1)]))
    assert leases.progress.committed == 4


def test_a_worker_holds_no_more_than_the_limit() -> None:
    leases = DataLeases(LoaderSpec(0, 100, 1), limit=3)
    leases.settle([{}])
    held: list[DataRange] = []
    for _ in range(5):
        held += leases.lease_batches((0, 1), 0, 2, report=LeaseReport(leased=held)).ranges
    assert len(held) == 3


@pytest.mark.parametrize("bad", [one(0, 5), one(8, 11), one(4, 4), one(0, 4, loader=1)])
def test_ranges_that_are_none_of_the_loaders_are_refused_and_change_nothing(bad: DataRange) -> None:
    leases = fresh(10, 4)
    before = copy.deepcopy(vars(leases))
    for report in (LeaseReport(leased=[bad]), LeaseReport(committed=[one(0, 4), bad]), LeaseReport(returned=[bad])):
        with pytest.raises(InvalidRequest, match="gives out batches of 4 out of 10"):
            leases.lease_batches((0, 1), 0, 1, report=report)
    assert vars(leases) == before


def test_workers_must_agree_on_a_loader() -> None:
    leases = DataLeases(LoaderSpec(2, 10, 4, seed=1))
    leases.agree(LoaderSpec(2, 10, 4, seed=1))
    with pytest.raises(JobMismatch, match="loader 2 differs: batch_size is 4, got 8"):
        leases.agree(LoaderSpec(2, 10, 8, seed=1))
    with pytest.raises(JobMismatch, match="seed is 1, got None"):
        leases.agree(LoaderSpec(2, 10, 4))


# -- all of it together, in any order --------------------------------------------------------------------------------

SIZE, BATCH = 23, 3
BUCKETS = {0: 0, 1: 1, 2: 1}  # the shard of each


@dataclass
class Trainer:
    """A worker: it leases, pushes one batch to one bucket after the other, and may stop anywhere."""

    rank: int
    incarnation: int
    asked: int = 0
    batches: list[DataRange] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # buckets that the first batch has still to be pushed to
    pushed: list[DataRange] = field(default_factory=list)

    def report(self) -> LeaseReport:
        return LeaseReport(leased=tuple(self.batches), committed=tuple(self.pushed))


class Training(RuleBasedStateMachine):
    """Two shards with three buckets, a coordinator that may be replaced, and workers that come, go, and come back."""

    @initialize()
    def begin(self) -> None:
        self.shards = [DataCommits([b for b, home in BUCKETS.items() if home == s]) for s in range(2)]
        self.leases = DataLeases(LoaderSpec(0, SIZE, BATCH))
        self.workers: list[Trainer] = []
        self.incarnation = 0
        self.had: Counter[tuple[int, int, int]] = Counter()  # by bucket, pass and position
        self.kept: tuple[list[dict[int, Committed]], Counter[tuple[int, int, int]]] | None = None

    def committed(self) -> list[Committed]:
        return [shard.whole() for shard in self.shards]

    def look(self) -> None:
        self.leases.settle(self.committed(), self.leases.doubtful)

    @rule(rank=st.integers(0, 3))
    def join(self, rank: int) -> None:
        self.incarnation += 1
        self.workers = [worker for worker in self.workers if worker.rank != rank]
        self.workers.append(Trainer(rank, self.incarnation))
        self.leases.gone(rank, self.incarnation - 1)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if self.workers:
            worker = data.draw(st.sampled_from(self.workers))
            self.workers.remove(worker)
            self.leases.gone(worker.rank, worker.incarnation)

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        if self.workers:
            worker = data.draw(st.sampled_from(self.workers))
            self.leases.gone(worker.rank, worker.incarnation)
            self.incarnation += 1
            worker.incarnation = self.incarnation

    @rule(data=st.data(), count=st.integers(1, 4), lost=st.booleans(), twice=st.booleans())
    def lease_batches(self, data: st.DataObject, count: int, lost: bool, twice: bool) -> None:
        if self.workers:
            self.lease_for(data.draw(st.sampled_from(self.workers)), count, lost, twice)

    def lease_for(self, worker: Trainer, count: int = 2, lost: bool = False, twice: bool = False) -> None:
        if self.leases.stale or self.leases.doubtful:
            self.look()
        ask = (worker.rank, worker.incarnation), worker.asked, count, len(self.workers), worker.report()
        lease = self.leases.lease_batches(*ask)
        if twice:
            assert set(lease.ranges) <= set(self.leases.lease_batches(*ask).ranges)
        if not lease.ranges and not lease.complete:
            self.look()
            lease = self.leases.lease_batches(*ask)
        if lost:
            return
        worker.pushed.clear()
        worker.batches += lease.ranges
        if lease.complete and not worker.batches:
            worker.asked += 1

    @rule(data=st.data(), many=st.integers(1, 6))
    def push(self, data: st.DataObject, many: int) -> None:
        for _ in range(many if self.workers else 0):
            self.push_for(data.draw(st.sampled_from(self.workers)))

    def push_for(self, worker: Trainer) -> None:
        """Pushes a batch to one more bucket."""
        if not worker.batches:
            return
        worker.left = worker.left or sorted(BUCKETS, key=lambda bucket: (bucket + worker.incarnation) % 3)
        bucket = worker.left.pop(0)
        batch = worker.batches[0]
        use = self.shards[BUCKETS[bucket]].use(bucket, [batch])
        assert use.lost == 0
        if not use.spent:
            self.had.update((bucket, batch.pass_number, position) for position in range(batch.start, batch.stop))
        if not worker.left:
            worker.pushed.append(worker.batches.pop(0))

    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        for worker in data.draw(st.lists(st.sampled_from(self.workers), max_size=1)) if self.workers else []:
            keep = 1 if worker.left else 0
            back, worker.batches = worker.batches[keep:], worker.batches[:keep]
            report = LeaseReport(worker.batches, worker.pushed, back)
            if not self.leases.stale:
                self.leases.lease_batches((worker.rank, worker.incarnation), worker.asked, 0, 1, report)

    @rule()
    def replace_the_coordinator(self) -> None:
        self.leases = DataLeases(LoaderSpec(0, SIZE, BATCH))

    @rule()
    def checkpoint(self) -> None:
        self.kept = (
            [{b: shard.of(b) for b, s in BUCKETS.items() if s == n} for n, shard in enumerate(self.shards)],
            (self.had.copy()),
        )

    @precondition(lambda self: self.kept is not None)
    @rule()
    def restore(self) -> None:
        """All shards go back, and all workers begin again: they are in whatever pass the coordinator finds."""
        each, had = self.kept
        for shard, snapshot in zip(self.shards, each, strict=True):
            shard.restore(copy.deepcopy(snapshot))
        self.had = had.copy()
        self.leases.stale = True
        self.workers = []

    @rule()
    def lose_a_shard(self) -> None:
        """It comes back with nothing, the other keeps what it has, and workers go on under new names."""
        self.shards[1].restore({})
        self.leases.stale = True
        for key in [key for key in self.had if BUCKETS[key[0]] == 1]:
            if key[1] == self.now():
                del self.had[key]
        for worker in self.workers:
            worker.pushed.clear()
            self.leases.gone(worker.rank, worker.incarnation)
            self.incarnation += 1
            worker.incarnation = self.incarnation

    def now(self) -> int:
        return max((had[0][0] for had in self.committed() if 0 in had), default=0)

    @invariant()
    def nothing_is_used_twice(self) -> None:
        assert all(count == 1 for count in getattr(self, "had", {}).values())

    def teardown(self) -> None:
        """Whatever happened: two workers that go on for ever finish the pass and the next one, with nothing missing."""
        if not hasattr(self, "leases"):
            return
        for worker in list(self.workers):
            self.leases.gone(worker.rank, worker.incarnation)
        number = self.now()
        self.workers = [Trainer(rank, self.incarnation + 1 + rank) for rank in (7, 8)]
        for _ in range(1000):
            for worker in self.workers:
                if not worker.batches:
                    self.lease_for(worker)
                for _ in BUCKETS:
                    self.push_for(worker)
            if all(worker.asked > number + 1 for worker in self.workers):
                break
        wanted = {(b, n, p): 1 for b in BUCKETS for n in (number, number + 1) for p in range(SIZE)}
        assert {key: count for key, count in self.had.items() if number <= key[1] <= number + 1} == wanted


class LongTraining(Training):
    """The same, in more examples."""


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=35, stateful_step_count=60)
TestLongTraining = pytest.mark.repeat(LongTraining.TestCase)
TestLongTraining.settings = settings(max_examples=600, stateful_step_count=60)
