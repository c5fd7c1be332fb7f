"""What becomes of a step whose place was lost: it counts as a whole wherever that can be known and done."""

from __future__ import annotations

import pytest

from ps_protocol.identity import Identity
from ps_protocol.messages.workers import JoinResult, ShardPushed
from ps_protocol.modes import parse_mode
from ps_worker.model.step import EndedStep
from ps_worker.strategies.sent_step import SentStep
from ps_worker.strategies.unfinished import Fate, Unfinished, has_all_before

STEP = EndedStep(0, set(), {}, False, ())
BEGUN = 8  # the clock for which the step was pushed first


def place(clock: int, pushed: int | None, on_shards: dict[int, ShardPushed] | None = None) -> JoinResult:
    return JoinResult(Identity("job", 0, 2), clock, 10.0, None, pushed=pushed, on_shards=on_shards or {})


ALL = place(10, 8, {0: ShardPushed(8, {}), 1: ShardPushed(8, {})})
HALF = place(10, 7, {0: ShardPushed(8, {}), 1: ShardPushed(7, {})})
ONE_BUCKET = place(10, 7, {0: ShardPushed(7, {2: 8}), 1: ShardPushed(7, {})})
NONE = place(10, 7, {0: ShardPushed(7, {}), 1: ShardPushed(7, {})})
BEFORE = place(5, 5, {0: ShardPushed(5, {}), 1: ShardPushed(5, {})})  # the job went back to an earlier clock
OLDER_SERVER = place(10, 7)


@pytest.mark.parametrize(
    ("now", "more", "fate"),
    [
        (ALL, {}, Fate.COUNTS),
        (ALL, {"rolled_back": True}, Fate.COUNTS),
        (HALF, {}, Fate.AGAIN),
        (NONE, {}, Fate.AGAIN),
        (OLDER_SERVER, {}, Fate.NOT_KNOWN),
        (HALF, {"is_leased": True}, Fate.AGAIN),
        (ONE_BUCKET, {"is_leased": True}, Fate.AGAIN),
        (NONE, {"is_leased": True}, Fate.DATA_COMES_AGAIN),
        (BEFORE, {"rolled_back": True, "waits_for_data": True}, Fate.DATA_COMES_AGAIN),
        (BEFORE, {"rolled_back": True}, Fate.OF_LATER_WEIGHTS),
        (BEFORE, {"rolled_back": True, "one_clock": False}, Fate.AGAIN),
    ],
)
def test_what_becomes_of_a_step(now: JoinResult, more: dict[str, bool], fate: Fate) -> None:
    how = {"rolled_back": False, "one_clock": True, "is_leased": False, "waits_for_data": False, **more}
    assert Unfinished(STEP, BEGUN - 1, begun=BEGUN).fate(now, **how) is fate


def test_a_step_of_which_nothing_was_pushed_is_pushed_whatever_the_servers_say() -> None:
    at_hand = Unfinished(STEP, BEGUN - 1)
    assert at_hand.fate(OLDER_SERVER, False, True, False, False) is Fate.AGAIN


def test_a_step_that_is_pushed_for_an_earlier_clock_after_a_rollback_counts_once() -> None:
    """It is lost once more right after that, and what it was pushed for first says nothing of the clocks since."""
    at_hand = Unfinished(STEP, BEGUN - 1, begun=BEGUN)
    assert at_hand.fate(BEFORE, True, False, False, False) is Fate.AGAIN
    at_hand.goes_on_from(BEFORE)
    at_hand.begun = at_hand.begun or BEFORE.clock + 1  # as it is pushed from there
    assert at_hand.fate(place(6, 6, {0: ShardPushed(6, {}), 1: ShardPushed(6, {})}), False, False, False, False) is (
        Fate.COUNTS
    )
    half = place(6, 5, {0: ShardPushed(6, {}), 1: ShardPushed(5, {})})
    assert half.has_had(0, 0, at_hand.begun), "it gets a skip"


@pytest.mark.parametrize(("now", "begun"), [(HALF, BEGUN), (ONE_BUCKET, BEGUN), (NONE, None), (OLDER_SERVER, BEGUN)])
def test_a_step_has_begun_where_any_shard_has_had_some_of_it(now: JoinResult, begun: int | None) -> None:
    at_hand = Unfinished(STEP, BEGUN - 1, begun=BEGUN)
    at_hand.goes_on_from(now)
    assert at_hand.begun == begun


def test_a_part_has_had_a_step_if_its_shard_has_or_it_is_ahead_of_its_shard() -> None:
    assert [HALF.has_had(shard, 0, BEGUN) for shard in (0, 1, 2)] == [True, False, False]
    assert [ONE_BUCKET.has_had(0, part, BEGUN) for part in (1, 2)] == [False, True]


@pytest.mark.parametrize("mode", ["ssp:1", "async"])
@pytest.mark.parametrize(("pushed", "has_all"), [(7, False), (8, True)])
def test_a_member_keeps_its_state_only_if_the_job_has_the_step_in_which_it_was_interrupted(
    mode: str, pushed: int, has_all: bool
) -> None:
    """Step 8 was interrupted, and the next one has ended, when the job goes back; 7 is the last step that is known to
    count."""
    now, rule = place(pushed, pushed), parse_mode(mode)
    assert rule is not None
    interrupted = SentStep(place(0, None), 8, (), (), ())
    assert has_all_before(now, 9, Unfinished(STEP, 8), interrupted, 7, rule) is has_all
