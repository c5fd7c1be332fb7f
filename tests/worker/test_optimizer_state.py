"""Optimizer state goes to the shards and comes back in torch's own layout: scripts resume in every mode, from each."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.optimizers import ELEMENTWISE, is_scalar_state, required_state
from ps_worker import InvalidRequest, PSError, Unsupported
from tests.tools.cluster import Cluster, in_parallel

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
}


def _net() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return ELEMENTWISE[name](model.parameters(), **SETTINGS[name])  # type: ignore[arg-type]


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        optimizer.zero_grad()
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        model(data).square().mean().backward()
        optimizer.step()


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What a file would hold."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_the_state_is_what_torch_would_have(shared: Cluster, job: str, name: str) -> None:
    alone = _net()
    expected = _optimizer(name, alone)
    _steps(alone, expected, 0, 4)
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer(name, model), bucket_bytes=256)
        _steps(model, optimizer, 0, 4)
        found = optimizer.state_dict()
    wanted = expected.state_dict()
    assert found["param_groups"][0].keys() >= wanted["param_groups"][0].keys()
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert found["state"][index].keys() == tensors.keys()
        assert all(_close(found["state"][index][key], value) for key, value in tensors.items())


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_known_states_are_those_of_torch(name: str) -> None:
    model = _net()
    optimizer = _optimizer(name, model)
    _steps(model, optimizer, 0, 2)
    for parameter, state in optimizer.state.items():
        found = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert required_state(name, SETTINGS[name]) <= found
        for key in found:
            assert is_scalar_state(name, key) == (state[key].shape != parameter.shape)


def _run(cluster: Cluster, mode: str, job: str, name: str, saved: Any, when: str, first: int, count: int) -> Any:
    """Some steps in one mode, from what was saved; returns what is saved then."""
    with cluster.connect(mode, job=job) as session:
        model = _net()
        optimizer = _optimizer(name, model)
        if saved is not None and when == "before":
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
        if saved is not None and when == "after":
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            again = optimizer.state_dict()  # asked for before any step
            assert again["state"].keys() == saved["optimizer"]["state"].keys()
        _steps(model, optimizer, first, count)
        return _saved(model, optimizer)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("first", "second"), [("single", "sync"), ("sync", "single"), ("sync", "async"), ("ssp:2", "sync")]
)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam"])
def test_a_run_resumes_in_another_mode(
    shared: Cluster, job: str, name: str, first: str, second: str, when: str
) -> None:
    whole = _run(shared, "single", job, name, None, when, 0, 8)
    half = _run(shared, first, job, name, None, when, 0, 4)
    found = _run(shared, second, job, name, half, when, 4, 4)
    assert all(_close(found["model"][key], value) for key, value in whole["model"].items())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_a_sync_run_resumes_to_the_last_digit(shared: Cluster, job: str, name: str, when: str) -> None:
    whole = _run(shared, "sync", job, name, None, when, 0, 8)
    half = _run(shared, "sync", job, name, None, when, 0, 4)
    found = _run(shared, "sync", job, name, half, when, 4, 4)
    assert all(torch.equal(found["model"][key], value) for key, value in whole["model"].items())


def test_two_workers_resume_as_they_would_have_gone_on(shared: Cluster, job: str) -> None:
    def run(saved: Any, first: int, count: int) -> list[Any]:
        def work(rank: int) -> Any:
            with shared.connect("sync", rank, 2, job=job) as session:
                model = _net()
                optimizer = _optimizer("AdamW", model)
                if saved is not None:
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
                _steps(model, optimizer, first, count)
                return _saved(model, optimizer) if rank == 0 else None  # one worker may ask alone

        return in_parallel(2, work)

    [whole, _], [half, _] = run(None, 0, 8), run(None, 0, 4)
    [found, _] = run(half, 4, 4)
    assert all(torch.equal(found["model"][key], value) for key, value in whole["model"].items())


def test_the_pieces_of_schedulers_and_groups_survive(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        plain = torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
        )
        model, optimizer = session.prepare(model, plain)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        _steps(model, optimizer, 0, 1)
        scheduler.step()
        saved = _saved(model, optimizer)
        assert [group["lr"] for group in saved["optimizer"]["param_groups"]] == [0.005, 0.01]
        scheduler.step()
        optimizer.load_state_dict(saved["optimizer"])
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
        assert plain.param_groups[0]["lr"] == 0.005  # what a scheduler made before `prepare` looks at


def test_state_without_momentum_takes_momentum_away(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer("SGD", model), bucket_bytes=256)
        fresh = optimizer.state_dict()
        assert fresh["state"] == {}
        _steps(model, optimizer, 0, 3)
        optimizer.load_state_dict(fresh)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        _steps(model, optimizer, 3, 1)
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert _close(parameter.detach(), old - 0.05 * parameter.grad)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_an_emptied_state_begins_anew(shared: Cluster, job: str, name: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer(name, model), bucket_bytes=256)
        _steps(model, optimizer, 0, 3)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        _steps(model, optimizer, 3, 2)
    alone = _net()
    alone.load_state_dict(weights)
    _steps(alone, _optimizer(name, alone), 3, 2)
    assert all(_close(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("how", ["clear", "assign"])
def test_state_that_the_script_clears_begins_anew(shared: Cluster, job: str, how: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        _steps(model, optimizer, 0, 3)
        if how == "clear":
            optimizer.state.clear()
        else:
            optimizer.state = defaultdict(dict)
        _steps(model, optimizer, 3, 3)
        return model

    alone = _net()
    train(alone, _optimizer("AdamW", alone))
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer("AdamW", model), bucket_bytes=256)
        train(model, optimizer)
        assert all(_close(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        with pytest.raises(Unsupported, match="state_dict"):
            optimizer.state[next(model.parameters())]["exp_avg"].zero_()
        assert isinstance(copy.deepcopy(optimizer), torch.optim.Optimizer)


def test_groups_that_are_taken_away_are_refused_in_words(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer("AdamW", model))
        optimizer.param_groups.pop()
        with pytest.raises(InvalidRequest, match="had 1 parameter groups at prepare and has 0 now"):
            _steps(model, optimizer, 0, 1)


def test_bad_state_is_refused_and_changes_nothing(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _optimizer("AdamW", model))
        _steps(model, optimizer, 0, 2)
        good = optimizer.state_dict()
        shape = {0: {**good["state"][0], "exp_avg": torch.zeros(3)}}
        with pytest.raises(InvalidRequest, match=r"'exp_avg' of 0\.weight: expected shape \(40, 6\), got \(3,\)"):
            optimizer.load_state_dict({**good, "state": shape})
        unknown = {0: {**good["state"][0], "momentum_buffer": torch.zeros(40, 6)}}
        with pytest.raises(InvalidRequest, match="the state of AdamW is step, exp_avg"):
            optimizer.load_state_dict({**good, "state": unknown})
        with pytest.raises(Unsupported, match=r"lacks exp_avg_sq, which AdamW needs"):
            optimizer.load_state_dict({**good, "state": {0: {k: good["state"][0][k] for k in ("step", "exp_avg")}}})
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({**good, "param_groups": good["param_groups"] * 2})
        again = optimizer.state_dict()
        assert all(torch.equal(again["state"][0][key], value) for key, value in good["state"][0].items())


def test_after_close_there_is_no_half_checkpoint(shared: Cluster, job: str) -> None:
    session = shared.connect("sync", job=job)
    model = _net()
    model, optimizer = session.prepare(model, _optimizer("AdamW", model))
    _steps(model, optimizer, 0, 1)
    session.close()
    with pytest.raises(PSError, match="save it before"):
        optimizer.state_dict()
