"""Optimizers that `prepare` has not returned: they step no prepared model, as each worker would train alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import ps_worker
from ps_worker import InvalidRequest, Session
from tests.tools.cluster import Cluster
from tests.tools.small_models import drawn, filled, same, step, weights_of

MODES = ["sync", "ssp:1", "async", "quorum", "local:2", "local:2s", "local:4/2"]
NOT_RETURNED = "session.prepare has not returned this optimizer"


def connected(shared: Cluster, mode: str, job: str) -> Session:
    if mode == "quorum":
        return ps_worker.connect(shared.address, "sync", job, elastic=True, quorum=1)
    return shared.connect(mode, job=job)


def make_net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **more)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_prepare_has_not_returned_steps_no_prepared_model(
    shared: Cluster, job: str, mode: str
) -> None:
    with connected(shared, mode, job) as session:
        net = make_net()
        model, optimizer = session.prepare(net, sgd(net))
        step(model, optimizer, drawn(1, 5, 3))
        before = weights_of(model)
        with pytest.raises(InvalidRequest, match=NOT_RETURNED):
            step(model, sgd(model, momentum=0.9), drawn(2, 5, 3))
        part = torch.optim.AdamW(make_net().parameters())
        part.add_param_group({"params": list(model[1].parameters())})
        with pytest.raises(InvalidRequest, match=r"AdamW steps 1\.weight"):
            part.step()
        assert same(weights_of(model), before)
        step(model, optimizer, drawn(2, 5, 3))
        assert session.clock == 2
        assert not same(weights_of(model), before)
    step(model, sgd(model), drawn(3, 5, 3))  # the session is over, and the model the script's own


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("local")])
def test_the_optimizer_that_was_handed_to_prepare_steps_no_more(shared: Cluster, job: str, mode: str) -> None:
    with connected(shared, mode, job) as session:
        model = make_net()
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        before = weights_of(model)
        with pytest.raises(InvalidRequest, match=NOT_RETURNED):
            step(model, optimizer, drawn(1, 5, 3))
        assert same(weights_of(model), before)


def test_a_scheduler_made_before_prepare_hides_no_step(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = make_net()
        optimizer = sgd(model)
        scheduler = StepLR(optimizer, 1)  # it has patched `step`
        _, prepared, _ = session.prepare(model, optimizer, scheduler)
        with pytest.raises(InvalidRequest, match=NOT_RETURNED):
            step(model, optimizer, drawn(1, 5, 3))
        step(model, prepared, drawn(1, 5, 3))
        assert session.clock == 1


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_a_frozen_parameter_of_a_prepared_model_is_trained_by_no_optimizer_of_its_own(
    shared: Cluster, job: str, mode: str
) -> None:
    with connected(shared, mode, job) as session:
        net = make_net()
        model, _ = session.prepare(net, torch.optim.SGD(net[0].parameters(), lr=0.1))
        model(drawn(1, 5, 3)).sum().backward()
        with pytest.raises(InvalidRequest, match=r"SGD steps 1\.weight"):
            torch.optim.SGD(model[1].parameters(), lr=0.1).step()


class Sam(torch.optim.Optimizer):
    """Steps by an optimizer of its own inside of its step, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and changes the weights after its step."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped
        super().__init__(wrapped.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        self.wrapped.step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


def test_an_optimizer_inside_a_step_of_the_sessions_own_passes(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        net = make_net()
        model, optimizer = session.prepare(net, Sam(net.parameters()))
        step(model, optimizer, drawn(1, 5, 3))
        assert session.clock == 1
        with pytest.raises(InvalidRequest, match=NOT_RETURNED):
            optimizer.base.step()


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_an_optimizer_that_wraps_the_sessions_own_passes(shared: Cluster, job: str, mode: str) -> None:
    with connected(shared, mode, job) as session:
        net = make_net()
        model, optimizer = session.prepare(net, sgd(net))
        step(model, Lookahead(optimizer), drawn(1, 5, 3))
        assert session.clock == 1


def test_optimizers_of_other_models_pass(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        net = make_net()
        session.prepare(net, sgd(net))
        other = make_net()
        step(other, sgd(other), drawn(1, 5, 3))


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_a_session_without_a_step_says_so_at_its_end(
    shared: Cluster, job: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ps_worker"), connected(shared, mode, job) as session:
        net = make_net()
        model, _ = session.prepare(net, sgd(net))
        model(drawn(1, 5, 3)).sum().backward()
    found = [record for record in caplog.records if "no step was made through this session" in record.getMessage()]
    assert [record.levelno for record in found] == [logging.WARNING]
    assert "\n" not in found[0].getMessage()


@pytest.mark.parametrize("what", ["a step", "no backward"])
def test_other_sessions_say_nothing_at_their_end(
    shared: Cluster, job: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ps_worker"), shared.connect("sync", job=job) as session:
        net = make_net()
        model, optimizer = session.prepare(net, sgd(net))
        if what == "a step":
            step(model, optimizer, drawn(1, 5, 3))
    assert "no step was made" not in caplog.text


def test_without_servers_any_optimizer_steps() -> None:
    with ps_worker.connect(mode="single") as session:
        net = make_net()
        model, _ = session.prepare(net, sgd(net))
        step(model, sgd(model), drawn(1, 5, 3))


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async", "local:2", "local:4/2"])
def test_a_next_stage_is_a_session_of_another_job(shared: Cluster, job: str, mode: str) -> None:
    """What the error says to do: the second stage starts from the first one's weights, with a fresh optimizer."""
    with connected(shared, mode, job) as session:
        net = make_net()
        model, optimizer = session.prepare(net, sgd(net))
        for number in range(4):
            step(model, optimizer, drawn(number, 5, 3))
    before = weights_of(net)
    with connected(shared, mode, f"{job[:120]}-stage2") as session:
        model, optimizer = session.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        assert same(weights_of(model), before)
        step(model, optimizer, drawn(9, 5, 3))
        assert session.clock == 1
        assert not same(weights_of(model), before)
