"""When a worker that failed is started again; the seconds are numbers, and nobody waits for them."""

from __future__ import annotations

from ps_launch.restarts import LONGEST_SECONDS, WELL_SECONDS, Restarts


def test_the_pause_grows_with_each_failure_in_a_row_up_to_the_longest() -> None:
    restarts = Restarts(20)
    pauses = [restarts.after(1.0) for _ in range(10)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_after_a_worker_ran_well_for_long_the_pause_is_short_again() -> None:
    restarts = Restarts(20)
    for _ in range(7):
        restarts.after(1.0)
    assert restarts.after(WELL_SECONDS - 0.1) == LONGEST_SECONDS
    assert [restarts.after(seconds) for seconds in (WELL_SECONDS, 1.0, 1.0)] == [0.5, 1.0, 2.0]
    assert WELL_SECONDS > LONGEST_SECONDS, "who fails at once after each pause is never taken for well"


def test_the_number_of_restarts_is_that_of_the_whole_run() -> None:
    restarts = Restarts(2)
    assert [restarts.after(10 * WELL_SECONDS) for _ in range(3)] == [0.5, 0.5, None]
    assert restarts.count == 2
    assert Restarts(0).after(1.0) is None
