"""A shard alone that is told to stop: each of its jobs has all of the time for its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from ps_protocol.errors import TryLater
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, train

DRAIN_SECONDS = 60.0
JOBS = ("one", "two", "three")


def test_the_last_checkpoints_of_several_jobs_are_made_at_the_same_time(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """In sync each waits for a step of its workers, which make none until all are asked for."""
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        workers = [
            stack.enter_context(RawWorker(cluster.address, vector_job(name, "sync", CELLS, 1), 0)) for name in JOBS
        ]
        for worker in workers:
            worker.initialise()
        draining = pool.submit(cluster.servers[1].drain, DRAIN_SECONDS)
        checkpoints = [cluster.coordinator.job(name).checkpoints for name in JOBS]
        until(lambda: all(each is not None and each._requests.open for each in checkpoints), "all are asked for")

        def step() -> bool:
            for worker in workers:
                try:
                    train(worker, 1)
                except TryLater:  # it would not be in the last checkpoint
                    worker.clock -= 1
            return draining.done()

        until(step, "the last checkpoints")
        draining.result()
        assert [len(CheckpointStore(tmp_path).names(name)) for name in JOBS] == [1, 1, 1]
