"""What a shard holds and nobody knows of is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from ps_server.coordinator.timing import Timing
from tests.tools.cluster import Cluster, until
from tests.tools.one_process import OneProcess
from tests.tools.raw_worker import RawWorker, vector_job

CELLS = 64


def test_a_job_that_ends_while_its_shards_are_asked_is_no_orphan(
    cluster: OneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    held = cluster.shards[0]
    held.create_job(vector_job("ended", "sync", CELLS, 1), [0])
    with caplog.at_level(logging.WARNING):
        cluster.coordinator.drop_orphaned_jobs()
        assert "ended" in held.jobs()
        held.drop_job("ended")
        cluster.coordinator.drop_orphaned_jobs()
        assert not caplog.records
        held.create_job(vector_job("ended", "sync", CELLS, 1), [0])
        cluster.coordinator.drop_orphaned_jobs()
        cluster.coordinator.drop_orphaned_jobs()
    assert "ended" not in held.jobs()
    assert [record.getMessage() for record in caplog.records] == ["job ended: run  is orphaned on shard 0: dropped"]


def test_a_job_that_is_made_after_it_was_dropped_does_not_stay(
    make_cluster: Callable[..., Cluster],
) -> None:
    """As where the call to make it was on its way for longer than the coordinator waited."""
    cluster = make_cluster(timing=Timing(orphans_look=0.02))
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
