"""The faults to come, and what is made of those that were: both without a cluster."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.faults import KINDS, Fault
from tests.chaos.ledger import Record
from tests.chaos.oracle import Life
from tests.chaos.plans import RARE, SECOND_SECONDS, Weather, steady
from tests.chaos.processes import UnlessStopped
from tests.chaos.trace import Trace, summaries, table

SIZES = {"worker": 3, "shard": 2, "coordinator": 1, "between": 2, "reader": 2, "relay": 1, "cluster": 1}
WEATHER = Weather([*KINDS], SIZES, 3.0, 10.0, 0.5)


def test_the_same_seed_plans_the_same_and_half_of_the_faults_overlap_with_a_second_one() -> None:
    first, again = (WEATHER.plans("1 sync", 4000.0, WEATHER.pairs(1)) for _ in range(2))
    assert first == again
    assert first != WEATHER.plans("2 sync", 4000.0, WEATHER.pairs(2))
    seconds = [plan.second for plan in first if plan.second is not None]
    assert 0.4 < len(seconds) / len(first) < 0.6
    assert all(0 <= second.after <= SECOND_SECONDS for second in seconds)
    assert all(sorted(plan.victims) == [*range(SIZES[KINDS[plan.kind].to])] for plan in first)
    assert first[-1].after < 4000.0 - WEATHER.every / 2


def test_a_long_run_makes_every_pair_of_kinds_and_modes_share_them() -> None:
    usual = {kind for kind in KINDS if kind not in RARE}
    wanted = set(itertools.product(usual, usual))
    drawn = [set(itertools.islice(WEATHER.pairs(7, turn, 3), 150)) for turn in range(3)]
    assert wanted <= set.union(*drawn)
    assert all(not one & other for one, other in itertools.combinations(drawn, 2))


def test_every_second_window_has_one_fault_near_its_beginning() -> None:
    plans = steady(["kill"], SIZES, "0", 60.0, 6)
    assert [plan.after for plan in plans] == [pytest.approx(66), pytest.approx(186), pytest.approx(306)]


def test_the_stand_in_for_a_container_engine_pauses_as_docker_does() -> None:
    pauses = UnlessStopped()
    assert [pauses.after(1.0) for _ in range(3)] == [0.1, 0.2, 0.4]
    assert pauses.after(11.0) == 0.1
    assert [pauses.after(1.0) for _ in range(12)][-2:] == [60.0, 60.0]


def _record(slot: int, steps: list[float]) -> Record:
    life = Life(slot, slot, attempted=[*range(len(steps))], at=dict(enumerate(steps)))
    return Record(life, 1, 0.0, False, steps=steps)


def _each_half(begin: float, end: float) -> list[float]:
    return [begin + number / 2 for number in range(int(2 * (end - begin)) + 1)]


def test_recovery_is_over_when_the_last_worker_steps_on_after_the_end_of_both_faults() -> None:
    faults = [Fault("kill", 0, 10.0, 10.0), Fault("stop", 1, 11.0, 16.0, first="kill"), Fault("cut", 0, 30.0, 30.0)]
    one, other = [9.0, *_each_half(17.0, 31.0)], [9.0, *_each_half(18.5, 29.5)]
    trace = Trace(0.0, 40.0, [_record(0, one), _record(1, other)], faults)
    assert trace.recoveries() == [("kill+stop", 2.5), ("cut", None)]
    under_way = [9.0, 16.5, *_each_half(19.5, 31.0)]
    trace = Trace(0.0, 40.0, [_record(0, under_way), _record(1, other)], faults)
    assert trace.recoveries()[0] == ("kill+stop", 3.5)
    assert trace.pairs() == {"kill+stop": 1}
    found = summaries([("cut", 1.0), ("cut", None), ("cut", 3.0)])
    assert found == {"cut": {"median": 2.0, "most": 3.0, "never": 1}}
    rows = table(trace.pairs(), ["kill", "stop"]).splitlines()
    assert [row.split() for row in rows] == [["1", "2"], ["kill", ".", "1", "1"], ["stop", ".", ".", "2"]]


def test_steps_of_a_part_of_the_window_are_counted_once() -> None:
    trace = Trace(0.0, 40.0, [_record(0, [1.0, 2.0, 11.0]), _record(1, [12.0])], [])
    assert (trace.useful(), trace.useful(0.0, 10.0), trace.useful(10.0, 20.0)) == (4, 2, 2)
