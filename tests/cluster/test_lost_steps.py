"""What is lost with a shard is counted, whoever comes back; and what belongs to a checkpoint, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import OutOfOrder
from ps_server.core.snapshot import CheckpointFile, SnapshotRequest
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, QUICK, job_of, join_again, make_checkpoint, train

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def cluster(make_cluster: MakeCluster, tmp_path: Path) -> Cluster:
    """Two shards that keep checkpoints."""
    return make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=QUICK)


def lost(cluster: Cluster) -> int:
    [found] = requests.fetch(cluster.address)["jobs"]
    return int(found["lost_step_count"])


def test_of_a_worker_that_joined_after_the_checkpoint_only_its_own_steps_are_lost(cluster: Cluster) -> None:
    spec = vector_job("job", "async", CELLS, 0)
    with RawWorker(cluster.address, spec, 0) as zero:
        zero.initialise()
        train(zero, 50)
        assert make_checkpoint(cluster, zero) == 50
        with RawWorker(cluster.address, spec, 1) as one:
            assert one.clock == 50
            train(zero, 4)
            train(one, 3)
            cluster.start_again(1)
            join_again(zero)
            join_again(one)
            assert lost(cluster) == 4 + 3


def test_a_dead_worker_is_counted_once_however_often_shards_die_after_it(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=QUICK)
    with job_of(cluster, "async", workers=2) as [zero, one]:
        assert make_checkpoint(cluster, zero, one) == 0
        train(one, 3)
        for deaths in range(2):
            cluster.start_again(1)
            join_again(zero)
            if deaths == 0:
                cluster.end_lease(1, "job")  # it died after the shard did: it does not join again
            until(lambda: lost(cluster) > 0, "the count")
            assert lost(cluster) == 3


@pytest.mark.parametrize("goes", ["leaves", "is lost"])
def test_of_a_worker_that_was_gone_before_the_shard_was_the_steps_are_counted_too(
    make_cluster: MakeCluster, tmp_path: Path, goes: str
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=QUICK)
    with job_of(cluster, "async", workers=2) as [zero, one]:
        assert make_checkpoint(cluster, zero, one) == 0
        train(zero, 2)
        train(one, 3)  # of which no heartbeat tells
        if goes == "leaves":
            one.leave()
        else:
            cluster.end_lease(1, "job")

        def gone() -> bool:
            [job] = requests.fetch(cluster.address)["jobs"]
            return [worker["rank"] for worker in job["workers"]] == [0]

        until(gone, "worker 1 being gone")
        for _ in range(2):  # once, however often shards die after it
            cluster.start_again(1)
            join_again(zero)
            assert lost(cluster) == 2 + 3


def test_a_shard_that_held_nothing_has_lost_nothing(cluster: Cluster) -> None:
    with job_of(cluster, "async", cells=16) as [worker]:
        assert worker.shard_of == [0]
        assert make_checkpoint(cluster, worker) == 0
        for _ in range(3):
            worker.step(-torch.ones(16))
        assert torch.equal(worker.pull(), torch.full((16,), 3.0))
        cluster.start_again(1)
        join_again(worker)
        assert torch.equal(worker.pull(), torch.full((16,), 3.0))
        assert lost(cluster) == 0


def test_a_job_with_fewer_buckets_than_shards_has_checkpoints_too(cluster: Cluster, tmp_path: Path) -> None:
    with job_of(cluster, "sync", cells=16) as [worker]:
        for _ in range(2):
            worker.step(-torch.ones(16))
        assert torch.equal(worker.pull(), torch.full((16,), 2.0))
        assert make_checkpoint(cluster, worker) == 2
        store = CheckpointStore(tmp_path)
        assert store.manifest("job", store.names("job")[-1]).versions == (2, 2)
        cluster.start_again(0)
        join_again(worker)
        assert torch.equal(worker.pull(), torch.full((16,), 2.0))


def test_a_late_call_to_begin_a_checkpoint_does_not_take_the_place_of_a_newer_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert CheckpointStore(tmp_path).begin("job", "000007")  # as the coordinator does
    with job_of(cluster, "sync") as [worker]:
        for shard in cluster.shards:
            shard.begin_snapshot(SnapshotRequest("job", "000007", 2))
            shard.begin_snapshot(SnapshotRequest("job", "000007", 2))
            for name, clock in (("000006", 3), ("000007", 3), ("000005", None)):
                with pytest.raises(OutOfOrder, match="checkpoint 000007 was begun already"):
                    shard.begin_snapshot(SnapshotRequest("job", name, clock))
        train(worker, 2)
        for shard in cluster.shards:
            captured = shard.await_snapshot("job", "000007", 10.0)
            assert (captured.extent.version_min, captured.extent.version_max) == (2, 2)


def test_a_checkpoint_that_is_all_written_when_its_job_is_set_back_is_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be of a clock that the job comes to only now, perhaps with other workers."""
    write, given_up = CheckpointStore.write_worker, []

    def write_late(store: CheckpointStore, job: str, name: str, rank: int, state: bytes) -> CheckpointFile:
        if not given_up:
            checkpoints = cluster.coordinator.jobs()["job"].checkpoints
            assert checkpoints is not None
            checkpoints.abandon()
            given_up.append(name)
        return write(store, job, name, rank, state)

    monkeypatch.setattr(CheckpointStore, "write_worker", write_late)
    with job_of(cluster, "sync") as [worker]:
        train(worker, 2)
        assert make_checkpoint(cluster, worker) == 2
        store = CheckpointStore(tmp_path)
        assert given_up[0] not in store.names("job")
        assert store.names("job") == [max(path.name for path in (tmp_path / "job").iterdir())]
        assert torch.equal(worker.pull(), torch.full((CELLS,), 2.0))
