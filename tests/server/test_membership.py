"""Who takes part in a job and until when; the time is whatever the caller says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.errors import Fenced, InvalidRequest, UnknownWorker
from ps_server.core.membership import JoinRequest, Member, Membership, Rivals

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
    assert membership.repeated(77, now=4.0) == replace(first, expires=14.0), "and its lease begins anew"
    assert membership.repeated(78, now=4.0) is None
    assert membership.repeated(0, now=4.0) is None, "no number is nobody's"
    membership.leave(0, first.incarnation)
    assert membership.repeated(77, now=4.0) is None


def test_after_a_rollback_a_job_starts_with_those_who_came_back_in_time() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    join(membership)
    join(membership)
    membership.rollback(now=100.0)
    assert not membership.started
    join(membership, 0)
    assert membership.stop_waiting(now=105.0) == []
    assert not membership.started
    assert membership.stop_waiting(now=110.0) == [1]
    assert membership.started


def test_if_nobody_came_back_in_time_the_rest_is_waited_for_from_the_first_one_on() -> None:
    """Nobody was kept waiting till then; and nobody waits for ever for one that is dead for good."""
    membership = Membership(world_size=3, lease=LEASE)
    for _ in range(3):
        join(membership)
    membership.rollback(now=100.0)
    assert membership.stop_waiting(now=500.0) == []
    assert not membership.started
    join(membership, 0, now=600.0)
    assert not membership.started
    join(membership, 1, now=605.0)
    assert membership.stop_waiting(now=609.0) == []
    assert membership.stop_waiting(now=610.0) == [2]
    assert membership.started


def test_an_elastic_job_whose_workers_were_all_late_waits_for_the_rest_too() -> None:
    membership = Membership(world_size=0, lease=LEASE)
    join(membership)
    join(membership)
    membership.rollback(now=100.0)
    assert membership.stop_waiting(now=110.0) == []
    assert membership.claim(None) == 2, "their ranks are kept for them"
    join(membership, 1, now=200.0)
    assert not membership.started
    join(membership, 0, now=201.0)
    assert membership.started


# -- launches --------------------------------------------------------------------------------------------------------


def launched(membership: Membership, launch: str, rank: int, now: float = 0.0, **more: float) -> Member:
    """A member of a launch, that has just joined."""
    incarnation = membership.next_incarnation()
    membership.join(Member(rank, incarnation, now + LEASE, launch=launch, **more))  # type: ignore[arg-type]
    return membership.members[rank]


def in_the_way(rivals: Rivals | None) -> list[int]:
    return [] if rivals is None else [member.rank for member in rivals.members]


def test_a_rank_that_another_launch_holds_may_not_be_taken_and_any_other_may() -> None:
    membership = Membership(world_size=4, lease=LEASE)
    launched(membership, "a", 0)
    launched(membership, "", 2)

    def rivals(rank: int, **newcomer: object) -> list[int]:
        return in_the_way(membership.rivals(rank, JoinRequest(**newcomer), now=1.0))  # type: ignore[arg-type]

    assert rivals(0, launch="b") == [0]
    assert rivals(1, launch="b") == [], "it is free"
    assert rivals(0, launch="a") == [], "its own launch starts it again"
    assert rivals(0) == [], "a client that knows of no launches fences, as ever"
    assert rivals(2, launch="b") == [], "and so is one fenced"
    assert rivals(0, launch="b", take_over=True) == []
    assert rivals(0, launch="b", previous=7) == [], "one that comes back is known by its incarnation"
    assert rivals(1, launch="b", launch_ranks=range(4)) == [0], "the launch is refused as a whole"
    assert rivals(1, launch="b", launch_ranks=range(1, 4)) == []
    assert rivals(3, launch="b", launch_ranks=range(2**32 - 1)) == [0], "whatever a client says takes no time"


def test_who_holds_a_rank_counts_as_live_once_it_was_heard_while_the_newcomer_waited() -> None:
    membership = Membership(world_size=1, lease=LEASE)
    member = launched(membership, "a", 0)
    membership.heartbeat(0, member.incarnation, clock=1, now=4.0)

    def rivals(now: float, waited: float) -> Rivals | None:
        return membership.rivals(0, JoinRequest(launch="b", waited=waited), now)

    found = rivals(5.0, 0.0)
    assert found is not None
    assert not found.live, "it may have died since"
    assert found.seconds == 9.0, "or is retired then"
    assert not rivals(6.0, 1.0).live  # type: ignore[union-attr]
    membership.heartbeat(0, member.incarnation, clock=1, now=6.5)
    assert not rivals(7.0, 0.6).live, "it may have lain in a queue"  # type: ignore[union-attr]
    assert rivals(7.0, 2.0).live  # type: ignore[union-attr]
    assert not rivals(7.0, 0.0).live, "for another newcomer that is old news"  # type: ignore[union-attr]


def test_one_live_worker_is_enough_to_keep_a_launch_out() -> None:
    membership = Membership(world_size=2, lease=LEASE)
    silent, alive = (launched(membership, "a", rank) for rank in range(2))
    membership.heartbeat(1, alive.incarnation, clock=1, now=3.0)
    found = membership.rivals(0, JoinRequest(launch="b", waited=2.0, launch_ranks=range(2)), now=4.0)
    assert in_the_way(found) == [silent.rank, alive.rank]
    assert found is not None
    assert found.live


def test_a_launch_keeps_what_its_worker_was_and_one_that_takes_over_knows_from_which() -> None:
    membership = Membership(world_size=1, lease=LEASE)
    launched(membership, "a", 0, since=100.0)
    first = launched(membership, "a", 0, since=200.0)
    assert (first.since, first.replaced) == (100.0, ())
    second = launched(membership, "b", 0, since=300.0)
    assert (second.since, second.replaced) == (300.0, (("a", first.incarnation),))
    with pytest.raises(Fenced, match="another launch took over"):
        membership.heartbeat(0, first.incarnation, clock=1, now=1.0)
    third = launched(membership, "b", 0)
    assert third.replaced == second.replaced
    with pytest.raises(Fenced) as fenced:
        membership.heartbeat(0, second.incarnation, clock=1, now=1.0)
    assert "another launch" not in str(fenced.value), "its own launch has started it again"


def test_a_launch_that_was_taken_over_does_not_take_over_in_turn() -> None:
    membership = Membership(world_size=1, lease=LEASE)
    launched(membership, "a", 0)
    launched(membership, "b", 0)
    for launch, kept_out in (("a", [0]), ("b", []), ("c", [])):
        newcomer = JoinRequest(launch=launch, take_over=True)
        assert in_the_way(membership.rivals(0, newcomer, now=1.0)) == kept_out, launch


def test_while_a_job_is_rolled_back_its_ranks_are_kept_for_the_launch_that_had_them() -> None:
    membership = Membership(world_size=1, lease=LEASE)
    launched(membership, "a", 0)
    membership.rollback(now=5.0)
    newcomer = JoinRequest(launch="b", waited=20.0)
    found = membership.rivals(0, newcomer, now=6.0)
    assert found is not None
    assert not found.live
    assert membership.rivals(0, JoinRequest(launch="a"), now=6.0) is None
    assert membership.rivals(0, newcomer, now=5.0 + LEASE) is None, "it did not come back"
    member = launched(membership, "a", 0, now=7.0)
    found = membership.rivals(0, newcomer, now=8.0)
    assert found is not None
    assert not found.live, "it may have asked before it died"
    membership.heartbeat(0, member.incarnation, clock=1, now=8.5)
    found = membership.rivals(0, newcomer, now=9.0)
    assert found is not None
    assert found.live
