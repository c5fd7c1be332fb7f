"""One bucket's protocol under every interleaving that hypothesis can think of.

The machine below keeps its own books, in sets of what was pushed and what was applied, and asks the protocol nothing
that it could be told. A contribution is a token (rank, incarnation, clock), so that each is known again wherever it
comes out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps_protocol.errors import Backlogged, OutOfOrder
from ps_protocol.modes import parse_mode
from ps_server.core.consistency import ADMITTED, Add, Admission, Live, Step, UpdateRule, update_rule
from tests.tools.modes import consistency
from tests.tools.rules import admits

Token = tuple[int, int, int]  # rank, incarnation, clock

RANKS = 4


def protocol(mode: str, ranks: int, clock: int = 0) -> tuple[UpdateRule[str], dict[int, Live]]:
    """An initialised bucket with workers 0 .. ranks - 1, all at `clock`."""
    roster = {rank: Live(incarnation=rank + 1, start=clock) for rank in range(ranks)}
    bucket: UpdateRule[str] = update_rule(consistency(mode), roster, initialised=True)
    for rank in roster:
        bucket.add_worker(rank, clock)
    return bucket, roster


def stage(bucket: UpdateRule[str], rank: int, clock: int) -> None:
    assert not bucket.is_repeat(rank, clock)
    bucket.stage(rank, clock, f"{rank}@{clock}")


def drain(bucket: UpdateRule[str]) -> list[str]:
    """Does all there is to do; the contributions in the order they were added, and a bar after each step."""
    done = []
    while (work := bucket.next()) is not None:
        done.append(work.contribution if isinstance(work, Add) else "|")
        do(bucket, work)
    return done


def do(bucket: UpdateRule[str], work: Add[str] | Step) -> None:
    """Does what is next. What a contribution is said to complete is complete with it."""
    completes = isinstance(work, Add) and bucket.completes(work)
    bucket.done(work)
    if isinstance(work, Add) and bucket.consistency.quorum is None:
        assert completes == isinstance(bucket.next(), Step)


# -- the claims one by one -------------------------------------------------------------------------------------------

ONE_STEP = "0@1 1@1 2@1 |"


@pytest.mark.parametrize(
    ("mode", "arrival", "applied"),
    [
        ("sync", (0, 1, 2), ONE_STEP),
        ("sync", (2, 1, 0), ONE_STEP),
        ("sync", (1, 2, 0), ONE_STEP),
        ("ssp:3", (2, 0, 1), "2@1 | 0@1 | 1@1 |"),
        ("async", (2, 0, 1), "2@1 | 0@1 | 1@1 |"),
    ],
)
def test_sync_steps_once_with_all_in_rank_order_and_other_modes_with_each_as_it_comes(
    mode: str, arrival: tuple[int, ...], applied: str
) -> None:
    bucket, _ = protocol(mode, 3)
    done = []
    for rank in arrival:
        stage(bucket, rank, 1)
        done += drain(bucket)
    assert " ".join(done) == applied


def test_ssp_waits_for_the_slowest_live_worker_and_says_so() -> None:
    bucket, _ = protocol("ssp:2", 2)
    for clock in (1, 2, 3):
        stage(bucket, 0, clock)
        drain(bucket)
    assert admits(bucket, 0, 2) == ADMITTED
    verdict = admits(bucket, 0, 3)
    assert (verdict.admitted, verdict.waiting_for) == (False, (1,))
    assert "clock 1 of every live worker is needed" in verdict.reason
    assert "worker 1 is at clock 0" in verdict.reason


def test_before_the_initial_weights_a_pull_waits_for_rank_0_and_nothing_is_applied() -> None:
    bucket, _ = protocol("async", 2)
    bucket.initialised = False
    bucket.stage(1, 1, "1@1")
    assert bucket.next() is None
    assert admits(bucket, 1, 0).waiting_for == (0,)
    bucket.initialised = True
    assert drain(bucket) == ["1@1", "|"]


def test_who_waits_in_the_same_update_is_not_blamed_for_it() -> None:
    bucket, _ = protocol("sync", 3)
    stage(bucket, 0, 1)
    stage(bucket, 1, 1)
    drain(bucket)
    assert admits(bucket, 0, 1).waiting_for == (2,)


@pytest.mark.parametrize("mode", ["sync", "ssp:0"])
def test_workers_whose_pushes_have_all_come_wait_for_the_shard_and_not_for_each_other(mode: str) -> None:
    bucket, _ = protocol(mode, 2)
    stage(bucket, 0, 1)
    assert admits(bucket, 0, 1).waiting_for == (1,)
    stage(bucket, 1, 1)
    assert [admits(bucket, rank, 1).waiting_for for rank in range(2)] == [(), ()]
    assert "is being applied" in admits(bucket, 0, 1).reason
    drain(bucket)
    assert [admits(bucket, rank, 1) for rank in range(2)] == [ADMITTED, ADMITTED]


def test_a_joiners_first_push_waits_while_an_earlier_update_is_open() -> None:
    bucket, roster = protocol("sync", 1)
    roster[1] = Live(incarnation=9, start=1)  # another shard's frontier was 1 already
    bucket.add_worker(1, 1)
    stage(bucket, 1, 2)
    assert drain(bucket) == []
    stage(bucket, 0, 1)
    assert drain(bucket) == ["0@1", "|"]
    stage(bucket, 0, 2)
    assert drain(bucket) == ["0@2", "1@2", "|"]


def test_a_joiner_does_not_wait_for_an_update_that_only_the_dead_could_have_brought() -> None:
    bucket, roster = protocol("sync", 1)
    roster[1] = Live(incarnation=9, start=1)  # worker 0 had pushed clock 1 to another shard, and not here
    bucket.add_worker(1, 1)
    del roster[0]
    stage(bucket, 1, 2)
    assert drain(bucket) == ["|", "1@2", "|"]  # update 1 is empty
    assert admits(bucket, 1, 2).admitted
    assert bucket.version == 2


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
@pytest.mark.parametrize("works", [0, 1])
def test_a_worker_that_comes_back_does_not_wait_for_what_its_older_self_left_behind(mode: str, works: int) -> None:
    bucket, roster = protocol(mode, 2)
    for clock in (1, 2, 3):
        for rank in (0, 1):
            if (rank, clock) != (1, 3):
                stage(bucket, rank, clock)
        if clock < 3:
            drain(bucket)
    for _ in range(works):
        bucket.done(bucket.next())  # type: ignore[arg-type]
    roster[0] = Live(incarnation=9, start=5)  # the frontier, as another shard had it
    bucket.add_worker(0, 5)
    stage(bucket, 1, 3)
    drain(bucket)
    for clock in (4, 5):
        stage(bucket, 1, clock)
        drain(bucket)
    assert admits(bucket, 0, 5).admitted
    assert admits(bucket, 1, 5).admitted


def test_staleness_counts_how_far_the_fastest_was_ahead_of_the_weights_a_gradient_was_taken_at() -> None:
    bucket, _ = protocol("async", 2)
    found = []
    for rank, clock in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
        stage(bucket, rank, clock)
        while (work := bucket.next()) is not None:
            if isinstance(work, Step):
                found.append(work.staleness)
            bucket.done(work)
    assert found == [0, 0, 0, 3, 2]


# -- with a quorum ---------------------------------------------------------------------------------------------------


def test_an_update_has_its_quorum_and_a_late_contribution_is_the_first_in_the_next() -> None:
    bucket, _ = protocol("sync quorum all-1", 4)
    for rank in (2, 0, 3):
        stage(bucket, rank, 1)
    assert drain(bucket) == ["2@1", "0@1", "3@1", "|"]
    stage(bucket, 1, 1)
    assert drain(bucket) == ["1@1"]
    for rank in (0, 2):
        stage(bucket, rank, 2)
    assert drain(bucket) == ["0@2", "2@2", "|"]


def test_no_worker_waits_for_a_late_one_and_a_late_one_goes_on_at_once() -> None:
    bucket, _ = protocol("sync quorum 2", 3)
    stage(bucket, 0, 1)
    drain(bucket)
    verdict = admits(bucket, 0, 1)
    assert (verdict.admitted, verdict.waiting_for) == (False, (1, 2))
    assert "1 of the 2 live workers" in verdict.reason
    stage(bucket, 1, 1)
    assert admits(bucket, 0, 1).waiting_for == ()
    assert "is being applied" in admits(bucket, 0, 1).reason
    drain(bucket)
    assert [admits(bucket, rank, 1).admitted for rank in range(3)] == [True, True, False]
    stage(bucket, 2, 1)
    assert not admits(bucket, 2, 1).admitted, "before it is added, its worker must not write its gradient again"
    assert drain(bucket) == ["2@1"]
    assert admits(bucket, 2, 1) == ADMITTED


def test_a_worker_is_in_an_update_once_however_fast_it_is() -> None:
    bucket, _ = protocol("sync quorum 2", 3)
    for rank in (0, 1, 2):
        stage(bucket, rank, 1)
        drain(bucket)
    stage(bucket, 2, 2)  # its clock 1 is in the open update still
    assert drain(bucket) == []
    assert not admits(bucket, 2, 2).admitted
    with pytest.raises(Backlogged):
        bucket.is_repeat(2, 3)
    stage(bucket, 0, 2)
    assert drain(bucket) == ["0@2", "|", "2@2"]
    assert admits(bucket, 2, 2).admitted


def test_a_worker_that_is_many_updates_late_counts_once_and_says_how_late() -> None:
    bucket, _ = protocol("sync quorum 2", 3)
    for clock in range(1, 6):
        for rank in (0, 1):
            stage(bucket, rank, clock)
        drain(bucket)
    stage(bucket, 2, 1)
    stage(bucket, 0, 6)
    found = []
    while (work := bucket.next()) is not None:
        found.append(work)
        bucket.done(work)
    assert found[-1] == Step((2, 0), staleness=5, clocks=(1, 6), late=(2,))
    assert bucket.clocks() == {0: 6, 1: 5, 2: 1}


def test_a_pull_of_all_that_is_staged_waits_for_a_step_of_a_rank_that_has_joined_again() -> None:
    """All its steps count as made from then on, and the open update has one of them still."""
    bucket, roster = protocol("sync quorum 2", 2)
    stage(bucket, 0, 1)
    assert drain(bucket) == ["0@1"]
    roster[0] = Live(incarnation=9, start=1)
    bucket.add_worker(0, 1)
    owed = bucket.owed()
    assert owed == {0: 1}
    assert not bucket.has(owed)
    assert drain(bucket) == ["|"]
    assert bucket.has(owed)


@pytest.mark.parametrize(("mode", "needed"), [("sync quorum all-1", 2), ("sync quorum 2", 2), ("sync quorum 3", 3)])
def test_of_fewer_live_workers_than_a_quorum_all_are_waited_for(mode: str, needed: int) -> None:
    bucket, roster = protocol(mode, 3)
    for rank in range(needed):
        assert drain(bucket)[-1:] != ["|"]
        stage(bucket, rank, 1)
    assert drain(bucket)[-1] == "|"
    for rank in (1, 2):
        del roster[rank]
    stage(bucket, 0, 2)
    assert drain(bucket)[-1] == "|"


def test_what_the_dead_have_brought_is_in_and_does_not_stand_for_the_living() -> None:
    bucket, roster = protocol("sync quorum 2", 3)
    stage(bucket, 0, 1)
    del roster[0]
    stage(bucket, 1, 1)
    assert drain(bucket) == ["0@1", "1@1"]
    stage(bucket, 2, 1)
    assert drain(bucket) == ["2@1", "|"]


def test_a_newcomer_joins_at_the_furthest_workers_clock_and_not_at_the_number_of_updates() -> None:
    bucket, roster = protocol("sync quorum 1", 2)
    for clock in (1, 2):
        for rank in (0, 1):
            stage(bucket, rank, clock)
            drain(bucket)
    assert (bucket.version, bucket.frontier()) == (4, 2)
    roster[2] = Live(incarnation=9, start=2)
    bucket.add_worker(2, 2)
    assert admits(bucket, 2, 2) == ADMITTED
    stage(bucket, 2, 3)
    assert drain(bucket) == ["2@3", "|"]


def test_after_its_quorum_an_update_waits_for_the_others_until_the_grace_is_over() -> None:
    bucket, _ = protocol("sync quorum 2 grace 1", 3)
    stage(bucket, 0, 1)
    drain(bucket)
    assert bucket.grace() is None
    stage(bucket, 1, 1)
    assert drain(bucket)[-1] != "|"
    assert bucket.grace() is not None
    assert "grace" in admits(bucket, 0, 1).reason
    bucket.end_grace(bucket.version)
    assert drain(bucket) == ["|"]
    bucket.end_grace(bucket.version - 1)  # of the update before: it comes late
    for rank in (0, 1):
        stage(bucket, rank, 2)
    assert drain(bucket)[-1] != "|"
    stage(bucket, 2, 1)
    assert drain(bucket)[-1] == "|", "all have come"


def test_where_no_push_is_taken_any_more_what_has_come_makes_its_updates() -> None:
    bucket, _ = protocol("sync quorum 3", 4)
    for rank in (0, 1, 2, 3):
        stage(bucket, rank, 1)
        drain(bucket)
    stage(bucket, 3, 2)  # behind its own clock 1
    bucket.close()
    assert drain(bucket) == ["|", "3@2", "|"]
    stage(bucket, 0, 2)
    assert drain(bucket) == ["0@2"], "the next update waits for its quorum again"


def test_a_restored_bucket_has_what_its_clocks_say_and_takes_workers_at_any_clock() -> None:
    bucket, roster = protocol("sync quorum 2", 3)
    bucket.restore(7, {0: 5, 1: 6})
    for rank in roster:
        bucket.add_worker(rank, 6)
    stage(bucket, 2, 7)
    stage(bucket, 0, 7)
    assert drain(bucket) == ["2@7", "0@7", "|"]
    assert bucket.version == 8


def test_workers_that_are_each_late_on_another_bucket_do_not_wait_for_each_other() -> None:
    buckets = [protocol("sync quorum all-1", 4)[0] for _ in range(4)]
    for late, bucket in enumerate(buckets):
        for rank in (*(rank for rank in range(4) if rank != late), late):
            stage(bucket, rank, 1)
            drain(bucket)
    assert all(admits(bucket, rank, 1).admitted for bucket in buckets for rank in range(4))


class Crew:
    """Workers that follow the protocol on several buckets: push to each in any order, and wait for each."""

    def __init__(self, mode: str, workers: int, buckets: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.buckets, rosters = zip(*(protocol(mode, workers) for _ in range(buckets)), strict=True)
        self.rosters = rosters
        self.clocks = dict.fromkeys(range(workers), 0)
        self.to_push: dict[int, list[int]] = {rank: [] for rank in range(workers)}
        self.to_pull: dict[int, list[int]] = {rank: [] for rank in range(workers)}
        self.computing = dict.fromkeys(range(workers), 0)

    def advance(self, rank: int) -> bool:
        """Does one thing that a worker can do; False if it waits."""
        if self.computing[rank]:
            self.computing[rank] -= 1
            return True
        for index in self.to_push[rank]:
            stage(self.buckets[index], rank, self.clocks[rank])
            self.to_push[rank].remove(index)
            return True
        for index in self.to_pull[rank]:
            if admits(self.buckets[index], rank, self.clocks[rank]).admitted:
                self.to_pull[rank].remove(index)
                return True
        if self.to_pull[rank]:
            return False
        self.clocks[rank] += 1
        self.computing[rank] = self.random.choice([0, 0, 1, 9])
        everywhere = range(len(self.buckets))
        self.to_push[rank] = self.random.sample(everywhere, len(self.buckets))
        self.to_pull[rank] = list(everywhere)
        return True

    def apply(self, index: int) -> bool:
        work = self.buckets[index].next()
        if work is not None:
            do(self.buckets[index], work)
        return work is not None


@pytest.mark.parametrize("mode", ["sync quorum all-1", "sync quorum 2", "sync quorum 1", "sync quorum all-2"])
def test_workers_never_wait_for_each_other_for_ever_whichever_updates_their_pushes_are_in(mode: str) -> None:
    for seed in range(60):
        crew = Crew(mode, workers=4, buckets=5, seed=seed)
        for _ in range(400):
            if crew.random.random() < 0.5:
                crew.apply(crew.random.randrange(5))
            else:
                crew.advance(crew.random.randrange(4))
        before = sum(crew.clocks.values())
        for _ in range(40):
            moved = [crew.apply(index) for index in range(5)] + [crew.advance(rank) for rank in range(4)]
            assert any(moved), (seed, crew.clocks)
        assert sum(crew.clocks.values()) > before


# -- every interleaving ----------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker as the machine knows it; `joined` is false between the two rounds of a join.

    weights: with a quorum, the version that its gradients are taken at; may_pull: at which clock
    """

    incarnation: int
    start: int
    clock: int
    joined: bool = True
    weights: int = 0
    may_pull: int = 0
    staged: set[int] = field(default_factory=set)
    applied: set[int] = field(default_factory=set)


class Interleavings(RuleBasedStateMachine):
    """Workers push, repeat, pull, die and join in any order, and the apply thread works when it likes.

    One rule draws every event, so that hypothesis leaves none out of a run; the frequent ones are named more than once.
    """

    EVENTS = (*["push", "work", "pull"] * 6, *["joined"] * 2, "wrong_clock", "die", "join", "initialise")

    MODES = ("sync", "ssp:0", "ssp:1", "ssp:3", "async")

    @initialize(mode=st.integers(0, 4), workers=st.integers(1, 3))
    def begin(self, mode: int, workers: int) -> None:
        self.consistency = consistency(self.MODES[mode])
        self.roster: dict[int, Live] = {}
        self.bucket: UpdateRule[Token] = update_rule(self.consistency, self.roster, initialised=workers != 3)
        self.workers: dict[int, Worker] = {}
        self.everyone: list[Worker] = []
        self.arrived: list[Token] = []  # staged and not yet added, in order of arrival
        self.open: list[Token] = []
        self.applied: set[Token] = set()
        for rank in range(workers):
            self.join(rank)
            self.joined(rank, self.workers[rank], 0)

    @rule(what=st.sampled_from(EVENTS), which=st.integers(0, RANKS - 1), number=st.integers(0, 3))
    def event(self, what: str, which: int, number: int) -> None:
        if what in ("work", "join", "initialise"):
            getattr(self, what)(which)
            return
        known = [(rank, worker) for rank, worker in sorted(self.workers.items()) if worker.joined == (what != "joined")]
        if known:
            getattr(self, what)(*known[which % len(known)], number)

    # -- what workers do

    def push(self, rank: int, worker: Worker, _: int) -> None:
        if not self.bucket.initialised:
            return
        clock = worker.clock + 1
        outstanding = self.arrived if self.has_quorum else [*self.arrived, *self.open]
        if any(token[0] == rank for token in outstanding):
            with pytest.raises(Backlogged):
                self.bucket.is_repeat(rank, clock)
            return
        assert not self.bucket.is_repeat(rank, clock)
        token = (rank, worker.incarnation, clock)
        self.bucket.stage(rank, clock, token)
        self.arrived.append(token)
        worker.clock = clock
        worker.staged.add(clock)

    @property
    def has_quorum(self) -> bool:
        return self.consistency.quorum is not None

    def come(self) -> int:
        """How many live workers have a contribution in the open update."""
        return sum(any(token[0] == rank for token in self.open) for rank in self.workers)

    def wrong_clock(self, rank: int, worker: Worker, number: int) -> None:
        assert self.bucket.is_repeat(rank, max(0, worker.clock - number))
        with pytest.raises(OutOfOrder):
            self.bucket.is_repeat(rank, worker.clock + 2 + number)

    def pull(self, rank: int, worker: Worker, number: int) -> None:
        """At the worker's own clock, at the next one (pulls are asked for before their pushes come), or late."""
        clock = max(worker.start, worker.clock + 1 - number)
        verdict = admits(self.bucket, rank, clock)
        if self.has_quorum:
            self.check_verdict(verdict, rank, worker, clock)
            return
        own = all(c in worker.applied for c in range(worker.start + 1, clock + 1))
        bound = self.consistency.max_staleness
        missed = set()
        if bound is not None:
            for other, them in self.workers.items():
                needed = range(them.start + 1, clock - bound + 1)
                if other != rank and not all(c in them.applied for c in needed):
                    missed.add(other)
        assert verdict.admitted == (self.bucket.initialised and own and not missed)
        assert bool(verdict.reason) != verdict.admitted
        if self.bucket.initialised:
            assert set(verdict.waiting_for) <= missed | {rank}
            # Those that have pushed are not waited for: the shard applies what they brought.
            late = {other for other in missed if bound is not None and self.workers[other].clock < clock - bound}
            assert set(verdict.waiting_for) - {rank} <= late
            assert verdict.waiting_for or not late
        if self.consistency.aggregate:
            assert admits(replace(self.bucket, consistency=parse_mode("ssp:0")), rank, clock) == verdict

    def check_verdict(self, verdict: Admission, rank: int, worker: Worker, clock: int) -> None:
        """With a quorum: its own contribution is in, or added when there were newer weights than it was taken at."""
        assert verdict.admitted == (self.bucket.initialised and clock <= worker.may_pull)
        assert bool(verdict.reason) != verdict.admitted
        if not verdict.admitted and self.bucket.initialised:
            here = {token[0] for token in [*self.arrived, *self.open]}
            assert set(verdict.waiting_for) <= (self.workers.keys() - here) | {rank}
            idle = rank in verdict.waiting_for or self.come() < self.consistency.needed(len(self.workers))
            assert idle or self.bucket.next() is not None, "no worker waits for a late one"

    # -- what the shard does

    def initialise(self, _: int) -> None:
        assert self.bucket.initialised or self.bucket.next() is None
        self.bucket.initialised = True

    def work(self, times: int) -> None:
        for _ in range(times + 1):
            work = self.bucket.next()
            assert self.bucket.next() == work, "looking changes nothing"
            if work is None:
                return
            if isinstance(work, Add):
                self.check_add(work)
            else:
                self.check_step(work)
            self.bucket.done(work)

    def check_add(self, work: Add[Token]) -> None:
        token = work.contribution
        assert (work.rank, work.clock) == (token[0], token[2])
        assert token in self.arrived, "added once"
        if self.has_quorum:
            added = {rank for rank, _, _ in self.open}
            assert token == next(token for token in self.arrived if token[0] not in added), "in order of arrival"
            worker = self.everyone[token[1] - 1]
            if self.bucket.version > worker.weights and worker.joined:
                worker.weights, worker.may_pull = self.bucket.version, max(worker.may_pull, token[2])
        elif self.consistency.aggregate:
            assert token[2] == self.bucket.version + 1, "update number r is made of clock r"
            assert all(rank < token[0] for rank, _, _ in self.open), "in rank order"
        else:
            assert token == self.arrived[0], "in order of arrival"
            assert not self.open
        self.arrived.remove(token)
        self.open.append(token)

    def check_step(self, work: Step) -> None:
        assert work.ranks == tuple(rank for rank, _, _ in self.open)
        update = self.bucket.version + 1
        if self.has_quorum:
            assert self.open
            assert len({rank for rank, _, _ in self.open}) == len(self.open), "a worker is in an update once"
            assert self.come() >= self.consistency.needed(len(self.workers))
            for _, incarnation, clock in self.open:
                worker = self.everyone[incarnation - 1]
                if clock > worker.may_pull:
                    worker.weights, worker.may_pull = update, clock
        elif self.consistency.aggregate:
            needed = {(r, w.incarnation, update) for r, w in self.workers.items() if w.start < update}
            assert needed <= set(self.open), "nobody live is left out of an update that needs it"
        for rank, incarnation, clock in self.open:
            self.everyone[incarnation - 1].applied.add(clock)
            self.applied.add((rank, incarnation, clock))
        self.open.clear()

    # -- who comes and goes

    def die(self, rank: int, worker: Worker, _: int) -> None:
        del self.workers[rank], self.roster[rank]

    def join(self, rank: int) -> None:
        """The first round of a join, in the place of whoever held the rank."""
        start = self.bucket.frontier()
        assert start >= max([0, *(clock for _, _, clock in [*self.arrived, *self.open])])
        newcomer = Worker(len(self.everyone) + 1, start, start, joined=False, may_pull=start)
        self.roster[rank] = Live(newcomer.incarnation, start)
        self.bucket.add_worker(rank, start)
        self.workers[rank] = newcomer
        self.everyone.append(newcomer)

    def joined(self, rank: int, worker: Worker, number: int) -> None:
        """The second round: `number` is what other shards' frontiers lay ahead of this one's."""
        worker.start = worker.clock = worker.may_pull = worker.start + number
        worker.joined, worker.weights = True, self.bucket.version
        self.roster[rank] = Live(worker.incarnation, worker.start)
        self.bucket.add_worker(rank, worker.start)

    # -- what holds at all times

    @invariant()
    def whoever_could_bring_something_is_the_only_reason_to_wait(self) -> None:
        if not self.bucket.initialised or self.bucket.next() is not None:
            return
        if self.has_quorum:
            waits = self.come() < self.consistency.needed(len(self.workers))
            assert waits or not (self.arrived or self.open)
            return
        outstanding = {token[1] for token in [*self.arrived, *self.open]}
        idle = [worker for worker in self.workers.values() if worker.incarnation not in outstanding]
        assert not outstanding or (self.consistency.aggregate and idle)

    @invariant()
    def the_version_counts_updates(self) -> None:
        if not self.consistency.aggregate:
            assert self.bucket.version == len(self.applied)

    def teardown(self) -> None:
        """When everyone has died, everything that was ever staged is applied."""
        self.workers.clear()
        self.roster.clear()
        self.bucket.initialised = True
        while self.bucket.next() is not None:
            self.work(RANKS)
        assert not self.arrived
        assert not self.open
        staged = {worker.incarnation: worker.staged for worker in self.everyone}
        assert self.applied == {t for t in self.applied if t[2] in staged[t[1]]}
        assert len(self.applied) == sum(map(len, staged.values()))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=60)


class QuorumInterleavings(Interleavings):
    """The same with a quorum: nothing is dropped or doubled, and no worker waits for a late one."""

    MODES = ("sync quorum 1", "sync quorum 2", "sync quorum 3", "sync quorum all-1", "sync quorum all-2")


class LongInterleavings(Interleavings):
    """Those of the first, in more examples."""


class LongQuorumInterleavings(QuorumInterleavings):
    """Those with a quorum, in more examples."""


TestQuorumInterleavings = QuorumInterleavings.TestCase
TestQuorumInterleavings.settings = settings(max_examples=40, stateful_step_count=60)
TestLongInterleavings = pytest.mark.repeat(LongInterleavings.TestCase)
TestLongInterleavings.settings = settings(max_examples=500, stateful_step_count=60)
TestLongQuorumInterleavings = pytest.mark.repeat(LongQuorumInterleavings.TestCase)
TestLongQuorumInterleavings.settings = settings(max_examples=500, stateful_step_count=60)
