"""What a script does to the parameters of a prepared model itself: the result is that of `single`, in every mode.

Each case trains alone as plain PyTorch would, and then on servers. With one worker the weights must agree; with two in
sync they must be those of a single process on the same data.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ps_worker import InvalidRequest, LimitExceeded, Session
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import close, drawn, filled, same, step, weights_of

Change = Callable[[Any, int], object]  # what a script does with its model after a step, and the step's number
STEPS = 9


def make_net() -> Any:
    convolution = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return filled(nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8 * 16, 4)), std=0.2)


def prepared(session: Session, **options: Any) -> Any:
    """A model and its optimizer."""
    model = make_net()
    return session.prepare(model, sgd(model), **{"bucket_bytes": 1024, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, change: Change) -> list[torch.Tensor]:
    """Steps with a change after each; the last of them is there for the change before it to have an effect."""
    for number in range(STEPS + 1):
        step(model, optimizer, drawn(number, 8, 3, 6, 6))
        if number < STEPS:
            optimizer.zero_grad()
            with torch.no_grad():
                change(model, number)
    return weights_of(model)


@functools.cache
def train_alone(change: Change) -> list[torch.Tensor]:
    model = make_net()
    return train(model, sgd(model), change)


def nothing(model: Any, number: int) -> None:
    """The script leaves its weights alone."""


# -- what scripts do -------------------------------------------------------------------------------------------------


def always(change: Callable[[Any], object]) -> Change:
    return lambda model, number: change(model)


def after(step_number: int, change: Callable[[Any], object]) -> Change:
    return lambda model, number: change(model) if number == step_number else None


def clamp(model: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def clamp_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def clamp_as_a_vector(model: Any) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat.clamp(-0.1, 0.1), model.parameters())


def begin_anew(model: Any) -> None:
    nn.init.normal_(model[4].weight, std=0.1, generator=torch.Generator().manual_seed(7))
    nn.init.zeros_(model[4].bias)


def halve_in_other_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def move(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def channels_last(model: Any, number: int) -> None:
    if number == 2:
        model.to(memory_format=torch.channels_last)
    if number > 2:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()


CHANGES: dict[str, Change] = {
    "clamp": always(clamp),
    "clamp by data": always(clamp_data),
    "clamp as a vector": always(clamp_as_a_vector),
    "decay": always(lambda model: model[0].weight.mul_(0.9)),
    "begin anew": after(5, begin_anew),
    "load": after(6, lambda model: model.load_state_dict(make_net().state_dict())),
    "halve in other memory": after(3, halve_in_other_memory),
    "move": after(3, move),
    "move as frameworks do": after(4, lambda model: model.to("cpu:0")),  # a copy: another device than "cpu" to torch
    "there and back": after(2, lambda model: model.double().float()),
    "channels last": channels_last,
    "through numpy": always(lambda model: model[4].weight.detach().numpy().__imul__(0.9)),
}


WAYS = (("sync", "shm"), ("async", "grpc"))


@pytest.mark.parametrize(
    ("name", "mode", "transport"),
    cases(
        [(name, *WAYS[number % 2]) for number, name in enumerate(CHANGES)],
        [
            *[(name, *WAYS[1 - number % 2]) for number, name in enumerate(CHANGES)],
            *[("clamp", *way) for way in (("sync", "grpc"), ("ssp:2", "shm"))],
        ],
    ),
)
def test_a_changed_model_trains_on_as_in_one_process(
    shared: Cluster, job: str, name: str, mode: str, transport: str
) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        assert close(train(*prepared(session), CHANGES[name]), train_alone(CHANGES[name]), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "transport"),
    crossed(["clamp", "clamp by data", "load", "halve in other memory", "channels last"], ["shm", "tcp", "grpc"]),
)
def test_in_sync_two_workers_end_alike_and_with_rank_0s_change(
    shared: Cluster, job: str, transport: str, name: str
) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job, transport=transport) as session:
            return train(*prepared(session), CHANGES[name])  # on the same data: the mean is one worker's gradient

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert close(first, train_alone(CHANGES[name]), rtol=1e-5)


def test_in_sync_a_change_by_one_other_rank_is_overwritten_by_rank_0(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        by_rank_1 = after(3, lambda model: nn.init.constant_(model[4].bias, 100.0))
        with shared.connect("sync", rank, 2, job=job) as session:
            return train(*prepared(session), by_rank_1 if rank else nothing)

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert first[-1].abs().max() < 50


def test_references_to_data_that_a_script_keeps_are_watched(shared: Cluster, job: str) -> None:
    kept: list[torch.Tensor] = []

    def clamp_kept(model: Any, number: int) -> None:
        if number == 0:
            kept.extend(parameter.data for parameter in model.parameters())
        for data in kept:
            data.clamp_(-0.1, 0.1)

    with shared.connect("sync", job=job) as session:
        assert close(train(*prepared(session), clamp_kept), train_alone(always(clamp)), rtol=1e-5)


def test_nothing_is_sent_where_nothing_changed(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where an average of the weights is swapped in and out again."""

    def swap(model: Any, number: int) -> None:
        kept = weights_of(model)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.zero_()
            parameter.data.copy_(value)

    sent: list[object] = []
    with shared.connect("sync", job=job) as session:
        model, optimizer = prepared(session)
        connection = session._strategy._training.participation.connection  # type: ignore[attr-defined]
        usual = connection.assign
        monkeypatch.setattr(connection, "assign", lambda *given: (sent.append(given), usual(*given)))
        train(model, optimizer, nothing)
        train(model, optimizer, swap)
        assert sent == []
        model[4].bias.data.zero_()
        optimizer.step()
        assert sent != []


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_parameters_on_another_device_keep_their_memory_and_train(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has one kind of memory: here two layers only count as being elsewhere. With a GPU: test_gpu.py."""
    model = make_net()
    elsewhere = {id(model[4].weight), id(model[4].bias), id(model[1].bias)}
    monkeypatch.setattr(
        "ps_worker.model.buffers.FlatBuffers._is_elsewhere", lambda self, tensor: id(tensor) in elsewhere
    )
    with shared.connect("sync", job=job, transport=transport) as session:
        before = model[4].weight.data_ptr()
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=1024, overlap=True)
        assert close(train(model, optimizer, always(clamp_data)), train_alone(always(clamp_data)), rtol=1e-5)
        assert model[4].weight.data_ptr() == before
        assert model[4].weight.grad is not None


# -- what is refused, or does not count ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_model_that_stays_another_type_is_refused_and_can_go_on(shared: Cluster, job: str, transport: str) -> None:
    with shared.connect("sync", job=job, transport=transport) as session:
        model, optimizer = prepared(session)
        model(drawn(0, 8, 3, 6, 6)).square().mean().backward()
        model.double()
        with pytest.raises(InvalidRequest, match=r"0\.weight is torch\.float64.*before optimizer\.step"):
            optimizer.step()
        model.float()
        optimizer.step()
        assert session.clock == 1


def halve_and_double(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sets all weights, and all state of the optimizer."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["momentum_buffer"] = 2 * state["momentum_buffer"]
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("error", [LimitExceeded("there is no room"), KeyboardInterrupt()], ids=["refused", "Ctrl-C"])
def test_what_is_set_before_a_step_that_ends_while_it_is_sent_goes_with_the_next(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Servers have a part of it by then: what they have counts no sooner, and once."""
    alone = make_net()
    optimizer = sgd(alone)
    train(alone, optimizer, nothing)
    halve_and_double(alone, optimizer)
    step(alone, optimizer, drawn(0, 8, 3, 6, 6))
    with shared.connect("sync", job=job) as session:
        model, optimizer = prepared(session)
        train(model, optimizer, nothing)
        halve_and_double(model, optimizer)
        connection = session._strategy._training.participation.connection  # type: ignore[attr-defined]
        usual, sent = connection.assign, list[object]()

        def assign(*given: object) -> None:
            if len(sent) == 2:
                raise error
            sent.append(given)
            usual(*given)

        monkeypatch.setattr(connection, "assign", assign)
        with pytest.raises(type(error)):
            optimizer.step()
        monkeypatch.undo()
        assert len(sent) == 2
        step(model, optimizer, drawn(0, 8, 3, 6, 6))
        assert close(weights_of(model), weights_of(alone), rtol=1e-5)


def test_a_late_worker_does_not_set_a_running_job_back(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with shared.connect("async", job=job, elastic=True) as first:
        model, optimizer = prepared(first)
        before = train(model, optimizer, nothing)
        with shared.connect("async", job=job, elastic=True) as second, caplog.at_level(logging.WARNING, "ps_worker"):
            late, stepper = prepared(second)
            assert second.clock > 0
            late.load_state_dict(make_net().state_dict())  # as a script that resumes from a file would
            stepper.step()  # without a gradient: nothing but the change could move the weights
            assert "is not taken over" in caplog.text
            assert same(before, late.parameters())
