"""`optimizer.add_param_group` after `prepare`: layers that are unfrozen train as they would in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ps_worker import InvalidRequest, Unsupported
from tests.tools.cluster import Cluster, in_parallel

UNFREEZE = 3


def _net() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    net[:4].requires_grad_(False)  # type: ignore[index]
    return net


def _head(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[4].parameters(), lr=0.01)


def _train(model: Any, optimizer: torch.optim.Optimizer, first: int = 0, last: int = 9) -> list[torch.Tensor]:
    """The usual recipe: the head first, then layer after layer with learning rates of their own."""
    for number in range(first, last):
        for layer, start in ((2, UNFREEZE), (0, 2 * UNFREEZE)):
            if number == start:
                model[layer].requires_grad_(True)
                optimizer.add_param_group({"params": model[layer].parameters(), "lr": 0.001 * (1 + layer)})
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[-1]["lr"] *= 0.9
    return [parameter.detach().clone() for parameter in model.parameters()]


def _alone() -> list[torch.Tensor]:
    model = _net()
    return _train(model, _head(model))


def _close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("mode", ["single", "sync", "ssp:2", "async"])
def test_layers_are_unfrozen_one_after_the_other(shared: Cluster, job: str, mode: str, transport: str) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        model = _net()
        model, optimizer = session.prepare(model, _head(model), bucket_bytes=256)
        assert _close(_train(model, optimizer), _alone())
        assert session.clock == 9
        state = optimizer.state_dict()
        assert len(state["state"]) == 6
        assert [float(state["state"][index]["step"]) for index in range(6)] == [9, 9, 6, 6, 3, 3]
    assert not any(name.startswith(job) for name in shared.coordinator.jobs())


def test_two_workers_agree_and_the_state_goes_into_a_resumed_run(shared: Cluster, job: str) -> None:
    def work(rank: int) -> tuple[list[torch.Tensor], Any]:
        with shared.connect("sync", rank, 2, job=job) as session:
            model = _net()
            model, optimizer = session.prepare(model, _head(model), bucket_bytes=256)
            found = _train(model, optimizer, 0, 5)
            return found, optimizer.state_dict()

    (first, state), (second, _) = in_parallel(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model = _net()
    for parameter, value in zip(model.parameters(), first, strict=True):
        parameter.data.copy_(value)
    model[2].requires_grad_(True)  # type: ignore[index]
    optimizer = _head(model)
    optimizer.add_param_group({"params": model[2].parameters()})  # type: ignore[index]
    optimizer.load_state_dict(state)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
        assert _close(_train(model, optimizer, 5), _alone())


def test_what_the_script_changes_of_an_added_layer_counts(shared: Cluster, job: str) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        _train(model, optimizer, 0, 5)
        model[2].weight.data.clamp_(-0.05, 0.05)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        return _train(model, optimizer, 5, 6)

    alone = _net()
    expected = train(alone, _head(alone))
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _head(model), bucket_bytes=256)
        assert _close(train(model, optimizer), expected)


def test_what_cannot_be_added_is_refused_and_changes_nothing(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model: Any = _net()
        model, optimizer = session.prepare(model, _head(model))
        with pytest.raises(Unsupported, match=r"of the models that were handed to prepare, got a tensor of \(2, 6\)"):
            optimizer.add_param_group({"params": nn.Linear(6, 2).parameters()})
        with pytest.raises(InvalidRequest, match=r"4\.weight is in an optimizer already"):
            optimizer.add_param_group({"params": model[4].parameters()})
        optimizer.add_param_group({"params": model[2].weight})
        with pytest.raises(InvalidRequest, match=r"2\.weight is in an optimizer already"):
            optimizer.add_param_group({"params": model[2].parameters()})
        with pytest.raises(InvalidRequest, match="at least one parameter"):
            optimizer.add_param_group({"params": []})
        with pytest.raises(InvalidRequest, match="lr"):
            optimizer.add_param_group({"params": model[2].bias, "lr": -1.0})
        assert len(optimizer.param_groups) == 2
        _train(model, optimizer, 0, 2)
