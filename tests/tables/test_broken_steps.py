"""Steps of tables on servers that are interrupted, refused or broken off, or whose place was lost; and what a script
does between backward and step. Rows are to fare as other parameters do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, LimitExceeded, NonFiniteGradient
from ps_runtime.signals import undisturbed
from ps_server.core.limits import Limits
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.row_transport import RowTransport
from ps_worker.tables.server_rows import TableStep
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster, until

TRANSPORTS = ["shm", "tcp", "grpc"]


class Net(nn.Module):
    """A table and a layer, whose gradients are ones: with SGD and a rate of 1 all go down by 1 with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0)
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum() + self.layer(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]


class Training:
    """Net in a session."""

    def __init__(self, session: ps_worker.Session) -> None:
        self.net: Any = Net()
        self.model, self.optimizer = session.prepare(self.net, torch.optim.SGD(self.net.parameters(), lr=1.0))

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(ids).backward()
        self.optimizer.step()

    def rows(self, count: int) -> list[float]:
        """The first rows."""
        return self.net.table.rows(torch.arange(count))[:, 0].tolist()  # type: ignore[no-any-return]

    @property
    def weight(self) -> float:
        """That of the layer."""
        return self.net.layer.weight.item()  # type: ignore[no-any-return]


@pytest.fixture(params=["single", "sync"])
def training(request: pytest.FixtureRequest, shared: Cluster, job: str) -> Iterator[Training]:
    if request.param == "single":
        yield Training(ps_worker.connect(mode="single"))
        return
    with shared.connect("sync", job=job) as session:
        yield Training(session)


@pytest.mark.parametrize(("transport", "announced"), crossed(TRANSPORTS, [3, 0, 8]))
def test_a_model_is_evaluated_in_inference_mode(shared: Cluster, job: str, transport: str, announced: int) -> None:
    ids = torch.arange(8)
    with shared.connect("sync", job=job, transport=transport) as session:
        training = Training(session)
        for steps in (1, 2):
            training.net.table.announce(ids[:announced] if announced else None)
            training.step(ids)
            with torch.inference_mode():
                assert training.model(ids).item() == -9.0 * steps


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_in_the_middle_of_a_step_waits_until_all_of_it_is_on_its_way(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C in a notebook: the clock has gone on, and rows are being written."""
    step, interrupts = RowTransport.step, 0

    def interrupted(self: RowTransport, *arguments: Any, **more: Any) -> Any:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments, **more)

    with shared.connect("async", job=job, transport=transport) as session:
        training = Training(session)
        monkeypatch.setattr(RowTransport, "step", interrupted)
        training.step(torch.arange(4))
        with pytest.raises(KeyboardInterrupt):
            training.step(torch.arange(4))
        assert session.clock == 2
        training.step(torch.arange(4))
        assert training.rows(5) == [-3.0] * 4 + [0.0]
        assert training.weight == -3.0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_the_lookup_after_an_interrupted_step_says_that_this_was_refused_though_its_rows_are_here(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, ids = make_cluster(shards=1, limits=Limits(push_norm=1000.0)), torch.arange(4)
    push_pull = Connection.push_pull

    def interrupted(*arguments: Any, **more: Any) -> Any:
        sent = push_pull(*arguments, **more)
        os.kill(os.getpid(), signal.SIGINT)
        return sent

    with cluster.connect("async", transport="shm") as session:
        small, large = (ps_worker.Embedding(1, initial="constant", scale=0.0) for _ in range(2))
        model = nn.ModuleList([small, large])
        _, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        (small(ids).sum() + large(ids).sum() * 1e9).backward()
        small.announce(ids)
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "push_pull", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        ahead: Any = small.local
        until(lambda: all(pull.done() for pull in ahead._ahead.pulls), "the rows")
        with pytest.raises(LimitExceeded, match="max-push-norm"):
            small(ids)
        optimizer.zero_grad()
        (small(ids).sum() + large(ids).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            assert small.rows(ids)[:, 0].tolist() == [-2.0] * 4
            assert large.rows(ids)[:, 0].tolist() == [-1.0] * 4


def test_a_worker_that_lost_its_place_goes_on_though_its_next_rows_need_more_memory(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster, ids = make_cluster(shards=2), torch.arange(200_000)
    with cluster.connect("async", transport="shm") as session:
        training = Training(session)
        for count in (10, 200_000, 10):
            training.step(ids[:count])
            cluster.lose_place(0)
        training.step(ids[:10])
        assert training.rows(10) == [-4.0] * 10, "each step counts on both shards, once"


def test_a_step_of_rows_in_several_messages_of_which_one_is_refused_is_left_out(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_worker.cluster.row_transport.MESSAGE_BYTES", 500)
    cluster = make_cluster(shards=2, limits=Limits(push_norm=1000.0))
    ids, large = torch.arange(1000), torch.ones(1000)
    large[-1] = 1e9
    with cluster.connect("async", transport="tcp") as session:
        training = Training(session)
        training.step(ids[:10])
        training.optimizer.zero_grad()
        (training.net.table(ids)[:, 0] * large).sum().backward()
        with pytest.raises(LimitExceeded, match="max-push-norm"):
            training.optimizer.step()
        training.step(ids[:10])
        assert session.clock == 3
        rows = training.rows(1000)
        assert set(rows[:10]) == {-2.0, -3.0}, "one shard has taken its part"
        assert set(rows[10:]) == {0.0, -1.0}
        assert rows[-1] == 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_refused_step_that_has_asked_for_rows_is_left_out(
    make_cluster: Callable[..., Cluster], transport: str
) -> None:
    """The shard answers the pull once it knows what becomes of the step."""
    cluster, ids = make_cluster(shards=1, limits=Limits(push_norm=1000.0)), torch.arange(10)
    with cluster.connect("async", transport=transport) as session:
        training = Training(session)
        training.step(ids)
        training.net.table.announce(ids)
        training.optimizer.zero_grad()
        (training.model(ids) * 1e9).backward()
        with pytest.raises(LimitExceeded, match="max-push-norm"):
            training.optimizer.step()
        training.step(ids)
        assert session.clock == 3
        assert training.rows(11) == [-2.0] * 10 + [0.0]


def make_refused_step(training: Training) -> None:
    training.model(torch.arange(2)).backward()
    training.net.layer.weight.grad.fill_(float("nan"))
    with pytest.raises(NonFiniteGradient, match="not finite"):
        training.optimizer.step()


def test_a_refused_step_may_be_repaired_and_made_again(shared: Cluster, job: str) -> None:
    """Rows keep their gradients for that, as other parameters do, where `zero_grad` and clipping find them."""
    with shared.connect("sync", job=job) as session:
        training = Training(session)
        make_refused_step(training)
        training.net.layer.weight.grad.fill_(1.0)
        nn.utils.clip_grad_value_([p for g in training.optimizer.param_groups for p in g["params"]], 0.5)
        training.optimizer.step()
        assert (training.rows(3), training.weight) == ([-0.5, -0.5, 0.0], -0.5)
        training.step(torch.arange(2))
        assert (training.rows(3), training.weight) == ([-1.5, -1.5, 0.0], -1.5), "each gradient counts once"


@pytest.mark.parametrize("zeroed", ["optimizer", "model"])
def test_a_refused_step_may_be_forgotten(shared: Cluster, job: str, zeroed: str) -> None:
    with shared.connect("sync", job=job) as session:
        training = Training(session)
        make_refused_step(training)
        getattr(training, zeroed).zero_grad()
        training.model(torch.arange(3, 4)).backward()
        training.optimizer.step()
        assert (training.rows(4), training.weight) == ([0.0, 0.0, 0.0, -1.0], -1.0)


def test_a_step_that_is_refused_before_its_rows_are_looked_at_may_be_made_again(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        training = Training(session)
        training.model(torch.arange(2)).backward()
        weight = training.net.layer.weight
        values, weight.data = weight.data, weight.data.double()
        with pytest.raises(InvalidRequest, match="float64"):
            training.optimizer.step()
        weight.data = values
        training.optimizer.step()
        assert (training.rows(3), training.weight) == ([-1.0, -1.0, 0.0], -1.0)


def test_the_memory_that_calls_of_a_step_send_is_not_the_scripts_after_it_was_broken_off(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some calls may be on their way when another cannot be made."""
    sent: list[TableStep] = []

    def breaks_off(connection: Connection, pushes: Any, drafts_count: bool, rows: list[TableStep], *more: Any) -> None:
        sent.extend(rows)
        raise InvalidRequest("broken off")

    with shared.connect("async", job=job, transport="tcp") as session:
        training = Training(session)
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "push_pull", lambda *arguments, **named: breaks_off(*arguments))
            with pytest.raises(InvalidRequest, match="broken off"):
                training.step(torch.arange(2))
        training.optimizer.zero_grad(set_to_none=False)
        [table] = sent
        assert table.rows is not None
        assert table.rows.gradients.tolist() == [[1.0], [1.0]]
        training.step(torch.arange(2))
        assert training.rows(3) == [-1.0, -1.0, 0.0]


def test_what_is_frozen_between_forward_and_backward_stays(training: Training) -> None:
    loss = training.model(torch.arange(2))
    training.net.table.requires_grad_(False)
    loss.backward()
    training.net.table.requires_grad_(True)
    training.optimizer.step()
    assert (training.rows(2), training.weight) == ([0.0, 0.0], -1.0)


def test_a_graph_that_is_kept_gives_its_gradient_again_after_zero_grad(training: Training) -> None:
    loss = training.model(torch.arange(2))
    loss.backward(retain_graph=True)
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    assert (training.rows(2), training.weight) == ([-1.0, -1.0], -1.0)


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_does_not_wait() -> None:
    interrupts = 0

    def interrupt_twice() -> None:
        nonlocal interrupts
        with undisturbed():
            while interrupts < 3:
                interrupts += 1
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert interrupts == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Breaks(torch.autograd.Function):
    is_broken = False

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Breaks.is_broken:
            raise RuntimeError("out of memory")
        return gradient


@pytest.mark.parametrize("zeroed", ["optimizer", "model"])
def test_a_backward_that_breaks_off_leaves_nothing_behind_once_gradients_are_zeroed(
    training: Training, zeroed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is used twice in a forward, and backward has come to one of the two."""

    def step(first: int, second: int) -> None:
        getattr(training, zeroed).zero_grad()
        broken = _Breaks.apply(training.net.table(torch.tensor([first])))  # type: ignore[no-untyped-call]
        (broken + training.net.table(torch.tensor([second]))).sum().backward()
        training.optimizer.step()

    step(1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(_Breaks, "is_broken", True)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(3, 4)
    step(5, 6)
    assert training.rows(8) == [0.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0, 0.0]


def test_the_optimizer_may_be_saved_between_backward_and_step(training: Training) -> None:
    for number in range(3):
        training.optimizer.zero_grad()
        (100 * training.model(torch.tensor([number]))).backward()
        state = training.optimizer.state_dict()
        training.optimizer.load_state_dict(state)
        in_groups = [p for group in training.optimizer.param_groups for p in group["params"]]
        assert sum(p.numel() for p in in_groups) == 2, "the layer's weight, and the row"
        nn.utils.clip_grad_value_(in_groups, 1.0)
        training.optimizer.step()
    assert (training.rows(3), training.weight) == ([-1.0, -1.0, -1.0], -3.0)
