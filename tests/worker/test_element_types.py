"""Element types: what no optimizer steps may have any, complex parameters train, and the rest is refused by name."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker
from ps_server.storage.export import export, model_state_dict, optimizer_state_dict
from ps_server.storage.manifest import Manifest
from ps_worker import InvalidRequest, NonFiniteGradient, Session, Unsupported
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import close, drawn, filled, same, step, weights_of

MakeCluster = Callable[..., Cluster]

NAMES = [
    *("complex64", "complex128", "int8", "int16", "uint16", "uint32", "uint64", "bool", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}


def some(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    """Any elements of that type."""
    size = math.prod(shape) * dtype.itemsize
    drawn_bytes = torch.randint(2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return drawn_bytes.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Quantised(torch.Tensor):
    """A weight in eight bits with a scale, as such packages make one: a tensor that consists of two others."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale_ = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scale_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> Quantised:
        return Quantised(inner["values_"], inner["scale_"])

    def dequantise(self) -> torch.Tensor:
        return self.values_.to(self.scale_.dtype) * self.scale_

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def each(apply: Callable[[torch.Tensor], torch.Tensor], own: Quantised) -> Quantised:
            return Quantised(apply(own.values_), apply(own.scale_))

        if call in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return each(lambda inner: call(inner), args[0])
        if call is torch.ops.aten._to_copy.default:
            return each(lambda inner: inner.clone(), args[0])
        raise NotImplementedError(f"{call}")


class Model(nn.Module):
    """One layer that trains, and tensors that do not: in buffers, persistent or not, and in a frozen parameter."""

    def __init__(self, seed: int, **kept: torch.Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        for name, tensor in kept.items():
            self.register_buffer(f"{name}_saved", tensor)
            self.register_buffer(f"{name}_apart", tensor.clone(), persistent=False)
            self.register_parameter(f"{name}_frozen", nn.Parameter(tensor.clone(), requires_grad=False))
        nn.init.constant_(self.head.weight, seed)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x)


def kept(seed: int) -> dict[str, torch.Tensor]:
    """Of each type: a matrix, a number, a matrix that lies the other way round, and nothing."""
    return {
        f"{name}_{shape}": tensor
        for name, dtype in DTYPES.items()
        for shape, tensor in {
            "matrix": some(dtype, seed, 2, 4),
            "number": some(dtype, seed),
            "turned": some(dtype, seed, 3, 2).T,
            "nothing": some(dtype, seed, 0),
        }.items()
    }


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in [*model.named_buffers(), *model.named_parameters()] if "head" not in name}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases([("sync", "shm"), ("async", "tcp"), ("local:4/2", "grpc")], [("sync", "grpc"), ("local:2", "auto")]),
)
def test_what_is_not_trained_may_have_any_type_and_starts_as_rank_0_has_it(
    shared: Cluster, job: str, mode: str, transport: str
) -> None:
    def work(rank: int) -> dict[str, torch.Tensor]:
        with shared.connect(mode, rank, 2, job=job, transport=transport) as session:
            model = Model(rank, **kept(rank))
            model, optimizer = session.prepare(model, sgd(model), bucket_bytes=256)
            step(model, optimizer, drawn(rank, 4, 3))
            return tensors_of(model)

    first, second = in_parallel(2, work)
    expected = tensors_of(Model(0, **kept(0)))
    for found in (first, second):
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()
        }
        assert {name for name in found if bits(found[name]) != bits(expected[name])} == set()


def test_a_conjugate_view_starts_as_the_values_that_it_shows(shared: Cluster, job: str) -> None:
    def work(rank: int) -> torch.Tensor:
        with shared.connect("sync", rank, 2, job=job) as session:
            model = Model(0)
            model.register_buffer("phases", some(torch.complex64, rank, 3).conj())
            model, optimizer = session.prepare(model, sgd(model))
            step(model, optimizer, drawn(rank, 4, 3))
            return model.phases.resolve_conj()  # type: ignore[no-any-return]

    first, second = in_parallel(2, work)
    assert same([first, second], [some(torch.complex64, 0, 3).conj().resolve_conj()] * 2)


@pytest.mark.parametrize("mode", ["sync", "async", "local:2"])
def test_a_quantised_weight_travels_as_the_tensors_that_it_consists_of(shared: Cluster, job: str, mode: str) -> None:
    class Quantising(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            weight = Quantised(some(torch.int8, seed, 3, 4), torch.tensor(0.5 + seed))
            self.base = nn.Parameter(weight, requires_grad=False)
            self.tied = self.base
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            base: Any = self.base
            return self.head(x @ base.dequantise())

    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect(mode, rank, 2, job=job) as session:
            model: Any = Quantising(rank)
            model, optimizer = session.prepare(model, sgd(model))  # it is in the optimizer, and has no gradient
            step(model, optimizer, drawn(rank, 4, 3))
            optimizer = session.prepare(torch.optim.Adam(model.parameters()))
            step(model, optimizer, drawn(rank, 4, 3))
            assert isinstance(model.base, Quantised)
            assert model.tied is model.base
            return [model.base.values_, model.base.scale_]

    first, second = in_parallel(2, work)
    assert same(first, [some(torch.int8, 0, 3, 4), torch.tensor(0.5)])
    assert same(second, first)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    return [each for name in names for each in inner_tensors(getattr(tensor, name))]


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchaos_weights_start_as_rank_0_has_them(shared: Cluster, job: str, kind: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job) as session:
            base = nn.Linear(32, 64).requires_grad_(False)
            nn.init.constant_(base.weight, 0.25 + rank)
            nn.init.constant_(base.bias, rank)
            torchao.quantize_(base, getattr(torchao, kind)())
            model: Any = nn.Sequential(base, filled(nn.Linear(64, 1)))
            model, optimizer = session.prepare(model, sgd(model))
            for number in range(2):
                step(model, optimizer, drawn(number, 4, 32))
            assert type(model[0].weight) is type(base.weight) is not nn.Parameter
            assert float(base.weight.dequantize().mean()) == pytest.approx(0.25, rel=0.01)
            return [each for parameter in model.parameters() for each in inner_tensors(parameter)]

    first, second = in_parallel(2, work)
    assert len(first) > 4, "of a weight there are several"
    assert same(first, second)


# -- complex parameters ----------------------------------------------------------------------------------------------


class Fourier(nn.Module):
    """Complex weights beside a real one, and one that is a number."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=dtype))
        self.scale = nn.Parameter(torch.randn((), generator=generator, dtype=dtype))
        self.b = nn.Parameter(torch.randn(4, generator=generator))

    def forward(self, x: torch.Tensor) -> Any:
        return (x.to(self.w.dtype) @ self.w * self.scale).abs() + self.b


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}  # kernels of their own on the shards: equal but for rounding


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = 6) -> list[torch.Tensor]:
    for number in range(first, last):
        step(model, optimizer, drawn(number, 5, 3))
    return weights_of(model)


@pytest.mark.parametrize(("name", "dtype"), crossed(OPTIMIZERS, [torch.complex64, torch.complex128]))
def test_complex_parameters_train_as_in_one_process(shared: Cluster, job: str, name: str, dtype: torch.dtype) -> None:
    make, alone = OPTIMIZERS[name], Fourier(dtype)
    own = make(alone.parameters())
    expected = train(alone, own)
    with shared.connect("sync", job=job, transport="grpc") as session:
        model: Any = Fourier(dtype)
        model, optimizer = session.prepare(model, make(model.parameters()), bucket_bytes=64)
        found = train(model, optimizer)
        assert close(found, expected) if name in FUSED else same(found, expected)
        there, here = optimizer.state_dict()["state"], own.state_dict()["state"]
        assert there.keys() == here.keys()
        for index, state in here.items():
            for key, value in state.items():
                if value is not None:
                    assert there[index][key].dtype == torch.as_tensor(value).dtype
                    torch.testing.assert_close(there[index][key], torch.as_tensor(value))


@pytest.mark.parametrize("mode", ["ssp:1", "async", "local:2", "local:4/2"])
def test_they_train_in_every_mode(shared: Cluster, job: str, mode: str) -> None:
    expected = train(alone := Fourier(), OPTIMIZERS["AdamW"](alone.parameters()), last=4)
    with shared.connect(mode, job=job) as session:
        model: Any = Fourier()
        options = {"outer": {"lr": 1.0, "momentum": 0.0}} if mode.startswith("local") else {}
        model, optimizer = session.prepare(model, OPTIMIZERS["AdamW"](model.parameters()), **options)
        assert close(train(model, optimizer, last=4), expected)


def test_several_workers_average_complex_gradients(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job) as session:
            model: Any = Fourier()
            model, optimizer = session.prepare(model, sgd(model), bucket_bytes=64)
            step(model, optimizer, drawn(rank, 5, 3))
            return weights_of(model)

    first, second = in_parallel(2, work)
    alone = Fourier()
    step(alone, sgd(alone), torch.cat([drawn(0, 5, 3), drawn(1, 5, 3)]))
    assert same(first, second)
    assert close(first, weights_of(alone))


def test_complex_state_goes_into_a_resumed_run(shared: Cluster, job: str) -> None:
    expected = train(alone := Fourier(), OPTIMIZERS["Adam"](alone.parameters()))
    with shared.connect("sync", job=job) as session:
        model: Any = Fourier()
        model, optimizer = session.prepare(model, OPTIMIZERS["Adam"](model.parameters()))
        train(model, optimizer, 0, 3)
        saved = model.state_dict(), optimizer.state_dict()
        saved = {name: tensor.clone() for name, tensor in saved[0].items()}, saved[1]
    with shared.connect("sync", job=f"{job}.again"[-128:]) as session:
        model = Fourier()
        model.load_state_dict(saved[0])
        model, optimizer = session.prepare(model, OPTIMIZERS["Adam"](model.parameters()))
        optimizer.load_state_dict(saved[1])
        assert close(train(model, optimizer, 3), expected)
        wrong = optimizer.state_dict()
        wrong["state"][0]["exp_avg"] = torch.zeros(4, 3, dtype=torch.complex64)
        with pytest.raises(
            InvalidRequest, match=r"'exp_avg' of w: expected shape \(3, 4, 2\), got \(4, 3, 2\), the last"
        ):
            optimizer.load_state_dict(wrong)


def test_what_the_script_does_to_complex_weights_and_gradients_counts(shared: Cluster, job: str) -> None:
    def disturbed(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        step(model, optimizer, drawn(0, 5, 3))
        model.w.data.mul_(0.5j)
        optimizer.zero_grad()
        model(drawn(1, 5, 3)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return weights_of(model)

    expected = disturbed(alone := Fourier(), sgd(alone))
    with shared.connect("sync", job=job) as session:
        model: Any = Fourier()
        model, optimizer = session.prepare(model, sgd(model))
        assert close(disturbed(model, optimizer), expected)
        before = weights_of(model)
        model.w.grad[0, 0] = complex(0, math.nan)
        with pytest.raises(NonFiniteGradient, match="the gradient of w is not finite"):
            optimizer.step()
        assert same(weights_of(model), before)


# -- files -----------------------------------------------------------------------------------------------------------


def train_until_checkpoint(cluster: Cluster, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest:
    made: list[Manifest] = []
    asked = threading.Thread(target=lambda: made.append(cluster.coordinator.job("job").checkpoint()))
    asked.start()
    while asked.is_alive():
        step(model, optimizer, drawn(0, 5, 3))
    [manifest] = made
    return manifest


def test_an_export_has_the_types_of_the_model(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")

    class Both(Fourier):
        def __init__(self) -> None:
            super().__init__(torch.complex128)
            for name, dtype in DTYPES.items():
                self.register_buffer(name, some(dtype, 1, 2, 2))
                self.register_buffer(f"{name}_apart", some(dtype, 1, 2, 2), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            if self.training:
                self.complex128 *= 1j
            return super().forward(x)

    model: Any = Both()
    with cluster.connect("sync", job="job") as session:
        model, optimizer = session.prepare(model, OPTIMIZERS["Adam"](model.parameters()))
        manifest = train_until_checkpoint(cluster, model, optimizer)
        export(tmp_path / "checkpoints", "job", manifest.name, tmp_path / "out")
    found = model_state_dict(tmp_path / "out")
    expected = Both()
    assert found.keys() == expected.state_dict().keys()
    for name in DTYPES:
        assert found[name].dtype == DTYPES[name]
        if name != "complex128":
            assert bits(found[name]) == bits(expected.state_dict()[name])
    changed = some(torch.complex128, 1, 2, 2) * 1j**manifest.clock
    assert same([found["complex128"]], [changed])
    expected.load_state_dict(found)
    own = OPTIMIZERS["Adam"](expected.parameters())
    own.load_state_dict(optimizer_state_dict(tmp_path / "out"))
    assert own.state[expected.w]["exp_avg"].dtype == torch.complex128
    plain = load_file(tmp_path / "out" / "model.safetensors")
    assert plain["uint16"].dtype == torch.uint16, "what other programs know, they read as it is"
    assert plain["complex128"].shape == (2, 2, 16), "and of the rest, its bytes"


def test_a_rollback_brings_back_what_a_script_has_changed(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")

    def changing() -> Any:
        model = Model(0, **{name: some(dtype, 1, 2, 2) for name, dtype in DTYPES.items()})
        return model, sgd(model)

    with cluster.connect("sync", job="job") as session:
        model, optimizer = session.prepare(*changing())
        train_until_checkpoint(cluster, model, optimizer)
        at_first = {name: bits(tensor) for name, tensor in tensors_of(model).items()}
        with torch.no_grad():
            for name, tensor in tensors_of(model).items():
                tensor.copy_(some(tensor.dtype, 2, 2, 2))
                assert bits(tensor) != at_first[name]
        last = {name: bits(tensor) for name, tensor in tensors_of(model).items()}
        train_until_checkpoint(cluster, model, optimizer)
        with torch.no_grad():
            for tensor in tensors_of(model).values():
                tensor.copy_(some(tensor.dtype, 3, 2, 2))
        cluster.start_again(1)
        for _ in range(2):
            step(model, optimizer, drawn(0, 5, 3))
        assert {name for name, tensor in tensors_of(model).items() if bits(tensor) != last[name]} == set()


# -- values over all workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_values_of_every_type_are_gathered(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        model = Model(0)
        session.prepare(model, sgd(model))
        given = kept(1)
        [gathered] = session.gather(given)
        told = session.broadcast(given)
        for found in (gathered, told):
            assert {n: (t.dtype, t.shape, bits(t)) for n, t in found.items()} == {
                n: (t.dtype, t.shape, bits(t)) for n, t in given.items()
            }
        with pytest.raises(Unsupported, match="holds a Quantised, which consists of other tensors: send these"):
            session.gather([Quantised(some(torch.int8, 0, 2), torch.tensor(1.0))])


# -- refused ---------------------------------------------------------------------------------------------------------


def trained_float8(model: nn.Module) -> None:
    model.register_parameter("w", nn.Parameter(some(torch.float8_e4m3fn, 0, 2)))


def trained_quantised(model: nn.Module) -> None:
    model.register_parameter("w", nn.Parameter(Quantised(some(torch.int8, 0, 2), torch.tensor(1.0))))


def sparse(model: nn.Module) -> None:
    model.register_buffer("w", torch.eye(2).to_sparse())


def old_quantised(model: nn.Module) -> None:
    model.register_buffer("w", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, of quantized tensors
@pytest.mark.parametrize(
    ("add", "said"),
    [
        (
            trained_float8,
            r"^w has dtype torch\.float8_e4m3fn, and servers step plain tensors of float32.*requires_grad",
        ),
        (trained_quantised, "^w is a Quantised, and servers step plain tensors of float32.*complex64, complex128"),
        (sparse, r"^w is a sparse tensor \(torch\.sparse_coo\): keep its indices and its values as two buffers"),
        (old_quantised, r"^w has dtype torch\.qint8, whose scale is no tensor: keep int_repr\(\)"),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_what_cannot_travel_is_refused_before_the_worker_joins(
    shared: Cluster, job: str, mode: str, add: Callable[[nn.Module], None], said: str
) -> None:
    model = Model(0)
    add(model)
    with shared.connect(mode, job=job) as session, pytest.raises(Unsupported, match=said):
        session.prepare(model, sgd(model))
    assert shared.coordinator.jobs().get(job) is None


def test_a_parameter_of_no_module_is_to_be_put_into_one(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(session: Session) -> None:
        model, weight = Model(0), nn.Parameter(torch.ones(2))
        session.prepare(model, torch.optim.SGD([*model.parameters(), weight], lr=0.1))

    said = "hold 1 parameters of no model.*Put a parameter of its own, such as the weight of a loss, into a module"
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match=said):
        prepare(session)
    with ps_worker.connect(mode="single") as session:
        prepare(session)
    assert "such as the weight of a loss, into a module" in caplog.text, "the dry run says it, too"


# -- nothing to train ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "beside"), crossed(["single", "sync", "async", "local:2"], [True, False]))
def test_a_parameter_without_elements_trains(shared: Cluster, job: str, mode: str, beside: bool) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(0, 3))
            self.wide = nn.Parameter(torch.ones(0, dtype=torch.float64))
            self.head = nn.Linear(3, 1) if beside else nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(torch.cat([x, self.w])) + self.wide.sum()

    def work(rank: int) -> tuple[int, Any]:
        with shared.connect(mode, rank, 1 if mode == "single" else 2, job=job) as session:
            model = Empty()
            model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            for _ in range(3):
                step(model, optimizer, drawn(0, 4, 3))
            return session.clock, optimizer.state_dict()["param_groups"]

    for clock, [group] in in_parallel(1 if mode == "single" else 2, work):
        assert clock == 3
        assert len(group["params"]) == 2 + 2 * beside


class Flat(nn.Module):
    """A model without parameters, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.scale * x.flatten(1)


@pytest.mark.parametrize("mode", cases(["single", "sync", "local:2"], ["async", "ssp:1"]))
def test_a_model_without_any_parameter_is_prepared_beside_another(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        model = nn.Linear(4, 1)
        before = model.weight.detach().clone()
        flat, model, optimizer = session.prepare(Flat(), model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(flat(torch.ones(2, 2, 2))).sum().backward()
            optimizer.step()
        assert session.clock == 3
        torch.testing.assert_close(model.weight.detach(), before - 3 * 0.1 * 2 * 2.0)


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_a_model_without_any_parameter_alone_has_nothing_to_train(shared: Cluster, job: str, mode: str) -> None:
    """torch makes no optimizer of no parameters, so there is none beside it."""
    with shared.connect(mode, job=job) as session, pytest.raises(InvalidRequest, match="got 1 models and 0 optimizers"):
        session.prepare(Flat())
