"""The states of workers that a coordinator has in memory, and the room that all jobs share for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from ps_protocol.errors import CheckpointDamaged, LimitExceeded
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.worker_states import WorkerStates


def test_a_state_that_comes_after_the_jobs_end_takes_no_room() -> None:
    """Its call had the job before it ended."""
    room = SharedRoom(10)
    ended, next_job = WorkerStates(room), WorkerStates(room)
    ended.save(0, 1, bytes(10))
    ended.close()
    ended.save(0, 2, bytes(6))
    ended.leave(1, (2, bytes(6)))
    next_job.save(0, 1, bytes(10))
    with pytest.raises(LimitExceeded):
        next_job.save(1, 1, bytes(1))


def test_a_worker_that_joins_late_finds_the_newest_state_of_any_rank() -> None:
    states = WorkerStates(SharedRoom(100))
    assert states.newest(-1) is None
    states.kept = {0: (4, b"zero"), 1: (6, b"one"), 2: (6, b"two")}
    assert states.newest(-1) == (6, b"one")
    assert states.newest(6) is None, "what was told is as new"
    states.leave(3, (7, b"left"))
    assert states.newest(6) == (7, b"left")


@pytest.mark.parametrize("ask", [lambda states: states.of(0), lambda states: states.newest(-1)], ids=["of", "newest"])
def test_a_state_is_read_from_the_next_checkpoint_where_the_last_one_is_gone(
    ask: Callable[[WorkerStates], tuple[int, bytes] | None],
) -> None:
    """The next checkpoint is complete, and the last one pruned, while a worker that joins reads its state."""
    states = WorkerStates(SharedRoom(100))

    class Pruned(dict[int, tuple[int, bytes]]):
        def __getitem__(self, rank: int) -> tuple[int, bytes]:
            raise CheckpointDamaged("the file is gone")

        def get(self, rank: int, default: object = None) -> tuple[int, bytes]:  # type: ignore[override]
            states.kept = following
            return self[rank]

        def items(self) -> NoReturn:  # type: ignore[override]
            states.kept = following
            raise CheckpointDamaged("the file is gone")

    following: dict[int, tuple[int, bytes]] = {0: (6, b"next")}
    states.kept = Pruned()
    assert ask(states) == (6, b"next")
    following = Pruned()
    states.kept = following
    with pytest.raises(CheckpointDamaged):
        ask(states)


@pytest.mark.parametrize("told", ["heartbeat", "state"])
def test_what_a_worker_has_taken_over_takes_room_until_it_tells_of_itself(told: str) -> None:
    states = WorkerStates(SharedRoom(10))
    states.leave(0, (4, bytes(10)))
    states.joined(0)
    assert states.of(0) == (4, bytes(10))
    assert states.left_at() == {}, "the rank is live"
    with pytest.raises(LimitExceeded):
        states.save(1, 5, bytes(1))
    if told == "heartbeat":
        states.joined(0, has_place=True)
    else:
        states.save(0, 5, b"")
    assert states.of(0) is None
    states.save(1, 5, bytes(10))
