"""A step that does not end, and a script that goes on: interrupted while its pushes are on their way, as in a notebook,
or refused by a shard."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import ps_worker
from ps_server.coordinator.timing import Timing
from ps_server.core.limits import Limits
from ps_worker import InvalidRequest, LimitExceeded
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.own_membership import OwnMembership
from ps_worker.cluster.participation import Participation
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.strategies.gradient_steps import GradientSteps
from ps_worker.strategies.job_training import JobTraining
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, hear_of_a_lost_place, in_parallel
from tests.tools.small_models import weights_of

STEPS, DISTURBED = 6, 3
TRANSPORTS = ["grpc", "tcp", "shm"]


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "ssp:1", "async", "local:2"], TRANSPORTS))
def test_the_next_step_comes_behind_the_pushes_of_an_interrupted_one(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    """So many buckets that most of them have not left when the interrupt comes; the first ones leave at once."""
    settle, number, interrupts = Participation.settle, 0, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        if number == DISTURBED and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt
        settle(participation)

    monkeypatch.setattr(Participation, "settle", interrupted)
    with shared.connect(mode, job=job, transport=transport) as session:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = session.prepare(model, plain, bucket_bytes=512, outer={"warm_up": 0})
        for number in range(STEPS):  # noqa: B007 (`interrupted` looks at it)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                model(torch.ones(3, 32)).square().mean().backward()
                optimizer.step()
        assert interrupts == 1
        # A round of local steps ends early with the step after the interrupt; the one that is missing counts.
        assert session.clock == STEPS + (mode == "local:2")


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "async"], ["grpc", "tcp"]))
def test_no_gradient_overtakes_an_interrupted_step_while_backward_runs(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    """The next step's gradients leave while backward runs: a shard that has not had the step before refuses them."""
    settle, pull, is_interrupted, may_go = Participation.settle, ShardCalls.pull, threading.Event(), threading.Event()
    number, connections = 0, list[Connection]()

    def interrupted(participation: Participation) -> None:
        if number == DISTURBED and not is_interrupted.is_set():
            is_interrupted.set()
            connections.append(participation.connection)
            raise KeyboardInterrupt
        settle(participation)

    def held(calls: ShardCalls, *arguments: Any) -> Future[Any]:
        if number != DISTURBED or is_interrupted.is_set():
            return pull(calls, *arguments)
        pool = ThreadPoolExecutor(1)
        landed = pool.submit(lambda: (may_go.wait(), pull(calls, *arguments).result())[1])
        pool.shutdown(wait=False)
        return landed

    monkeypatch.setattr(Participation, "settle", interrupted)
    monkeypatch.setattr(ShardCalls, "pull", held)
    with shared.connect(mode, job=job, transport=transport) as session:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=64)
        for number in range(STEPS):  # noqa: B007 (`interrupted` looks at it)
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
            if is_interrupted.is_set():
                wait(connections[0]._drafted.values())
                may_go.set()
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
        assert is_interrupted.is_set()
        assert session.clock == STEPS


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("mode", "wire"), crossed(["sync", "async"], ["int8", "int4"]))
def test_what_a_narrow_wire_has_left_out_of_an_interrupted_step_is_sent_with_later_ones(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str, wire: str, overlap: bool
) -> None:
    """With `overlap` the next gradients leave before it is known that the interrupted step counts."""
    settle, number, interrupts = Participation.settle, 0, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        settle(participation)
        if number == DISTURBED and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Participation, "settle", interrupted)
    gradients = [torch.linspace(0.1, 1.7, 16).roll(number).reshape(4, 4) for number in range(STEPS)]
    with shared.connect(mode, job=job, transport="tcp") as session:
        net: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, sgd, bucket_bytes=64, gradient_wire=wire, overlap=overlap)
        for number, gradient in enumerate(gradients):  # noqa: B007 (`interrupted` looks at it)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                sum((parameter * gradient).sum() for parameter in model.parameters()).backward()
                optimizer.step()
        assert interrupts == 1
        assert session.clock == STEPS
        residuals = session._strategy._training.model.residuals.copy()  # type: ignore[attr-defined]
        for parameter, left in zip(net.parameters(), residuals.values(), strict=True):
            torch.testing.assert_close(-parameter.detach() + left.view(4, 4), sum(gradients))


def test_what_a_narrow_wire_has_left_out_of_an_interrupted_round_is_sent_later_where_the_place_is_lost_then(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the interrupt ends its round without a difference, as its base is gone, and the place is lost."""
    settle, number, interrupts = Participation.settle, 0, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        settle(participation)
        if number == 3 and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Participation, "settle", interrupted)
    gradients = [torch.linspace(0.1, 1.7, 16).roll(number).reshape(4, 4) for number in range(9)]
    outer = {"warm_up": 0, "lr": 0.5, "momentum": 0.0, "nesterov": False}
    with shared.connect("local:2", job=job, transport="tcp") as session:
        net: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, sgd, bucket_bytes=64, gradient_wire="int8", outer=outer)
        for number, gradient in enumerate(gradients):
            if number == 4:
                assert interrupts == 1
                hear_of_a_lost_place(session, shared, job)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                sum((parameter * gradient).sum() for parameter in model.parameters()).backward()
                optimizer.step()
        residuals = session._strategy._training.model.residuals.copy()  # type: ignore[attr-defined]
        counted = sum(gradients[:4] + gradients[5:])
        for weights, left in zip(session.global_weights().values(), residuals.values(), strict=True):
            torch.testing.assert_close(-weights / outer["lr"] + left.view(4, 4), counted)


@pytest.mark.parametrize("case", cases(["is under way"], ["has arrived", "is lost again", "others wait"]))
def test_a_script_goes_on_after_an_interrupt_while_the_rest_of_a_round_is_on_its_way_from_a_new_place(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In local:H/F the place is lost between two fragments. What was on its way counts once; the step that finds it
    over is left out, as in local:H. Until then the weights of the servers are on their way.
    """
    settle, number, interrupts, loops = Participation.settle, -1, 0, list[JobTraining]()

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        comes = number == 6 and not interrupts and loops[0].sent is not None and loops[0].unfinished is not None
        if not comes or case != "is under way":
            settle(participation)
        if comes:
            interrupts += 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Participation, "settle", interrupted)
    outer = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, "nesterov": False, "delay": 0}
    with shared.connect("local:4/2", job=job, transport="tcp") as session:
        net = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4))
        plain = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, plain, bucket_bytes=64, outer=outer)
        loops.append(session._strategy._training)  # type: ignore[attr-defined]
        for number in range(16):
            if number == 6 or (case == "is lost again" and number == 7):
                hear_of_a_lost_place(session, shared, job)
            if number == 7:
                with pytest.raises(InvalidRequest, match=r"are gone, as calls have failed, or were interrupted"):
                    session.global_weights()
                if case == "others wait":
                    loops[0].stepped = False
                    loops[0].empty_step()
                    assert not loops[0].stepped, "it is no step of the script"
                    assert session.global_weights()
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                (2.0**number * sum(layer.sum() for layer in model)).backward()
                optimizer.step()
        assert interrupts == 1
        whole, later = 2.0**16 - 1, 0.0 if case == "others wait" else 2.0**7
        first, second = whole - later - 2.0**6, whole - later  # the first fragment of that round had left before step 6
        assert sorted(-layer[0].item() for layer in net) == [first, first, second, second]


@pytest.mark.parametrize("mode", cases(["local:4/2"], ["local:2"]))
def test_weights_that_a_new_place_overwrites_when_the_interrupt_comes_are_not_returned(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Where they have memory of their own, as with fragments or narrow weights, and the round has just begun."""
    settle, loops, interrupts = Participation.settle, list[JobTraining](), 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        if loops and loops[0]._left is not None and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt
        settle(participation)

    monkeypatch.setattr(Participation, "settle", interrupted)
    with shared.connect(mode, job=job, transport="tcp") as session:
        net = nn.Linear(4, 4)
        wire = {"weight_wire": "int8"} if mode == "local:2" else {}
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), outer={"warm_up": 0}, **wire)
        loops.append(session._strategy._training)  # type: ignore[attr-defined]
        assert session.global_weights()
        hear_of_a_lost_place(session, shared, job)
        with pytest.raises(KeyboardInterrupt):
            session.barrier()
        with pytest.raises(InvalidRequest, match=r"to fetch the weights in a new place"):
            session.global_weights()
        session.barrier()
        assert session.global_weights()


class Net(nn.Module):
    """Buckets and rows on both shards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ps_worker.Embedding(8, initial="uniform", scale=0.1, seed=1)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "ssp:1", "async"], TRANSPORTS))
def test_a_step_that_shards_refuse_is_left_out_and_the_next_ones_count(
    make_cluster: Callable[..., Cluster], mode: str, transport: str
) -> None:
    """One worker's gradients are too large once: it is told so, and neither it nor the other waits for that step."""
    cluster = make_cluster(shards=2, limits=Limits(push_norm=100.0))

    def work(rank: int) -> list[torch.Tensor]:
        errors: list[int] = []
        with cluster.connect(mode, rank, 2, transport=transport) as session:
            torch.manual_seed(0)
            own: Any = Net()
            model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=0.01), bucket_bytes=256)
            for number in range(STEPS):
                optimizer.zero_grad()
                loss = model(torch.arange(20)).square().mean()
                (loss * 1e9 if rank == 1 and number == DISTURBED else loss).backward()
                try:
                    optimizer.step()
                except LimitExceeded:
                    errors.append(number)
            assert errors == [DISTURBED] * rank
            assert session.clock == STEPS
            return [*weights_of(own.layers), own.table.rows(torch.arange(20))]

    for weights in in_parallel(2, work):
        assert all(values.abs().lt(10).all() for values in weights), "nothing of the refused step has come in"


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "async"], TRANSPORTS))
def test_a_step_that_shards_refuse_after_it_was_interrupted_is_told_of_by_the_next_one(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    """The refusal is there before the next step begins, which says so; those after it count."""
    cluster, settle, number, interrupts = (
        make_cluster(shards=2, limits=Limits(push_norm=100.0)),
        Participation.settle,
        0,
        0,
    )

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        if number == DISTURBED and not interrupts:
            interrupts += 1
            wait(participation.connection._last.pushed)
            raise KeyboardInterrupt
        settle(participation)

    monkeypatch.setattr(Participation, "settle", interrupted)
    errors: list[int] = []
    with cluster.connect(mode, transport=transport) as session:
        net: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
        for number in range(STEPS):
            optimizer.zero_grad()
            (
                sum(parameter.sum() for parameter in model.parameters()) * (1e9 if number == DISTURBED else 1.0)
            ).backward()
            try:
                optimizer.step()
            except LimitExceeded:
                errors.append(number)
            except KeyboardInterrupt:
                assert number == DISTURBED
        assert (interrupts, errors) == (1, [DISTURBED + 1])
        assert session.clock == STEPS - 1, "the step that was refused is left out, and the one that says so is none"
        for parameter in net.parameters():
            assert parameter.eq(-(STEPS - 2.0)).all()


RATE, FALLS, MORE = 0.5, 0.9, 3
# What a worker does on its way to the next place, in this order; and whether the interrupt comes before or after it.
ON_THE_WAY: dict[str, tuple[type, str, bool]] = {
    "it waits for the place": (OwnMembership, "renewed", False),
    "it has the place": (OwnMembership, "renewed", True),
    "it waits for the weights": (Participation, "settle", False),
    "it has the weights": (Participation, "_check", True),
    "it goes back itself": (WorkerCheckpoint, "rollback", False),
    "it has gone back itself": (WorkerCheckpoint, "rollback", True),
    "it has ended its step": (JobTraining, "_end_in_place", True),
    "it is about to go on": (GradientSteps, "moved", True),
}


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
    """A step whose gradient is 1 for each weight, and the next rate."""
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    schedule.step()


def interrupt_once(monkeypatch: pytest.MonkeyPatch, where: str, interrupts: list[str]) -> None:
    """Ctrl-C comes once, where a worker that has lost its place is on its way to the next one."""
    owner, name, is_behind = ON_THE_WAY[where]
    rejoin, method, left = Participation.rejoin, getattr(owner, name), []

    def leaves(*arguments: Any) -> bool:
        left.append(where)
        return rejoin(*arguments)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        is_due = bool(left) and not interrupts
        if is_due and is_behind:
            method(*arguments, **options)
        if is_due:
            interrupts.append(where)
            raise KeyboardInterrupt
        return method(*arguments, **options)

    monkeypatch.setattr(Participation, "rejoin", leaves)
    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("transport", cases(["tcp"], ["grpc", "shm"]))
def test_a_worker_that_is_interrupted_in_its_new_place_goes_on_there(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """What showed that it had lost the place before says nothing about this one."""
    cluster, interrupts = make_cluster(shards=2, lease=600.0), list[str]()
    with cluster.connect("sync", transport=transport) as session:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        plain = torch.optim.SGD(model.parameters(), lr=RATE)
        parts = session.prepare(model, plain, ExponentialLR(plain, FALLS), bucket_bytes=64)
        step_with(*parts)
        cluster.lose_place(0)
        interrupt_once(monkeypatch, "it waits for the weights", interrupts)
        while not interrupts:
            with contextlib.suppress(KeyboardInterrupt):
                step_with(*parts)
        for _ in range(MORE):
            step_with(*parts)
        assert session.clock > MORE


@pytest.mark.parametrize(("where", "transport"), crossed(ON_THE_WAY, ["grpc", "shm"]))
def test_a_rollback_that_is_interrupted_is_made_by_the_next_step(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, transport: str
) -> None:
    """The schedule and the weights go back together, wherever the interrupt comes: the sum of the rates shows that."""
    cluster = make_cluster(
        shards=2, checkpoint_dir=tmp_path, lease=600.0, timing=Timing(checkpoint_look=0.02, recovery_look=0.02)
    )
    interrupts: list[str] = []
    with cluster.connect("sync", transport=transport) as session:
        layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        for layer in layers:
            nn.init.zeros_(layer.weight)
        plain = torch.optim.SGD([layer.weight for layer in layers], lr=RATE)
        parts = session.prepare(nn.Sequential(*layers), plain, ExponentialLR(plain, FALLS), bucket_bytes=64)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(cluster.coordinator.job("default").checkpoint)
            while not made.done():
                step_with(*parts)
        for _ in range(MORE):
            step_with(*parts)
        cluster.start_again(1)
        interrupt_once(monkeypatch, where, interrupts)
        while not interrupts:
            with contextlib.suppress(KeyboardInterrupt):
                step_with(*parts)
        for _ in range(MORE):
            step_with(*parts)
        assert interrupts == [where]
        expected = torch.full((4, 4), -RATE * sum(FALLS**number for number in range(session.clock)))
        for weights in weights_of(parts[0]):
            torch.testing.assert_close(weights, expected)
