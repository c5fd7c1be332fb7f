"""A step counts on all shards, once, also where its worker loses its place before it, or in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker.cluster.participation import Participation, PlaceLost
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.whole_steps import CUT, STEPS, CutInHalf, Net, prepared, set_all, size, total

pytestmark = pytest.mark.usefixtures("soon_sure")

MakeCluster = Callable[..., Cluster]


def check_all_count(session: ps_worker.Session, net: Any, mode: str, rejoins: int, made: int = STEPS) -> None:
    """Checks that all steps count, once, and that the worker has counted none as lost."""
    steps = made * (2 if mode.startswith("local") else 1)
    assert net.values() == [-total(*range(1, steps + 1))] * len(net.values())
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


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_a_fragment_that_is_cut_in_half_counts_as_a_whole_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """And so does the rest of its round, which had not left the worker."""
    cluster = make_cluster(shards=2)
    with cluster.connect("local:4/2", transport=transport) as session:
        net, step = prepared(session, "local:4/2")
        cut = CutInHalf(cluster, monkeypatch, of=any)
        for _ in range(2 * STEPS):
            step()
        assert cut.left == 0
        check_all_count(session, net, "local:4/2", 1, made=2 * STEPS)


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
@pytest.mark.parametrize(("times", "first"), cases([(2, 0)], [(1, 1)]))
def test_a_step_that_is_cut_in_half_counts_as_a_whole_once_with_a_quorum(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, transport: str, times: int, first: int
) -> None:
    cluster = make_cluster(shards=2)
    how: dict[str, Any] = {"elastic": True, "quorum": 1, "transport": transport}
    with ps_worker.connect(cluster.address, "sync", **how) as session:
        net, step = prepared(session, "sync")
        cut = CutInHalf(cluster, monkeypatch, times, first)
        for _ in range(STEPS):
            step()
        assert cut.left == 0
        session.barrier()
        check_all_count(session, net, "sync", times)


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
        assert net.values() == [-total(*range(1, made + STEPS + 1))] * len(net.values())


def test_two_workers_in_sync_lose_no_gradient_of_either(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buckets go the same way, though one of them gets worker 0's gradient an update later than the other. Those of
    worker 1 are all alike: the mean of the update that leaves worker 0 out is one of them."""
    cluster = make_cluster(shards=2)
    cut = CutInHalf(cluster, monkeypatch)

    def is_back() -> bool:
        """Whether worker 0 has another place. Where the other one had come to its end by then, an update with nothing
        but the skip of worker 0 would be none: one bucket would have a step less, and no gradient less."""
        return any(
            member.rank == 0 and member.incarnation > 2 for member in cluster.coordinator.job("default").workers.all()
        )

    def work(rank: int) -> list[float]:
        with cluster.connect("sync", rank=rank, world_size=2, transport="tcp") as session:
            net, step = prepared(session, "sync", size if rank == 0 else lambda _: 1.0)
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
            model(size(number)).backward()
            if number == CUT:
                with torch.no_grad():
                    for layer in net.layers:
                        layer.fill_(100.0)
            optimizer.step()
        assert cut.left == 0
        assert net.values() == [100.0 - total(*range(CUT, STEPS + 1))] * 32


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
    ("mode", "transport"), cases([("sync", "tcp"), ("async", "shm")], [("ssp:1", "shm"), ("async", "tcp")])
)
@pytest.mark.parametrize("counts", [True, False])
def test_what_a_script_sets_after_it_has_interrupted_a_step_goes_with_the_next_one(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, counts: bool
) -> None:
    """Also where the place is lost between the two. counts: the step that was interrupted does, or half of it"""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, step = prepared(session, mode, overlap=False)  # CutInHalf would hold a draft, and what is set behind it
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
        # A step that was interrupted may count in part, and what goes with it not.
        taken, later = 50.0 - total(*(CUT,) * counts, CUT + 1), 100.0 - size(CUT + 1)
        assert net.values() == [later] * 16 + [taken] * 16 + [later] * 4 + [taken] * 4


@pytest.mark.parametrize(
    ("mode", "transport"), cases([("sync", "tcp"), ("async", "shm")], [("ssp:1", "grpc"), ("async", "tcp")])
)
@pytest.mark.parametrize("counts", [True, False])
def test_what_a_script_has_set_for_a_step_that_it_interrupts_goes_with_the_next_one_that_finds_the_place_lost(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, counts: bool
) -> None:
    """Unless the step that was interrupted counts. What the script has set since goes with the next one anyway."""
    cluster = make_cluster(shards=2)
    with cluster.connect(mode, transport=transport) as session:
        net, step = prepared(session, mode)
        for _ in range(CUT - 1):
            step()
        cut = None if counts else CutInHalf(cluster, monkeypatch)
        set_all(net, 50.0)
        Interrupt(monkeypatch).in_step(step)
        with torch.no_grad():
            net.layers[0].fill_(100.0)
        net.table.assign(torch.arange(4), torch.full((4, 1), 100.0))
        if cut is None:
            cluster.lose_place(0)
        else:
            assert cut.left == 0
        net.looks_up = False  # a look-up would find it
        step()
        made = total(*(CUT,) * counts)
        assert net.values()[:32] == [100.0 - size(CUT + 1)] * 16 + [50.0 - made - size(CUT + 1)] * 16
        assert net.values()[32:] == [100.0] * 4 + [50.0 - made] * 4
        assert scrape(session.metrics_address)["ps_worker_lost_steps_total"] == (not counts)


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
        assert net.values() == [50.0 - total(CUT, CUT + 1)] * 40


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
