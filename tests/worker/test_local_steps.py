"""Local steps (mode local:H): what a script gets is its own optimizer, and the servers' weights once a round."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_worker import InvalidRequest, JobMismatch, NonFiniteGradient, Session, Unsupported
from ps_worker.cluster.connection import Connection
from ps_worker.model.local_settings import local_settings
from ps_worker.state.inner import InnerStates
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape
from tests.tools.small_models import close, drawn, filled, same, step, weights_of
from tests.tools.small_steps import Make, adamw, batch, make_net, sgd

AVERAGING = {"lr": 1.0, "momentum": 0.0, "warm_up": 0}
TRANSPORTS = ("grpc", "tcp", "shm")


def elastic(cluster: Cluster, mode: str, job: str, **more: Any) -> Session:
    return ps_worker.connect(cluster.address, mode, job, elastic=True, **more)


def train(session: Session, steps: int, make: Make, **options: Any) -> list[torch.Tensor]:
    """The servers' weights after some steps."""
    model = make_net()
    model, optimizer = session.prepare(model, make(model), bucket_bytes=256, **options)
    for number in range(steps):
        step(model, optimizer, batch(session.rank, number))
    return list(session.global_weights().values())


def together(
    cluster: Cluster,
    job: str,
    mode: str,
    steps: int,
    make: Make,
    **options: Any,
) -> list[torch.Tensor]:
    """The weights of two workers after some steps, which must be the same."""
    transport = options.pop("transport", "auto")

    def work(rank: int) -> list[torch.Tensor]:
        with cluster.connect(mode, rank, 2, job=job, transport=transport) as session:
            return train(session, steps, make, **options)

    first, second = in_parallel(2, work)
    assert same(first, second)
    return first


def alone(steps: int, make: Make) -> list[torch.Tensor]:
    model = make_net()
    optimizer = make(model)
    for number in range(steps):
        step(model, optimizer, batch(0, number))
    return weights_of(model)


@pytest.mark.parametrize("transport", cases(["tcp"], ["grpc", "shm"]))
def test_rounds_of_one_averaged_step_are_sync(shared: Cluster, job: str, transport: str) -> None:
    in_rounds = together(shared, f"{job}-l", "local:1", 12, sgd, outer=AVERAGING, transport=transport)
    assert close(in_rounds, together(shared, f"{job}-s", "sync", 12, sgd), rtol=0, atol=1e-6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_worker_that_averages_is_the_script_alone_to_the_bit(shared: Cluster, job: str, transport: str) -> None:
    with shared.connect("local:4", job=job, transport=transport) as session:
        assert same(train(session, 12, adamw, outer=AVERAGING), alone(12, adamw))
        assert (session.clock, session.round) == (12, 3)


def reference(
    steps: int,
    make: Make,
    every: int,
    warm_up: int,
    outer: dict[str, Any],
    workers: int = 2,
) -> list[torch.Tensor]:
    """DiLoCo in one process, as plain PyTorch: the weights after whole rounds."""
    base = make_net()
    models = [make_net() for _ in range(workers)]
    inner = [make(model) for model in models]
    outer_optimizer = torch.optim.SGD(base.parameters(), lr=1.0)
    made, done, round_number = 0, 0, 1
    while done < steps:
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            step(model, optimizer, batch(rank, done))
        done, made = done + 1, made + 1
        if made < (1 if round_number <= warm_up else every):
            continue
        if round_number == warm_up + 1:
            outer_optimizer.param_groups[0].update(outer)
        for parameter, *others in zip(base.parameters(), *(model.parameters() for model in models), strict=True):
            parameter.grad = torch.stack([parameter.detach() - other.detach() for other in others]).mean(0)
        outer_optimizer.step()
        for model in models:
            model.load_state_dict(base.state_dict())
        made, round_number = 0, round_number + 1
    return weights_of(base)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_job_is_diloco_with_rounds_of_one_averaged_step_first(shared: Cluster, job: str, make: Make) -> None:
    found = together(shared, job, "local:4", 17, make, outer={"warm_up": 5})
    expected = reference(17, make, 4, 5, {"lr": 0.8, "momentum": 0.7, "nesterov": True})
    assert close(found, expected, rtol=0, atol=1e-6)
    assert not close(found, reference(17, make, 4, 5, {"lr": 1.0}), rtol=0, atol=1e-4)


def test_two_runs_agree_to_the_bit_over_every_transport(shared: Cluster, job: str) -> None:
    runs = [
        together(shared, f"{job}-{number}", "local:3", 14, adamw, outer={"warm_up": 2}, transport=transport)
        for number, transport in enumerate((*TRANSPORTS, "auto"))
    ]
    assert all(same(run, runs[0]) for run in runs)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=4)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


class SignSgd(torch.optim.Optimizer):
    """A script's own optimizer, which writes by way of `.data`."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad.sign()


def muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([model[0].weight, model[2].weight], lr=0.01)


NOT_ELEMENTWISE = [lbfgs, adafactor, SignSgd] + [muon] * hasattr(torch.optim, "Muon")


@pytest.mark.parametrize("make", NOT_ELEMENTWISE, ids=lambda make: make.__name__)
def test_any_optimizer_steps_on_the_workers(shared: Cluster, job: str, make: Make) -> None:
    parameters = make_net().parameters if make is SignSgd else None
    make_of = (lambda model: SignSgd(model.parameters())) if parameters else make

    def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(rank, 0)).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()

    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("local:2", rank, 2, job=job) as session:
            model = make_net()
            given = make_of(model)
            model, optimizer = session.prepare(model, given, outer={"warm_up": 1, "lr": 1.0, "momentum": 0.0})
            assert optimizer is given
            for _ in range(5):
                train_one(model, optimizer, rank)
            return list(session.global_weights().values())

    found = in_parallel(2, work)
    assert same(*found)
    models = [make_net() for _ in range(2)]
    optimizers = [make_of(model) for model in models]
    for number in range(5):
        for rank in range(2):
            train_one(models[rank], optimizers[rank], rank)
        if number in (0, 2, 4):
            means = [torch.stack(both).mean(0) for both in zip(*map(weights_of, models), strict=True)]
            for model in models:
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    parameter.data.copy_(mean)
    assert close(found[0], weights_of(models[0]), rtol=0, atol=2e-5)
    assert not close(found[0], weights_of(make_net()), rtol=0, atol=1e-3)


def test_schedulers_accumulation_clipping_and_several_optimizers_are_the_scripts_own(shared: Cluster, job: str) -> None:
    def run(models: Any, optimizers: Any, schedulers: Any) -> list[torch.Tensor]:
        for number in range(8):
            for part in range(2):
                (models(batch(0, 2 * number + part)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(models.parameters(), 0.5)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return weights_of(models)

    def made() -> Any:
        model = make_net()
        optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.02), torch.optim.SGD(model[2].parameters(), lr=0.1)]
        return model, optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]

    expected = run(*made())
    with shared.connect("local:4", job=job) as session:
        model, optimizers, schedulers = made()
        model, *optimizers = session.prepare(model, *optimizers, outer=AVERAGING)
        assert same(run(model, optimizers, schedulers), expected)
        assert (session.clock, session.round) == (16, 4)


def test_gradient_scaling_and_half_precision_run_as_in_one_process(shared: Cluster, job: str) -> None:
    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for number in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch(0, number)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights_of(model)

    model = make_net()
    expected = run(model, adamw(model))
    with shared.connect("local:4", job=job) as session:
        model = make_net()
        assert same(run(*session.prepare(model, adamw(model), outer=AVERAGING)), expected)


# -- unlike workers ----------------------------------------------------------------------------------------------------


def test_workers_that_would_wait_for_each_other_forever_are_told_what_differs(shared: Cluster, job: str) -> None:
    differences: list[tuple[str, dict[str, Any], str]] = [
        ("local:4", {}, "the mode is local:8 in the registered job and local:4 in this one"),
        ("sync", {}, "the mode is local:8 in the registered job and sync in this one"),
        ("local:8", {"warm_up": 3}, "the warm-up is 64 in the registered job and 3 in this one"),
        ("local:8", {"lr": 0.7}, "the outer optimizer's lr is 0.8 in the registered job and 0.7 in this one"),
        ("local:8", {"momentum": 0.9}, "the outer optimizer's momentum is 0.7 in the registered job and 0.9"),
        ("local:8", {"nesterov": False}, "the outer optimizer's nesterov is True in the registered job and False"),
    ]
    with elastic(shared, "local:8", job) as session:
        model = make_net()
        session.prepare(model, sgd(model))
        for mode, outer, difference in differences:
            with elastic(shared, mode, job) as other:
                model = make_net()
                with pytest.raises(JobMismatch) as told:
                    other.prepare(model, sgd(model), outer=outer)
                assert difference in str(told.value)


@pytest.mark.parametrize("mode", ["local:8", "sync"])
def test_a_wrong_outer_setting_is_refused_in_every_mode(shared: Cluster, job: str, mode: str) -> None:
    """And has changed nothing of the session, which takes right ones after all of them."""
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"beta": 1}, "outer takes lr, momentum, nesterov, warm_up, delay, mixing, got 'beta'"),
        ({"lr": "fast"}, "outer['lr'] is a number, got 'fast'"),
        ({"lr": True}, "outer['lr'] is a number, got True"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"lr": float("nan")}, "lr must be a number above 0, got nan"),
        ({"momentum": 1}, "momentum must be from 0 to below 1, got 1"),
        ({"warm_up": 1.5}, "outer['warm_up'] is a whole number, got 1.5"),
        ({"warm_up": -1}, "the warm-up of local:H has 0 to 1000000000 steps, got -1"),
        ({"nesterov": 1}, "outer['nesterov'] is True or False, got 1"),
    ]
    with shared.connect(mode, job=job) as session:
        model = make_net()
        for outer, message in refusals:
            with pytest.raises(InvalidRequest) as refused:
                session.prepare(model, sgd(model), outer=outer)
            assert message in str(refused.value)
        session.prepare(model, sgd(model))


def test_outer_settings_may_be_numbers_of_numpy() -> None:
    given = {"lr": np.float32(0.5), "momentum": np.float64(0.25), "nesterov": np.False_, "warm_up": np.int64(3)}
    expected = local_settings("local:8", {"lr": 0.5, "momentum": 0.25, "nesterov": False, "warm_up": 3})
    assert repr(local_settings("local:8", given)) == repr(expected)


# -- between rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.5), adamw, sgd]
)
def test_an_optimizer_that_loses_its_state_steps_as_a_new_one(make: Make) -> None:
    net = make_net()
    optimizer = make(net)
    for number in range(3):
        step(net, optimizer, batch(0, number))
    InnerStates([optimizer], lambda: None).begin_anew()
    other = copy.deepcopy(net)
    others = make(other)
    for number in range(3, 6):
        step(net, optimizer, batch(0, number))
        step(other, others, batch(0, number))
    assert same(weights_of(net), weights_of(other))


def test_global_weights_are_those_that_the_round_began_with(shared: Cluster, job: str) -> None:
    def work(rank: int) -> Any:
        with shared.connect("local:3", rank, 2, job=job) as session:
            model = make_net()
            model, optimizer = session.prepare(model, adamw(model), outer={"warm_up": 0})
            found = []
            for number in range(5):
                step(model, optimizer, batch(rank, number))
                found.append((session.clock, session.round, weights_of(model), session.global_weights()))
            names = list(dict(model.named_parameters()))
            return names, found

    (names, first), (_, second) = in_parallel(2, work)
    assert [(clock, number) for clock, number, _, _ in first] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    begins = list(make_net().parameters())
    for (_, number, own, servers), (_, _, other, others) in zip(first, second, strict=True):
        assert list(servers) == names
        assert same(servers.values(), others.values())
        at_round = number == 1 and own is first[2][2]
        assert same(own, servers.values()) == at_round == same(own, other)
        if number == 0:
            assert same(servers.values(), begins)
    assert same(first[2][3].values(), first[4][3].values())


@pytest.mark.parametrize("mode", ["single", "sync", "ssp:1", "async"])
def test_global_weights_are_the_models_own_in_every_other_mode(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        model = make_net()
        with pytest.raises(InvalidRequest, match="has 0 models"):
            session.global_weights()
        model, optimizer = session.prepare(model, sgd(model), outer={"warm_up": 3})
        step(model, optimizer, batch(0, 0))
        weights = session.global_weights()
        assert same(weights.values(), weights_of(model))
        assert session.round == session.clock == 1
        weights["0.bias"].zero_()  # a copy
        assert not same(weights.values(), weights_of(model))
        with pytest.raises(InvalidRequest, match="takes a model that was handed to prepare"):
            session.global_weights(make_net())


def test_of_several_models_one_is_asked_for(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        models = make_net(), make_net()
        optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
        session.prepare(*models, optimizer)
        with pytest.raises(InvalidRequest, match="has 2 models to choose from"):
            session.global_weights()
        assert session.global_weights(models[1]).keys() == models[1].state_dict().keys()


def test_models_and_optimizers_are_copied_and_saved_without_the_session(shared: Cluster, job: str) -> None:
    with shared.connect("local:4", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model))
        step(model, optimizer, batch(0, 0))
        copied_model, copied_optimizer = copy.deepcopy((model, optimizer))
        step(copied_model, copied_optimizer, batch(0, 1))
        assert session.clock == 1
        content = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, content)
        assert len(content.getvalue()) < 40_000
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
    step(model, optimizer, batch(0, 1))
    assert session.clock == 1, "the session was closed"
    assert gradients
    assert same(weights_of(model), weights_of(copied_model)), "the optimizer's own state went on"


# -- what is refused, and what is left out -----------------------------------------------------------------------------


def test_parameters_are_not_added_later(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        step(model, optimizer, batch(0, 0))
        before = weights_of(model)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        with pytest.raises(Unsupported, match="Give the optimizer all of them before prepare"):
            step(model, optimizer, batch(0, 1))
        assert same(before, weights_of(model))


def test_tables_of_rows_are_refused_with_what_to_do(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        model = nn.Sequential(ps_worker.Embedding(4), nn.Linear(4, 1))
        with pytest.raises(Unsupported, match=r"has no tables of rows, and the model has '0': train it in sync"):
            session.prepare(model, sgd(model))


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_layers_of_other_types_train_beside_those_of_float32(shared: Cluster, job: str, wire: str) -> None:
    def make() -> Any:
        return filled(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6).double(), nn.Linear(6, 6).bfloat16()]))

    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("local:2", rank, 2, job=job, transport="tcp") as session:
            model = make()
            wires = {"gradient_wire": wire, "weight_wire": wire}
            model, optimizer = session.prepare(model, sgd(model), outer={"warm_up": 1}, **wires)
            for number in range(7):
                optimizer.zero_grad()
                x = batch(rank, number)
                sum(layer(x.to(layer.weight.dtype)).square().mean().float() for layer in model).backward()
                optimizer.step()
            return list(session.global_weights().values())

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert not any(torch.equal(*pair) for pair in zip(first, make().parameters(), strict=True))


@pytest.mark.parametrize("weights", cases(["int4"], ["bfloat16", "int8"]))
def test_rounds_travel_in_blocks_with_the_same_bits_on_every_transport(shared: Cluster, job: str, weights: str) -> None:
    wires = {"gradient_wire": "int4", "weight_wire": weights, "outer": {"warm_up": 2}}
    runs = [together(shared, f"{job}-{way}", "local:3", 14, adamw, transport=way, **wires) for way in ("grpc", "tcp")]
    assert same(*runs)
    plain = together(shared, f"{job}-plain", "local:3", 14, adamw, outer={"warm_up": 2})
    assert not same(runs[0], plain)
    assert close(runs[0], plain, rtol=0, atol=0.05)


def test_weights_in_blocks_send_as_few_bytes_in_rounds_as_in_sync(shared: Cluster, job: str) -> None:
    """All but the first weights come as codes: a worker keeps what it has pulled, whatever its own steps do."""

    def pulled(name: str, mode: str) -> float:
        with shared.connect(mode, job=f"{job}-{name}", transport="tcp") as session:
            train(session, 12, adamw, gradient_wire="int4", weight_wire="int4", outer={"warm_up": 0})
            found = scrape(session.metrics_address)
        assert session.round == 12 // (3 if name == "local" else 1)
        return found['ps_wire_bytes_total{direction="pull",format="int4"}'] / session.round

    assert pulled("local", "local:3") == pulled("sync", "sync") > 0


def test_a_quorum_is_refused(shared: Cluster, job: str) -> None:
    with elastic(shared, "local:2", job, quorum="all-1") as session:
        model = make_net()
        with pytest.raises(InvalidRequest, match="local:H takes no quorum"):
            session.prepare(model, sgd(model))


def spoil(model: Any) -> None:
    with torch.no_grad():
        model[0].bias[0] = float("nan")


def test_a_round_whose_calls_have_failed_has_no_global_weights(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is in their place by then. The next step pulls them."""
    with shared.connect("local:2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model), outer={"warm_up": 0})
        step(model, optimizer, batch(0, 0))
        with monkeypatch.context() as replaced:
            replaced.setattr(Connection, "push_pull", cut)
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, batch(0, 1))
        with pytest.raises(InvalidRequest, match="the weights that round 1 began with are gone"):
            session.global_weights()
        step(model, optimizer, batch(0, 2))
        assert same(session.global_weights().values(), weights_of(model))


def cut(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_difference_that_is_not_finite_is_refused_and_the_script_may_go_back(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model), outer={"warm_up": 0})
        step(model, optimizer, batch(0, 0))
        spoil(model)
        before = session.global_weights()
        with pytest.raises(NonFiniteGradient, match=r"0\.weight is not finite after the steps of this round"):
            step(model, optimizer, batch(0, 1))
        assert (session.clock, session.round) == (1, 0)
        assert same(before.values(), session.global_weights().values())
        model.load_state_dict(before)
        step(model, optimizer, batch(0, 2))
        assert (session.clock, session.round) == (2, 1)
        assert all(value.isfinite().all() for value in session.global_weights().values())


def test_a_round_that_is_not_finite_is_skipped_if_the_script_says_so(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("local:2", rank, 2, job=job) as session:
            model = make_net()
            model, optimizer = session.prepare(model, adamw(model), outer=AVERAGING, non_finite="skip")
            step(model, optimizer, batch(0, 0))
            if rank == 1:
                spoil(model)  # its loss, gradients and moments are no numbers then
            step(model, optimizer, batch(0, 1))
            assert session.round == 1
            if rank == 1:
                assert not optimizer.state, "no NaN is left in its moments"
                assert _counter(session, "ps_worker_fresh_inner_state_total") == 1
                assert _counter(session, "ps_worker_non_finite_total") == 1
            return weights_of(model)

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert close(first, alone(2, adamw), rtol=0, atol=1e-6), "the round is that of the other worker"


def _counter(session: Session, name: str) -> float | None:
    return session._metrics.registry.get_sample_value(name)


def test_channels_last_and_replaced_weights_count(shared: Cluster, job: str) -> None:
    def made() -> Any:
        return filled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)), std=0.2)

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        for number in range(6):
            step(model, optimizer, drawn(number, 8, 3, 6, 6))
            if number == 1:
                model.to(memory_format=torch.channels_last)
            if number == 2:
                model[2].weight.data = model[2].weight.data * 0.5
        return weights_of(model)

    model = made()
    expected = run(model, sgd(model))
    with shared.connect("local:3", job=job) as session:
        model = made()
        assert same(run(*session.prepare(model, sgd(model), outer=AVERAGING)), expected)


def test_sparse_gradients_train_as_in_one_process(shared: Cluster, job: str) -> None:
    def made() -> Any:
        return filled(nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)))

    def run(model: Any, *optimizers: Any) -> list[torch.Tensor]:
        for number in range(4):
            model.zero_grad()
            ids = torch.randint(20, (8, 3), generator=torch.Generator().manual_seed(number))
            model(ids).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights_of(model)

    def optimizers(model: Any) -> Any:
        return torch.optim.SparseAdam(model[0].parameters()), torch.optim.AdamW(model[2].parameters())

    model = made()
    expected = run(model, *optimizers(model))
    with shared.connect("local:4", job=job) as session:
        model = made()
        assert same(run(*session.prepare(model, *optimizers(model), outer=AVERAGING)), expected)
