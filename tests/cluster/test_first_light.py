"""The whole path once: workers train through real shards and end with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tools.cluster import Cluster, in_parallel


@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async"])
def test_workers_train_a_model_together(cluster: Cluster, mode: str) -> None:
    def work(rank: int) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(rank)
        data = torch.randn(64, 8, generator=generator)
        target = data.sum(dim=1, keepdim=True)
        with cluster.connect(mode, rank, 2) as session:
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02), bucket_bytes=256)
            losses = []
            for _ in range(60):
                loss = nn.functional.mse_loss(model(data), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert session.clock == 60
        return losses[0], losses[-1]

    for first, last in in_parallel(2, work):
        assert last < first / 4
