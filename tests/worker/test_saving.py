"""What a script saves of a prepared model, by whatever code: every tensor, and each no larger than itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ps_worker
from ps_worker import Session
from ps_worker.model.optimizer import ServerOptimizer
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster
from tests.tools.small_models import assert_apart, drawn, filled, same, step, weights_of

MODES = ["single", "ddp", "sync", "ssp:2", "async", "local:4", "local:4/2"]
FEW_MODES = cases(["ddp", "sync", "local:4/2"], ["single", "ssp:2", "async", "local:4"])  # where one test has them all
TRANSPORTS = ["shm", "tcp", "grpc"]


class Net(nn.Module):
    """Layers of several sizes and types, two of which have one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second, self.third = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.third(self.second(self.norm(self.first(x)).relu()))
        return self.last(x) * self.scale


@pytest.fixture
def session(mode: str, shared: Cluster, job: str, alone: None) -> Iterator[Session]:
    """A session in each mode; that of ddp is a group of one."""
    with ps_worker.connect(shared.address, mode, job) as found:
        yield found


def prepared(session: Session, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has made two steps."""
    net = filled(Net(), seed)
    model, optimizer = session.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
    for number in range(2):
        step(model, optimizer, drawn(number, 6, 4))
    return model, optimizer


def size_of(thing: object) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return len(file.getvalue())


@pytest.mark.parametrize("mode", FEW_MODES)
def test_the_jobs_weights_take_no_memory_where_the_model_has_them_and_no_copy_is_wanted(session: Session) -> None:
    model, _ = prepared(session)
    own, found = session.unwrap(model).state_dict(), session.global_weights(copy=False)
    assert same(found.values(), session.global_weights().values())
    is_own = {name: found[name].data_ptr() == own[name].data_ptr() for name in own}
    assert all(is_own.values()) or session.mode.startswith("local"), is_own
    assert not any(session.global_weights()[name].data_ptr() == own[name].data_ptr() for name in own)


# -- where parameters lie --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FEW_MODES)
def test_each_parameter_and_its_gradient_has_a_storage_of_its_own(session: Session) -> None:
    model, optimizer = prepared(session)
    net = session.unwrap(model)
    assert_apart(net.parameters())
    assert not any(parameter._is_view() for parameter in net.parameters())
    if session.mode != "ddp":  # torch's own gradients are views into its buckets
        assert_apart(parameter.grad for parameter in net.parameters() if parameter.grad is not None)
    assert net.second.weight is net.third.weight
    state = net.state_dict()
    assert state["second.weight"].data_ptr() == state["third.weight"].data_ptr() == net.second.weight.data_ptr()
    step(model, optimizer, drawn(3, 6, 4))
    session.close()
    assert_apart(net.parameters())
    assert size_of(net.last.weight) < net.last.weight.nbytes + 4000
    assert size_of(net.last.weight.grad) < net.last.weight.nbytes + 4000


@pytest.mark.parametrize(
    ("mode", "transport", "bucket_bytes"), crossed(["sync", "async", "local:1"], TRANSPORTS, [64, None])
)
def test_weights_land_where_the_parameters_lie(
    mode: str, transport: str, bucket_bytes: int | None, shared: Cluster, job: str
) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        net = filled(Net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = session.prepare(net, optimizer, bucket_bytes=bucket_bytes)
        places = [parameter.data_ptr() for parameter in net.parameters()]
        storages = [parameter.untyped_storage().data_ptr() for parameter in net.parameters()]
        for number in range(3):
            before = weights_of(net)
            step(model, optimizer, drawn(number, 6, 4))
            assert not same(before, net.parameters())
        assert [parameter.data_ptr() for parameter in net.parameters()] == places
        assert [parameter.untyped_storage().data_ptr() for parameter in net.parameters()] == storages
    kept = weights_of(net)
    del session, model, optimizer
    assert same(kept, net.parameters()), "the memory is there for as long as the parameters are"
    net.first.weight.data.fill_(2.0)
    assert net.first.weight.sum() == 2.0 * net.first.weight.numel()


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "async", "local:2"], TRANSPORTS))
def test_a_model_that_is_shared_with_other_processes_goes_on(
    mode: str, transport: str, shared: Cluster, job: str
) -> None:
    alone, plain = filled(Net()), []
    for shares in (False, True):
        with shared.connect(mode, job=f"{job}-{shares}", transport=transport) as session:
            model, optimizer = prepared(session)
            if shares:
                model.share_memory()
            for number in range(4):
                step(model, optimizer, drawn(number, 6, 4))
            if shares:
                assert all(parameter.is_shared() for parameter in model.parameters())
                assert same(plain, model.parameters())
            plain = weights_of(model)
    assert not same(plain, alone.parameters())


@pytest.mark.parametrize("mode", ["sync"])
def test_a_model_that_several_processes_were_started_with_is_each_ones_own(session: Session) -> None:
    net = filled(Net()).share_memory()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert not any(parameter.is_shared() for parameter in model.parameters())


# -- what saves it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FEW_MODES)
def test_safetensors_saves_and_loads_the_model(session: Session, tmp_path: Path) -> None:
    model, optimizer = prepared(session)
    net = session.unwrap(model)
    safetensors.torch.save_model(net, str(tmp_path / "model"))
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    fresh = Net()
    assert safetensors.torch.load_model(fresh, str(tmp_path / "model")) == (set(), [])
    assert same(fresh.state_dict().values(), expected.values())
    step(model, optimizer, drawn(3, 6, 4))
    assert not same(net.state_dict().values(), expected.values())
    safetensors.torch.load_model(net, str(tmp_path / "model"))
    assert same(net.state_dict().values(), expected.values())


@pytest.mark.parametrize("mode", FEW_MODES)
def test_a_saved_parameter_is_as_large_as_itself(session: Session) -> None:
    model, _ = prepared(session)
    net = session.unwrap(model)
    for tensor in (net.scale, net.scale.data, net.scale.detach(), net.state_dict()["scale"]):
        assert size_of(tensor) < 2500
    if session.mode != "ddp":
        assert size_of(net.scale.grad) < 2500


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is meant; torch says so once in a process
@pytest.mark.parametrize("mode", MODES)
def test_torchs_checkpoints_save_and_load_model_and_optimizer(session: Session, tmp_path: Path) -> None:
    model, optimizer = prepared(session)
    clock = session.clock
    optimizer.zero_grad()
    state, optimizer_state = get_state_dict(model, optimizer)
    expected = weights_of(model)
    moments = {name: value["exp_avg"].clone() for name, value in optimizer_state["state"].items()}
    assert session.clock == clock, "nothing was stepped to look at the state"
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)

    step(model, optimizer, drawn(3, 6, 4))
    assert not same(expected, model.parameters())
    clock = session.clock
    optimizer.zero_grad()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert same(expected, model.parameters())
    assert session.clock == clock
    _, found = get_state_dict(model, optimizer)
    assert moments.keys() == found["state"].keys()
    assert all(torch.equal(found["state"][name]["exp_avg"], moment) for name, moment in moments.items())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_optimizer_has_the_name_of_the_scripts_own(session: Session) -> None:
    model, optimizer = prepared(session)
    assert type(optimizer).__name__ == "Adam"
    assert isinstance(optimizer, ServerOptimizer)
    assert repr(optimizer).startswith("Adam (\nParameter Group 0")
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(made) is ServerOptimizer
        assert made.param_groups[0]["lr"] == 0.1
    step(model, optimizer, drawn(3, 6, 4))
