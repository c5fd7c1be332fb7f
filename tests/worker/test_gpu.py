"""Workers on a GPU end where workers on a CPU end. Needs a CUDA device; test_segments.py is the twin without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tools.cluster import Cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_on_a_gpu_trains_as_on_a_cpu(cluster: Cluster, transport: str, wire: str, overlap: bool) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
        with cluster.connect("sync", job=f"on-{device}", transport=transport) as session:
            session.device = torch.device(device)
            model, optimizer = session.prepare(
                model,
                torch.optim.AdamW(model.parameters(), lr=0.01),
                bucket_bytes=4096,
                gradient_wire=wire,
                weight_wire=wire,
                overlap=overlap,
            )
            for batch in torch.randn(20, 32, 64):
                model(batch.to(device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    tolerance = {"float32": 1e-4, "bfloat16": 5e-2}[wire]  # kernels of GPUs sum in another order
    for on_gpu, on_cpu in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=tolerance, atol=tolerance)


def test_a_model_spread_over_two_devices_trains_as_on_one(cluster: Cluster) -> None:
    class Spread(nn.Module):
        def __init__(self, second: str) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 8).to(second)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(batch).tanh().to(self.second.weight.device))
            return found

    def train(second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Spread(second)
        with cluster.connect("sync", job=f"second-on-{second}") as session:
            session.device = torch.device("cpu")
            model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            for batch in torch.randn(20, 32, 64):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for apart, together in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)
