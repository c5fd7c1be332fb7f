"""A move to another place that an error or an interrupt ends: the worker goes on from there with its next step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ps_worker
from ps_protocol.errors import LimitExceeded, Unreachable
from ps_server.shard.pulls import Pulls
from ps_worker.cluster.own_membership import OwnMembership
from ps_worker.cluster.participation import Participation
from ps_worker.strategies.assignments import Assignments
from ps_worker.strategies.sent_step import last_state
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.whole_steps import CUT, CutInHalf, Net, size, total

MakeCluster = Callable[..., Cluster]


def trained_with_momentum(session: ps_worker.Session, value: float) -> tuple[Any, Any, Callable[[], None]]:
    """Returns a model whose steps CUT - 1 are made and whose weights and momentum are set for the next one, its
    optimizer, and what makes a step."""
    net: Any = Net(with_table=False)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    # Without drafts: CutInHalf would hold one of them, and what is set behind it.
    model, optimizer = session.prepare(net, sgd, bucket_bytes=64, overlap=False)
    numbers = itertools.count(1)

    def step() -> None:
        optimizer.zero_grad()
        model(size(next(numbers))).backward()
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
        assert momentum_of(optimizer) == [0.5 * (0.5 * 10 + size(CUT)) + size(CUT + 1)] * 2
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
        training = session._strategy._training  # type: ignore[attr-defined]
        left = training.checkpoint, training.clock, training.sent, training.participation.membership.place
        assert last_state(*left, training.model, training._restore_count).clock == CUT - 1
        step()
        assert "its last gradient is lost, or a part of it" in caplog.text
        assert momentum_of(optimizer) == [0.5 * 10 + size(CUT + 1)] * 2
        assert net.values() == [100.0 - (0.5 * 10 + size(CUT + 1))] * 32
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
        assert momentum_of(optimizer) == [0.5 * 10 + size(CUT + 1)] * 2
        assert net.values() == [100.0 - (0.5 * 10 + size(CUT + 1))] * 32
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
        (step, look), (step_of_other, _) = stepping(session, nets[0], first=1), stepping(other, nets[1], first=5)
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
        last = 3 if is_in_step else 2
        taken = -total(1, last, 5, 6)
        assert nets[0].values() == [50.0 - size(last)] * 16 + [taken] * 16 + [70.0 - size(last)] * 16 + [taken] * 16


def test_weights_that_a_shard_writes_after_an_interrupt_of_a_move_are_not_what_the_script_has_set(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards write them to the model's memory, which they have mapped. The script keeps a reference to `.data`."""
    cluster = make_cluster(shards=2)
    connect: Any = partial(ps_worker.connect, cluster.address, "async", job="moved", elastic=True, transport="shm")
    with connect() as session, connect() as other:
        net: Any = Net(False)
        (step, look), (step_of_other, _) = stepping(session, net, first=1), stepping(other, Net(False), first=5)
        step()
        step_of_other()
        held = [layer.data for layer in net.layers]
        cluster.lose_place(session.rank, "moved")
        part, is_asked, may_write = session._strategy._training.participation, threading.Event(), threading.Event()  # type: ignore[attr-defined]
        copy_out, written = Pulls._copy_out, list[object]()

        def copied_later(pulls: Pulls, job: Any, bucket: Any, pull: Any, *rest: Any) -> Any:
            if pull.worker.rank == session.rank and not may_write.is_set():
                is_asked.set()
                assert may_write.wait(30.0)
            copied = copy_out(pulls, job, bucket, pull, *rest)
            written.append(pull)
            return copied

        def begins_to_write() -> bool:
            """Whether it is to be interrupted: in the new place, once a shard is about to write."""
            if part.has_arrived:
                return False
            assert is_asked.wait(30.0)
            threading.Timer(0.2, may_write.set).start()
            return True

        monkeypatch.setattr(Pulls, "_copy_out", copied_later)
        fail_once(monkeypatch, Participation, "settle", KeyboardInterrupt(), begins_to_write)
        with pytest.raises(KeyboardInterrupt):
            look()
        until(lambda: len(written) == 2)
        step_of_other()
        step()
        assert net.values() == [-total(1, 2, 5, 6)] * 32
        assert len(held) == 2


@pytest.mark.parametrize(("where", "transport"), crossed(WHERE, ["tcp", "shm", "grpc"]))
def test_a_step_after_an_interrupted_move_takes_its_rows_along(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], transport: str
) -> None:
    """Its gradient is there before the worker has arrived in the other place."""
    cluster = make_cluster(shards=2)
    with cluster.connect("async", transport=transport) as session:
        net: Any = Net(with_table=True)
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
        model().backward()
        cluster.lose_place(0)
        part = session._strategy._training.participation  # type: ignore[attr-defined]
        fail_once(monkeypatch, *where, KeyboardInterrupt(), lambda: not part.has_arrived)
        with pytest.raises(KeyboardInterrupt):
            optimizer.state_dict()
        optimizer.step()
        assert net.values() == [-1.0] * 40


def stepping(session: ps_worker.Session, net: Any, first: int = 1) -> tuple[Callable[[], None], Callable[[], object]]:
    """Returns what makes a step of a model, and what looks at its optimizer's state. first: the first step's number"""
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
    numbers = itertools.count(first)

    def step() -> None:
        optimizer.zero_grad()
        model(size(next(numbers))).backward()
        optimizer.step()

    return step, optimizer.state_dict
