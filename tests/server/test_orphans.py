"""What a shard holds and nobody knows of is dropped."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ps_server.coordinator.timing import Timing
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job

CELLS = 64


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
