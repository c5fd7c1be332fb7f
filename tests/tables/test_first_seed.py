"""The seed of rows that are not there is rank 0's, whoever registers the job, and wherever the rows go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker
from ps_server.storage.export import export
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.rollbacks import QUICK

UNSEEN = torch.arange(10)


def model(seed: int) -> nn.Sequential:
    return nn.Sequential(ps_worker.Embedding(4, seed=seed))


def rows_of_both(cluster: Cluster, seeds: tuple[int, int], then: Callable[[], None] = lambda: None) -> torch.Tensor:
    """What both workers read: rank 0 joins when the other has registered the job. then: what rank 0 does"""

    def work(rank: int) -> torch.Tensor:
        if rank == 0:
            until(lambda: "default" in cluster.coordinator.jobs())
        with cluster.connect("async", rank, 2) as session:
            own = model(seeds[rank])
            session.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
            session.barrier()
            if rank == 0:
                then()
            session.barrier()
            return own[0].rows(UNSEEN)

    first, second = in_parallel(2, work)
    assert torch.equal(first, second)
    return first


def test_rank_0_brings_the_seed_and_checkpoints_and_exports_have_it(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    expected = model(7)[0].rows(UNSEEN)
    cluster = make_cluster(shards=2, checkpoint_dir=tmp_path, timing=QUICK)
    assert torch.equal(rows_of_both(cluster, (7, 8), lambda: save(cluster)), expected)
    cluster.stop()
    export(tmp_path, "default", None, tmp_path / "out")
    alone = model(9)
    alone.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(alone[0].rows(UNSEEN), expected)
    cluster = make_cluster(shards=3, checkpoint_dir=tmp_path, restore=True)
    assert torch.equal(rows_of_both(cluster, (10, 11)), expected)


def save(cluster: Cluster) -> None:
    """Makes a checkpoint: in async, of this moment."""
    [table] = cluster.coordinator.job("default").placed.spec.tables
    assert table.rows.initializer.seed == 8, "the job was registered with the other one"
    made = threading.Thread(target=cluster.coordinator.job("default").checkpoint)
    made.start()
    made.join(30)
    assert not made.is_alive()
