"""A job with a world size whose workers are all gone waits for all of them again; the time is what the caller says."""

from __future__ import annotations

import pytest

from ps_server.core.membership import RETURN_LEASES, LiveWorker, Membership

LEASE = 10.0
GRACE = RETURN_LEASES * LEASE


class Job:
    """A job of so many declared workers, which all joined at time 0. Heartbeats come when a test says so."""

    def __init__(self, world_size: int) -> None:
        self.membership = Membership(world_size, LEASE)
        for rank in range(world_size or 2):
            self.join(rank, 0.0)

    def join(self, rank: int, now: float, launch_ranks: range = range(0), is_back: bool = False) -> bool:
        """Has a worker join; returns whether it may train."""
        membership = self.membership
        membership.join(LiveWorker(rank, membership.next_incarnation(), now + LEASE), launch_ranks, is_back)
        return membership.started

    def hear(self, now: float, *ranks: int) -> None:
        for rank in ranks:
            self.membership.heartbeat(rank, self.membership.workers[rank].incarnation, 1, now)

    def leave(self, rank: int, now: float, done: bool = False) -> None:
        self.membership.leave(rank, self.membership.workers[rank].incarnation, now, done)

    def expire(self, now: float) -> list[int]:
        """Ends the leases that are over; returns whose."""
        gone = self.membership.expired(now)
        for member in gone:
            self.membership.leave(member.rank, member.incarnation, now, expired=True)
        return [member.rank for member in gone]


@pytest.fixture
def all_dead() -> Job:
    """Three workers that were heard at second 100, and whose leases are over."""
    job = Job(3)
    job.hear(100.0, 0, 1, 2)
    assert job.expire(110.0) == [0, 1, 2]
    return job


def test_when_all_are_gone_the_first_that_comes_back_waits_for_all(all_dead: Job) -> None:
    assert [all_dead.join(rank, 500.0 + rank) for rank in (2, 0, 1)] == [False, False, True]


def test_those_that_do_not_come_are_waited_for_from_the_first_one_on(all_dead: Job) -> None:
    assert not all_dead.join(0, 500.0)
    assert all_dead.membership.stop_waiting(500.0 + GRACE - 1) == []
    assert all_dead.membership.stop_waiting(500.0 + GRACE) == [1, 2]
    assert all_dead.membership.started


def test_those_that_did_not_come_once_are_not_waited_for_the_next_time(all_dead: Job) -> None:
    all_dead.join(0, 500.0)
    all_dead.membership.stop_waiting(500.0 + GRACE)
    all_dead.hear(600.0, 0)
    assert all_dead.expire(610.0) == [0]
    assert all_dead.join(0, 620.0)


def test_those_that_a_launch_is_about_to_start_are_waited_for_as_at_the_first_start(all_dead: Job) -> None:
    assert not all_dead.join(0, 500.0, launch_ranks=range(2))
    assert all_dead.membership.stop_waiting(10_000.0) == [2], "no launch has named it"
    assert not all_dead.membership.started
    assert all_dead.join(1, 10_001.0, launch_ranks=range(2))


def test_the_launch_of_another_host_is_waited_for_from_its_first_worker_on(all_dead: Job) -> None:
    all_dead.join(0, 500.0, launch_ranks=range(1))
    assert not all_dead.join(1, 530.0, launch_ranks=range(1, 3))
    assert all_dead.membership.stop_waiting(10_000.0) == []


def test_a_worker_that_left_done_is_not_waited_for(all_dead: Job) -> None:
    job = Job(2)
    job.hear(100.0, 0, 1)
    job.leave(1, 100.0, done=True)
    assert job.expire(110.0) == [0]
    assert job.join(0, 111.0)


def test_a_worker_without_which_the_others_went_on_is_not_waited_for() -> None:
    job = Job(2)
    job.hear(100.0, 0, 1)
    job.hear(108.0, 0)
    assert job.expire(110.0) == [1]
    for now in range(116, 300, 8):
        job.hear(float(now), 0)
    assert job.expire(310.0) == [0]
    assert job.join(0, 311.0), "it trained alone before, too"


def test_a_worker_that_was_told_to_leave_shortly_before_the_others_is_waited_for() -> None:
    """Its launcher had died, or stops all of them."""
    job = Job(2)
    job.leave(1, 100.0)
    job.leave(0, 101.0)
    assert not job.join(0, 200.0)
    assert job.join(1, 203.0)


@pytest.mark.parametrize("heard", [100.0, 102.4])
def test_a_worker_that_is_started_again_trains_once_another_is_known_to_have_lived_on(heard: float) -> None:
    """All may have died at one time: then some leases end later than others."""
    job = Job(2)
    job.hear(100.0, 0)
    job.hear(heard, 1)
    assert not job.join(0, 103.0), "the other may be dead, too"
    assert not job.membership.doubt_is_over()
    job.hear(105.0, 1)
    assert job.membership.doubt_is_over()
    assert (job.membership.started, job.membership.rejoining) == (True, {})


def test_one_in_doubt_that_comes_to_its_end_is_not_waited_for() -> None:
    job = Job(2)
    job.hear(100.0, 0, 1)
    assert not job.join(0, 103.0), "the other may be dead, too"
    job.leave(1, 103.5, done=True)
    assert (job.membership.started, job.membership.rejoining) == (True, {})


def test_a_worker_that_is_started_again_goes_on_at_once_with_one_that_lived_on_without_it() -> None:
    job = Job(2)
    job.hear(100.0, 0, 1)
    job.hear(108.0, 1)
    assert job.expire(110.0) == [0]
    assert job.join(0, 110.5)


def test_one_that_takes_the_place_of_a_worker_that_left_goes_on_at_once() -> None:
    """That one was not killed: nothing says that the others were."""
    job = Job(2)
    job.hear(100.0, 0)
    job.leave(1, 101.0)
    assert job.join(1, 101.5)


def test_one_in_doubt_that_is_dead_is_waited_for_as_the_others() -> None:
    job = Job(2)
    job.hear(100.0, 0)
    job.hear(102.0, 1)
    assert job.expire(110.0) == [0]
    assert not job.join(0, 110.5)
    job.hear(111.5, 0)
    assert job.expire(112.0) == [1]
    assert not job.membership.started
    assert job.join(1, 120.0)


def test_nobody_is_waited_for_for_ever_though_the_first_comes_back_before_its_own_lease_is_over() -> None:
    """As after a coordinator that stood still while all died: it has heard of no end."""
    job = Job(3)
    job.hear(100.0, 0, 1, 2)
    assert not job.join(0, 105.0)
    job.hear(109.0, 0)
    assert job.expire(111.0) == [1, 2]
    job.hear(118.0, 0)
    assert not job.join(2, 119.0)
    assert job.membership.stop_waiting(119.0 + GRACE) == [1], "it does not come back"
    assert job.membership.started


def test_one_that_dies_while_all_are_waited_for_is_waited_for_in_turn(all_dead: Job) -> None:
    all_dead.join(0, 500.0)
    all_dead.join(1, 509.0)
    assert all_dead.expire(510.0) == [0]
    assert not all_dead.join(2, 512.0)
    assert all_dead.join(0, 515.0)


def test_a_launch_that_fails_before_all_are_there_leaves_the_next_one_to_wait_for_all(all_dead: Job) -> None:
    all_dead.join(0, 500.0, launch_ranks=range(3))
    all_dead.leave(0, 510.0)
    assert [all_dead.join(rank, 600.0 + rank) for rank in (1, 2, 0)] == [False, False, True]


def test_processes_that_lived_all_the_time_wait_a_lease_for_one_another(all_dead: Job) -> None:
    """Their machines stood still, say."""
    assert not all_dead.join(0, 120.0, is_back=True)
    assert not all_dead.join(1, 121.0, is_back=True)
    assert all_dead.membership.stop_waiting(129.0) == []
    assert all_dead.membership.stop_waiting(130.0) == [2]


def test_new_processes_wait_for_one_another_after_a_rollback_too() -> None:
    """The servers died with them: they were live in the coordinator's file."""
    job = Job(2)
    job.membership.rollback(100.0)
    assert not job.join(0, 106.0)
    assert job.membership.stop_waiting(120.0) == []
    assert job.join(1, 150.0)


def test_an_elastic_job_starts_with_whoever_comes_back() -> None:
    job = Job(0)
    assert job.expire(110.0) == [0, 1]
    assert job.join(0, 111.0)


def test_a_coordinator_that_comes_back_to_a_job_without_workers_has_them_all_waited_for() -> None:
    membership = Membership(3, LEASE)
    membership.started = True
    membership.resume({2}, now=50.0)
    membership.join(LiveWorker(0, 10, 80.0))
    assert (membership.started, sorted(membership.rejoining)) == (False, [1])
    membership.join(LiveWorker(1, 11, 90.0))
    assert membership.started
