"""Who takes part in a job and until when; the time is whatever the caller says it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from ps_protocol.errors import Fenced, InvalidRequest, UnknownWorker
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.job_workers import Roster
from ps_server.coordinator.timing import Clock
from ps_server.coordinator.watchers import Watchers
from ps_server.core.membership import LiveWorker, Membership, Rivals

LEASE = 10.0


def job(world_size: int, joined: int = 0) -> Membership:
    """A job of so many declared workers, of which some have joined at time 0."""
    membership = Membership(world_size, LEASE)
    for _ in range(joined):
        join(membership)
    return membership


def join(
    membership: Membership,
    rank: int | None = None,
    now: float = 0.0,
    launch_ranks: range = range(0),
    is_back: bool = False,
    **more: object,
) -> LiveWorker:
    member = LiveWorker(membership.claim(rank), membership.next_incarnation(), now + LEASE, **more)  # type: ignore[arg-type]
    membership.join(member, launch_ranks, is_back)
    return membership.workers[member.rank]


def test_a_newcomer_gets_the_rank_it_asks_for_or_the_lowest_free_one() -> None:
    membership = job(world_size=0)
    assert membership.claim(None) == membership.claim(None) == 0, "claiming changes nothing"
    assert [join(membership, rank).rank for rank in (1, None, None, 7, None)] == [1, 0, 2, 7, 3]
    membership.leave(2, membership.workers[2].incarnation)
    assert join(membership).rank == 2


def test_a_rank_beyond_the_declared_world_is_refused() -> None:
    membership = job(world_size=2, joined=2)
    for rank in (2, None):
        with pytest.raises(InvalidRequest, match="rank must be below the job's world_size 2, got 2"):
            membership.claim(rank)


def test_incarnations_rise_across_all_ranks_and_are_never_given_twice() -> None:
    membership = job(world_size=0)
    first = join(membership, 0)
    membership.leave(0, first.incarnation)
    assert [first.incarnation, join(membership, 1).incarnation, join(membership, 0).incarnation] == [1, 2, 3]


def test_a_worker_that_joins_anew_fences_its_older_self() -> None:
    membership = job(world_size=1)
    older, newer = join(membership, 0), join(membership, 0)
    with pytest.raises(Fenced, match=f"incarnation {newer.incarnation} is live"):
        membership.heartbeat(0, older.incarnation, clock=1, now=1.0)
    assert not membership.leave(0, older.incarnation)
    assert membership.workers[0] is newer


def test_a_worker_that_is_newer_than_the_live_one_was_not_replaced_and_joins_again() -> None:
    """The servers have gone back to a state of before it joined: of its rank they know the worker that it followed."""
    membership = job(world_size=1)
    older = join(membership, 0)
    with pytest.raises(UnknownWorker, match="never joined: incarnation 1 is live, the call came from 4") as refused:
        membership.heartbeat(0, 4, clock=7, now=1.0)
    assert not isinstance(refused.value, Fenced)
    assert membership.workers == {0: older}, "it does not count before it has joined again"
    assert membership.claim(0, JoinRequest(pid=2, previous=4)) == 0
    newer = join(membership, 0)
    with pytest.raises(Fenced):
        membership.heartbeat(0, older.incarnation, clock=1, now=1.0)
    membership.heartbeat(0, newer.incarnation, clock=1, now=1.0)


def test_a_worker_that_never_joined_is_unknown() -> None:
    membership = job(world_size=0)
    with pytest.raises(UnknownWorker) as refused:
        membership.heartbeat(3, 1, clock=0, now=0.0)
    assert not isinstance(refused.value, Fenced)
    assert not membership.leave(3, 1)


def test_a_lease_runs_out_unless_a_heartbeat_comes_and_a_clock_never_runs_backwards() -> None:
    membership = job(world_size=0, joined=2)
    for clock in (5, 3):
        membership.heartbeat(1, 2, clock, now=8.0)
    assert membership.workers[1].clock == 5
    expired = {now: [member.rank for member in membership.expired(now)] for now in (9.9, 10.0, 18.0)}
    assert expired == {9.9: [], 10.0: [0], 18.0: [0, 1]}


@pytest.mark.parametrize(
    ("world_size", "ranks", "started"),
    [(2, [], False), (2, [0], False), (2, [0, 0], False), (2, [0, 1], True), (0, [0], True)],
)
def test_training_starts_when_all_declared_workers_have_joined_and_a_death_does_not_undo_it(
    world_size: int, ranks: list[int], started: bool
) -> None:
    membership = job(world_size)
    for rank in ranks:
        last = join(membership, rank)
    assert membership.started is started
    if ranks:
        membership.leave(last.rank, last.incarnation)
    assert membership.started is started


def test_a_repeated_join_gets_the_place_that_was_given_already() -> None:
    membership = job(world_size=2)
    first = join(membership, attempt=77)
    join(membership)
    assert membership.repeated(77, now=4.0) == replace(first, expires=14.0), "and its lease begins anew"
    assert membership.repeated(78, now=4.0) is None
    assert membership.repeated(0, now=4.0) is None, "no number is no worker's"
    membership.leave(0, first.incarnation)
    assert membership.repeated(77, now=4.0) is None


# -- after a rollback ------------------------------------------------------------------------------------------------


def test_after_a_rollback_a_job_starts_with_those_who_came_back_in_time() -> None:
    membership = job(world_size=2, joined=2)
    membership.rollback(now=100.0)
    join(membership, 0, 101.0, is_back=True)
    assert membership.stop_waiting(now=105.0) == []
    assert not membership.started
    assert membership.stop_waiting(now=110.0) == [1]
    assert membership.started


def test_if_no_worker_came_back_in_time_the_rest_is_waited_for_from_the_first_one_on() -> None:
    """No worker was kept waiting till then, and none waits for ever for one that is dead for good."""
    membership = job(world_size=3, joined=3)
    membership.rollback(now=100.0)
    assert membership.stop_waiting(now=500.0) == []
    for rank, now in ((0, 600.0), (1, 605.0)):
        join(membership, rank, now, is_back=True)
        assert not membership.started
    assert membership.stop_waiting(now=609.0) == []
    assert membership.stop_waiting(now=610.0) == [2]
    assert membership.started


def test_an_elastic_job_whose_workers_were_all_late_waits_for_the_rest_too() -> None:
    membership = job(world_size=0, joined=2)
    membership.rollback(now=100.0)
    assert membership.stop_waiting(now=110.0) == []
    assert membership.claim(None) == 2, "their ranks are kept for them"
    join(membership, 1, now=200.0)
    assert not membership.started
    join(membership, 0, now=201.0)
    assert membership.started


def test_a_worker_that_leaves_instead_of_coming_back_is_not_waited_for() -> None:
    membership = job(world_size=3, joined=3)
    before = [membership.workers[rank].incarnation for rank in range(3)]
    membership.rollback(now=100.0)
    join(membership, 0, now=100.0)
    assert not membership.leave(0, before[0]), "it has come back since"
    assert not membership.leave(2, before[1])
    assert sorted(membership.rejoining) == [1, 2]
    for rank in (1, 2):
        assert not membership.started
        assert not membership.leave(rank, before[rank]), "it had no place"
    assert membership.started
    assert (sorted(membership.workers), membership.rejoining, membership.away) == ([0], {}, {})


# -- launches --------------------------------------------------------------------------------------------------------


def rivals(membership: Membership, rank: int, now: float, **newcomer: object) -> list[int]:
    """The ranks because of which a newcomer may not join."""
    found = membership.rivals(rank, JoinRequest(**newcomer), now)  # type: ignore[arg-type]
    return [] if found is None else [member.rank for member in found.workers]


@pytest.mark.parametrize(
    ("rank", "newcomer", "in_the_way"),
    [
        pytest.param(0, {"launch": "b"}, [0], id="held by another launch"),
        pytest.param(1, {"launch": "b"}, [], id="free"),
        pytest.param(0, {"launch": "a"}, [], id="its own launch starts it again"),
        pytest.param(0, {}, [], id="a client that knows of no launches fences, as ever"),
        pytest.param(2, {"launch": "b"}, [], id="and so is one fenced"),
        pytest.param(0, {"launch": "b", "take_over": True}, [], id="taken over"),
        pytest.param(0, {"launch": "b", "previous": 7}, [], id="one that comes back is known by its incarnation"),
        pytest.param(1, {"launch": "b", "launch_ranks": range(4)}, [0], id="the launch is refused as a whole"),
        pytest.param(1, {"launch": "b", "launch_ranks": range(1, 4)}, [], id="none of its ranks is held"),
        pytest.param(3, {"launch": "b", "launch_ranks": range(2**32 - 1)}, [0], id="whatever it says takes no time"),
    ],
)
def test_a_rank_that_another_launch_holds_may_not_be_taken_and_any_other_may(
    rank: int, newcomer: dict[str, object], in_the_way: list[int]
) -> None:
    membership = job(world_size=4)
    join(membership, 0, launch="a")
    join(membership, 2)
    assert rivals(membership, rank, 1.0, **newcomer) == in_the_way


def test_a_worker_that_holds_a_rank_counts_as_live_once_it_was_heard_twice_while_the_newcomer_waited() -> None:
    membership = job(world_size=1)
    heard = partial(membership.heartbeat, 0, join(membership, launch="a").incarnation, 1)

    def held(now: float, waited: float) -> Rivals | None:
        return membership.rivals(0, JoinRequest(launch="b", waited=waited), now)

    heard(now=4.0)
    assert not held(5.0, 0.0).live, "it may have died since"
    assert held(5.0, 0.0).seconds == 9.0, "or is retired then"
    assert not held(6.0, 1.0).live
    heard(now=6.5)
    assert not held(7.0, 0.6).live, "it may have lain in a queue"
    assert not held(7.0, 2.0).live, "or the network may have held it back"
    for moment in (7.0, 7.1, 7.2, 7.7):
        heard(now=moment)
        assert not held(8.0, 3.0).live, "and others with it"
    heard(now=9.0)
    assert held(9.5, 4.5).live
    assert not held(9.5, 3.0).live, "for another newcomer the first of both is old news"
    assert not held(9.5, 0.0).live


def test_one_live_worker_is_enough_to_keep_a_launch_out() -> None:
    membership = job(world_size=2)
    _, alive = (join(membership, rank, launch="a") for rank in range(2))
    for moment in (3.0, 5.5):
        membership.heartbeat(1, alive.incarnation, clock=1, now=moment)
    newcomer = JoinRequest(launch="b", waited=4.0, launch_ranks=range(2))
    assert rivals(membership, 0, 6.0, **vars(newcomer)) == [0, 1]
    assert membership.rivals(0, newcomer, now=6.0).live


def test_a_launch_keeps_what_its_worker_was_and_one_that_takes_over_knows_from_which() -> None:
    membership = job(world_size=1)
    join(membership, 0, launch="a", since=100.0)
    first = join(membership, 0, launch="a", since=200.0)
    assert (first.since, first.replaced) == (100.0, ())
    second = join(membership, 0, launch="b", since=300.0)
    assert (second.since, second.replaced) == (300.0, (("a", first.incarnation),))
    with pytest.raises(Fenced, match="another launch took over"):
        membership.heartbeat(0, first.incarnation, clock=1, now=1.0)
    assert join(membership, 0, launch="b").replaced == second.replaced
    with pytest.raises(Fenced) as fenced:
        membership.heartbeat(0, second.incarnation, clock=1, now=1.0)
    assert "another launch" not in str(fenced.value), "its own launch has started it again"


def test_a_launch_that_was_taken_over_does_not_take_over_in_turn() -> None:
    membership = job(world_size=1)
    for launch in ("a", "b"):
        join(membership, 0, launch=launch)
    kept_out = {launch: rivals(membership, 0, 1.0, launch=launch, take_over=True) for launch in "abc"}
    assert kept_out == {"a": [0], "b": [], "c": []}


def test_while_a_job_is_rolled_back_its_ranks_are_kept_for_the_launch_that_had_them() -> None:
    membership = job(world_size=1)
    join(membership, 0, launch="a")
    membership.rollback(now=5.0)
    newcomer = JoinRequest(launch="b", waited=20.0)
    assert not membership.rivals(0, newcomer, now=6.0).live
    assert membership.rivals(0, JoinRequest(launch="a"), now=6.0) is None
    assert membership.rivals(0, newcomer, now=5.0 + LEASE) is None, "it did not come back"
    member = join(membership, 0, now=7.0, launch="a")
    assert not membership.rivals(0, newcomer, now=8.0).live, "it may have asked before it died"
    for moment in (8.5, 11.0):
        membership.heartbeat(0, member.incarnation, clock=1, now=moment)
    assert membership.rivals(0, newcomer, now=11.5).live


@pytest.mark.parametrize("how", ["tell", "end"])
def test_a_watcher_may_stop_when_it_is_told(how: str) -> None:
    """A stream of which the client has gone closes in the thread that tells it."""
    roster: Roster = ([0], 1, True)
    told: list[Roster | None] = []
    watchers = Watchers(lambda: roster, Clock(), lambda *_: False)
    stops: list[Callable[[], None]] = []

    def stopping(now: Roster | None) -> None:
        told.append(now)
        for stop in stops:
            stop()

    stops.append(watchers.add(stopping))
    watchers.add(told.append)
    getattr(watchers, how)()
    getattr(watchers, how)()
    last = roster if how == "tell" else None
    assert told == [roster, roster, last, last, last], "the first is told once more, the second twice"
