"""What a script does to the parameters of a prepared model itself: the result is that of `single`, in every mode.

Each case trains alone as plain PyTorch would, and then on servers. With one worker the weights must agree; with two in
sync they must be those of a single process on the same data.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ps_worker import InvalidRequest, Unsupported
from tests.tools.cluster import Cluster, in_parallel

# What a script does after a step: model, the step's number, the weights as they were at the beginning.
Change = Callable[[nn.Module, int, dict[str, torch.Tensor]], None]
STEPS = 9
MODES = ["sync", "ssp:2", "async"]


def _net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return net


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, change: Change, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(STEPS):
        model(torch.randn(8, 3, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model, number, first)
    # One more step, so that the last change has an effect beyond this process.
    model(torch.randn(8, 3, 6, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _alone(change: Change) -> list[torch.Tensor]:
    model = _net()
    return _train(model, _sgd(model), change)


@torch.no_grad()
def _clamp(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def _clamp_by_data(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _begin_anew(model: Any, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 5:
        generator = torch.Generator().manual_seed(7)
        nn.init.normal_(model[4].weight, std=0.1, generator=generator)
        nn.init.zeros_(model[4].bias)


def _load(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 6:
        model.load_state_dict(first)


@torch.no_grad()
def _decay(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    next(model.parameters()).mul_(0.9)


def _replace_data(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 3:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def _move_without_a_change(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 3:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def _move_as_frameworks_do(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number in (0, 4):
        model.to("cpu:0")  # copies: torch takes it for another device than "cpu"


def _there_and_back(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 2:
        model.double()
        model.float()


def _channels_last(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number == 2:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if number > 2:
        weight = next(model.parameters())
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()


def _vector(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
    if number % 2:
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat.clamp(-0.1, 0.1), model.parameters())


class _KeepsReferences:
    """A script that asked for `.data` once and writes to it for ever after."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
        if number == 0:
            self.kept = [parameter.data for parameter in model.parameters()]
        for data in self.kept:
            data.clamp_(-0.1, 0.1)


CHANGES: list[Change] = [
    _clamp,
    _clamp_by_data,
    _begin_anew,
    _load,
    _decay,
    _replace_data,
    _move_without_a_change,
    _move_as_frameworks_do,
    _there_and_back,
    _channels_last,
    _vector,
]


def _close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_trains_on_as_in_one_process(
    shared: Cluster, job: str, mode: str, transport: str, change: Change
) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        assert _close(_train(model, optimizer, change), _alone(change))


def test_references_to_data_that_a_script_keeps_are_watched(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        assert _close(_train(model, optimizer, _KeepsReferences()), _alone(_clamp))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("change", [_clamp, _clamp_by_data, _load, _replace_data, _channels_last])
def test_in_sync_two_workers_end_alike_and_with_rank_0s_change(
    shared: Cluster, job: str, transport: str, change: Change
) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job, transport=transport) as session:
            model = _net()
            model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
            return _train(model, optimizer, change)  # both see the same data: the mean is one worker's gradient

    found = in_parallel(2, work)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert _close(found[0], _alone(change))


def test_in_sync_a_change_by_one_other_rank_is_overwritten_by_rank_0(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        def change(model: Any, number: int, first: dict[str, torch.Tensor]) -> None:
            if rank == 1 and number == 3:
                nn.init.constant_(model[4].bias, 100.0)

        with shared.connect("sync", rank, 2, job=job) as session:
            model = _net()
            model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
            return _train(model, optimizer, change)

    found = in_parallel(2, work)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][-1].abs().max() < 50


def test_an_average_that_is_swapped_in_and_out_changes_nothing(shared: Cluster, job: str) -> None:
    def swap(model: nn.Module, number: int, first: dict[str, torch.Tensor]) -> None:
        kept = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.copy_(torch.zeros_like(parameter))
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)

    with shared.connect("async", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        strategy: Any = session._strategy._training  # type: ignore[attr-defined]
        _train(model, optimizer, swap)
        assert strategy._model.weights.changed() == set()


def test_nothing_is_sent_where_nothing_changed(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        strategy: Any = session._strategy._training  # type: ignore[attr-defined]
        usual = strategy.participation.connection.assign
        strategy.participation.connection.assign = lambda *arguments: (sent.append(arguments), usual(*arguments))
        _train(model, optimizer, lambda model, number, first: None)
        assert sent == []
        with torch.no_grad():
            model[4].bias.zero_()
        optimizer.step()
        assert sent != []


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_model_that_stays_another_type_is_refused_and_can_go_on(shared: Cluster, job: str, transport: str) -> None:
    with shared.connect("sync", job=job, transport=transport) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        data = torch.randn(8, 3, 6, 6)
        model(data).square().mean().backward()
        model.double()
        with pytest.raises(InvalidRequest, match=r"0\.weight is torch\.float64.*before optimizer\.step"):
            optimizer.step()
        model.float()
        optimizer.step()
        assert session.clock == 1


def test_a_late_worker_does_not_set_a_running_job_back(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with shared.connect("async", job=job, elastic=True) as first:
        model = _net()
        start = copy.deepcopy(model.state_dict())
        model, optimizer = first.prepare(model, _sgd(model), bucket_bytes=1024)
        _train(model, optimizer, lambda model, number, first: None)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with shared.connect("async", job=job, elastic=True) as second, caplog.at_level(logging.WARNING, "ps_worker"):
            late = _net()
            late, stepper = second.prepare(late, _sgd(late), bucket_bytes=1024)
            assert second.clock > 0
            late.load_state_dict(start)  # as a script that resumes from a file would
            stepper.step()  # without a gradient: nothing but the change could move the weights
            assert "is not taken over" in caplog.text
            assert all(torch.equal(a, b) for a, b in zip(before, late.parameters(), strict=True))


def test_copies_and_saved_parts_are_plain_and_small(shared: Cluster, job: str, tmp_path: Any) -> None:
    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model))
        copied = copy.deepcopy(model)
        assert type(copied[4].weight) is nn.Parameter
        assert copied[4].weight.untyped_storage().nbytes() == copied[4].weight.nbytes
        for name, thing in (("state", model[4].state_dict()), ("parameter", {"b": model[4].bias}), ("head", model[4])):
            torch.save(thing, tmp_path / name)
            assert (tmp_path / name).stat().st_size < model[4].weight.nbytes + 8000
        torch.save(model, tmp_path / "model")
        loaded = torch.load(tmp_path / "model", weights_only=False)
        assert type(loaded[4].weight) is nn.Parameter
        assert torch.equal(loaded[4].weight, model[4].weight)
        state = torch.load(tmp_path / "state")
        assert type(state["weight"]) is torch.Tensor
        average = torch.optim.swa_utils.AveragedModel(model)
        _train(model, optimizer, lambda model, number, first: average.update_parameters(model))
        assert not torch.equal(average.module[4].weight, model[4].weight)
    assert type(model[4].weight) is nn.Parameter  # the session is over


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_parameters_on_another_device_keep_their_memory_and_train(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has one kind of memory: here two layers only count as being elsewhere. With a GPU: test_gpu.py."""
    model: Any = _net()
    elsewhere = {id(model[4].weight), id(model[4].bias), id(model[1].bias)}
    monkeypatch.setattr(
        "ps_worker.model.buffers.FlatBuffers._is_elsewhere", lambda self, tensor: id(tensor) in elsewhere
    )
    with shared.connect("sync", job=job, transport=transport) as session:
        before = model[4].weight.data_ptr()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024, overlap=True)
        assert _close(_train(model, optimizer, _clamp_by_data), _alone(_clamp_by_data))
        assert model[4].weight.data_ptr() == before
        assert model[4].weight.grad is not None


def test_numpy_writes_to_a_detached_parameter(shared: Cluster, job: str) -> None:
    def change(model: Any, number: int, first: dict[str, torch.Tensor]) -> None:
        array = model[4].weight.detach().numpy()
        array *= 0.9

    with shared.connect("sync", job=job) as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model), bucket_bytes=1024)
        assert _close(_train(model, optimizer, change), _alone(change))


def test_parameters_made_of_others_are_plain_in_copies(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model: Any = _net()
        model, _ = session.prepare(model, _sgd(model))
        head = nn.Linear(8 * 16, 4)
        head.weight = nn.Parameter(model[4].weight.detach())
        head.bias = nn.Parameter(model.state_dict()["4.bias"])
        assert isinstance(head.weight, nn.Parameter)
        copied = copy.deepcopy(head)
        assert type(copied.weight) is nn.Parameter
        assert copied.weight.requires_grad
        other = _net()
        other.load_state_dict(model.state_dict(), assign=True)
        other(torch.randn(8, 3, 6, 6)).sum().backward()
        torch.nn.utils.parametrizations.weight_norm(copied)


def test_memory_that_is_moved_as_a_whole_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, transport="shm") as session:
        model = _net()
        model, optimizer = session.prepare(model, _sgd(model))
        model.share_memory()
        model(torch.randn(8, 3, 6, 6)).sum().backward()
        with pytest.raises(Unsupported, match="do that before prepare, or use transport grpc"):
            optimizer.step()
