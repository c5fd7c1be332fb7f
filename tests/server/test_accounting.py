"""What rollbacks have cost: each step counts once, as lost or as made again."""

from __future__ import annotations

from ps_server.core.accounting import StepAccounting


def account(**fields: object) -> StepAccounting:
    return StepAccounting(aggregate=False, **fields)  # type: ignore[arg-type]


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
    assert steps.lost_steps == 10 + (31 - 18) - 2 - 5


def test_what_a_worker_that_does_not_come_back_had_done_is_counted_and_the_rest_if_it_does() -> None:
    steps = account(unaccounted={0: (40, 44)})
    steps.give_up(0)
    assert steps.lost_steps == 4
    steps.settle(0, 45)
    assert steps.lost_steps == 5
    steps.settle(0, 60)
    assert steps.lost_steps == 5
