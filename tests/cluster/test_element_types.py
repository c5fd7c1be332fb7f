"""Element types: what a model does not train travels as it is, of any type, and comes back in rollbacks and exports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ps_worker
from ps_protocol.tensors import BYTES_DTYPES, elements_of, put_elements
from ps_server.storage.export import export
from ps_worker import Unsupported
from ps_worker.state.model_state import FrozenTensor
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import same, weights_of

MODES = ["sync", "ssp:1", "async", "local:2", "local:4/2"]


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Mixed(nn.Module):
    """Trains one weight beside a buffer and a frozen parameter of every type that no bucket has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, generator=generator))
        for name, dtype in BYTES_DTYPES.items():
            values = torch.randint(0, 50, (2, 3, dtype.itemsize), generator=generator, dtype=torch.uint8)
            tensor = values.view(dtype).reshape(2, 3)
            self.register_buffer(f"{name}_buffer", tensor, persistent=False)
            self.register_buffer(f"{name}_scalar", tensor[0, 0].clone())
            self.register_buffer(f"{name}_turned", tensor.clone().t())
            frozen = nn.Parameter(tensor.clone(), requires_grad=False)
            self.register_parameter(f"{name}_frozen", frozen)
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64, generator=generator).conj())


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)


def bytes_of_all(model: nn.Module) -> list[torch.Tensor]:
    frozen = [*model.named_parameters(), *model.named_buffers()]
    return [elements_of(tensor).clone() for name, tensor in frozen if name != "weight"]


@pytest.mark.parametrize("mode", MODES)
def test_every_worker_begins_with_what_rank_0_has_of_any_type(shared: Cluster, job: str, mode: str) -> None:
    mixed = [Mixed(seed=rank) for rank in range(2)]

    def work(rank: int) -> nn.Module:
        with shared.connect(mode, rank, 2, job=job) as session:
            model, optimizer = session.prepare(mixed[rank], trained(mixed[rank]))
            model.weight.square().sum().backward()
            optimizer.step()
            return mixed[rank]

    first, second = in_parallel(2, work)
    assert same(bytes_of_all(first), bytes_of_all(Mixed(seed=0)))
    assert same(bytes_of_all(second), bytes_of_all(first))
    assert not same(weights_of(first)[:1], weights_of(Mixed(seed=0))[:1])


@pytest.mark.parametrize("name", BYTES_DTYPES)
def test_a_buffer_that_training_changes_goes_back_to_its_bytes(name: str) -> None:
    tensor: torch.Tensor = getattr(Mixed(seed=1), f"{name}_turned")
    other: torch.Tensor = getattr(Mixed(seed=2), f"{name}_turned")
    before = elements_of(tensor).clone()
    frozen = FrozenTensor(tensor)
    assert not frozen.changed()
    saved = frozen.copy()
    put_elements(tensor, elements_of(other))
    assert frozen.changed()
    assert frozen.takes(saved)
    assert not frozen.takes(saved[1:])
    frozen.put(saved)
    assert torch.equal(elements_of(tensor), before)


def test_an_export_has_the_true_types(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")
    mixed = Mixed(seed=1)
    expected = Mixed(seed=1)
    with cluster.connect("sync") as session:
        model, optimizer = session.prepare(mixed, trained(mixed))
        model.int16_buffer += 1
        expected.int16_buffer += 1
        for _ in range(2):
            model.weight.square().sum().backward()
            optimizer.step()
    cluster.stop()  # with a last checkpoint
    export(tmp_path / "checkpoints", "default", None, tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    tensors = dict([*expected.named_parameters(), *expected.named_buffers()])
    for name, dtype in BYTES_DTYPES.items():
        for kind in ("buffer", "scalar", "turned", "frozen"):
            tensor, own = found[f"{name}_{kind}"], tensors[f"{name}_{kind}"]
            if name == "complex128":
                tensor = torch.view_as_complex(tensor)
            assert torch.equal(elements_of(tensor).view(torch.uint8), elements_of(own)), name
            if name in ("complex64", "complex128", "int8", "int16", "uint16", "float8_e4m3fn"):
                assert (tensor.dtype, tensor.shape) == (dtype, own.shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alone", [True, False])
def test_a_parameter_without_elements_trains_as_in_one_process(
    shared: Cluster, job: str, mode: str, alone: bool
) -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    if not alone:
        model.weight = nn.Parameter(torch.ones(2))
    with shared.connect(mode, job=job) as session:
        prepared, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for _ in range(4):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in prepared.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert session.clock == 4


class Packed(torch.Tensor):
    """A tensor made of others, as quantized ones are."""

    def __tensor_flatten__(self) -> Any:
        return [], None


def packed() -> torch.Tensor:
    return torch.ones(3).as_subclass(Packed)


@pytest.mark.parametrize(
    ("tensor", "is_trained", "says"),
    [
        (lambda: torch.ones(3, dtype=torch.complex64), True, "its real view.*view_as_complex"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), True, "leave it out of the optimizer"),
        (packed, False, "a tensor made of others: hand the model to prepare as it was before"),
        (lambda: torch.ones(3).to_sparse(), False, "expected a dense tensor"),
    ],
)
def test_elements_that_servers_cannot_have_are_refused_before_a_worker_joins(
    shared: Cluster,
    job: str,
    tensor: Callable[[], torch.Tensor],
    is_trained: bool,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        if is_trained:
            model.register_parameter("more", nn.Parameter(tensor()))
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_buffer("more", tensor())
        return model, optimizer

    with shared.connect("sync", job=job) as session, pytest.raises(Unsupported, match=says):
        session.prepare(*make())
    assert shared.state(job) == {"known": False}
    with caplog.at_level(logging.WARNING, "ps_worker"), ps_worker.connect(mode="single") as session:
        session.prepare(*make())
    assert "more" in caplog.text


def test_a_base_is_packed_after_prepare(shared: Cluster, job: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    with shared.connect("sync", job=job) as session:
        prepared, optimizer = session.prepare(model, trained(model))
        prepared[0].weight = nn.Parameter(prepared[0].weight.detach().as_subclass(Packed), requires_grad=False)
        for _ in range(2):
            prepared(torch.ones(2)).sum().backward()
            optimizer.step()
        assert session.clock == 2
