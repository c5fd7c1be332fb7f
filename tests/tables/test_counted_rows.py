"""A job of sync goes back, or goes on: each sample is in its row as often as in the other weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_server.core.limits import Limits
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.rollbacks import QUICK, await_first

RATE = 0.5
SAMPLES, BATCH, PASSES, COMMON = 64, 4, 3, -5


class Both(nn.Module):
    """Rows and other weights whose gradients are ones: with SGD a row counts lookups, and a weight counts updates."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(32, initial="constant", scale=0.0, seed=0, ids=lambda batch: batch[0])
        self.top = nn.Parameter(torch.zeros(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.top.sum()  # type: ignore[no-any-return]

    def counted(self, ids: torch.Tensor) -> list[float]:
        """How often ids were looked up in steps that count, over the workers of an update."""
        rows = self.rows.rows(ids) / -RATE
        assert all(len(set(row)) == 1 for row in rows.tolist())
        return rows[:, 0].tolist()

    def updates(self) -> float:
        """How many updates the other weights have had."""
        [count] = set((self.top / -RATE).tolist())
        return count


def samples() -> TensorDataset:
    """Each has an id of its own, and one that all have."""
    own = torch.arange(SAMPLES) * 2**40
    return TensorDataset(torch.stack([own, torch.full_like(own, COMMON)], 1))


def train(session: ps_worker.Session, passes: int, between: Callable[[], None]) -> tuple[list[float], float, float]:
    """Trains some passes; how often each sample was trained, how often the id was that all have, and the updates."""
    own = Both()
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
    model, optimizer, batches = session.prepare(own, optimizer, loader)
    for _ in range(passes):
        for (ids,) in batches:
            between()
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
    session.barrier()
    return own.counted(torch.arange(SAMPLES) * 2**40), own.counted(torch.tensor([COMMON]))[0], own.updates()


@pytest.mark.parametrize(("shards", "cold"), cases([(2, False)], [(3, False), (2, True)]))
def test_a_lost_shard_takes_rows_and_weights_back_to_one_clock(
    make_cluster: Callable[..., Cluster], tmp_path: Path, shards: int, cold: bool
) -> None:
    """So that each sample is in the rows as often as in the weights, also where a shard has rows and no bucket."""
    more: dict[str, object] = {"limits": Limits(table_bytes=6_000), "cold_rows_dir": tmp_path / "cold"} if cold else {}
    directory = tmp_path / "checkpoints"
    options = {"checkpoint_dir": directory, "checkpoint_every": "3steps", "timing": QUICK, "shards": shards, **more}
    cluster, store = make_cluster(**options), CheckpointStore(directory)
    lost = threading.Event()

    def work(rank: int) -> tuple[tuple[list[float], float, float], int]:
        with cluster.connect("sync", rank, 2) as session:

            def between() -> None:
                if not session.clock:
                    await_first(cluster)
                if rank == 0 and not lost.is_set() and session.clock >= 8:
                    until(lambda: store.names("default"), "a checkpoint")
                    cluster.start_again(1)
                    lost.set()

            return train(session, PASSES, between), session.clock

    steps = PASSES * SAMPLES // BATCH // 2
    found = in_parallel(2, work)
    assert lost.is_set()
    assert found == [(([PASSES / 2] * SAMPLES, BATCH * steps, steps), steps)] * 2  # an update is a mean of two workers


@pytest.mark.parametrize(("before", "after"), cases([(2, 3)], [(2, 1), (1, 2)]))
def test_a_job_goes_on_from_a_checkpoint_on_any_number_of_shards(
    make_cluster: Callable[..., Cluster], tmp_path: Path, before: int, after: int
) -> None:
    """The first checkpoints were made while workers trained, the last one when they had left."""
    cluster = make_cluster(shards=before, checkpoint_dir=tmp_path, checkpoint_every="2steps", timing=QUICK)

    def begin(rank: int) -> object:
        with cluster.connect("sync", rank, 2) as session:
            return train(session, 1, lambda: None)

    steps = SAMPLES // BATCH // 2
    in_parallel(2, begin)
    cluster.stop()
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("default", store.names("default")[-1])
    again = make_cluster(shards=after, checkpoint_dir=tmp_path, restore=True, timing=QUICK)

    def go_on(rank: int) -> tuple[list[float], float, float]:
        with again.connect("sync", rank, 2) as session:
            own = Both()
            session.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
            common = own.counted(torch.tensor([COMMON]))[0]
            assert session.clock == manifest.clock
            return own.counted(torch.arange(SAMPLES) * 2**40), common, own.updates()

    for counted, common, updates in in_parallel(2, go_on):
        assert manifest.clock == updates <= steps
        assert common == sum(counted) == BATCH * updates
