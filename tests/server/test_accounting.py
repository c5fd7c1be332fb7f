"""What rollbacks have cost: each step counts once, as lost or as made again."""

from __future__ import annotations

from ps_server.core.accounting import StepAccounting
from ps_server.core.snapshot import VersionRange


def account(**fields: object) -> StepAccounting:
    return StepAccounting(goes_back_together=False, **fields)  # type: ignore[arg-type]


def test_a_new_process_does_not_make_what_its_rank_had_done_uncounted() -> None:
    steps = account(unaccounted={0: (40, 44), 1: (40, 44)})
    steps.settle(0, 46)  # the same process comes back, and knows better than what was heard of it last
    steps.settle(1)
    steps.settle(1, 90)  # each is booked once
    assert (steps.lost_steps, steps.redone_steps) == (6 + 4, 0)


def test_clocks_that_a_worker_skipped_when_it_came_back_are_not_lost() -> None:
    steps = account()
    steps.joined(0, 0, None)
    steps.joined(0, 20, 15)  # it was away, and the others went on
    steps.unaccounted = {0: (10, 24)}
    steps.joined(0, 30, 25)
    assert steps.lost_steps == 5 + 5
    steps.unaccounted = {0: (18, 31)}
    steps.joined(0, 31, 31)
    assert steps.lost_steps == 10 + 1, "the others are counted, or were never made"


def test_a_step_that_is_pushed_again_is_not_lost() -> None:
    """Its worker had finished 44 steps, and comes back in the 45th."""
    steps = account(unaccounted={0: (40, 45)})
    steps.joined(0, 50, 44, pushed=40)  # the shard that went back has to get the 45th anew, for clock 51
    assert steps.lost_steps == 4
    steps.unaccounted = {0: (40, 51)}
    steps.joined(0, 51, 51, pushed=40)
    assert steps.lost_steps == 4 + 1, "with that shard once more"
    steps = account()
    steps.joined(0, 50, 44, pushed=45)  # it was staged everywhere, and its worker never heard so
    steps.unaccounted = {0: (40, 50)}
    steps.joined(0, 50, 50, pushed=40)
    assert steps.lost_steps == 5


def test_steps_that_are_lost_once_more_count_once_and_those_that_were_made_again_count_again() -> None:
    reached = [VersionRange(40, 40, {0: 40})]
    steps = account()
    steps.rolled_back(reached, heard={0: 45})
    steps.joined(0, 45, 45)  # another shard has them still
    steps.rolled_back(reached, heard={0: 47})
    steps.joined(0, 40, 47)  # no shard has them
    assert steps.lost_steps == 7
    steps.rolled_back(reached, heard={0: 42})
    steps.joined(0, 42, 42)
    assert steps.lost_steps == 7 + 2


def test_steps_of_a_worker_that_was_gone_before_the_shard_count_once_and_in_sync_not_at_all() -> None:
    reached = [VersionRange(40, 40, {0: 40, 1: 38})]
    steps = account()
    steps.gone(1, 41)
    steps.rolled_back(reached, heard={0: 45}, gone={1: 44})  # shards know better than what it said last
    assert steps.lost_steps == 44 - 38
    steps.settle(0)
    steps.rolled_back(reached, heard={}, gone={1: 44})
    assert steps.lost_steps == 44 - 38 + 5
    steps.joined(1, 50, 46)  # it was alive, and had done more
    assert steps.lost_steps == 46 - 38 + 5
    together = StepAccounting(goes_back_together=True)  # the others make that step again, and nothing of it is missing
    together.gone(1, 41)
    together.rolled_back(reached, heard={}, gone={1: 44})
    assert (together.lost_steps, together.redone_steps) == (0, 0)


def test_what_a_worker_that_does_not_come_back_had_done_is_counted_and_the_rest_if_it_does() -> None:
    steps = account(unaccounted={0: (40, 44)})
    steps.give_up(0)
    assert steps.lost_steps == 4
    steps.settle(0, 45)
    assert steps.lost_steps == 5
    steps.settle(0, 60)
    assert steps.lost_steps == 5
