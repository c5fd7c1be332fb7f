"""What is lost with a shard, or with all of them, comes back from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import JobMismatch, NoCheckpoints, NotFound, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_runtime.free_ports import free_port
from ps_server.config import ServerConfig
from ps_server.coordinator.state_file import SavedJob, StateFile
from ps_server.core.statistics import RecoveryStatistics
from ps_server.ops import requests, status_text
from ps_server.server import Server
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cases import cases
from tests.tools.cluster import START_SECONDS, Cluster, in_parallel, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, QUICK, job_of, join_again, make_checkpoint, step, train

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def cluster(make_cluster: MakeCluster, tmp_path: Path) -> Cluster:
    """Two shards that keep checkpoints."""
    return make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=QUICK)


@pytest.mark.parametrize("which", cases([0], [1]))
def test_in_sync_a_job_goes_back_to_the_one_clock_of_its_checkpoint(
    make_cluster: MakeCluster, tmp_path: Path, which: int
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="4steps", lease=LEASE, timing=QUICK)
    with job_of(cluster, "sync") as [worker]:
        store = CheckpointStore(tmp_path)
        until(lambda: train(worker, 1) is not None and len(store.names("job")) == 2, "two checkpoints")
        before = worker.clock
        cluster.start_again(which)
        join_again(worker)
        clock = store.manifest("job", store.names("job")[-1]).clock
        assert worker.clock == clock
        assert worker.joined.restore_count == 1  # type: ignore[attr-defined]
        saved = worker.joined.worker_state  # type: ignore[attr-defined]
        state = saved.content, saved.clock
        assert state == (b"state of %d" % clock, clock)
        assert torch.equal(worker.pull(), torch.full((CELLS,), float(clock))), "every shard is at that clock"
        assert torch.equal(train(worker, 3), torch.full((CELLS,), clock + 3.0))
        [found] = requests.fetch(cluster.address)["jobs"]
        assert (found["restore_count"], found["redone_step_count"], found["lost_step_count"]) == (1, before - clock, 0)
        worker.leave()  # or the servers would wait for the checkpoint that is due next


@pytest.mark.parametrize("mode", cases(["async"], ["ssp:2"]))
def test_without_a_common_clock_the_others_keep_theirs_and_what_is_lost_is_counted(cluster: Cluster, mode: str) -> None:
    with job_of(cluster, mode) as [worker]:
        train(worker, 3)
        assert make_checkpoint(cluster, worker) == 3
        train(worker, 4)
        cluster.start_again(1)
        join_again(worker)
        assert worker.clock == 7
        found = worker.pull()
        mine = torch.cat([torch.full((16,), float(shard)) for shard in worker.shard_of])
        assert torch.equal(found, torch.where(mine == 1, 3.0, 7.0))
        assert torch.equal(train(worker, 1), found + 1)
        [said] = requests.fetch(cluster.address)["jobs"]
        assert (said["restore_count"], said["redone_step_count"], said["lost_step_count"]) == (0, 0, 4)
        assert "4 steps lost with shards" in status_text.table(requests.fetch(cluster.address))


@pytest.mark.parametrize(
    ("mode", "shards"), cases([("sync", 1), ("async", 1), ("ssp:2", 3)], [("sync", 3), ("ssp:2", 1), ("async", 3)])
)
def test_a_job_goes_on_on_another_number_of_shards(
    make_cluster: MakeCluster, tmp_path: Path, mode: str, shards: int
) -> None:
    spec = vector_job("job", mode, CELLS, 2, frozen=8)
    first = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=QUICK)
    workers = [RawWorker(first.address, spec, rank) for rank in range(2)]
    workers[0].initialise()
    for _ in range(3):
        in_parallel(2, lambda rank: step(workers[rank]))
    last = workers[0].pull()
    assert make_checkpoint(first, *workers) == 3
    first.stop()
    first.servers.clear()

    second = make_cluster(shards=shards, checkpoint_dir=tmp_path, restore=True, lease=LEASE)
    with RawWorker(second.address, spec, 0) as zero, RawWorker(second.address, spec, 1) as one:
        assert (zero.clock, one.clock) == (3, 3)
        assert zero.incarnation > workers[1].incarnation
        assert torch.equal(zero.pull(), last)
        assert set(zero.shard_of) == set(range(shards))
        after = in_parallel(2, lambda rank: step((zero, one)[rank]))
        assert max(after[0][0], after[1][0]) == last[0] + (1 if mode == "sync" else 2)


def test_a_restored_job_has_to_be_the_same(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, restore=True, lease=LEASE, timing=QUICK)
    with job_of(cluster, "sync") as [worker]:
        train(worker, 1)
        make_checkpoint(cluster, worker)
        worker.leave()
    with pytest.raises(JobMismatch, match=r"differs from its checkpoint 00000\d: parameter 'cells' has shape"):
        RawWorker(cluster.address, vector_job("job", "sync", CELLS + 1, 1), 0)


def test_without_restore_a_job_of_the_same_name_begins_anew_and_never_goes_back_to_the_earlier_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job_of(cluster, "sync") as [worker]:
        train(worker, 2)
        worker.leave()
    assert len(CheckpointStore(tmp_path).names("job")) == 1, "what it ended with"
    with job_of(cluster, "sync") as [worker]:
        assert torch.equal(worker.pull(), torch.zeros(CELLS))
        cluster.start_again(1)
        until(lambda: not cluster.coordinator.jobs(), "the job's end")
        with pytest.raises(NotFound, match=r"shard 1 was started anew and lost its part.*no checkpoint"):
            worker.join()


def test_a_job_without_checkpoints_ends_with_a_shard_and_says_why(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(lease=LEASE)
    with job_of(cluster, "async") as [worker]:
        train(worker, 1)
        with pytest.raises(NoCheckpoints):
            cluster.coordinator.job("job").checkpoint()
        cluster.start_again(1)
        until(lambda: not cluster.coordinator.jobs(), "the job's end")
        with pytest.raises(NotFound, match="started without --checkpoint-dir"):
            worker.heartbeat()


def test_the_workers_wait_for_each_other_after_the_job_was_set_back(cluster: Cluster) -> None:
    with job_of(cluster, "sync", workers=2) as [zero, one]:
        in_parallel(2, lambda rank: step((zero, one)[rank]))
        assert make_checkpoint(cluster, zero, one) == 1
        cluster.start_again(1)
        join_again(zero)
        job = cluster.coordinator.jobs()["job"]
        assert job.workers.roster() == ([0], 2, False), "one of two is back"
        assert "waits for worker 1 to join again" in status_text.table(requests.fetch(cluster.address))
        join_again(one)
        assert job.workers.roster() == ([0, 1], 2, True)


def test_the_coordinator_comes_back_and_its_workers_notice_nothing(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The coordinator alone in its process: no shard is lost with it."""
    directory, port = tmp_path / "checkpoints", free_port()
    alone = Server(ServerConfig(shard_count=1, checkpoint_dir=directory, lease=LEASE, port=port))
    shard = Server(ServerConfig(index=0, coordinator=alone.address, checkpoint_dir=directory))
    try:
        assert shard.wait_ready(START_SECONDS)
        with RawWorker(alone.address, vector_job("job", "sync", CELLS, 1), 0) as worker:
            worker.initialise()
            step(worker)
            alone.stop()
            assert torch.equal(step(worker), torch.full((CELLS,), 2.0)), "training does not need it"
            alone = Server(ServerConfig(shard_count=1, checkpoint_dir=directory, lease=LEASE, port=port, resume=True))

            def heard() -> bool:
                try:
                    worker.heartbeat()
                except TryLater:
                    return False
                return True

            until(heard, "an answer to a heartbeat")
            assert torch.equal(step(worker), torch.full((CELLS,), 3.0))
            assert [m.rank for m in alone.coordinator.jobs()["job"].workers.all()] == [0]  # type: ignore[union-attr]
            assert (directory / ".coordinator.json").stat().st_mode & 0o777 == 0o600, "it holds the workers' keys"
    finally:
        shard.stop()
        alone.stop()


def test_a_damaged_checkpoint_is_left_for_the_one_before_it_and_that_is_said_and_counted(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job_of(cluster, "sync") as [worker]:
        for _ in range(2):
            train(worker, 2)
            make_checkpoint(cluster, worker)
        last = CheckpointStore(tmp_path).names("job")[-1]
        file = tmp_path / "job" / last / "shard-1.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(data)
        cluster.start_again(1)
        join_again(worker)
        assert worker.clock == 2
        assert f"checkpoint {last} cannot be used, trying the one before" in caplog.text
        assert "SHA-256" in caplog.text
        recovery = cluster.coordinator.statistics().recovery
        assert recovery == RecoveryStatistics(restored=1, damaged=1)


def test_what_a_set_back_has_cost_is_still_known_after_the_coordinator_died(tmp_path: Path) -> None:
    kept = SavedJob(
        spec={},
        run="a run",
        placement=(0, 1),
        shard_processes={0: 7, 1: 8},
        last_incarnation=5,
        restore_count=1,
        started=True,
        workers=(),
        lost_steps=12,
        redone_steps=3,
        unaccounted={2: (40, 44)},
        began={0: 0, 2: 17},
        settled={2: ((20, 22), (30, 31))},
        rejoining=(1,),
        pending_removals=((0, 1, 4), (1, 1, 4)),
    )
    StateFile(tmp_path).save(lambda: {"job": kept})
    assert StateFile(tmp_path).load() == ({"job": kept}, {})


def test_who_joins_when_a_shard_has_just_been_started_anew_is_told_to_try_again(cluster: Cluster) -> None:
    """The coordinator does not know of it yet. That there is no such job there is no reason to give up."""
    spec = vector_job("job", "async", CELLS, 1)
    with RawWorker(cluster.address, spec, 0):
        cluster.shards[1].drop_job("job")
        with pytest.raises(TryLater, match="knows no job"):
            cluster.coordinator.join("job", 0, JoinRequest(pid=1))
