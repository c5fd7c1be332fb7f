"""Jobs of one name that were registered at different times are different runs: none is joined, mixed or rolled back to
by a worker or a server of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import InvalidRequest, NotFound, RunEnded, TryLater, VersionMismatch
from ps_protocol.versions import (
    VERSION,
    check_coordinator_run,
    check_server_version,
    check_shard_version,
    check_worker_version,
)
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from tests.tools.one_process import DirectShard, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

CELLS = 64
SPEC = vector_job("job", "async", CELLS, 0)


def started(cluster: OneProcess, rank: int = 0) -> DirectWorker:
    worker = DirectWorker(cluster, SPEC, rank)
    if rank == 0:
        worker.initialise()
    return worker


def steps(worker: DirectWorker, count: int) -> torch.Tensor:
    for _ in range(count):
        worker.push()
    return worker.pull()


def test_a_new_run_does_not_find_the_weights_of_the_old_one_on_a_shard(cluster: OneProcess) -> None:
    """The coordinator died, and its successor knows no job; the shards still hold what there was."""
    old = started(cluster)
    assert torch.equal(steps(old, 7), torch.full((CELLS,), 7.0))
    cluster.start_coordinator(None)
    new = started(cluster)
    assert new.run > old.run
    assert (new.clock, new.pull().tolist()) == (0, [0.0] * CELLS)
    assert torch.equal(steps(new, 1), torch.ones(CELLS))
    with pytest.raises(RunEnded, match=f"run {old.run} of job 'job' has ended: run {new.run} has"):
        old.push()


def test_a_run_is_later_than_the_one_before_it_though_the_clock_went_back(cluster: OneProcess) -> None:
    old = started(cluster)
    cluster.clock.seconds -= 500
    cluster.start_coordinator(None)
    new = started(cluster)
    assert new.run > old.run
    assert new.pull().tolist() == [0.0] * CELLS


def test_a_job_is_not_made_where_a_process_serves_that_has_not_called_in(cluster: OneProcess) -> None:
    """A shard was started anew at its address. When it called in, its part of the job would count as lost."""
    known = cluster.coordinator.shards()[1].api
    assert isinstance(known, DirectShard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "process", lambda: cluster.process_of(1) + 1)
        with pytest.raises(TryLater, match="shard 1 was started anew, and has not called in yet"):
            cluster.coordinator.register_job(SPEC)
    assert (cluster.coordinator.jobs(), cluster.shards[0].statistics().jobs) == ({}, {})
    assert torch.equal(steps(started(cluster), 1), torch.ones(CELLS))


def test_a_shard_that_missed_the_end_of_a_run_takes_the_next_one(cluster: OneProcess) -> None:
    """`ps-server end` while a shard was cut off."""
    old = started(cluster)
    steps(old, 5)
    cluster.shards[1].drop_job = lambda *_: None  # type: ignore[method-assign]  # the call does not reach it
    cluster.coordinator.job("job").end()
    assert cluster.shards[1].run_of("job") == old.run
    new = started(cluster)
    assert (new.clock, new.pull().tolist()) == (0, [0.0] * CELLS)


def test_a_worker_of_an_ended_run_joins_no_other_whatever_its_incarnation(cluster: OneProcess) -> None:
    """It slept while its job ended and another one of the name began, in which more workers have come and gone."""
    old = started(cluster)
    steps(old, 3)
    cluster.coordinator.job("job").end()
    new = started(cluster)
    for _ in range(4):
        other = started(cluster, 1)
        other.leave()
    assert new.place.worker.incarnation <= old.place.worker.incarnation < other.place.worker.incarnation
    before = steps(new, 1)
    member = old.place.worker
    job = cluster.coordinator
    for call in (
        old.rejoin,
        old.push,
        old.pull,
        old.save_state,
        lambda: job.job("job", old.run).workers.heartbeat(0, member.incarnation, 3, member.key),
    ):
        with pytest.raises(RunEnded):
            call()
    assert old.leave(), "its run is over"
    assert torch.equal(new.pull(), before)
    assert [worker.rank for worker in job.job("job").workers.all()] == [0]


def test_calls_that_come_late_change_nothing_of_a_later_run() -> None:
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads())
    buckets = [0, 1, 2, 3]
    early, late = f"{1:016x}", f"{2:016x}"
    shard.create_job(SPEC, buckets, late)
    shard.add_worker("job", 0, 1, 0, run=late)
    with pytest.raises(RunEnded):
        shard.create_job(SPEC, buckets, early)
    with pytest.raises(RunEnded):
        shard.add_worker("job", 1, 9, None, run=early)
    with pytest.raises(RunEnded):
        shard.remove_worker("job", 0, 9, run=early)
    shard.drop_job("job", early)
    assert shard.run_of("job") == late
    assert list(shard.jobs()["job"].partition.roster) == [0]
    with pytest.raises(NotFound, match="does not know run"):
        shard.add_worker("job", 0, 1, 0, run=f"{3:016x}")
    shard.drop_job("job", late)
    assert shard.jobs() == {}


@pytest.mark.parametrize("buckets", [[0, 39], [1, 1]])
def test_a_later_run_with_buckets_that_cannot_be_leaves_the_one_that_is_here(buckets: list[int]) -> None:
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads())
    shard.create_job(SPEC, [0, 1, 2, 3], f"{1:016x}")
    with pytest.raises(InvalidRequest, match="expected buckets below 4, each once"):
        shard.create_job(SPEC, buckets, f"{2:016x}")
    assert shard.run_of("job") == f"{1:016x}"


def test_a_restored_job_is_a_new_run_that_may_go_back_to_where_it_began(cluster: OneProcess, tmp_path: Path) -> None:
    old = started(cluster)
    steps(old, 2)
    cluster.while_waiting()
    made = cluster.coordinator.job("job").checkpoint()
    steps(old, 3)
    cluster.coordinator.job("job").end()
    cluster.start_coordinator(CheckpointPolicy(tmp_path, restore=True))
    new = DirectWorker(cluster, SPEC, 0)
    assert new.run > old.run
    assert torch.equal(new.pull(), torch.full((CELLS,), 2.0))
    steps(new, 4)
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    assert cluster.coordinator.job("job").placed.continues == (old.run, made.name)
    new.rejoin()
    assert set(new.pull().tolist()) == {2.0, 6.0}, "the shard that was lost is back at the checkpoint"
    with pytest.raises(RunEnded):
        old.rejoin()


def test_versions_that_do_not_fit_are_refused_in_words() -> None:
    for version in range(VERSION + 1):
        check_worker_version(version)  # servers are upgraded first
    with pytest.raises(VersionMismatch, match=f"speaks version {VERSION + 1}: upgrade"):
        check_worker_version(VERSION + 1)
    check_shard_version(VERSION)
    for version in (0, VERSION + 1):
        with pytest.raises(VersionMismatch, match="all servers of a cluster need one version"):
            check_shard_version(version)
    check_server_version(VERSION + 1)
    with pytest.raises(VersionMismatch, match="upgrade the servers"):
        check_server_version(0)
    with pytest.raises(VersionMismatch, match="makes a job without a run"):
        check_coordinator_run("")
    for run in ("1", "0" * 15 + "G", "0" * 17, "run"):
        with pytest.raises(InvalidRequest, match="a run is 16 hexadecimal digits"):
            check_coordinator_run(run)
