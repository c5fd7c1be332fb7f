"""Groups of processes as servers see them: one lease, one state, one way out of the job."""

from __future__ import annotations

import pytest

from ps_protocol.errors import LimitExceeded
from ps_protocol.messages.workers import group_state, member_states
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.worker_states import WorkerStates
from ps_server.core.membership import Member, Membership

LEASE = 10.0


def group(now: float = 0.0) -> Membership:
    """A job in which a group of two has joined as rank 0."""
    membership = Membership(1, LEASE, group_size=2)
    membership.join(Member(0, 1, now + LEASE))
    return membership


def test_the_lease_of_a_group_is_that_of_its_most_silent_member() -> None:
    membership = group()
    membership.heartbeat(0, 1, 0, now=6.0, of=0)
    assert membership.members[0].expires == LEASE, "the other one has said nothing yet"
    membership.heartbeat(0, 1, 0, now=7.0, of=1)
    assert membership.members[0].expires == 6.0 + LEASE
    membership.heartbeat(0, 1, 3, now=12.0, of=0)
    assert membership.members[0].expires == 7.0 + LEASE
    assert [member.rank for member in membership.take_silent(17.0)] == [0]


def test_a_group_that_joins_again_is_heard_anew() -> None:
    membership = group()
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=1.0, of=of)
    membership.join(Member(0, 2, 5.0 + LEASE))
    membership.heartbeat(0, 2, 0, now=9.0, of=0)
    assert membership.members[0].expires == 5.0 + LEASE


def test_a_group_stays_until_each_member_is_done_and_those_that_are_need_not_be_heard() -> None:
    membership = group()
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=1.0, of=of)
    assert not membership.member_leaves(0, 1)
    assert not membership.member_leaves(0, 1), "the same one again"
    membership.heartbeat(0, 1, 0, now=30.0, of=0)
    assert membership.members[0].expires == 30.0 + LEASE
    assert membership.member_leaves(0, 0)


def test_the_state_of_a_group_counts_once_all_members_have_sent_theirs_of_one_clock() -> None:
    states = WorkerStates(SharedRoom(1000), group_size=2)
    states.save(3, 4, b"first", of=0)
    states.save(3, 5, b"second", of=1)
    assert states.at(None) == {}
    states.save(3, 5, b"first again", of=0)
    assert states.at(5) == {3: (5, group_state([b"first again", b"second"]))}
    assert member_states(states.at(5)[3][1]) == (b"first again", b"second")
    assert states.member_left(3, 1, (6, b"two")) is None
    assert states.member_left(3, 0, (6, b"one")) == (6, group_state([b"one", b"two"]))
    states.kept = {0: (9, group_state([b"zero", b"other"]))}
    assert states.newest(-1) == (9, b"zero"), "of a group, that of its first member"


def test_what_members_have_sent_is_counted_and_given_back() -> None:
    room = SharedRoom(10)
    states = WorkerStates(room, group_size=2)
    states.save(0, 1, bytes(8), of=1)
    with pytest.raises(LimitExceeded):
        states.save(0, 1, bytes(8), of=0)
    states.joined(0)
    WorkerStates(room).save(0, 1, bytes(10))
