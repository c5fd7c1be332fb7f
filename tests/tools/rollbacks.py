"""A job of four buckets whose workers train, have checkpoints made, and join again after a rollback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from ps_protocol.errors import TryLater, UnknownWorker
from ps_server.coordinator.timing import Timing
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, joined, vector_job

CELLS = 64  # four buckets of 16, on two shards
# Workers that stand still are not waited for when a checkpoint is asked for, and a shard that is new is found at once.
# The disk of a busy machine has its time.
QUICK = Timing(asked_checkpoint=0.1, checkpoint_look=0.02, recovery_look=0.02, fallback=60.0)
LEASE = 600.0  # these workers send heartbeats only where a test has them do so


def job_of(
    cluster: Cluster, mode: str, workers: int = 1, cells: int = CELLS
) -> AbstractContextManager[list[RawWorker]]:
    """The workers of a job of this mode, called "job", with its initial values."""
    return joined(cluster.address, vector_job("job", mode, cells, workers))


def make_checkpoint(cluster: Cluster, *workers: RawWorker) -> int:
    """Has a checkpoint made while these workers do nothing but send their state; its clock."""
    for worker in workers:  # before it is asked for: QUICK waits a tenth of a second for it
        worker.save_state(worker.clock, b"state of %d" % worker.clock)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(cluster.coordinator.job(workers[0].spec.name).checkpoint)

        def done() -> bool:
            for worker in workers:
                worker.heartbeat()
                worker.save_state(worker.clock, b"state of %d" % worker.clock)
            return made.done()

        until(done, "the checkpoint")
        return made.result().clock


def await_first(cluster: Cluster, job: str = "default") -> None:
    """Waits until all shards have begun a job's first checkpoint. Call it before the first step: with the next ones the
    checkpoint is made, however fast they are."""
    shards = [shard.jobs()[job] for shard in cluster.shards]
    until(lambda: all(shard.snapshot_task is not None for shard in shards), "the beginning of the first checkpoint")


def step(worker: RawWorker, value: float = -1.0) -> torch.Tensor:
    """One step with the same gradient in every cell, and the weights after it."""
    worker.step(torch.full((CELLS,), value))
    return worker.pull()


def train(worker: RawWorker, steps: int) -> torch.Tensor:
    """Several steps, with the worker's state where a checkpoint asks for it; the weights after them."""
    for _ in range(steps):
        weights = step(worker)
        if worker.clock in worker.flagged:
            worker.save_state(worker.clock, b"state of %d" % worker.clock)
    return weights


def join_again(worker: RawWorker) -> None:
    """Waits until the servers tell the worker to join again, and has it join."""

    def told() -> bool:
        try:
            worker.heartbeat()
        except UnknownWorker:
            return True
        except TryLater:
            pass  # the coordinator itself is away
        return False

    until(told, "being told to join again")
    worker.joined = worker.join()  # type: ignore[attr-defined]
