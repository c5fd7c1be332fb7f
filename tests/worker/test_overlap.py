"""Buckets that leave while backward still runs: when they do, and that a script may do whatever it likes afterwards.

Over gRPC a bucket leaves as a draft; where memory is shared nothing leaves that a shard looks at before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ps_server.core.limits import DEFAULTS
from ps_worker import NonFiniteGradient, Session
from tests.tools.cluster import Cluster, in_parallel, until

# One step of a script: model, optimizer, its number, data.
Step = Callable[[nn.Module, torch.optim.Optimizer, int, torch.Tensor], None]
STEPS = 10
SURPRISE = 6  # by then buckets leave early


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return session.prepare(model, optimizer, bucket_bytes=512, overlap=overlap, **more)


def _weights_after(
    cluster: Cluster, job: str, overlap: bool | None, step: Step, workers: int = 1, transport: str = "grpc"
) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        with cluster.connect("sync", rank, workers, job=job, transport=transport) as session:
            model, optimizer = _prepare(session, overlap)
            for number in range(STEPS):
                step(model, optimizer, number, torch.randn(16, 8, generator=generator))
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in model.parameters()]

    return in_parallel(workers, work)[0]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    optimizer.step()


def _clipping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def _clipping_late(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number >= SURPRISE:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def _clipping_by_data(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number >= SURPRISE:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-0.001, 0.001)  # which torch's version counters do not see
    optimizer.step()


def _scaling(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number == SURPRISE:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5
    optimizer.step()


def _dropping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number == SURPRISE:
        next(model.parameters()).grad = None
    optimizer.step()


def _replacing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number == SURPRISE:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _skipping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    if number != SURPRISE:  # a spike of the loss, say
        optimizer.step()


def _zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, 100 * data)
    if number >= SURPRISE:
        optimizer.zero_grad(set_to_none=False)
        _backward(model, data)
    optimizer.step()


def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    with model.no_sync():
        _backward(model, data[:8])
    _backward(model, data[8:])
    optimizer.step()


def _twice(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data[:8])
    if number >= SURPRISE:
        _backward(model, data[8:])
    optimizer.step()


def _learning_rate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    _backward(model, data)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    optimizer.step()


def _part(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    """Backward through a part of the model, thrown away."""
    if number >= SURPRISE:
        model[:2](data).sum().backward()  # type: ignore[index]
        optimizer.zero_grad()
    _plain(model, optimizer, number, data)


STEPS_OF_SCRIPTS = [
    _plain,
    _clipping,
    _clipping_late,
    _clipping_by_data,
    _scaling,
    _dropping,
    _replacing,
    _skipping,
    _zeroing,
    _accumulating,
    _twice,
    _learning_rate,
    _part,
]


@pytest.mark.parametrize("step", STEPS_OF_SCRIPTS)
def test_overlap_changes_no_bit_of_the_result(cluster: Cluster, step: Step) -> None:
    without = _weights_after(cluster, "without", False, step, workers=2)
    for overlap in (None, True):
        with_it = _weights_after(cluster, f"with-{overlap}", overlap, step, workers=2)
        assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))


@pytest.mark.parametrize("step", [_plain, _clipping_by_data, _twice])
def test_overlap_changes_no_bit_where_memory_is_shared(cluster: Cluster, step: Step) -> None:
    without = _weights_after(cluster, "without", False, step, workers=2)
    shared = _weights_after(cluster, "shared", True, step, workers=2, transport="shm")
    assert all(torch.equal(a, b) for a, b in zip(without, shared, strict=True))


def _drafts(cluster: Cluster) -> int:
    """Buckets that shards keep for a step that has not come yet."""
    jobs = [shard.jobs()["default"] for shard in cluster.shards]
    return sum(bool(bucket.pending) for job in jobs for bucket in job.state.buckets.values())


def test_buckets_leave_before_backward_ends(cluster: Cluster) -> None:
    with cluster.connect("sync", transport="grpc") as session:
        model, optimizer = _prepare(session, True)
        left = []
        first = next(model.parameters())  # the last to get its gradient
        first.register_hook(
            lambda gradient: left.append(len(session._strategy._training.participation.connection._drafted))
        )  # type: ignore[attr-defined]
        _backward(model, torch.ones(4, 8))
        assert left[0] > 0
        until(lambda: _drafts(cluster) > 0)
        optimizer.step()
        assert session.clock == 1
        assert _drafts(cluster) == 0


def test_a_draft_changes_no_weight_before_its_step(cluster: Cluster) -> None:
    with cluster.connect("async", transport="grpc") as session:
        model, optimizer = _prepare(session, True)
        _backward(model, torch.ones(4, 8))
        until(lambda: _drafts(cluster) > 0)
        assert all(shard.jobs()["default"].state.buckets.versions() == (0, 0) for shard in cluster.shards)
        optimizer.zero_grad()
        _plain(model, optimizer, 0, torch.ones(4, 8))
        assert all(shard.jobs()["default"].state.buckets.versions()[0] <= 1 for shard in cluster.shards)


def test_a_gradient_that_is_not_finite_pushes_nothing(cluster: Cluster) -> None:
    with cluster.connect("sync", transport="grpc") as session:
        model, optimizer = _prepare(session, True)
        _plain(model, optimizer, 0, torch.ones(4, 8))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradient):
            _plain(model, optimizer, 1, torch.full((4, 8), float("nan")))
        versions = [shard.jobs()["default"].state.buckets.versions() for shard in cluster.shards]
        assert all(high <= 1 for _, high in versions)
        assert session.clock == 1
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        _plain(model, optimizer, 1, torch.ones(4, 8))
        assert session.clock == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drafts_of_all_workers_get_by_with_a_small_budget(make_cluster: Callable[..., Cluster], mode: str) -> None:
    cluster = make_cluster(limits=replace(DEFAULTS, staged_bytes=1024))

    def work(rank: int) -> int:
        with cluster.connect(mode, rank, 3, transport="grpc") as session:
            model, optimizer = _prepare(session, True)
            for number in range(STEPS):
                _clipping_late(model, optimizer, number, torch.ones(4, 8))
            return session.clock

    assert in_parallel(3, work) == [STEPS] * 3
