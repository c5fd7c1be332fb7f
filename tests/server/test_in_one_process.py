"""A coordinator and two shards in one process: no gRPC, no thread of the coordinator's, and no time but the test's."""

from __future__ import annotations

import threading

import pytest
import torch

from ps_protocol.errors import NotFound, TryLater, UnknownWorker
from ps_protocol.messages.workers import JoinRequest
from tests.tools.one_process import CELLS, OneProcess, join_all, train


def test_workers_join_train_and_leave(cluster: OneProcess) -> None:
    before = {thread.name for thread in threading.enumerate()}
    each = join_all(cluster, "sync")
    assert torch.equal(train(each), torch.ones(CELLS))
    assert torch.equal(train(each), torch.full((CELLS,), 2.0))
    for worker in each:
        member = worker.place.worker
        cluster.coordinator.job("job").workers.heartbeat(worker.rank, member.incarnation, worker.clock, member.key)
    statistics = cluster.coordinator.job("job").statistics()
    assert [(worker.rank, worker.clock) for worker in statistics.workers] == [(0, 2), (1, 2)]
    assert (statistics.started, statistics.buckets, statistics.lost_steps) == (True, 4, 0)
    assert not each[0].leave()
    cluster.while_waiting()
    assert each[1].leave(), "the last one ends the job"
    assert cluster.coordinator.jobs() == {}
    assert all(shard.jobs() == {} for shard in cluster.shards.values())
    with pytest.raises(NotFound):
        cluster.coordinator.join("job", 0, JoinRequest())
    ours = {"leases", "recovery", "rounds", "held-jobs", "state", "checkpoints", "deserted"}
    started = {thread.name.partition("_")[0] for thread in threading.enumerate() if thread.name not in before}
    assert not {name for name in started if name in ours or name.startswith("shard-")}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shard_that_dies_comes_back_from_a_checkpoint(cluster: OneProcess, mode: str) -> None:
    [worker] = join_all(cluster, mode, 1)
    train([worker])
    cluster.while_waiting(lambda: train([worker]))
    manifest = cluster.coordinator.job("job").checkpoint()
    cluster.while_waiting()
    assert sorted(manifest.workers) == [0]
    if mode == "sync":
        assert manifest.versions == (manifest.clock, manifest.clock)
    train([worker])
    before = worker.clock
    cluster.start_shard(1)
    with pytest.raises(TryLater, match="rolled back to a checkpoint"):
        worker.rejoin()
    cluster.coordinator.recover_jobs()
    with pytest.raises(UnknownWorker):
        worker.push()
    worker.clock = before  # the push that was refused was no step
    place = worker.rejoin()
    statistics = cluster.coordinator.job("job").statistics()
    if mode == "sync":
        assert place.state == (manifest.clock, b"state at %d" % manifest.clock)
        assert torch.equal(worker.pull(), torch.full((CELLS,), float(manifest.clock)))
        assert (statistics.restore_count, statistics.redone_steps) == (1, before - manifest.clock)
    else:
        assert worker.pull().max() == before, "the shard that lived keeps what it had"
        assert (statistics.restore_count, statistics.lost_steps) == (0, before - manifest.clocks[0])
    train([worker])
