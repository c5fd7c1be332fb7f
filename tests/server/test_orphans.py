"""What a shard holds and nobody knows of is dropped, and a job that shards have dropped ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import TryLater
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.timing import Timing
from tests.tools.cluster import Cluster, until
from tests.tools.one_process import DirectWorker, FullDisk, OneProcess
from tests.tools.raw_worker import RawWorker, vector_job

CELLS = 64


def test_a_job_that_ends_while_its_shards_are_asked_is_no_orphan(
    cluster: OneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    held = cluster.shards[0]
    held.create_job(vector_job("ended", "sync", CELLS, 1), [0])
    with caplog.at_level(logging.WARNING):
        cluster.coordinator.held_jobs.compare()
        assert "ended" in held.jobs()
        held.drop_job("ended")
        cluster.coordinator.held_jobs.compare()
        assert not caplog.records
        held.create_job(vector_job("ended", "sync", CELLS, 1), [0])
        cluster.coordinator.held_jobs.compare()
        cluster.coordinator.held_jobs.compare()
    assert "ended" not in held.jobs()
    assert [record.getMessage() for record in caplog.records] == ["job ended: run  is orphaned on shard 0: dropped"]


def test_a_job_that_is_made_after_it_was_dropped_does_not_stay(
    make_cluster: Callable[..., Cluster],
) -> None:
    """As where the call to make it was on its way for longer than the coordinator waited."""
    cluster = make_cluster(timing=Timing(held_jobs_look=0.02), lease=120.0)  # nobody sends a heartbeat
    kept, late = vector_job("kept", "sync", CELLS, 1), vector_job("late", "sync", CELLS, 1)
    with RawWorker(cluster.address, kept, 0) as worker:
        worker.initialise()
        with RawWorker(cluster.address, late, 0) as other:
            other.initialise()
            other.leave()
        until(lambda: "late" not in cluster.coordinator.jobs(), "the job's end")
        other_shape = vector_job("late", "sync", 2 * CELLS, 1)
        for shard in cluster.shards:
            shard.create_job(late, range(4))
        until(lambda: all("late" not in shard.jobs() for shard in cluster.shards), "its end on the shards")
        worker.step(-torch.ones(CELLS))
        assert torch.equal(worker.pull(), torch.ones(CELLS)), "what is known stays"
        with RawWorker(cluster.address, other_shape, 0) as other:
            other.initialise()
            other.step(-torch.ones(2 * CELLS))
            assert torch.equal(other.pull(), torch.ones(2 * CELLS)), "and its name is free"


@pytest.mark.usefixtures("caplog")
def test_a_job_that_ended_while_the_file_could_not_say_so_ends_when_its_shards_are_asked(tmp_path: Path) -> None:
    """The disk was full when the last worker left, and then the coordinator died: its successor takes the job for one
    that runs, and another launch would wait to join it."""
    disk = FullDisk()
    cluster = OneProcess(tmp_path, disk=disk)
    spec = vector_job("job", "sync", CELLS, 1)
    old = DirectWorker(cluster, spec, 0)
    old.initialise()
    disk.full = True
    assert old.leave(done=True)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    disk.full = False
    for _ in range(3):
        cluster.coordinator.held_jobs.compare()
    assert list(cluster.coordinator.jobs()) == ["job"], "its worker may live"
    cluster.clock.seconds += 100
    cluster.coordinator.expire_workers()
    with pytest.raises(TryLater, match="this shard knows no job 'job'"):
        DirectWorker(cluster, spec, 0)
    cluster.coordinator.held_jobs.compare()
    assert not cluster.coordinator.jobs()
    new = DirectWorker(cluster, spec, 0)
    assert (new.run > old.run, new.clock) == (True, 0)
    cluster.coordinator.held_jobs.compare()
    cluster.coordinator.held_jobs.compare()
    assert list(cluster.coordinator.jobs()) == ["job"], "what runs stays"
    cluster.stop()


def test_a_job_whose_part_a_shard_has_lost_is_not_taken_for_one_that_has_ended(
    cluster: OneProcess, tmp_path: Path
) -> None:
    """A shard was started anew: it holds no part of the job until that is rolled back."""
    worker = DirectWorker(cluster, vector_job("job", "sync", CELLS, 1), 0)
    worker.initialise()
    cluster.start_shard(1)
    for _ in range(3):
        cluster.coordinator.held_jobs.compare()
    assert list(cluster.coordinator.jobs()) == ["job"]
    assert list(cluster.shards[0].jobs()) == ["job"]


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_job_that_ended_so_goes_back_on_all_shards_where_one_died_with_the_coordinator(
    tmp_path: Path, mode: str
) -> None:
    """The shard that stays has dropped the job, too, when it ended."""
    disk = FullDisk()
    cluster = OneProcess(tmp_path, disk=disk)
    spec = vector_job("job", mode, CELLS, 1)
    old = DirectWorker(cluster, spec, 0)
    old.initialise()
    kept = old.checkpoint()
    disk.full = True
    assert old.leave(done=True)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    disk.full = False
    cluster.start_shard(1)
    assert not any("job" in shard.jobs() for shard in cluster.shards.values())
    cluster.coordinator.recover_jobs()
    assert all("job" in shard.jobs() for shard in cluster.shards.values())
    new = DirectWorker(cluster, spec, 0)
    assert (new.run, new.clock) == (old.run, kept.clock)
    cluster.stop()
