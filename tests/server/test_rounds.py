"""The rules of rounds: who is waited for, what a round holds, and what a worker gets that asks again or comes late."""

from __future__ import annotations

import random

import pytest

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_server.core.rounds_of_values import Given, RoundsOfValues, ValueRound, newest

LIMIT = 1000


def given(value: bytes, incarnation: int = 1, clock: int = 0) -> Given:
    return Given(incarnation, clock, value)


def test_a_round_is_complete_when_every_live_worker_has_given_its_value() -> None:
    rounds, live = RoundsOfValues(LIMIT), {0: 1, 2: 1}
    assert rounds.contribute(2, 1, given(b"two"), live, True) is None
    found = rounds.contribute(0, 1, given(b"zero", clock=7), live, True)
    assert found == ValueRound(1, 7, ((0, b"zero"), (2, b"two")))
    assert rounds.completed == 1
    assert rounds.given == {}


def test_nobody_is_left_out_before_all_declared_workers_have_joined() -> None:
    rounds = RoundsOfValues(LIMIT)
    assert rounds.contribute(0, 1, given(b""), {0: 1}, started=False) is None
    assert rounds.settle({0: 1, 1: 2}, started=True) is None
    assert rounds.contribute(1, 1, given(b"", 2), {0: 1, 1: 2}, True) is not None


def test_a_worker_that_came_back_gives_its_value_again() -> None:
    rounds = RoundsOfValues(LIMIT)
    rounds.contribute(0, 1, given(b"before", 1), {0: 1, 1: 2}, True)
    assert rounds.settle({0: 3, 1: 2}, True) is None
    assert rounds.contribute(1, 1, given(b"x", 2), {0: 3, 1: 2}, True) is None
    found = rounds.contribute(0, 1, given(b"after", 3), {0: 3, 1: 2}, True)
    assert dict(found.values)[0] == b"after"


def test_a_repeat_changes_nothing_and_gets_what_the_first_got() -> None:
    rounds, live = RoundsOfValues(LIMIT), {0: 1, 1: 1}
    rounds.contribute(0, 1, given(b"first"), live, True)
    assert rounds.contribute(0, 1, given(b"second"), live, True) is None
    found = rounds.contribute(1, 1, given(b""), live, True)
    assert dict(found.values)[0] == b"first"
    assert rounds.contribute(0, 1, given(b"third"), live, True) == found
    assert rounds.completed == 1


def test_the_round_that_comes_next_at_a_clock_is_the_first_that_is_not_behind_it() -> None:
    rounds = RoundsOfValues(LIMIT)
    for number in (1, 2, 3):
        rounds.contribute(0, number, given(b"", clock=100 * number), {0: 1}, True)
    assert [rounds.following(clock) for clock in (0, 100, 101, 300, 301)] == [1, 1, 2, 3, 4]


def test_a_round_beyond_the_open_one_is_refused() -> None:
    rounds = RoundsOfValues(LIMIT)
    for number in (0, 2):
        with pytest.raises(InvalidRequest, match="round 1 is open"):
            rounds.contribute(0, number, given(b""), {0: 1}, True)
    assert rounds.given == {}


def test_a_coordinator_that_missed_rounds_learns_of_them_from_its_workers() -> None:
    rounds, live = RoundsOfValues(LIMIT, completed=1, behind=True), {0: 1, 1: 1}
    assert rounds.contribute(0, 2, given(b""), live, True) is None
    assert rounds.contribute(1, 5, given(b"b"), live, True) is None
    with pytest.raises(LimitExceeded, match="round 2 is not kept"):
        rounds.contribute(0, 2, given(b""), live, True)
    found = rounds.contribute(0, 5, given(b"a"), live, True)
    assert found == ValueRound(5, 0, ((0, b"a"), (1, b"b")))
    with pytest.raises(InvalidRequest, match="round 6 is open"):
        rounds.contribute(0, 9, given(b""), live, True)


def test_too_many_bytes_end_the_round_for_all_alike() -> None:
    rounds, live = RoundsOfValues(10), {0: 1, 1: 1, 2: 1}
    assert rounds.contribute(0, 1, given(bytes(6)), live, True) is None
    found = rounds.contribute(1, 1, given(bytes(5)), live, True)
    assert found.values == ()
    assert "workers 0, 1 are 11 bytes together: the limit max-round-bytes is 10" in found.refused
    assert rounds.contribute(2, 1, given(b""), live, True) == found, "also for one that had given nothing yet"


def test_past_rounds_are_kept_up_to_a_limit_and_the_last_one_always() -> None:
    rounds = RoundsOfValues(10)
    for number in range(1, 6):
        rounds.contribute(0, number, given(bytes(4)), {0: 1}, True)
    assert [one.number for one in rounds.kept] == [4, 5]
    with pytest.raises(LimitExceeded, match="round 3 is not kept any more"):
        rounds.contribute(0, 3, given(b""), {0: 1}, True)
    assert [one.number for one in newest(rounds.kept, 1)] == [5]
    assert newest((), 1) == ()


@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_of_calls_repeats_deaths_and_joins_all_get_the_same(seed: int) -> None:
    """Workers with scripts of ten calls: each ends with the same results, and none is waited for that is gone."""
    draw = random.Random(seed)
    rounds, live = RoundsOfValues(10**6), {0: 1, 1: 2}
    incarnation, at = 2, {0: 1, 1: 1}
    results: dict[int, dict[int, ValueRound]] = {0: {}, 1: {}}
    for _ in range(5000):
        if all(number > 10 for number in at.values()):
            break
        event = draw.random()
        if event < 0.03:  # somebody joins: another process, with a script from its beginning, or one that comes back
            rank = draw.randrange(4)
            incarnation += 1
            live[rank] = incarnation
            if draw.random() < 0.5 or rank not in at:
                at[rank], results[rank] = 1, {}
            rounds.settle(live, True)
        elif event < 0.05 and len(live) > 1:
            rank = draw.choice(sorted(live))
            del live[rank]
            del at[rank]
            rounds.settle(live, True)
        else:
            rank = draw.choice(sorted(live))
            if at[rank] > 10:  # its script is over
                if len(live) > 1:
                    del live[rank]
                    del at[rank]
                    rounds.settle(live, True)
                continue
            number = draw.choice([at[rank], max(1, at[rank] - 1)])  # a repeat that was under way for long
            found = rounds.contribute(rank, number, given(b"%d" % rank, live[rank]), live, True)
            if found is not None and number == at[rank]:
                results[rank][number] = found
                at[rank] += 1
    else:
        raise AssertionError("some wait for ever")
    for rank, own in results.items():
        for number, found in own.items():
            assert found == rounds.kept[number - 1], f"worker {rank}, round {number}"
            assert found.number == number
            assert [who for who, _ in found.values] == sorted(who for who, _ in found.values)
