"""What is saved holds what was trained: every update that was acknowledged, of every worker, in every mode."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ps_server.shard.pushes import Updates
from ps_worker import Session
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.small_models import same, weights_of

LOOSE = ["ssp:3", "async"]
TRANSPORTS = ["shm", "tcp", "grpc"]
STEPS = 6


class Count(nn.Module):
    """Each step adds 1 to every weight, whatever the data."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(300))
        self.one = nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        return -self.cells.sum() - self.one


def counting(session: Session, **options: Any) -> tuple[Count, torch.optim.Optimizer]:
    model = Count()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = session.prepare(model, optimizer, bucket_bytes=256, **options)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def holds(weights: dict[str, torch.Tensor], count: float) -> bool:
    return all(bool((value == count).all()) for value in weights.values())


@pytest.mark.parametrize(("transport", "mode"), crossed(TRANSPORTS, LOOSE))
def test_after_a_barrier_all_have_every_step(mode: str, transport: str, shared: Cluster, job: str) -> None:
    """Rank 0 is at its end, in `barrier`, before rank 1 makes its last steps."""
    last_steps = threading.Event()

    def work(rank: int) -> None:
        with shared.connect(mode, rank, 2, job=job, transport=transport) as session:
            model, optimizer = counting(session)
            for number in range(STEPS):
                if rank == 1 and number == STEPS - 2:
                    assert last_steps.wait(60)
                step(model, optimizer)
            places = [parameter.data_ptr() for parameter in model.parameters()]
            if rank == 0:
                last_steps.set()
            session.barrier()
            assert holds(model.state_dict(), 2 * STEPS)
            assert holds(session.global_weights(), 2 * STEPS)
            assert [parameter.data_ptr() for parameter in model.parameters()] == places
            session.barrier()
            step(model, optimizer)
            session.barrier()
            assert holds(model.state_dict(), 2 * STEPS + 2)

    in_parallel(2, work)


@pytest.mark.parametrize("mode", LOOSE)
def test_global_weights_wait_for_what_is_staged_and_for_no_worker(
    mode: str, shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards acknowledge rank 1's second push, and apply it only when the test lets them."""
    holding, schedule = threading.Event(), Updates.schedule

    def hold(self: Updates, hosted: Any, buckets: Any) -> None:
        if not holding.is_set() or hosted.name != job:
            schedule(self, hosted, buckets)

    monkeypatch.setattr(Updates, "schedule", hold)
    begun = threading.Event()

    def other() -> None:
        with shared.connect(mode, 1, 2, job=job, transport="grpc") as second:
            model, optimizer = counting(second)
            step(model, optimizer)
            holding.set()
            begun.set()
            step(model, optimizer)

    def saved() -> None:
        found.append(first.global_weights())

    found: list[dict[str, torch.Tensor]] = []
    with shared.connect(mode, 0, 2, job=job, transport="grpc") as first:
        thread, saving = threading.Thread(target=other), threading.Thread(target=saved)
        thread.start()
        model, _ = counting(first)
        assert begun.wait(60)
        hosted = [(shard, shard._hosted.get(job, "")) for shard in shared.shards]
        parts = [part for _, each in hosted for part in each.units.values()]
        until(lambda: all(part.rule.staged.get(1) == 2 for part in parts), "rank 1's second push")
        saving.start()
        until(lambda: all(any(w.owed for w in part.waiters.values()) for part in parts), "rank 0's wait")
        assert not found
        holding.clear()
        for shard, each in hosted:
            shard._updates.schedule(each, each.units)
        saving.join(60)
        thread.join(60)
        assert holds(found[0], 2), "rank 0 has made no step, and nobody waits for it"
        assert holds(model.state_dict(), 2)


@pytest.mark.parametrize("transport", cases(TRANSPORTS[:1], TRANSPORTS[1:]))
def test_with_a_quorum_the_late_ones_are_saved_too(transport: str, shared: Cluster, job: str) -> None:
    """Each worker has a cell of its own, and makes one step. That of rank 2 comes after an update without it, and no
    other step follows that would take it along."""
    go = threading.Event()

    def work(rank: int) -> None:
        with shared.connect("sync", rank, 3, job=job, transport=transport, quorum=2) as session:
            model = nn.ParameterList([nn.Parameter(torch.zeros(8)) for _ in range(3)])
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = session.prepare(model, optimizer)
            if rank == 2:
                assert go.wait(60)
            (-model[rank].sum()).backward()
            optimizer.step()
            if rank == 0:
                go.set()
            session.barrier()
            weights = [value.clone() for value in model.state_dict().values()]
            assert [float(value[0]) for value in weights] == [0.5, 0.5, 1.0]
            every = session.gather(weights)
            assert all(same(one, weights) for one in every)
            assert same(session.global_weights().values(), weights)

    in_parallel(3, work)


@pytest.mark.parametrize(("transport", "mode"), crossed(TRANSPORTS, LOOSE))
def test_what_the_script_has_set_stays_and_goes_with_its_next_step(
    mode: str, transport: str, shared: Cluster, job: str
) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        model, optimizer = counting(session)
        step(model, optimizer)
        model().backward()  # a gradient that is there already stays
        with torch.no_grad():
            model.one.fill_(50.0)
        model.cells.data[:3] = 7.0
        session.barrier()
        weights = session.global_weights()
        assert weights["one"] == 50.0
        assert weights["cells"].tolist() == [7.0] * 3 + [1.0] * 297
        assert same(weights.values(), model.state_dict().values())
        optimizer.step()
        assert model.one.item() == 51.0
        assert model.cells.tolist() == [8.0] * 3 + [2.0] * 297
        assert holds({"one": session.global_weights()["one"]}, 51.0)


@pytest.mark.parametrize("mode", ["sync", "local:4", "local:4/2"])
def test_where_each_step_brings_all_weights_or_they_are_the_workers_own_none_are_fetched(
    mode: str, shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.connect(mode, job=job) as session:
        model, optimizer = counting(session)
        for _ in range(2):
            step(model, optimizer)
        monkeypatch.setattr("ps_worker.cluster.connection.Connection.pull", None)
        before = weights_of(model)
        session.barrier()
        session.global_weights()
        assert same(before, model.parameters())


@pytest.mark.parametrize("mode", cases(LOOSE[:1], LOOSE[1:]))
def test_parameters_that_were_added_later_are_saved_with_every_update(mode: str, shared: Cluster, job: str) -> None:
    def work(rank: int) -> None:
        with shared.connect(mode, rank, 2, job=job) as session:
            model = Count()
            optimizer = torch.optim.SGD([model.cells], lr=1.0)
            model, optimizer = session.prepare(model, optimizer)
            optimizer.add_param_group({"params": [model.one], "lr": 1.0})
            for _ in range(STEPS * (1 + rank)):
                step(model, optimizer)
            session.barrier()
            assert holds(session.global_weights(), 3 * STEPS)

    in_parallel(2, work)


def test_after_the_session_is_closed_the_weights_are_the_models_own(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session:
        model, optimizer = counting(session)
        step(model, optimizer)
    assert holds(session.global_weights(), 1)
