"""`session.prepare(optimizer)`: a script goes on with another optimizer, as it would in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import ps_worker
from ps_protocol.errors import LimitExceeded
from ps_worker import InvalidRequest, Session, Unsupported
from tests.chaos.cluster import free_ports
from tests.tools.cases import cases, crossed
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel
from tests.tools.forkserver import Nursery
from tests.tools.small_models import close, drawn, filled, same, step, weights_of

WAYS = [("sync", "shm"), ("sync", "grpc"), ("ssp:2", "tcp"), ("async", "grpc")]
Make = Callable[[Any], torch.optim.Optimizer]


def make_net() -> Any:
    return filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)))


def frozen_net() -> Any:
    """The same, of which the first stage trains the head alone."""
    net = make_net()
    net[:4].requires_grad_(False)
    return net


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        step(model, optimizer, drawn(number, 8, 6))


# -- what steps the model in the second stage --------------------------------------------------------------------------

NEXT: dict[str, Make] = {
    "another class": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "the same class": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5, nesterov=True),
    "state from the constructor": lambda net: torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.1),
    "other groups": lambda net: torch.optim.RMSprop(
        [{"params": [p for p in net.parameters() if p.dim() > 1], "lr": 0.002}, {"params": [net[0].bias, net[4].bias]}],
        lr=0.005,
    ),
    "fewer": lambda net: torch.optim.SGD(net[2:].parameters(), lr=0.05),
}


def both_stages(prepare: Callable[..., Any], make: Make, net: Callable[[], Any] = make_net, first: Make = sgd) -> Any:
    """Trains two stages; returns the weights after each step of the second one, and its optimizer's state."""
    model = net()
    model, optimizer = prepare(model, first(model))
    train(model, optimizer, 0, 4)
    model.requires_grad_(True)
    optimizer = prepare(make(model))
    found = []
    for number in range(4, 9):
        step(model, optimizer, drawn(number, 8, 6))
        optimizer.param_groups[0]["lr"] *= 0.9
        found += weights_of(model)
    return found, optimizer.state_dict()


def alone(*things: Any) -> Any:
    """What `prepare` is in one process without a session."""
    return things if len(things) > 1 else things[0]


def alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The state_dicts of two optimizers, but for rounding."""
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for name, value in state.items():
            if value is not None:
                torch.testing.assert_close(torch.as_tensor(found["state"][index][name]), torch.as_tensor(value))
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {key: ours[key] for key in ("lr", "params")} == {key: theirs[key] for key in ("lr", "params")}


@pytest.mark.parametrize(("kind", "way"), crossed(NEXT, [("single", "auto"), *WAYS]))
def test_a_script_goes_on_with_another_optimizer(shared: Cluster, job: str, way: tuple[str, str], kind: str) -> None:
    mode, transport = way
    expected, state = both_stages(alone, NEXT[kind])
    with shared.connect(mode, job=job, transport=transport) as session:

        def prepare(*things: Any) -> Any:
            return session.prepare(*things, bucket_bytes=256)

        found, own = both_stages(prepare, NEXT[kind])
        assert close(found, expected)
        alike(own, state)
        assert session.clock == 9


@pytest.mark.parametrize(("kind", "mode"), crossed(NEXT, ["single", "sync", "async"]))
def test_layers_that_were_frozen_train_in_the_next_stage(shared: Cluster, job: str, mode: str, kind: str) -> None:
    def head(net: Any) -> torch.optim.Optimizer:
        return sgd(net[4])

    expected, state = both_stages(alone, NEXT[kind], frozen_net, head)
    with shared.connect(mode, job=job) as session:
        found, own = both_stages(session.prepare, NEXT[kind], frozen_net, head)
        assert close(found, expected)
        alike(own, state)
    assert not any(name.startswith(job) for name in shared.coordinator.jobs())


def three_stages(prepare: Callable[..., Any]) -> list[torch.Tensor]:
    """The head; then all of it, by two optimizers; then one of these is replaced, and the other goes on."""
    net = frozen_net()
    net, of_head = prepare(net, sgd(net[4]))
    train(net, of_head, 0, 3)
    net.requires_grad_(True)
    lower, upper = prepare(torch.optim.Adam(net[:3].parameters(), lr=0.01), torch.optim.Adam(net[4].parameters()))
    for number in range(3, 6):
        loss = net(drawn(number, 8, 6)).square().mean()
        for each in (lower, upper):
            each.zero_grad()
        loss.backward()
        lower.step()
        upper.step()
    lower = prepare(torch.optim.Adam(net[0].parameters(), lr=0.02, amsgrad=True))
    for number in range(6, 9):
        train(net, lower, number, number + 1)
        train(net, upper, number, number + 1)
    return weights_of(net)


@pytest.mark.parametrize("mode", ["single", "sync", "async"])
def test_optimizers_that_are_not_replaced_go_on_with_their_state(shared: Cluster, job: str, mode: str) -> None:
    expected = three_stages(alone)
    with shared.connect(mode, job=job) as session:
        assert close(three_stages(session.prepare), expected)


def test_state_that_an_optimizer_brings_is_taken_over(shared: Cluster, job: str) -> None:
    def make(net: Any) -> torch.optim.Optimizer:
        own = torch.optim.AdamW(net.parameters(), lr=0.01)
        other = make_net()
        before = torch.optim.AdamW(other.parameters(), lr=0.01)
        train(other, before, 20, 23)
        own.load_state_dict(before.state_dict())
        return own

    for net, first in ((make_net, sgd), (frozen_net, lambda net: sgd(net[4]))):
        expected, state = both_stages(alone, make, net, first)
        with shared.connect("sync", job=job) as session:
            found, own = both_stages(session.prepare, make, net, first)
            assert close(found, expected)
            alike(own, state)


FUSED: dict[str, Make] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5, fused=True),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.1, fused=True),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", FUSED)
def test_one_worker_steps_to_the_bit_as_one_process_with_a_new_optimizer(shared: Cluster, job: str, kind: str) -> None:
    def first(net: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), fused=True)

    expected, state = both_stages(alone, FUSED[kind], first=first)
    with shared.connect("sync", job=job) as session:
        found, own = both_stages(session.prepare, FUSED[kind], first=first)
    assert same(found, expected)
    for index, each in state["state"].items():
        assert all(torch.equal(own["state"][index][name], value) for name, value in each.items())


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "quorum"])
def test_several_workers_change_together(shared: Cluster, job: str, mode: str) -> None:
    more: dict[str, Any] = {"quorum": 1} if mode == "quorum" else {}

    def work(rank: int) -> tuple[list[torch.Tensor], Any]:
        with shared.connect(mode.replace("quorum", "sync"), rank, 2, job=job, **more) as session:
            net = make_net()
            net, optimizer = session.prepare(net, sgd(net), bucket_bytes=256, overlap=True)
            for number in range(4):
                step(net, optimizer, drawn(2 * number + rank, 8, 6))
            net, optimizer = session.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
            for number in range(4, 8):
                step(net, optimizer, drawn(2 * number + rank, 8, 6))
            session.barrier()
            return weights_of(net), optimizer.state_dict()

    (first, state), (second, other) = in_parallel(2, work)
    steps = {float(each["step"]) for each in state["state"].values()}
    if mode != "sync":  # an update is of one worker, and steps of the other one's first stage may come after the change
        late = {"ssp:1": 1, "quorum": 4}[mode]
        assert steps <= {float(count) for count in range(4, 9 + late)}
        return
    assert same(first, second)
    alike(state, other)
    assert steps == {4.0}
    net = make_net()
    optimizer: torch.optim.Optimizer = sgd(net)
    for number in range(8):
        if number == 4:
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        step(net, optimizer, torch.cat([drawn(2 * number, 8, 6), drawn(2 * number + 1, 8, 6)]))
    assert close(first, weights_of(net), atol=1e-5)


def test_a_worker_that_joins_late_comes_to_the_stage_of_the_others(shared: Cluster, job: str) -> None:
    def second_stage(session: Session, steps: int, late: bool) -> Any:
        net = make_net()
        net, optimizer = session.prepare(net, sgd(net))
        if not late:
            train(net, optimizer, 0, 3)
        optimizer = session.prepare(torch.optim.Adam(net.parameters(), lr=0.01))
        train(net, optimizer, 3, 3 + steps)
        return net, optimizer

    with ps_worker.connect(shared.address, "async", job, elastic=True) as first:
        net, optimizer = second_stage(first, 4, late=False)
        with ps_worker.connect(shared.address, "async", job, elastic=True) as second:
            _, others = second_stage(second, 2, late=True)
            assert {float(each["step"]) for each in others.state_dict()["state"].values()} == {6.0}, "none is lost"
        train(net, optimizer, 9, 10)
        assert {float(each["step"]) for each in optimizer.state_dict()["state"].values()} == {7.0}


@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async", "quorum"])
def test_workers_that_come_to_a_stage_with_unlike_optimizers_are_told_the_difference(
    shared: Cluster, job: str, mode: str
) -> None:
    """Whoever is the first at a shard begins the stage there."""
    more: dict[str, Any] = {"quorum": 1} if mode == "quorum" else {}
    mode = "sync" if mode == "quorum" else mode

    def work(rank: int) -> str:
        with shared.connect(mode, rank, 2, job=job, **more) as session:
            net = make_net()
            net, optimizer = session.prepare(net, sgd(net))
            train(net, optimizer, 0, 2)
            kind = (torch.optim.Adam, torch.optim.RMSprop)[rank]
            optimizer = session.prepare(kind(net.parameters(), lr=0.01))
            try:
                train(net, optimizer, 2, 3)
            except InvalidRequest as error:
                return str(error)
            return ""

    said = [each for each in in_parallel(2, work) if each]
    assert said
    for each in said:
        found = re.search(r"in stage 1: the optimizer is (\w+), and this worker's is (\w+)", each)
        assert found is not None, each
        assert set(found.groups()) == {"Adam", "RMSprop"}, each


@pytest.mark.parametrize(("mode", "steps_before"), crossed(["sync", "async", "local:2"], [2, 0]))
def test_a_worker_that_joins_late_continues_the_schedule_of_the_stage(
    shared: Cluster, job: str, mode: str, steps_before: int
) -> None:
    """Once its script has come to that stage: until then it has another optimizer, and another schedule."""
    factors = (0.9, 0.5)

    def connect() -> Session:
        return ps_worker.connect(shared.address, mode, job, elastic=True)

    def first_stage(session: Session) -> Any:
        net = make_net()
        optimizer = sgd(net)
        return session.prepare(net, optimizer, ExponentialLR(optimizer, factors[0]))

    def second_stage(session: Session, net: Any) -> Any:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        return session.prepare(optimizer, ExponentialLR(optimizer, factors[1]))

    def steps(count: int, net: Any, optimizer: Any, schedule: Any) -> None:
        for number in range(count):
            step(net, optimizer, drawn(number, 8, 6))
            schedule.step()

    with connect() as first:
        net, *stage = first_stage(first)
        steps(3, net, *stage)
        stage = second_stage(first, net)
        steps(4, net, *stage)
        second = connect()
        late, *of_late = first_stage(second)
    with second:
        steps(steps_before, late, *of_late)
        assert of_late[0].param_groups[0]["lr"] == pytest.approx(0.1 * factors[0] ** steps_before)
        optimizer, schedule = second_stage(second, late)
        step(late, optimizer, drawn(0, 8, 6))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factors[1] ** 4)
        schedule.step()
        assert schedule.last_epoch == 5


def test_a_gradient_of_an_earlier_stage_counts_and_its_hyper_parameters_do_not(shared: Cluster, job: str) -> None:
    with ps_worker.connect(shared.address, "async", job, elastic=True) as first:
        ahead = nn.Linear(1, 1, bias=False)
        ahead, optimizer = first.prepare(ahead, torch.optim.SGD(ahead.parameters(), lr=0.5))
        with ps_worker.connect(shared.address, "async", job, elastic=True) as second:
            behind = nn.Linear(1, 1, bias=False)
            behind, old = second.prepare(behind, torch.optim.SGD(behind.parameters(), lr=0.5))
            optimizer = first.prepare(torch.optim.SGD(ahead.parameters(), lr=0.25, momentum=0.5))
            before = ahead.weight.item()
            for each in (optimizer, old):
                each.param_groups[0]["params"][0].grad = torch.ones(1, 1)
            optimizer.step()
            old.step()
            assert behind.weight.item() == pytest.approx(before - 0.25 * (1 + 1.5))
            with pytest.raises(InvalidRequest, match="the job has come to its stage 1, and this script to stage 0"):
                old.state_dict()


# -- local:H ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode"), crossed(["another class", "other groups", "fewer"], ["local:2", "local:4/2"])
)
def test_local_steps_go_on_with_another_optimizer(shared: Cluster, job: str, mode: str, kind: str) -> None:
    expected, state = both_stages(alone, NEXT[kind])
    with shared.connect(mode, job=job) as session:

        def prepare(*things: Any) -> Any:
            return session.prepare(*things, outer={"lr": 1.0, "momentum": 0.0})

        found, own = both_stages(prepare, NEXT[kind])
        assert close(found, expected, atol=1e-5)
        alike(own, state)
        assert session.clock == 9


def test_a_frozen_layer_cannot_be_unfrozen_there(shared: Cluster, job: str) -> None:
    with shared.connect("local:2", job=job) as session:
        net = frozen_net()
        net, optimizer = session.prepare(net, sgd(net[4]))
        net.requires_grad_(True)
        with pytest.raises(Unsupported, match="give them all before prepare, and set requires_grad=False on those"):
            session.prepare(sgd(net))
        train(net, optimizer, 0, 2)
        assert session.clock == 2


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_an_optimizer_that_was_replaced_steps_no_more(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        net = make_net()
        net, old = session.prepare(net, sgd(net))
        new = session.prepare(torch.optim.Adam(net.parameters()))
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="this SGD was replaced by a later call of prepare"):
                old.step()
            net(drawn(0, 8, 6)).sum().backward()
        if mode == "sync":
            with pytest.raises(InvalidRequest, match="this optimizer was replaced by a later call of prepare"):
                old.state_dict()
        train(net, new, 0, 2)


def test_what_the_shards_cannot_do_is_refused_and_changes_nothing(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        net = make_net()
        net, optimizer = session.prepare(net, sgd(net))

        def refused(error: type[Exception], said: str, *things: Any, **more: Any) -> None:
            with pytest.raises(error, match=said):
                session.prepare(*things, **more)

        stranger = make_net()
        refused(Unsupported, "LBFGS cannot run on a parameter server", torch.optim.LBFGS(net.parameters()))
        refused(InvalidRequest, "hold 6 parameters of no model that was handed to prepare", sgd(stranger))
        refused(InvalidRequest, "0.weight is in optimizers 0 and 1", sgd(net[0]), sgd(net))
        refused(
            Unsupported,
            "would be stepped by SGD and .* by Adam, and one optimizer has had both",
            *(sgd(net[0]), torch.optim.Adam(net[2].parameters())),
        )
        wrong = torch.optim.SGD(net.parameters(), lr=0.1)
        wrong.param_groups[0]["lr"] = -1.0
        refused(InvalidRequest, "lr", wrong)
        refused(InvalidRequest, "settings of the first one", sgd(net), bucket_bytes=512)
        refused(InvalidRequest, "this session has its models already", stranger, sgd(stranger))
        train(net, optimizer, 0, 2)
        expected = make_net()
        train(expected, sgd(expected), 0, 2)
        assert close(weights_of(net), weights_of(expected))


def test_state_that_a_shard_has_no_memory_for_is_refused(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 418 parameters; each shard's part of it comes to keep its weights twice."""
    free = {"bytes": 0}
    monkeypatch.setattr("ps_server.shard.optimizer_room.free_bytes", lambda: free["bytes"])
    with shared.connect("sync", job=job) as session:
        net = make_net()
        net, optimizer = session.prepare(net, sgd(net), bucket_bytes=256)
        train(net, optimizer, 0, 2)
        optimizer = session.prepare(torch.optim.RMSprop(net.parameters()))
        train(net, optimizer, 2, 3)  # as much as SGD's momentum
        assert session.clock == 3
        optimizer = session.prepare(torch.optim.AdamW(net.parameters()))
        with pytest.raises(LimitExceeded, match="what AdamW keeps in stage 2 does not fit into this shard's memory"):
            train(net, optimizer, 3, 4)
        free["bytes"] = 2 * 4 * sum(each.numel() for each in net.parameters())
        train(net, optimizer, 3, 5)
        assert session.clock == 5


def test_what_is_prepared_already_comes_back_as_it_is(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        net = make_net()
        own = sgd(net)
        net, optimizer = session.prepare(net, own)
        train(net, optimizer, 0, 2)
        scheduler = StepLR(optimizer, 1)
        assert session.prepare(net, own, scheduler) == (net, optimizer, scheduler)
        assert session.prepare(optimizer) is optimizer
        state = optimizer.state_dict()["state"]
        assert all(each["momentum_buffer"].abs().sum() > 0 for each in state.values()), "no stage has begun"


def test_an_optimizer_without_a_model_is_refused_before_there_is_one(shared: Cluster, job: str) -> None:
    said = "got 0 models and 1 optimizers"
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match=said):
        session.prepare(sgd(make_net()))


def test_servers_that_know_no_stages_are_told_apart(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.rpc.job_service.MAX_STAGES", 0)  # what those of an earlier version answer
    with shared.connect("sync", job=job) as session:
        net = make_net()
        net, optimizer = session.prepare(net, sgd(net))
        with pytest.raises(Unsupported, match=r"the servers are of an earlier version.*connect\(job=...\)"):
            session.prepare(torch.optim.Adam(net.parameters()))
        train(net, optimizer, 0, 2)


# -- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_is_stepped_by_the_next_optimizer_if_it_is_of_its_class(shared: Cluster, job: str) -> None:
    def train_rows(prepare: Callable[..., Any]) -> list[torch.Tensor]:
        net: Any = nn.ModuleDict(
            {"rows": ps_worker.Embedding(2, initial="constant", scale=0.5), "head": filled(nn.Linear(2, 1))}
        )
        net, optimizer = prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for number in range(4):
            if number == 2:
                optimizer = prepare(torch.optim.SGD(net.parameters(), lr=0.25))
            net["head"](net["rows"](torch.tensor([1, 2]))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [net["rows"](torch.tensor([1, 2, 3])).detach(), *weights_of(net["head"])]

    with ps_worker.connect(mode="single") as session:
        expected = train_rows(session.prepare)
    with shared.connect("sync", job=job) as session:
        assert close(train_rows(session.prepare), expected)
    with shared.connect("sync", job=job) as session:
        net: Any = nn.ModuleDict({"rows": ps_worker.Embedding(2), "head": nn.Linear(2, 1)})
        net, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        with pytest.raises(Unsupported, match="the rows of table 'rows' are stepped by SGD as long as the job runs"):
            session.prepare(torch.optim.Adam(net.parameters()))
        session.prepare(torch.optim.Adam(net["head"].parameters()))


# -- DDP -------------------------------------------------------------------------------------------------------------

IN_DDP = """
import sys, torch, ps_worker
session = ps_worker.connect()
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
model[0].requires_grad_({how} != "frozen")
model, optimizer = session.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
for stage in range(2):
    if stage:
        if {how} == "new":
            session.unwrap(model)[1] = torch.nn.Linear(2, 1)
        session.unwrap(model).requires_grad_(True)
        optimizer = session.prepare(torch.optim.Adam(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2) * (1 + session.rank)).sum().backward()
        optimizer.step()
sums = session.gather(sum(parameter.double().sum() for parameter in model.parameters()).item())
print("equal" if len(set(sums)) == 1 else sums, session.clock, flush=True)
"""


@pytest.mark.parametrize("how", cases(["trains", "new"], ["frozen"]))
def test_ddp_goes_on_with_another_optimizer_but_for_what_it_does_not_average(
    nursery: Nursery, tmp_path: Path, how: str
) -> None:
    script, logs = tmp_path / "script.py", [tmp_path / f"log-{rank}" for rank in range(2)]
    script.write_text(IN_DDP.format(how=repr(how)))
    variables = {"PS_MODE": "ddp", "PS_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    processes = [nursery.run(script, [], log, PS_RANK=str(rank), **variables) for rank, log in enumerate(logs)]
    codes = [process.wait(TEST_SECONDS) for process in processes]
    said = [log.read_text() for log in logs]
    if how == "trains":
        assert codes == [0, 0], said
        assert all("equal 4" in text for text in said)
    else:
        assert 0 not in codes
        was = {"frozen": "was frozen", "new": "was not there"}[how]
        assert any(f"Adam steps a parameter that {was} when prepare wrapped the model" in text for text in said)
