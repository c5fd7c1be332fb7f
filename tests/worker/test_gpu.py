"""Workers on a GPU end where workers on a CPU end. Needs a CUDA device; test_segments.py is the twin without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ps_protocol.layout import BucketSpec, Slice
from ps_protocol.tensors import BLOCKS
from ps_worker.model.gpu import GpuStaging
from ps_worker.model.residual import Leaving, Residuals
from tests.tools.cluster import Cluster
from tests.tools.small_models import assert_apart, close, drawn, filled, same, step, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(
    cluster: Cluster, job: str, device: str, model: nn.Module, transport: str = "auto", **options: Any
) -> list[torch.Tensor]:
    """The weights after some steps of one worker in sync."""
    with cluster.connect("sync", job=job, transport=transport) as session:
        session.device = torch.device(device)
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
        for number in range(20):
            step(model, optimizer, drawn(number, 32, 64).to(device))
    return [parameter.cpu() for parameter in weights_of(model)]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_on_a_gpu_trains_as_on_a_cpu(
    shared: Cluster, job: str, transport: str, wire: str, overlap: bool
) -> None:
    if wire == "int4" and transport == "shm":
        transport = "auto"  # a format of blocks is for messages alone

    def train(device: str) -> list[torch.Tensor]:
        model = filled(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), std=0.1)
        options = {"bucket_bytes": 4096, "gradient_wire": wire, "weight_wire": wire, "overlap": overlap}
        return trained(shared, f"{job}-{device}", device, model, transport, **options)

    tolerance = {"float32": 1e-4, "bfloat16": 5e-2, "int4": 1e-1}[wire]  # kernels of GPUs sum in another order
    assert close(train("cuda"), train("cpu"), rtol=tolerance, atol=tolerance)


class Spread(nn.Module):
    """Two layers, of which the second may be on another device."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 8)
        filled(self, std=0.1)
        self.second.to(second)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(batch).tanh().to(self.second.weight.device))
        return found


def test_a_model_spread_over_two_devices_trains_as_on_one(shared: Cluster, job: str) -> None:
    apart, together = (trained(shared, f"{job}-{second}", "cpu", Spread(second)) for second in ("cuda", "cpu"))
    assert close(apart, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["sync", "async", "local:1"])
def test_each_parameter_on_a_gpu_has_a_storage_of_its_own_and_is_saved_by_any_code(
    shared: Cluster, job: str, mode: str, tmp_path: Path
) -> None:
    def net(seed: int) -> nn.Module:
        return filled(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)), seed).to("cuda")

    with shared.connect(mode, job=job) as session:
        session.device = torch.device("cuda")
        trained_net = net(0)
        model, optimizer = session.prepare(trained_net, torch.optim.AdamW(trained_net.parameters(), lr=0.01))
        for number in range(2):
            step(model, optimizer, drawn(number, 32, 64).to("cuda"))
        assert_apart(trained_net.parameters())
        assert_apart(parameter.grad for parameter in trained_net.parameters() if parameter.grad is not None)
        safetensors.torch.save_model(trained_net, str(tmp_path / "model.safetensors"))
        expected = weights_of(trained_net)
    loaded = net(1)
    safetensors.torch.load_model(loaded, str(tmp_path / "model.safetensors"))
    assert same(weights_of(loaded), expected)


def encoded_after_counts(staging: GpuStaging, is_busy: bool) -> torch.Tensor:
    """Returns the payload of a bucket that leaves behind two interrupted steps, whose residuals count meanwhile.

    is_busy: the training thread's stream has much to do when the second of them counts; the bucket's gradient does not
             wait for that
    """
    numel, device = 1 << 20, torch.device("cuda")
    bucket = BucketSpec(0, "float32", "float32", False, 0, numel, (Slice(0, 0, 0, numel),))
    residuals, gradient = Residuals({0: numel}, device, staging.down), torch.linspace(0.1, 1.7, numel, device=device)
    first, second, third = (Leaving(bucket, staging.mark()) for _ in range(3))

    def leave(leaving: Leaving) -> torch.Tensor:
        assert leaving.made is not None
        return staging.fetch(lambda: residuals.encode(leaving, gradient, BLOCKS["int8"], ()), leaving.made)

    leave(first)
    leave(second)
    residuals.count(first)
    torch.cuda.synchronize()
    if is_busy:
        torch.cuda._sleep(10**9)
    residuals.count(second)
    return leave(third)


def test_a_bucket_leaves_with_the_whole_residual_of_a_step_that_counts_meanwhile() -> None:
    staging = GpuStaging(torch.device("cuda"), None)
    assert torch.equal(encoded_after_counts(staging, is_busy=True), encoded_after_counts(staging, is_busy=False))
