"""A table that is looser than its job: contributions are applied as they come, and a snapshot is of one clock."""

from __future__ import annotations

import random

import pytest

from ps_protocol.modes import Consistency
from ps_server.core.consistency import ADMITTED, Add, Live, UpdateRule
from ps_server.core.loose import LooseRule, table_rule
from ps_server.core.quorum import update_rule
from ps_server.core.snapshot import VersionRange
from tests.tools.modes import consistency
from tests.tools.rules import admits

SYNC = consistency("sync")


def rule_of(own: str = "async", ranks: int = 2, clock: int = 0) -> tuple[UpdateRule[str], dict[int, Live]]:
    """The rule of a table in a job of sync, with workers 0 .. ranks - 1, all at `clock`."""
    roster = {rank: Live(incarnation=rank + 1, start=clock) for rank in range(ranks)}
    rule: UpdateRule[str] = table_rule(SYNC, consistency(own), roster)
    for rank in roster:
        rule.add_worker(rank, clock)
    return rule, roster


def stage(rule: UpdateRule[str], *pushes: tuple[int, int]) -> None:
    for rank, clock in pushes:
        assert not rule.is_repeat(rank, clock)
        rule.stage(rank, clock, f"{rank}@{clock}")


def drain(rule: UpdateRule[str]) -> list[str]:
    """Does all there is to do; the contributions in the order they were added, and a bar after each step."""
    done = []
    while (work := rule.next()) is not None:
        done.append(work.contribution if isinstance(work, Add) else "|")
        rule.done(work)
    return done


def step(rule: UpdateRule[str], *pushes: tuple[int, int]) -> None:
    for push in pushes:
        stage(rule, push)
        drain(rule)


@pytest.mark.parametrize(
    ("job", "own", "expected"),
    [("sync", "async", LooseRule), ("sync", "ssp:2", LooseRule), ("ssp:2", "async", UpdateRule)],
)
def test_the_rule_is_the_tables_own(job: str, own: str, expected: type) -> None:
    rule: UpdateRule[str] = table_rule(consistency(job), consistency(own), {})
    assert type(rule) is expected
    assert rule.consistency == consistency(own)
    assert rule.initialised


@pytest.mark.parametrize("job", ["sync", "ssp:2", "async", "sync quorum 2"])
def test_a_table_without_its_own_has_the_jobs(job: str) -> None:
    rule: UpdateRule[str] = table_rule(consistency(job), None, {})
    assert rule == update_rule(consistency(job), {}, initialised=True)


def test_a_push_is_applied_at_once_while_a_bucket_waits_for_the_others() -> None:
    rule, _ = rule_of()
    stage(rule, (1, 1))
    assert drain(rule) == ["1@1", "|"]
    assert admits(rule, 1, 1) == ADMITTED
    assert admits(rule, 0, 0) == ADMITTED
    bucket: UpdateRule[str] = update_rule(SYNC, rule.roster, initialised=True)
    stage(bucket, (1, 1))
    assert drain(bucket) == []
    assert admits(bucket, 1, 1).waiting_for == (0,)


def test_a_bound_of_its_own_is_kept() -> None:
    rule, _ = rule_of("ssp:1")
    step(rule, (0, 1), (0, 2))
    assert admits(rule, 0, 1) == ADMITTED
    assert admits(rule, 0, 2).waiting_for == (1,)


def test_a_repeat_is_known_and_a_later_clock_is_refused() -> None:
    rule, _ = rule_of()
    step(rule, (0, 1))
    assert rule.is_repeat(0, 1)
    assert rule.version == 1


def test_what_is_past_the_clock_of_a_snapshot_waits_until_all_of_the_clock_is_in() -> None:
    rule, _ = rule_of()
    step(rule, (0, 1), (1, 1), (0, 2))
    rule.hold(2)
    stage(rule, (0, 3))
    assert drain(rule) == []
    assert not rule.is_at(2)
    stage(rule, (1, 2))
    assert not rule.is_at(2), "it is not in the rows yet"
    assert drain(rule) == ["1@2", "|"]
    assert rule.is_at(2)
    assert rule.extent() == VersionRange(2, 2, {0: 2, 1: 2})
    rule.hold(None)
    assert drain(rule) == ["0@3", "|"]


def test_what_waits_for_a_snapshot_is_pulled_after_it() -> None:
    rule, _ = rule_of()
    step(rule, (0, 1))
    rule.hold(1)
    stage(rule, (0, 2))
    verdict = admits(rule, 0, 2)
    assert (verdict.admitted, verdict.waiting_for) == (False, ())
    step(rule, (1, 1))
    assert rule.is_at(1)
    rule.hold(None)
    drain(rule)
    assert admits(rule, 0, 2) == ADMITTED


def test_it_is_too_late_for_a_clock_that_a_worker_has_pushed_beyond() -> None:
    """Also where that push is not in the rows: a thread may be adding it."""
    rule, _ = rule_of()
    step(rule, (0, 1))
    assert not rule.has_passed(1)
    stage(rule, (0, 2))
    assert rule.has_passed(1)
    assert not rule.has_passed(2)


def test_what_a_snapshot_waits_for_is_taken_however_much_is_staged() -> None:
    rule, _ = rule_of()
    assert not rule.is_awaited(1, 1)
    rule.hold(1)
    assert rule.is_awaited(1, 1)
    assert not rule.is_awaited(0, 2)


def test_a_snapshot_waits_for_no_dead_worker_and_has_what_one_left() -> None:
    rule, roster = rule_of(ranks=3)
    step(rule, (0, 1), (2, 1))
    rule.hold(1)
    del roster[1]
    assert rule.is_at(1)
    stage(rule, (2, 2))
    del roster[2]
    assert rule.is_at(1), "and not for what a dead one has pushed beyond"
    assert rule.extent() == VersionRange(1, 1, {0: 1, 1: 0, 2: 1})


def test_without_a_worker_no_clock_is_complete() -> None:
    """Those that come may bring the clock."""
    rule, roster = rule_of(ranks=1, clock=4)
    rule.hold(5)
    del roster[0]
    assert not rule.is_at(5)
    roster[1] = Live(incarnation=9, start=4)
    rule.add_worker(1, 4)
    assert not rule.is_at(5)
    step(rule, (1, 5))
    assert rule.is_at(5)


def test_a_worker_that_joined_further_on_is_at_the_clock_of_the_snapshot_after_a_restore() -> None:
    rule, roster = rule_of(ranks=1, clock=4)
    rule.hold(5)
    step(rule, (0, 5))
    stage(rule, (0, 6))
    roster[1] = Live(incarnation=9, start=6)
    rule.add_worker(1, 6)
    assert rule.is_at(5)
    reached = rule.extent()
    assert reached == VersionRange(5, 5, {0: 5, 1: 5})
    again, _ = rule_of(ranks=0)
    again.restore(rule.version, reached.clocks)
    assert again.frontier() == 5
    assert again.versions() == (5, 5)


@pytest.mark.parametrize("came", ["nothing", "staged", "added"])
def test_a_table_is_at_one_clock_only_where_nothing_is_on_its_way(came: str) -> None:
    """Otherwise a checkpoint of buckets at clock 51 would have rows of 50, and what came later would be lost."""
    rule, _ = rule_of(clock=50)
    assert rule.versions() == (50, 50)
    step(rule, (0, 51))
    assert rule.versions() == (50, 51)
    if came != "nothing":
        stage(rule, (1, 51))
    if came == "added":
        work = rule.next()
        assert isinstance(work, Add)
        rule.done(work)
    assert rule.versions() == (50, 51)
    if came == "nothing":
        stage(rule, (1, 51))
    drain(rule)
    assert rule.versions() == (51, 51)


def test_what_a_dead_worker_left_is_on_its_way_until_it_is_in_the_rows() -> None:
    rule, roster = rule_of(clock=50)
    step(rule, (0, 51))
    stage(rule, (1, 51))
    roster.clear()
    assert rule.versions() == (50, 51)
    drain(rule)
    assert rule.versions() == (51, 51)


@pytest.mark.parametrize("own", ["async", "ssp:0", "ssp:2"])
@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_has_every_step_up_to_its_clock_once_and_none_beyond(own: str, seed: int) -> None:
    """Workers in sync: none begins a clock before all buckets have the one before, and rows may come after these."""
    chance, ranks = random.Random(seed), 3
    rule, roster = rule_of(own, ranks)
    pushed, rows, named, found = dict.fromkeys(range(ranks), 0), list[str](), 0, dict[int, set[str]]()
    for _ in range(400):
        live = [rank for rank in roster if pushed[rank] <= min(pushed.values()) + 1]
        if not named and chance.random() < 0.2:
            named = min(pushed.values()) + 1 + rule.has_passed(min(pushed.values()) + 1)
            rule.hold(named)
        rank = chance.choice(live)
        if rank not in rule.waiting and all(add.rank != rank for add in rule.added):
            pushed[rank] += 1
            stage(rule, (rank, pushed[rank]))
        for _ in range(chance.randrange(4)):
            work = rule.next()
            if work is None:
                break
            rows += [work.contribution] if isinstance(work, Add) else []
            rule.done(work)
            if named and rule.is_at(named):
                assert rule.extent() == VersionRange(named, named, dict.fromkeys(range(ranks), named))
                found[named], named = set(rows), 0
                rule.hold(None)
    assert len(found) > 10
    assert len(set(rows)) == len(rows)
    for clock, steps in found.items():
        assert steps == {f"{rank}@{each}" for rank in range(ranks) for each in range(1, clock + 1)}


@pytest.mark.parametrize(
    ("own", "job", "expected"),
    [
        *(("async", job, False) for job in ("sync", "ssp:3", "async")),
        *(("ssp:3", job, False) for job in ("sync", "ssp:3", "ssp:2", "ssp:0")),
        ("ssp:0", "sync", False),
        *(("ssp:3", job, True) for job in ("ssp:4", "async")),
        ("sync", "ssp:0", True),
        ("sync", "async", True),
        ("sync", "sync", False),
    ],
)
def test_of_two_rules_one_may_be_stricter(own: str, job: str, expected: bool) -> None:
    rule: Consistency = consistency(own)
    assert rule.is_stricter_than(consistency(job)) is expected
