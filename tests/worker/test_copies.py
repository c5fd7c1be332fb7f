"""What a script may do with a prepared model besides training it: copy, average, save and compile it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ps_worker
from ps_worker import Session
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster
from tests.tools.small_models import close, same, weights_of

MODES = ["single", "ddp", "sync", "ssp:2", "async"]


class Net(nn.Module):
    """Two layers, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


@pytest.fixture
def session(mode: str, shared: Cluster, job: str, alone: None) -> Iterator[Session]:
    """A session in each mode; that of ddp is a group of one."""
    with ps_worker.connect(shared.address, mode, job) as found:
        yield found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12.0).view(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def prepared(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of training."""
    model = Net()
    model, optimizer = session.prepare(model, sgd(model, momentum=0.9))
    step(model, optimizer)
    return model, optimizer


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> Any:
    return AveragedModel(model).module


COPIES: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, pickled, saved, averaged]


@pytest.mark.parametrize(("mode", "make"), crossed(MODES, COPIES))
def test_a_copy_is_a_plain_model_that_trains_by_itself(
    session: Session, make: Callable[[nn.Module], nn.Module]
) -> None:
    model, optimizer = prepared(session)
    inner = session.unwrap(model)
    found = make(inner)
    assert type(found) is Net
    before = weights_of(inner)
    assert same(found.state_dict().values(), inner.state_dict().values())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in found.parameters())
    with getattr(found, "no_sync", contextlib.nullcontext)():
        step(found, sgd(found))
    assert session.clock == 1, "no hook of the session has seen it"
    assert same(inner.parameters(), before)
    assert not any(torch.equal(a, b) for a, b in zip(found.parameters(), before, strict=True))
    step(model, optimizer)  # and the model itself goes on
    assert session.clock == 2


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_an_average_is_taken_after_each_step(session: Session) -> None:
    model, optimizer = prepared(session)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    expected = model.second.weight.detach().clone()
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(model)
        expected = 0.5 * expected + 0.5 * model.second.weight.detach()
    assert torch.allclose(average.module.second.weight, expected)


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_a_copy_may_be_prepared_by_a_session_of_its_own(session: Session, shared: Cluster, job: str) -> None:
    model, _ = prepared(session)
    for number, make in enumerate((copy.deepcopy, pickled)):
        found = make(model)
        with ps_worker.connect(shared.address, "sync", f"{job}-{number}") as other:
            found, optimizer = other.prepare(found, sgd(found), overlap=True)
            with found.no_sync():  # without it, the second backward would come too late
                found(torch.ones(3, 4)).sum().backward()
            step(found, optimizer)
            assert other.clock == 1


@pytest.mark.parametrize("mode", ["single"])
def test_a_saved_model_is_loaded_without_this_package(session: Session, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model, _ = session.prepare(model, sgd(model))
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['ps_worker'] = sys.modules['ps_protocol'] = None\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "with model.no_sync():\n"
        "    model(torch.ones(2))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize("mode", ["single", "ddp"])
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_of_the_optimizer_is_watched_by_nothing(
    session: Session, make: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
) -> None:
    _, optimizer = prepared(session)
    found = make(optimizer)
    assert type(found) is torch.optim.SGD
    assert len(found.state) == len(optimizer.state)
    found.step()
    assert session.clock == 1


@pytest.mark.parametrize("mode", ["sync"])
def test_copies_and_saved_parts_are_plain_and_small(session: Session, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    model, _ = session.prepare(model, sgd(model))
    head = model[2]
    copied = copy.deepcopy(model)[2].weight
    assert type(copied) is nn.Parameter
    assert copied.untyped_storage().nbytes() == copied.nbytes
    for name, thing in (("state", head.state_dict()), ("parameter", {"b": head.bias}), ("head", head)):
        torch.save(thing, tmp_path / name)
        assert (tmp_path / name).stat().st_size < head.weight.nbytes + 8000
    assert type(torch.load(tmp_path / "state")["weight"]) is torch.Tensor
    session.close()
    assert type(head.weight) is nn.Parameter


@pytest.mark.parametrize("mode", ["sync"])
def test_parameters_made_of_others_are_plain_in_copies(session: Session) -> None:
    model, _ = prepared(session)
    other = nn.Linear(8, 1)
    other.weight = nn.Parameter(model.second.weight.detach())
    other.bias = nn.Parameter(model.state_dict()["second.bias"])
    copied = copy.deepcopy(other)
    assert type(copied.weight) is nn.Parameter
    assert copied.weight.requires_grad
    torch.nn.utils.parametrizations.weight_norm(copied)
    assigned = Net()
    assigned.load_state_dict(model.state_dict(), assign=True)
    assigned(torch.ones(3, 4)).sum().backward()


# -- compiled --------------------------------------------------------------------------------------------------------


def whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, fullgraph=True, backend=backend)  # type: ignore[no-any-return]


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(fullgraph=True, backend=backend)
    return model


def assert_trains(
    session: Session, backend: str, before: bool, compiled: Callable[[nn.Module, str], nn.Module], within: float
) -> None:
    """A model that is compiled before or after `prepare` ends where one without a compiler or a session does."""
    torch._dynamo.reset()
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    model = compiled(net, backend) if before else net
    model, optimizer = session.prepare(model, sgd(net))
    model = model if before else compiled(model, backend)
    plain = sgd(alone)
    for _ in range(4):  # more than it takes to find out that buckets may leave during backward
        step(model, optimizer)
        step(alone, plain)
    assert session.clock == 4
    assert close(net.parameters(), alone.parameters(), atol=within)


@pytest.mark.parametrize(("mode", "before", "compiled"), crossed(["sync", "single"], [True, False], [whole, in_place]))
def test_a_compiled_model_trains_without_a_graph_break(
    session: Session, before: bool, compiled: Callable[[nn.Module, str], nn.Module]
) -> None:
    """fullgraph=True makes a graph break an error, and the tests' settings a warning."""
    assert_trains(session, "aot_eager", before, compiled, within=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_so_does_one_that_inductor_compiles(session: Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about what it imports for this
        assert_trains(session, "inductor", False, whole, within=1e-3)  # BatchNorm makes rounding large
