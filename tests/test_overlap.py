"""Buckets that leave while backward still runs: when they do, when they must not, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Cluster, in_parallel
from torch import nn

from ps_worker import NonFiniteGradient, Session, Unsupported

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]


def _net() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    generator = torch.Generator().manual_seed(0)  # of its own: workers are threads, and share torch's
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def _backward(model: nn.Module, data: torch.Tensor) -> None:
    model(data).square().mean().backward()


def _prepare(session: Session, overlap: bool | None, **more: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.prepare(model, optimizer, bucket_bytes=512, overlap=overlap, **more)


def _weights_after(
    cluster: Cluster, job: str, overlap: bool | None, step: Step, workers: int = 1
) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        with cluster.connect("sync", rank, workers, job=job) as session:
            model, optimizer = _prepare(session, overlap)
            for _ in range(8):
                step(model, optimizer, torch.randn(16, 8, generator=generator))
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in model.parameters()]

    return in_parallel(workers, work)[0]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    _backward(model, data)
    optimizer.step()


def _clipping(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    _backward(model, data)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    with model.no_sync():
        _backward(model, data[:8])
    _backward(model, data[8:])
    optimizer.step()


def _twice(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    _backward(model, data[:8])
    _backward(model, data[8:])
    optimizer.step()


@pytest.mark.parametrize("step", [_plain, _clipping, _accumulating, _twice])
def test_overlap_changes_no_bit_of_the_result(cluster: Cluster, step: Step) -> None:
    without = _weights_after(cluster, "without", False, step, workers=2)
    by_itself = _weights_after(cluster, "auto", None, step, workers=2)
    assert all(torch.equal(a, b) for a, b in zip(without, by_itself, strict=True))


def test_buckets_leave_before_backward_ends(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        model, optimizer = _prepare(session, True)
        left = []
        first = next(model.parameters())  # the last to get its gradient
        first.register_hook(lambda gradient: left.append(len(session._strategy._pushed)))  # type: ignore[union-attr]
        _backward(model, torch.ones(4, 8))
        assert left[0] > 0
        optimizer.step()
        assert session.clock == 1


def test_gradients_changed_after_buckets_left_are_refused(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        model, optimizer = _prepare(session, True)
        with pytest.raises(Unsupported, match="overlap=False"):
            _clipping(model, optimizer, torch.ones(4, 8))


def test_a_second_backward_after_buckets_left_is_refused(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        model, optimizer = _prepare(session, True)
        with pytest.raises(Unsupported, match="no_sync"):
            _twice(model, optimizer, torch.ones(16, 8))


def test_a_gradient_that_is_not_finite_does_not_leave_early(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        model, optimizer = _prepare(session, True)
        _plain(model, optimizer, torch.ones(4, 8))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradient):
            _plain(model, optimizer, torch.full((4, 8), float("nan")))
        versions = [engine.jobs()["default"].state.versions() for engine in _engines(cluster)]
        assert all(high <= 1 for _, high in versions)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def _engines(cluster: Cluster) -> list[object]:
    return [server.engine for server in cluster.servers]
