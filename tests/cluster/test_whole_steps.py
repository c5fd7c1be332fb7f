"""A step counts on all shards, once, also where its worker loses its place before it, or in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_protocol.errors import LimitExceeded, Unreachable
from ps_protocol.messages.data import PushKind
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.pushes import Pushes
from ps_worker.cluster.own_membership import OwnMembership
from ps_worker.cluster.participation import Participation, PlaceLost
from ps_worker.strategies.assignments import Assignments
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel, scrape, until

MakeCluster = Callable[..., Cluster]

STEPS, CUT = 5, 3


class Net(nn.Module):
    """Buckets on each shard, by default one, and rows on both; all go down by 1 with each step."""

    def __init__(self, with_table: bool, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(layers))
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0) if with_table else None

    def forward(self) -> torch.Tensor:
        rows = torch.zeros(()) if self.table is None else self.table(torch.arange(8)).sum()
        return sum((layer.sum() for layer in self.layers), rows)

    def values(self) -> list[float]:
        """All of them."""
        rows = [] if self.table is None else self.table.rows(torch.arange(8))[:, 0].tolist()
        return [*(value for layer in self.layers for value in layer.tolist()), *rows]


class CutInHalf:
    """Has the lease of worker 0 end once one shard has had all of a step, and before the other has had any.

    times: so often, also when the step is pushed again
    first: the shard that has it
    """

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch, times: int = 1, first: int = 0) -> None:
        self.left, self._cluster = times, cluster
        self._first, self._second = cluster.shards[first], cluster.shards[1 - first]
        self._clock = CUT
        for name in ("_stage_all", "_stage_rows"):
            patch.setattr(Pushes, name, self._held(getattr(Pushes, name)))

    def _held(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def staged(pushes: Pushes, job: HostedJob, call: Any, *rest: Any, **more: Any) -> Any:
            if pushes is self._second._pushes and self._is_of_step(call) and self.left:
                rules = self._first.jobs()[job.name].state.rules.values()
                # The first of several calls moves `_clock` on. The worker's others wait for the next step then, so that
                # nothing of this one comes late; a call of another worker does not, for that step waits for it.
                until(
                    lambda: all(
                        rule.pushed.get(0, 0) >= (call.clock if call.worker.rank else self._clock) for rule in rules
                    ),
                    "the step on one shard",
                )
                if self.left and call.clock == self._clock:  # the first of several calls
                    self.left, self._clock = self.left - 1, self._clock + 1
                    self._cluster.lose_place(0, job.name)
            return stage(pushes, job, call, *rest, **more)

        return staged

    def _is_of_step(self, call: Any) -> bool:
        """Whether a call brings a step, and not what is assigned before it, or what a table begins with."""
        kinds = {bucket.kind for bucket in getattr(call, "buckets", ())}
        return getattr(call, "clock", 0) == self._clock and kinds.isdisjoint({PushKind.ASSIGN, PushKind.ASSIGN_STATE})


def prepared(session: ps_worker.Session, mode: str) -> tuple[Any, Callable[..., None]]:
    """Returns a model, and what makes a step of it, or in local:2 a round of two.

    before: is called in the last step of it, before that ends
    """
    is_local = mode.startswith("local")
    net: Any = Net(with_table=not is_local)
    options: dict[str, Any] = {"outer": {"warm_up": 0, "lr": 1.0, "momentum": 0.0}} if is_local else {}
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64, **options)

    def step(before: Callable[[], None] | None = None) -> None:
        for is_last in (False, True) if is_local else (True,):
            optimizer.zero_grad()
            model().backward()
            if is_last and before is not None:
                before()
            optimizer.step()

    return net, step


def set_all(net: Any, value: float) -> None:
    """Sets all of them, with the next step."""
    with torch.no_grad():
        for layer in net.layers:
            layer.fill_(value)
    net.table.assign(torch.arange(8), torch.full((8, 1), value))


def check_all_count(session: ps_worker.Session, net: Any, mode: str, rejoins: int) -> None:
    """Checks that all steps count, once, and that the worker has counted none as lost."""
    steps = STEPS * (2 if mode.startswith("local") else 1)
    assert net.values() == [-float(steps)] * len(net.values())
    figures = scrape(session.metrics_address)
    assert (figures["ps_worker_rejoins_total"], figures["ps_worker_lost_steps_total"]) == (rejoins, 0)


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases(
        [("sync", "shm"), ("async", "tcp"), ("local:2", "grpc")],
        [("async", "shm"), ("sync", "grpc"), ("ssp:1", "shm"), ("ssp:0", "tcp"), ("local:2", "shm")],
    ),
)
@pytest.mark.parametrize(("times", "first"), cases([(1, 0), (2, 1)], [(1, 1), (2, 0)]))
def test_a_step_that_is_cut_in_half_counts_as_a_whole_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, times: int, first: int
) -> None:
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, step = prepared(session, mode)
        cut = CutInHalf(cluster, monkeypatch, times, first)
        for _ in range(STEPS):
            step()
        assert cut.left == 0
        check_all_count(session, net, mode, times)


@pytest.mark.parametrize("transport", cases(["shm"], ["tcp"]))
@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async", "local:2"])
def test_a_step_whose_place_is_lost_before_it_is_pushed_counts_once(
    make_cluster: MakeCluster, mode: str, transport: str
) -> None:
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, step = prepared(session, mode)
        for number in range(1, STEPS + 1):
            step(before=(lambda: cluster.lose_place(0)) if number == CUT else None)
        check_all_count(session, net, mode, 1)


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:1"]))
def test_no_step_is_lost_when_all_servers_are_ended_and_started_again(
    make_cluster: MakeCluster, tmp_path: Path, mode: str
) -> None:
    """As for an upgrade, while a worker steps as fast as it can, without a loader."""
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=60.0)
    with cluster.connect(mode, transport="tcp") as session, ThreadPoolExecutor(1) as pool:
        net, step = prepared(session, mode)
        step()
        restarting = pool.submit(cluster.start_all_again)
        made = 1
        while not restarting.done():
            step()
            made += 1
        for _ in range(STEPS):
            step()
        restarting.result()
        assert net.values() == [-float(made + STEPS)] * len(net.values())


def test_two_workers_in_sync_lose_no_gradient_of_either(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buckets go the same way, though one of them gets worker 0's gradient an update later than the other."""
    cluster = make_cluster(shards=2)
    cut = CutInHalf(cluster, monkeypatch)

    def is_back() -> bool:
        """Whether worker 0 has another place. Where the other one had come to its end by then, an update with nothing
        but the skip of worker 0 would be none: one bucket would have a step less, and no gradient less."""
        return any(
            member.rank == 0 and member.incarnation > 2 for member in cluster.coordinator.job("default").members.all()
        )

    def work(rank: int) -> list[float]:
        with cluster.connect("sync", rank=rank, world_size=2, transport="tcp") as session:
            net, step = prepared(session, "sync")
            for number in range(STEPS):
                if rank == 1 and number == CUT:
                    until(is_back, "worker 0 in another place")
                step()
            session.barrier()
            return list(net.values())

    each = in_parallel(2, work)
    assert cut.left == 0
    assert len({value for values in each for value in values}) == 1


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_what_a_narrow_wire_has_left_out_of_a_step_that_was_cut_in_half_is_sent_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """What was sent and what is still to be sent are the gradients together, on both shards alike."""
    cluster = make_cluster(shards=2)
    gradient = torch.linspace(0.1, 1.7, 16)
    with cluster.connect("async", transport="tcp") as session:
        net: Any = Net(with_table=False)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, sgd, bucket_bytes=64, gradient_wire=wire)
        cut = CutInHalf(cluster, monkeypatch)
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((layer * gradient).sum() for layer in model.layers).backward()
            optimizer.step()
        assert cut.left == 0
        residuals = session._strategy._training.model.residuals.copy()  # type: ignore[attr-defined]
        for layer, left in zip(net.layers, residuals.values(), strict=True):
            torch.testing.assert_close(-layer.detach() + left, STEPS * gradient)


def test_weights_that_a_script_has_set_count_with_a_step_that_was_cut_in_half(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=2)
    with cluster.connect("async") as session:
        net: Any = Net(with_table=False)
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
        cut = CutInHalf(cluster, monkeypatch)
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            model().backward()
            if number == CUT:
                with torch.no_grad():
                    for layer in net.layers:
                        layer.fill_(100.0)
            optimizer.step()
        assert cut.left == 0
        assert net.values() == [100.0 - (STEPS - CUT + 1)] * 32


def trained_after_setting(
    session: ps_worker.Session, then: Callable[[Any], object], how: dict[str, str]
) -> list[float]:
    """Makes a step with each leased batch; returns the values at the end. Before one of them ends, it sets weights,
    rows and the optimizer's state.

    then: is called right after that, with the model
    """
    net: Any = Net(with_table=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    loader = DataLoader(TensorDataset(torch.zeros(STEPS, 1)), batch_size=1)
    model, optimizer, loader = session.prepare(net, optimizer, loader, bucket_bytes=64, **how)
    for number, _ in enumerate(loader, 1):
        optimizer.zero_grad()
        model().backward()
        if number == CUT:
            state = optimizer.state_dict()
            for each in state["state"].values():
                each["momentum_buffer"].fill_(10.0)
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for layer in net.layers:
                    layer.fill_(100.0)
            net.table.assign(torch.arange(8), torch.full((8, 1), 100.0))
            then(net)
        optimizer.step()
    values: list[float] = net.values()
    return values


@pytest.mark.parametrize(
    ("mode", "transport", "how"),
    cases(
        [("sync", "tcp", {}), ("async", "grpc", {"weight_wire": "bfloat16"})],
        [("ssp:2", "shm", {}), ("sync", "tcp", {"weight_wire": "int4"}), ("async", "tcp", {})],
    ),
)
@pytest.mark.parametrize("is_in_step", [True, False])
def test_what_a_script_has_set_counts_once_where_the_data_of_its_step_comes_again(
    make_cluster: MakeCluster, mode: str, transport: str, how: dict[str, str], is_in_step: bool
) -> None:
    """And where the place is lost between what it sets and its step: it reads rows there."""
    cluster = make_cluster(shards=2)

    def train(job: str, then: Callable[[Any], object]) -> list[float]:
        with ps_worker.connect(cluster.address, mode, job=job, elastic=True, transport=transport) as session:
            return trained_after_setting(session, then, how)

    def lose(net: Any) -> None:
        cluster.lose_place(0, "lost")
        if not is_in_step:
            net.table.rows(torch.arange(8))

    expected = train("undisturbed", lambda _: None)
    assert train("lost", lose) == pytest.approx(expected, abs=0.5 if how else 0.0)


class Interrupt:
    """Interrupts one step where its answers are there, as Ctrl-C does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._settle, self._is_due = Participation.settle, False
        patch.setattr(Participation, "settle", lambda participation: self._settled(participation))

    def _settled(self, participation: Participation) -> None:
        is_of_step = self._is_due and participation.connection.clock == CUT
        try:
            self._settle(participation)
        except PlaceLost:
            if not is_of_step:
                raise
        if is_of_step:
            self._is_due = False
            raise KeyboardInterrupt

    def in_step(self, step: Callable[[], None]) -> None:
        """Makes a step, and interrupts it."""
        self._is_due = True
        with pytest.raises(KeyboardInterrupt):
            step()


@pytest.mark.parametrize(
    ("mode", "transport"), cases([("sync", "tcp"), ("async", "shm")], [("ssp:1", "grpc"), ("async", "tcp")])
)
@pytest.mark.parametrize("counts", [True, False])
def test_what_a_script_sets_after_it_has_interrupted_a_step_goes_with_the_next_one(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, counts: bool
) -> None:
    """Also where the place is lost between the two. counts: the step that was interrupted does, or half of it"""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, step = prepared(session, mode)
        for _ in range(CUT - 1):
            step()
        cut = None if counts else CutInHalf(cluster, monkeypatch)
        set_all(net, 50.0)
        Interrupt(monkeypatch).in_step(step)
        assert cut is None or cut.left == 0
        with torch.no_grad():
            net.layers[0].fill_(100.0)
        net.table.assign(torch.arange(4), torch.full((4, 1), 100.0))
        if counts:
            cluster.lose_place(0)
        # The place is lost in the first call after the interrupt.
        assert net.table.rows(torch.arange(4)).tolist() == [[100.0]] * 4
        step()
        taken = 50.0 - (2 if counts else 1)  # a step that was interrupted may count in part, and what goes with it not
        assert net.values() == [99.0] * 16 + [taken] * 16 + [99.0] * 4 + [taken] * 4


def test_rows_that_go_with_a_step_that_is_interrupted_go_with_no_other(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=2)
    with cluster.connect("async") as session:
        net, step = prepared(session, "async")
        for _ in range(CUT - 1):
            step()
        set_all(net, 50.0)
        Interrupt(monkeypatch).in_step(step)
        step()
        assert net.values() == [48.0] * 40


class ComplexNet(nn.Module):
    """Its gradient is 1 in every element's real part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return torch.view_as_real(self.weight)[..., 0].sum()


def test_a_complex_weight_that_a_script_has_set_counts_once_where_the_data_of_its_step_comes_again(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(shards=2)
    data = TensorDataset(torch.zeros(6, 1))
    with ps_worker.connect(cluster.address, "async", job="complex", elastic=True, transport="tcp") as session:
        net = ComplexNet()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer, loader = session.prepare(net, optimizer, DataLoader(data, batch_size=1), bucket_bytes=64)
        for number, _ in enumerate(loader, 1):
            optimizer.zero_grad()
            model().backward()
            if number == 3:
                with torch.no_grad():
                    net.weight.fill_(100)
                cluster.lose_place(0, "complex")
            optimizer.step()
        assert torch.equal(net.weight.detach(), torch.full((5, 3), 96, dtype=torch.complex64))


# -- a move to another place that an error or an interrupt ends --------------------------------------------------------


def trained_with_momentum(session: ps_worker.Session, value: float) -> tuple[Any, Any, Callable[[], None]]:
    """Returns a model whose steps CUT - 1 are made and whose weights and momentum are set for the next one, its
    optimizer, and what makes a step. Each gradient is 1."""
    net: Any = Net(with_table=False)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    # Without drafts: CutInHalf would hold one of them, and what is set behind it.
    model, optimizer = session.prepare(net, sgd, bucket_bytes=64, overlap=False)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    for _ in range(CUT - 1):
        step()
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["momentum_buffer"].fill_(value)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for layer in net.layers:
            layer.fill_(100.0)
    return net, optimizer, step


def momentum_of(optimizer: Any) -> list[float]:
    """That of each layer: all elements have the same."""
    return [each["momentum_buffer"].unique().item() for each in optimizer.state_dict()["state"].values()]


def fail_once(
    patch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException, when: Callable[[], bool]
) -> None:
    """Has a method raise an error instead, the first time that it is called when it is to."""
    method, left = getattr(owner, name), [error]

    def failing(*arguments: Any, **named: Any) -> Any:
        if left and when():
            raise left.pop()
        return method(*arguments, **named)

    patch.setattr(owner, name, failing)


class LostBehind:
    """Has the worker lose its place once all shards have had step CUT, before that is over."""

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.is_lost = False
        settle = Participation.settle

        def settled(participation: Participation) -> None:
            settle(participation)
            connection = participation.connection
            if connection.clock == CUT and not self.is_lost:
                self.is_lost = True
                cluster.lose_place(0)
                connection.pull()  # a call that the shards refuse
                settle(participation)

        patch.setattr(Participation, "settle", settled)


@pytest.mark.parametrize(("mode", "transport"), cases([("sync", "tcp"), ("async", "shm")], [("ssp:1", "grpc")]))
def test_a_step_that_counts_is_known_where_the_worker_gets_a_place_only_at_its_second_attempt(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    transport: str,
) -> None:
    """What the script has set for it is not sent again."""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        _, optimizer, step = trained_with_momentum(session, 10.0)
        lost = LostBehind(cluster, monkeypatch)
        fail_once(monkeypatch, Participation, "rejoin", Unreachable("no route"), lambda: lost.is_lost)
        with pytest.raises(Unreachable, match="no route"):
            step()
        step()
        assert "its last gradient counts" in caplog.text
        assert momentum_of(optimizer) == [0.5 * (0.5 * 10 + 1) + 1] * 2
        figures = scrape(session.metrics_address)
        assert (figures["ps_worker_rejoins_total"], figures["ps_worker_lost_steps_total"]) == (1, 0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_part_of_a_step_is_counted_as_lost_where_the_worker_gets_a_place_only_at_its_second_attempt(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """What the script has set for it goes with the next step."""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport="tcp") as session:
        net, optimizer, step = trained_with_momentum(session, 10.0)
        cut = CutInHalf(cluster, monkeypatch)
        fail_once(monkeypatch, Participation, "rejoin", Unreachable("no route"), lambda: cut.left == 0)
        with pytest.raises(Unreachable, match="no route"):
            step()
        # What it would leave behind if it ended here: the state of before the step.
        assert session._strategy._training._last_state().clock == CUT - 1  # type: ignore[attr-defined]
        step()
        assert "its last gradient is lost, or a part of it" in caplog.text
        assert momentum_of(optimizer) == [0.5 * 10 + 1] * 2
        assert net.values() == [100.0 - (0.5 * 10 + 1)] * 32
        figures = scrape(session.metrics_address)
        assert (figures["ps_worker_rejoins_total"], figures["ps_worker_lost_steps_total"]) == (1, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LimitExceeded("refused")])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_script_has_set_goes_with_the_next_step_where_this_one_is_not_pushed_again(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    error: BaseException,
) -> None:
    """One shard has had it, and it ends in the next place before the other one gets it. It is counted as lost."""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport="tcp") as session:
        net, optimizer, step = trained_with_momentum(session, 10.0)
        cut = CutInHalf(cluster, monkeypatch)
        fail_once(monkeypatch, Assignments, "send", error, lambda: cut.left == 0)
        with pytest.raises(type(error)):
            step()
        assert f"step {CUT} was broken off" in caplog.text
        step()
        assert momentum_of(optimizer) == [0.5 * 10 + 1] * 2
        assert net.values() == [100.0 - (0.5 * 10 + 1)] * 32
        figures = scrape(session.metrics_address)
        assert (figures["ps_worker_rejoins_total"], figures["ps_worker_lost_steps_total"]) == (1, 1)


# Where the interrupt comes: before the worker has a place, before it has the weights there, and after.
WHERE = [(OwnMembership, "renewed"), (Participation, "settle"), (OwnMembership, "await_started")]


@pytest.mark.parametrize(("where", "transport"), crossed(WHERE, ["tcp", "shm", "grpc"]))
@pytest.mark.parametrize("is_in_step", [True, False])
def test_weights_that_a_script_sets_after_it_has_interrupted_a_move_go_with_the_next_step(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[type, str],
    transport: str,
    is_in_step: bool,
) -> None:
    """So do those that it had set before. What it only looks at takes the weights that another worker has made."""
    cluster = make_cluster(shards=2)
    connect: Any = partial(ps_worker.connect, cluster.address, "async", job="moved", elastic=True, transport=transport)
    with connect() as session, connect() as other:
        nets: list[Any] = [Net(False, layers=4), Net(False, layers=4)]
        (step, look), (step_of_other, _) = [
            stepping(each, net) for each, net in zip([session, other], nets, strict=True)
        ]
        step()
        step_of_other()
        first, second, third, fourth = nets[0].layers
        held = second.data
        with torch.no_grad():
            first.fill_(50.0)
        cluster.lose_place(session.rank, "moved")
        part = session._strategy._training.participation  # type: ignore[attr-defined]
        fail_once(monkeypatch, *where, KeyboardInterrupt(), lambda: not part.has_arrived)
        with pytest.raises(KeyboardInterrupt):
            (step if is_in_step else look)()
        step_of_other()
        third.data.fill_(70.0)
        assert held.shape == fourth.data.shape
        step()
        assert nets[0].values() == [49.0] * 16 + [-4.0] * 16 + [69.0] * 16 + [-4.0] * 16


def stepping(session: ps_worker.Session, net: Any) -> tuple[Callable[[], None], Callable[[], object]]:
    """Returns what makes a step of a model, with a gradient of 1; and what looks at the state of its optimizer."""
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step, optimizer.state_dict
