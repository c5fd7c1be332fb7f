"""Groups of processes as servers see them: one lease, one state, one way out of the job."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.errors import Forbidden, InvalidRequest, LimitExceeded
from ps_protocol.messages.workers import JoinRequest, group_state, member_states
from ps_protocol.v1 import membership_pb2, types_pb2
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.worker_states import WorkerStates
from ps_server.core.membership import LiveWorker, Membership
from ps_server.rpc.worker_services import MembershipService
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import vector_job

LEASE = 10.0


def group(now: float = 0.0) -> Membership:
    """A job in which a group of two has joined as rank 0."""
    membership = Membership(1, LEASE, group_size=2)
    membership.join(LiveWorker(0, 1, now + LEASE))
    return membership


def test_the_lease_of_a_group_is_that_of_its_most_silent_member() -> None:
    membership = group()
    membership.heartbeat(0, 1, 0, now=6.0, of=0)
    assert membership.workers[0].expires == LEASE, "the other one has said nothing yet"
    membership.heartbeat(0, 1, 0, now=7.0, of=1)
    assert membership.workers[0].expires == 6.0 + LEASE
    membership.heartbeat(0, 1, 3, now=12.0, of=0)
    assert membership.workers[0].expires == 7.0 + LEASE
    assert [member.rank for member in membership.take_silent(17.0)] == [0]


def test_what_members_tell_of_their_processes_is_kept_until_the_group_joins_again() -> None:
    """Workers of an earlier version tell nothing."""
    membership = group()
    membership.heartbeat(0, 1, 0, now=6.0, of=0)
    membership.heartbeat(0, 1, 0, now=6.0, of=1, process=("node-7", 4711))
    membership.heartbeat(0, 1, 0, now=7.0, of=1)
    assert membership.workers[0].processes == {1: ("node-7", 4711)}
    membership.join(LiveWorker(0, 2, 5.0 + LEASE))
    assert membership.workers[0].processes == {}


def test_a_group_that_joins_again_is_heard_anew() -> None:
    membership = group()
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=1.0, of=of)
    membership.join(LiveWorker(0, 2, 5.0 + LEASE))
    membership.heartbeat(0, 2, 0, now=9.0, of=0)
    assert membership.workers[0].expires == 5.0 + LEASE


def test_a_group_stays_until_each_member_is_done_and_those_that_are_need_not_be_heard() -> None:
    membership = group()
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=1.0, of=of)
    assert not membership.member_leaves(0, 1)
    assert not membership.member_leaves(0, 1), "the same one again"
    membership.heartbeat(0, 1, 0, now=30.0, of=0)
    assert membership.workers[0].expires == 30.0 + LEASE
    assert membership.member_leaves(0, 0)
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=40.0, of=of)
    assert membership.workers[0].expires == 30.0 + LEASE, "all are done: nobody keeps it"


def test_a_heartbeat_shortens_no_lease_that_was_prolonged() -> None:
    membership = group()
    for of in (0, 1):
        membership.heartbeat(0, 1, 0, now=1.0, of=of)
    membership.postpone(5.0, now=8.0)
    assert membership.workers[0].expires == 16.0
    membership.heartbeat(0, 1, 0, now=9.0, of=0)
    assert membership.workers[0].expires == 16.0
    membership.heartbeat(0, 1, 0, now=9.5, of=1)
    assert membership.workers[0].expires == 9.0 + LEASE


def test_a_group_is_heard_when_its_most_silent_member_is() -> None:
    membership = group()
    membership.heartbeat(0, 1, 0, now=6.0, of=0)
    assert membership.workers[0].heard == -math.inf
    membership.heartbeat(0, 1, 0, now=7.0, of=1)
    assert membership.workers[0].heard == 6.0
    membership.heartbeat(0, 1, 0, now=12.0, of=0)
    assert membership.workers[0].heard == 6.0, "the other one may be dead"


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
    assert states.member_left(0, 1, (1, bytes(8))) is None
    states.leave(0, None)
    WorkerStates(room).save(0, 1, bytes(10))


def test_the_members_states_together_are_one_workers_state() -> None:
    """They come back in one message, with the answer to a join."""
    room = SharedRoom(100)
    states = WorkerStates(room, group_size=2, state_bytes=10)
    states.save(0, 1, bytes(6), of=0)
    with pytest.raises(LimitExceeded, match=r"max-state-bytes is 10, got states of 12 bytes of members of one group"):
        states.save(0, 1, bytes(6), of=1)
    states.save(0, 2, bytes(6), of=1)
    states.save(0, 2, bytes(4), of=0)
    assert set(states.at(2)) == {0}
    states.member_left(0, 0, (3, bytes(6)))
    with pytest.raises(LimitExceeded):
        states.member_left(0, 1, (3, bytes(6)))
    states.forget()
    WorkerStates(room).save(0, 1, bytes(100))


Hold = tuple[CoordinatedJob, LiveWorker, WorkerStates]


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Cluster:
    return make_cluster(checkpoint_dir=tmp_path / "checkpoints")


@pytest.fixture
def live(cluster: Cluster, job: str) -> Hold:
    """A job of two groups of two, with the first live worker and the states that its checkpoints hold."""
    made, _ = cluster.coordinator.register_job(replace(vector_job(job, "sync", 16, 2), group_size=2))
    member = made.join(0, JoinRequest()).worker
    made.join(1, JoinRequest())
    assert made.checkpoints is not None
    return made, member, made.checkpoints._states


@pytest.mark.parametrize("done", [True, False])
def test_only_a_live_worker_leaves_states_of_its_group(live: Hold, done: bool) -> None:
    made, member, states = live
    made.leave(0, member.incarnation, member.key, (5, b"own"), done=True, of=0)
    held = states._room.held
    with pytest.raises(Forbidden):
        made.leave(0, member.incarnation, b"no key", (5, b"a stranger's"), done, of=1)
    for rank, incarnation in ((0, member.incarnation + 9), (1, 7), (7, 3)):  # never joined, or fenced
        assert not made.leave(rank, incarnation, b"no key", (5, b"a stranger's"), done, of=1)
    assert states._room.held == held
    made.leave(0, member.incarnation, member.key, (5, b"other"), done=True, of=1)
    assert states.of(0) == (5, group_state([b"own", b"other"]))


def test_a_leave_of_a_fenced_group_leaves_nothing(live: Hold) -> None:
    made, member, states = live
    made.join(0, JoinRequest(waited=True))
    for of in (0, 1, 1):
        made.leave(0, member.incarnation, member.key, (5, bytes(100)), done=True, of=of)
    assert states._room.held == 0
    assert len(made.workers.all()) == 2


def test_the_first_member_speaks_for_its_group(cluster: Cluster, live: Hold) -> None:
    """Whichever leaves last, what the job keeps of figures and of the script is the first member's."""
    made, member, _ = live
    with ThreadPoolExecutor(1) as senders:
        service = MembershipService(cluster.coordinator, senders)
        for of in (0, 1):
            worker = types_pb2.WorkerIdentity(
                job=made.spec.name, rank=0, incarnation=member.incarnation, lease_key=member.key, member=of
            )
            script = {"clock": 3 + of, "content": b"of %d" % of}
            told = membership_pb2.SaveWorkerStateRequest(worker=worker, script=script, script_request=1)
            service.SaveWorkerState(told, None)
            leaving = membership_pb2.LeaveRequest(
                worker=worker, done=True, script=script, figures={"step_count": 7 + of}
            )
            service.Leave(leaving, None)
    assert made.figures.of_done()[0].steps == 7
    assert made.script._report == (3, b"of 0")


def test_a_heartbeat_tells_where_a_member_runs(cluster: Cluster, live: Hold) -> None:
    made, member, _ = live
    with ThreadPoolExecutor(1) as senders:
        service = MembershipService(cluster.coordinator, senders)
        worker = types_pb2.WorkerIdentity(
            job=made.spec.name, rank=0, incarnation=member.incarnation, lease_key=member.key, member=1
        )
        with pytest.raises(InvalidRequest, match="a host's name"):
            service._heartbeat(membership_pb2.HeartbeatRequest(worker=worker, host="node 7"), None)
        assert service._heartbeat(membership_pb2.HeartbeatRequest(worker=worker), None).live_count == 2
        assert made.workers.all()[0].processes == {}
        service._heartbeat(membership_pb2.HeartbeatRequest(worker=worker, host="node-7", pid=4711), None)
    assert made.workers.all()[0].processes == {1: ("node-7", 4711)}
