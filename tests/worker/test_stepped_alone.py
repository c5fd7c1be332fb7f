"""An optimizer that the session does not know trains on this worker alone: it is refused, and so is no other one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker import InvalidRequest, Session
from tests.chaos.cluster import free_ports
from tests.tools.cases import cases, crossed
from tests.tools.cluster import TEST_SECONDS, Cluster
from tests.tools.forkserver import Nursery
from tests.tools.said import said_by_workers
from tests.tools.small_models import drawn, filled, same, step, weights_of

MODES = ["sync", "ssp:2", "async", "local:2", "local:4/2"]


def make_net() -> Any:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(params=cases(["async", "local:2", "local:4/2", "sync with a quorum"], ["sync", "ssp:2"]))
def session(request: pytest.FixtureRequest, shared: Cluster, job: str) -> Iterator[Session]:
    mode, more = (request.param, {}) if request.param in MODES else ("sync", {"quorum": 1})
    with ps_worker.connect(shared.address, mode, job, elastic=True, **more) as running:
        yield running


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, said: str) -> None:
    """A step of this optimizer raises, and changes nothing."""
    before = weights_of(model)
    with pytest.raises(InvalidRequest, match=said):
        step(model, optimizer, drawn(0, 8, 3))
    assert same(weights_of(model), before)


def test_a_fresh_optimizer_over_prepared_parameters_is_refused(session: Session) -> None:
    model = make_net()
    model, optimizer = session.prepare(model, sgd(model))
    step(model, optimizer, drawn(1, 8, 3))
    fresh = torch.optim.Adam(model.parameters())
    refused(model, fresh, r"Adam steps 0\.weight, 0\.bias, 2\.weight and 1 more on this worker alone.*prepare\(opt")
    of_a_group = sgd(make_net())
    of_a_group.add_param_group({"params": model[2].bias})
    refused(model, of_a_group, r"SGD steps 2\.bias on this worker alone")
    step(model, optimizer, drawn(2, 8, 3))
    assert session.clock == 2


def test_so_is_one_over_parameters_that_no_optimizer_of_the_session_has(session: Session) -> None:
    model = make_net()
    model, optimizer = session.prepare(model, sgd(model[2]))
    refused(model, sgd(model[0]), r"SGD steps 0\.weight, 0\.bias on this worker alone")
    step(model, optimizer, drawn(2, 8, 3))


def test_a_layer_that_comes_into_the_model_later_is_trained_on_no_worker_alone(session: Session) -> None:
    model = make_net()
    model, optimizer = session.prepare(model, sgd(model))
    step(model, optimizer, drawn(1, 8, 3))
    model[2] = nn.Linear(4, 2)  # a new head
    said = r"SGD has 2\.weight, 2\.bias, which came into the model after prepare: each worker would train that alone"
    refused(model, sgd(model[2]), said)
    for handed_over in (model, model[2]):
        with pytest.raises(InvalidRequest, match=said):
            session.prepare(sgd(handed_over))
    step(model, optimizer, drawn(2, 8, 3))
    assert session.clock == 2


def test_the_one_that_was_handed_over_is_refused_where_another_came_back(session: Session) -> None:
    model = make_net()
    own = sgd(model)
    _, optimizer = session.prepare(model, own)
    if session.mode.startswith("local"):
        assert optimizer is own, "it steps on this worker there"
        step(model, own, drawn(1, 8, 3))
    else:
        refused(model, own, r"it was handed to prepare, which has returned another optimizer\. Step that one")


def test_other_optimizers_step_as_ever(session: Session) -> None:
    model, other = make_net(), make_net()
    unused = torch.optim.Adam(model.parameters())
    model, optimizer = session.prepare(model, sgd(model))
    alone = make_net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for number in range(3):
        step(model, optimizer, drawn(number, 8, 3))
        averaged.update_parameters(model)
        step(other, sgd(other), drawn(number, 8, 3))
        step(alone, sgd(alone), drawn(number, 8, 3))
    assert same(weights_of(other), weights_of(alone))
    optimizer.zero_grad()
    unused.step()  # changes nothing: no parameter has a gradient
    session.close()
    step(model, sgd(model), drawn(0, 8, 3))  # the model is the script's own again


def test_a_step_in_one_process_warns_that_servers_would_refuse_it(caplog: pytest.LogCaptureFixture) -> None:
    with ps_worker.connect(mode="single") as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model))
        step(model, optimizer, drawn(1, 8, 3))
        fresh = torch.optim.Adam(model.parameters())
        for number in range(2):
            step(model, fresh, drawn(number, 8, 3))
        model[2] = nn.Linear(4, 2)
        step(model, session.prepare(sgd(model[2])), drawn(2, 8, 3))
    refused = "in sync, ssp and async this is refused: "
    stepped, new = [record.getMessage() for record in said_by_workers(caplog)]
    assert stepped.startswith(f"{refused}Adam steps 0.weight, 0.bias, 2.weight and 1 more on this worker alone")
    assert new.startswith(f"{refused}SGD has 2.weight, 2.bias, which came into the model after prepare")


def test_a_table_is_stepped_by_no_other_optimizer_either(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.ModuleDict({"rows": ps_worker.Embedding(2), "head": nn.Linear(2, 1)})
        model, _ = session.prepare(model, sgd(model))
        model["head"](model["rows"](torch.tensor([1, 2]))).sum().backward()
        with pytest.raises(InvalidRequest, match=r"SGD steps rows\.weight on this worker alone"):
            torch.optim.SGD(model["rows"].parameters(), lr=0.1).step()


# -- said at the end -------------------------------------------------------------------------------------------------


def no_step(_: nn.Module, __: torch.optim.Optimizer) -> None:
    """Only evaluates."""


def by_hand(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model(drawn(0, 8, 3)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


def as_usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer, drawn(0, 8, 3))


@pytest.mark.parametrize(
    ("mode", "train", "is_told"),
    cases(
        [
            *(("sync", train, train is by_hand) for train in (no_step, by_hand, as_usual)),
            *((mode, by_hand, True) for mode in MODES if mode != "sync"),
        ],
        [(mode, train, False) for mode in MODES if mode != "sync" for train in (no_step, as_usual)],
    ),
)
def test_a_script_that_trains_without_a_step_is_told_at_its_end(
    shared: Cluster,
    job: str,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    train: Callable[[nn.Module, torch.optim.Optimizer], None],
    is_told: bool,
) -> None:
    with shared.connect(mode, job=job) as session:
        model = make_net()
        train(*session.prepare(model, sgd(model)))
        session.close()
    said = [record for record in caplog.records if "no step was made through this session" in record.getMessage()]
    assert len(said) == is_told
    assert all(record.levelno == logging.WARNING for record in said)


@pytest.mark.parametrize(("mode", "trains"), crossed(["sync", "local:2"], ["a copy", "nothing", "both"]))
def test_a_script_that_trains_a_copy_over_a_prepared_loader_is_told_at_its_end(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, mode: str, trains: str
) -> None:
    """One that evaluates with gradients enabled is not, nor is one that trains another model beside its own."""
    with shared.connect(mode, job=job) as session:
        model, loader = make_net(), DataLoader(TensorDataset(drawn(0, 8, 3)), batch_size=4)
        copied = deepcopy(model)
        model, optimizer, loader = session.prepare(model, sgd(model), loader)
        own = sgd(copied)
        for [batch] in loader:
            if trains == "nothing":
                model(batch)
                continue
            step(copied, own, batch)
            if trains == "both":
                step(model, optimizer, batch)
    said = [record for record in caplog.records if "another optimizer has stepped parameters of no" in record.message]
    assert len(said) == (trains == "a copy")
    assert all(record.message.startswith("no step was made through this session, although") for record in said)


def test_a_script_that_an_error_ends_is_told_the_error_alone(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        with shared.connect("sync", job=job) as session:
            model = make_net()
            by_hand(*session.prepare(model, sgd(model)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    assert "no step was made" not in caplog.text


@pytest.mark.parametrize(("mode", "takes"), crossed(["sync", "local:2"], [True, False]))
def test_a_script_that_trains_with_its_own_loader_is_told_at_its_end(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, mode: str, takes: bool
) -> None:
    with ps_worker.connect(shared.address, mode, job, elastic=True) as session:
        model, loader = make_net(), DataLoader(TensorDataset(drawn(0, 8, 3)), batch_size=4)
        model, optimizer, prepared = session.prepare(model, sgd(model), loader)
        for [batch] in prepared if takes else loader:
            step(model, optimizer, batch)
    said = [record for record in caplog.records if "no batch was asked of a loader that prepare" in record.getMessage()]
    assert len(said) == (not takes)


IGNORES_WHAT_COMES_BACK = """
import torch, ps_worker
session = ps_worker.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found, _ = session.prepare(model, optimizer)
for _ in range(2):
    ({called}(torch.ones(1, 2) * (1 + session.rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("called", cases(["model"], ["found"]))
def test_ddp_tells_a_script_whose_steps_average_nothing(nursery: Nursery, tmp_path: Path, called: str) -> None:
    script, logs, ports = tmp_path / "script.py", [tmp_path / f"log-{rank}" for rank in range(2)], free_ports(1)
    script.write_text(IGNORES_WHAT_COMES_BACK.format(called=called))
    variables = {"PS_MODE": "ddp", "PS_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports)}
    processes = [nursery.run(script, [], log, PS_RANK=str(rank), **variables) for rank, log in enumerate(logs)]
    codes = [process.wait(TEST_SECONDS) for process in processes]
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], said
    assert ["so this process trains alone" in text for text in said] == [called == "model"] * 2
