"""When a worker that failed or a shard that ended is started again; the seconds are numbers: no test waits for them."""

from __future__ import annotations

import pytest

from ps_launch.restarts import Restarts, ShardRestarts


@pytest.mark.parametrize(
    ("most", "ran", "pauses"),
    [
        # The pause doubles with each failure in a row, up to 30 seconds.
        (20, [1.0] * 8, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        # After a minute without a failure, twice the longest pause, the pause is short again.
        (20, [1.0, 1.0, 59.9, 60.0, 1.0, 1.0], [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]),
        # The number of restarts is that of the whole run.
        (2, [600.0] * 3, [0.5, 0.5, None]),
        (0, [1.0], [None]),
    ],
)
def test_a_worker_is_started_again_after_a_pause(most: int, ran: list[float], pauses: list[float | None]) -> None:
    restarts = Restarts(most)
    assert [restarts.after(seconds) for seconds in ran] == pauses


@pytest.mark.parametrize(
    ("most", "ready", "pauses"),
    [
        # At once, then after pauses that double, up to 10 seconds; without end.
        (None, [1.0] * 8, [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]),
        # After half a minute in which it served, three times the longest pause, it is started at once again.
        (None, [0.0, 0.0, 0.0, 29.9, 30.0, 0.0], [0.0, 1.0, 2.0, 4.0, 0.0, 1.0]),
        # A number of restarts is of those in a row.
        (2, [0.0, 0.0, 0.0], [0.0, 1.0, None]),
        (2, [0.0, 0.0, 600.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0, None]),
        (0, [600.0], [None]),
    ],
)
def test_a_shard_is_started_again_at_once_and_then_after_pauses(
    most: int | None, ready: list[float], pauses: list[float | None]
) -> None:
    restarts = ShardRestarts(most)
    assert [restarts.after(seconds) for seconds in ready] == pauses
    assert restarts.count == sum(pause is not None for pause in pauses)
