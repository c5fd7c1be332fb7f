"""A shard that is told to stop: alone, or shortly before the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import PSError, TryLater
from ps_server.coordinator.timing import Timing
from ps_server.rpc.operator_client import OperatorClient
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


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shard_that_is_told_to_stop_right_before_the_coordinator_has_its_part_in_the_last_checkpoint(
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where an orchestrator signals all pods: the checkpoint that the shard asks for may be complete before the
    coordinator asks for the last one."""
    asks, ask = threading.Event(), OperatorClient.checkpoint_job

    def noted(*arguments: Any, **more: Any) -> Any:
        asks.set()
        return ask(*arguments, **more)

    monkeypatch.setattr(OperatorClient, "checkpoint_job", noted)
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=Timing(stops_together=60.0))
    first, second = cluster.servers

    def end_shard() -> None:
        second.drain(DRAIN_SECONDS)
        second.stop()

    with RawWorker(cluster.address, vector_job("job", mode, CELLS, 1), 0) as worker, ThreadPoolExecutor() as pool:
        worker.initialise()
        train(worker, 3)
        shard = pool.submit(end_shard)
        assert asks.wait(DRAIN_SECONDS)
        with suppress(PSError):  # the shard has ended
            train(worker, 10)
        coordinator = pool.submit(first.drain, DRAIN_SECONDS)

        def step() -> bool:
            before = worker.clock
            try:
                train(worker, 1)
            except PSError:  # it would not be in the last checkpoint, or the shard has ended
                worker.clock = before
                with suppress(PSError):
                    worker.save_state(worker.clock, b"state of %d" % worker.clock)
            return coordinator.done()

        until(step, "the last checkpoint")
        coordinator.result()
        shard.result()
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("job", store.names("job")[-1])
    assert "without a last checkpoint" not in caplog.text
    assert min(manifest.versions) >= 13
    assert sorted(manifest.shards) == [0, 1]
