"""A step counts on all shards or on none, and no lost place loses one: what is missing of it is pushed again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from tests.tools.cluster import Cluster, in_parallel, until

MakeCluster = Callable[..., Cluster]
STEPS = 6
LOST_AT = 3  # the step in which the place is lost
ROWS = 4


class Net(nn.Module):
    """Two layers, each a bucket on a shard of its own, and a table on both: all gradients are ones."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 1, bias=False), nn.Linear(16, 1, bias=False)
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0) if rows else None
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.first(x).sum() + self.second(x).sum()
        return dense if self.table is None else dense + self.table(torch.arange(ROWS)).sum()  # type: ignore[no-any-return]

    def values(self) -> set[float]:
        """All weights and rows, each once."""
        found = {*self.first.weight.flatten().tolist(), *self.second.weight.flatten().tolist()}
        return found if self.table is None else found | set(self.table.rows(torch.arange(ROWS))[:, 0].tolist())


def train(session: ps_worker.Session, rows: bool, lose: Callable[[], None]) -> tuple[Net, Any]:
    """Makes all steps, each of which takes 1 from each weight and row; loses the place in one."""
    net: Any = Net(rows)
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.ones(1, 16)).backward()
        if number == LOST_AT:
            lose()
        optimizer.step()
    return net, session


class Halfway:
    """Ends the place of worker 0 in a step that one shard has staged, before the other one takes it.

    first: the shard that has it
    """

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, first: int, job: str = "default") -> None:
        self._cluster, self._job = cluster, job
        self._first, second = cluster.shards[first], cluster.shards[1 - first]
        self.is_due, self.times = False, 0
        for name in ("push", "exchange", "push_rows"):
            monkeypatch.setattr(second, name, self._late(getattr(second, name)))

    def begin(self) -> None:
        self.is_due = True

    def _late(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def held(*arguments: Any) -> Any:
            if self.is_due:
                self.is_due = False
                self.times += 1
                hosted = self._first.jobs()[self._job]
                until(lambda: self._has_all(hosted), "the other shard's half of the step")
                self._cluster.end_lease(0, self._job)
                second = self._cluster.shards[1 - self._cluster.shards.index(self._first)].jobs()[self._job]
                until(lambda: 0 not in second.state.roster or self._is_new(second), "the end of the place")
            return call(*arguments)

        return held

    def _has_all(self, hosted: Any) -> bool:
        rules = list(hosted.state.rules.values())
        return all(rule.pushed.get(0, 0) >= LOST_AT for rule in rules)

    def _is_new(self, hosted: Any) -> bool:
        return bool(hosted.state.roster[0].incarnation > 1)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_half_a_step_is_pushed_to_its_end(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, first: int, rows: bool
) -> None:
    cluster = make_cluster(shards=2)
    halfway = Halfway(cluster, monkeypatch, first)
    with cluster.connect(mode, transport=transport) as session:
        net, session = train(session, rows, halfway.begin)
        assert halfway.times == 1
        assert net.values() == {-float(STEPS)}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async", "local:2"])
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_a_step_whose_place_is_lost_before_it_is_pushed_counts_once(
    make_cluster: MakeCluster, mode: str, transport: str, rows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if mode.startswith("local") and rows:
        pytest.skip("no tables in local:H")
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, session = train(session, rows, lambda: cluster.end_lease(0))
        if mode.startswith("local"):
            assert set(session.global_weights(net)["first.weight"].flatten().tolist()) == {-float(STEPS)}
        else:
            assert net.values() == {-float(STEPS)}
    if caplog.records:
        assert "is lost" not in caplog.text


def test_a_second_loss_in_the_step_that_is_pushed_again_does_not_make_it_count_twice(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=2)
    one, other = Halfway(cluster, monkeypatch, 0), Halfway(cluster, monkeypatch, 1)

    def both() -> None:
        one.begin()
        other.begin()

    with cluster.connect("async", transport="tcp") as session:
        net, session = train(session, True, both)
        assert one.times == other.times == 1
        assert net.values() == {-float(STEPS)}


def test_what_a_script_has_set_before_a_step_that_is_pushed_again_counts_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=2)
    halfway = Halfway(cluster, monkeypatch, 0)
    net: Any = Net(False)
    with cluster.connect("async", transport="tcp") as session:
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 16)).backward()
            if number == LOST_AT:
                halfway.begin()
                with torch.no_grad():
                    net.first.weight.fill_(100.0)
                    net.second.weight.fill_(100.0)
            optimizer.step()
        assert halfway.times == 1
        assert net.values() == {100.0 - (STEPS - LOST_AT + 1)}


def test_what_a_narrow_wire_left_out_is_sent_once(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With error feedback all that was left out comes with later steps: so do the sums agree, but for the last rest."""

    def trained(break_off: bool) -> torch.Tensor:
        cluster = make_cluster(shards=2)
        halfway = Halfway(cluster, monkeypatch, 0) if break_off else None
        net: Any = Net(False)
        with cluster.connect("async", transport="tcp") as session:
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            model, optimizer = session.prepare(net, optimizer, bucket_bytes=64, gradient_wire="int8")
            for number in range(1, STEPS + 1):
                optimizer.zero_grad()
                model(torch.linspace(0.1, 1.7, 16)[None]).backward()
                if number == LOST_AT and halfway is not None:
                    halfway.begin()
                optimizer.step()
            assert halfway is None or halfway.times == 1
            return torch.cat([net.first.weight.detach().clone(), net.second.weight.detach().clone()])

    assert torch.equal(trained(False), trained(True))


def test_two_workers_in_sync_lose_no_gradient_of_either(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buckets go the same way, though one of them gets worker 0's gradient an update later than the other."""
    cluster = make_cluster(shards=2)
    halfway = Halfway(cluster, monkeypatch, 0)

    def work(rank: int) -> tuple[float, float]:
        with cluster.connect("sync", rank=rank, world_size=2, transport="tcp") as session:
            net, _ = train(session, False, halfway.begin if rank == 0 else lambda: None)
            session.barrier()
            return net.first.weight[0, 0].item(), net.second.weight[0, 0].item()

    (first, second), _ = in_parallel(2, work)
    assert halfway.times == 1
    assert first == second


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ps_worker")
