"""A launcher reports that a process has ended: the coordinator acts at once, and only on the process that is meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ps_protocol.errors import InvalidRequest, TryLater, UnknownWorker
from ps_protocol.messages.workers import JoinRequest
from ps_server.core.membership import LiveWorker, Membership, NamedProcess
from tests.tools.one_process import OneProcess, join_all, train

PROCESS = NamedProcess("launch", "host", 7)
REQUEST = JoinRequest(pid=7, host="host", launch="launch")


def member_of(membership: Membership, rank: int, now: float = 0.0, **changes: object) -> LiveWorker:
    """Makes a worker of PROCESS, with changes, live."""
    made = LiveWorker(rank, membership.next_incarnation(), now + membership.lease, pid=7, host="host", launch="launch")
    membership.join(replace(made, **changes))  # type: ignore[arg-type]
    return membership.workers[rank]


@pytest.mark.parametrize(
    ("other", "is_meant"),
    [
        ({}, True),
        ({"pid": 8}, False),
        ({"host": "another"}, False),
        ({"launch": "another"}, False),
        ({"launch": ""}, False),
    ],
    ids=str,
)
def test_a_report_is_about_one_process(other: dict[str, object], is_meant: bool) -> None:
    membership = Membership(world_size=2, lease=100.0)
    member = member_of(membership, 0, **other)
    assert membership.ended(PROCESS, 0.0) == ([member] if is_meant else [])


def test_a_report_about_an_older_worker_leaves_the_newer_one_of_the_same_process() -> None:
    """In containers one process has the number of the one before."""
    membership = Membership(world_size=1, lease=100.0)
    older = member_of(membership, 0)
    newer = member_of(membership, 0)
    assert membership.ended(replace(PROCESS, incarnation=older.incarnation), 0.0) == []
    assert membership.ended(replace(PROCESS, incarnation=newer.incarnation), 0.0) == [newer]


def test_nothing_waits_for_a_reported_worker_to_come_back_after_a_rollback() -> None:
    membership = Membership(world_size=2, lease=100.0)
    member_of(membership, 0)
    member_of(membership, 1, pid=8)
    membership.rollback(0.0)
    member_of(membership, 1, pid=8)
    assert membership.stop_waiting(1.0) == []
    assert membership.ended(PROCESS, 1.0) == []
    assert membership.stop_waiting(1.0) == [0]
    assert membership.started


def test_the_others_go_on_at_once_when_a_workers_end_is_reported(cluster: OneProcess) -> None:
    each = join_all(cluster, "sync")
    train(each)
    job, now = cluster.coordinator.job("job"), cluster.clock.seconds
    ended = job.workers.all()[1]
    meant = NamedProcess(ended.launch or "launch", ended.host, ended.pid)
    assert job.expire(meant) == [], "a worker whose launch is not known is not meant"
    each[1].join(REQUEST)
    assert job.expire(replace(PROCESS, pid=8)) == []
    assert job.expire(PROCESS) == [1]
    assert job.expire(PROCESS) == [], "two reports are one"
    assert [member.rank for member in job.workers.all()] == [0]
    assert cluster.clock.seconds == now, "no lease has run out"
    with pytest.raises(UnknownWorker):
        each[1].push()
    before = each[0].pull()
    assert torch.equal(train(each[:1]), before + 1.0), "no contribution of the other is waited for"


def test_a_late_report_leaves_the_process_that_has_taken_the_place(cluster: OneProcess) -> None:
    each = join_all(cluster, "sync")
    job = cluster.coordinator.job("job")
    each[1].join(REQUEST)
    each[1].join(replace(REQUEST, pid=8))
    assert job.expire(PROCESS) == []
    assert [member.pid for member in job.workers.all()][1] == 8


# -- shards ----------------------------------------------------------------------------------------------------------


def another(cluster: OneProcess, index: int) -> tuple[str, int]:
    """Has another process, at an address of its own, ask for a shard's index; its address and number."""
    cluster.start_process(index)
    return cluster.address_of(index), cluster.process_of(index)


def test_another_process_takes_a_shards_index_at_once_when_its_end_is_reported(cluster: OneProcess) -> None:
    directory, before, now = cluster.coordinator.shard_directory, cluster.process_of(1), cluster.clock.seconds
    address, process = another(cluster, 1)
    with pytest.raises(TryLater, match="shard 1 is already served by"):
        directory.register(1, address, "", 1, process)
    assert not directory.report_end(1, process), "it is not the shard yet"
    assert not directory.report_end(0, before)
    with pytest.raises(TryLater, match="shard 1 is already served by"):
        directory.register(1, address, "", 1, process)
    assert directory.report_end(1, before)
    directory.register(1, address, "", 1, process)
    assert cluster.coordinator.shards()[1].process == process
    assert not directory.report_end(1, before), "a late report changes nothing"
    assert cluster.clock.seconds == now, "no silence was waited for"


def test_a_process_that_was_reported_by_mistake_stays_the_shard(cluster: OneProcess) -> None:
    directory, process = cluster.coordinator.shard_directory, cluster.process_of(1)
    address = cluster.address_of(1)
    assert directory.report_end(1, process)
    directory.register(1, address, "", 1, process)
    other_address, other = another(cluster, 1)
    with pytest.raises(TryLater, match="shard 1 is already served by"):
        directory.register(1, other_address, "", 1, other)


def test_a_report_of_a_shard_that_there_is_not_is_refused(cluster: OneProcess) -> None:
    with pytest.raises(InvalidRequest, match="shard index must be below 2, got 2"):
        cluster.coordinator.shard_directory.report_end(2, 1)
