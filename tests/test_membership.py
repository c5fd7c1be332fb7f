"""Who takes part in a job and until when; the time is whatever the caller says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.errors import Fenced, InvalidRequest, UnknownWorker
from ps_server.core.membership import Member, Membership

LEASE = 10.0


def join(membership: Membership, rank: int | None = None, now: float = 0.0) -> Member:
    rank = membership.claim(rank)
    member = Member(rank, membership.next_incarnation(), expires=now + membership.lease)
    membership.join(member)
    return member


def test_a_newcomer_gets_the_rank_it_asks_for_or_the_lowest_free_one() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    assert [join(membership, rank).rank for rank in (1, None, None, 7, None)] == [1, 0, 2, 7, 3]
    membership.leave(2, membership.members[2].incarnation)
    assert join(membership).rank == 2


def test_claiming_a_rank_changes_nothing() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    assert membership.claim(None) == membership.claim(None) == 0
    assert not membership.members


def test_a_rank_beyond_the_declared_world_is_refused() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    with pytest.raises(InvalidRequest, match="rank must be below the job's world_size 2, got 2"):
        membership.claim(2)
    join(membership)
    join(membership)
    with pytest.raises(InvalidRequest, match="got 2"):
        membership.claim(None)


def test_incarnations_rise_across_all_ranks_and_are_never_given_twice() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    first = join(membership, 0)
    membership.leave(0, first.incarnation)
    assert [first.incarnation, join(membership, 1).incarnation, join(membership, 0).incarnation] == [1, 2, 3]


def test_a_worker_that_joins_anew_fences_its_older_self() -> None:
    membership = Membership(world_size=1, lease=LEASE)
    older = join(membership, 0)
    newer = join(membership, 0)
    with pytest.raises(Fenced, match=f"incarnation {newer.incarnation} is live"):
        membership.heartbeat(0, older.incarnation, clock=1, now=1.0)
    assert not membership.leave(0, older.incarnation)
    assert membership.members[0] is newer


def test_who_never_joined_is_unknown() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    with pytest.raises(UnknownWorker) as refused:
        membership.heartbeat(3, 1, clock=0, now=0.0)
    assert not isinstance(refused.value, Fenced)
    assert not membership.leave(3, 1)


def test_a_lease_runs_out_unless_a_heartbeat_comes() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    silent, alive = join(membership), join(membership)
    membership.heartbeat(alive.rank, alive.incarnation, clock=5, now=8.0)
    assert membership.expired(9.9) == []
    assert [member.rank for member in membership.expired(10.0)] == [silent.rank]
    assert {member.rank for member in membership.expired(18.0)} == {silent.rank, alive.rank}


def test_a_clock_never_runs_backwards() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    member = join(membership)
    membership.heartbeat(0, member.incarnation, clock=5, now=1.0)
    membership.heartbeat(0, member.incarnation, clock=3, now=2.0)
    assert membership.members[0].clock == 5


def test_training_starts_when_all_declared_workers_have_joined_and_a_death_does_not_undo_it() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    assert not membership.started
    first = join(membership)
    assert not membership.started
    join(membership)
    assert membership.started
    membership.leave(first.rank, first.incarnation)
    assert membership.started


def test_the_same_worker_joining_twice_is_not_two_workers() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    join(membership, 0)
    join(membership, 0)
    assert not membership.started


def test_an_elastic_job_starts_with_whoever_is_there() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    join(membership)
    assert membership.started


def test_a_repeated_join_gets_the_place_that_was_given_already() -> None:
    membership = Membership(world_size=2, lease=10.0)
    first = Member(0, membership.next_incarnation(), expires=10.0, attempt=77)
    membership.join(first)
    membership.join(Member(1, membership.next_incarnation(), expires=10.0))
    assert membership.seated(77, now=4.0) == replace(first, expires=14.0, heard=4.0), "and its lease begins anew"
    assert membership.seated(78, now=4.0) is None
    assert membership.seated(0, now=4.0) is None, "no number is nobody's"
    membership.leave(0, first.incarnation)
    assert membership.seated(77, now=4.0) is None


def test_after_it_was_set_back_a_job_starts_with_those_who_came_back_in_time() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    join(membership)
    join(membership)
    membership.set_back(now=100.0)
    assert not membership.started
    join(membership, 0)
    assert membership.give_up(now=105.0) == []
    assert not membership.started
    assert membership.give_up(now=110.0) == [1]
    assert membership.started


def test_if_nobody_came_back_in_time_the_rest_is_waited_for_from_the_first_one_on() -> None:
    """Nobody was kept waiting till then; and nobody waits for ever for one that is dead for good."""
    membership = Membership(world_size=3, lease=LEASE)
    for _ in range(3):
        join(membership)
    membership.set_back(now=100.0)
    assert membership.give_up(now=500.0) == []
    assert not membership.started
    join(membership, 0, now=600.0)
    assert not membership.started
    join(membership, 1, now=605.0)
    assert membership.give_up(now=609.0) == []
    assert membership.give_up(now=610.0) == [2]
    assert membership.started


def test_an_elastic_job_whose_workers_were_all_late_waits_for_the_rest_too() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    join(membership)
    join(membership)
    membership.set_back(now=100.0)
    assert membership.give_up(now=110.0) == []
    assert membership.claim(None) == 2, "their ranks are kept for them"
    join(membership, 1, now=200.0)
    assert not membership.started
    join(membership, 0, now=201.0)
    assert membership.started
