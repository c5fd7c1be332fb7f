"""Rounds of a time (mode local:Ts): each worker makes as many steps as it can, and they weigh in the mean."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.convert import job_spec, job_spec_message
from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_protocol.local import Local
from ps_server.ops import requests, status_text
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker import Session
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import joined, vector_job
from tests.tools.rollbacks import QUICK
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls
from tests.tools.small_models import drawn, filled, same, step

MODE = "local:30s"
AVERAGING = {"lr": 1.0, "momentum": 0.0, "warm_up": 0}


class Clocks:
    """Replaces `time` in the code that ends rounds: each worker's thread has its own clock, which the test sets."""

    def __init__(self) -> None:
        self._own = threading.local()

    def monotonic(self) -> float:
        return float(getattr(self._own, "now", 0.0))

    def go_on(self, seconds: float) -> None:
        self._own.now = self.monotonic() + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr("ps_worker.model.local_round.time", clocks)
    return clocks


class Steps:
    """A vector that each step of plain SGD moves by the same."""

    def __init__(self, session: Session, moves: float, **outer: Any) -> None:
        self.model = nn.Module()
        self.model.cells = nn.Parameter(torch.zeros(64))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model, self.optimizer = session.prepare(self.model, optimizer, outer={**AVERAGING, **outer})
        self._session, self._moves = session, moves

    def make(self) -> None:
        self.model.cells.grad = torch.full((64,), self._moves)
        self.optimizer.step()

    def of_all(self) -> float:
        cells = self._session.global_weights()["cells"]
        assert torch.equal(cells, cells[:1].expand(64))
        return float(cells[0])


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_round_ends_with_the_first_step_after_its_time_and_weighs_its_steps(
    shared: Cluster, job: str, clocks: Clocks, transport: str
) -> None:
    steps = {0: (3, 1), 1: (1, 2)}  # of each rank, in each round

    def work(rank: int) -> None:
        with shared.connect(MODE, rank, 2, job=job, transport=transport) as session:
            cells = Steps(session, [1.0, 5.0][rank])
            # Differences of 3 with weight 3 and 5 with weight 1; then of 1 with weight 1 and 10 with weight 2.
            for number, expected in enumerate([-14 / 4, -14 / 4 - 21 / 3]):
                for _ in range(steps[rank][number] - 1):
                    clocks.go_on(29 / 3)
                    cells.make()
                    assert session.round == number
                clocks.go_on(30)
                cells.make()
                assert session.round == number + 1
                assert cells.of_all() == pytest.approx(expected, rel=1e-6)
                assert session.clock == sum(steps[rank][: number + 1]), "its own steps"
            assert scrape(session.metrics_address)["ps_worker_clock"] == session.clock
            session.barrier()
            known = requests.fetch(shared.address)
            assert f"job {job}: {MODE}, " in status_text.table(known)
            session.barrier()

    in_parallel(2, work)


def test_the_warm_up_has_rounds_of_one_step_whatever_the_time(shared: Cluster, job: str, clocks: Clocks) -> None:
    with shared.connect(MODE, job=job) as session:
        cells = Steps(session, 1.0, warm_up=3)
        for number in range(1, 6):
            cells.make()
            assert session.round == min(number, 3)
        clocks.go_on(30)
        cells.make()
        assert (session.clock, session.round) == (6, 4)


def test_workers_with_another_time_are_refused(shared: Cluster, job: str) -> None:
    def join(mode: str) -> None:
        with ps_worker.connect(shared.address, mode, job, elastic=True) as session:
            Steps(session, 1.0)

    with ps_worker.connect(shared.address, MODE, job, elastic=True) as session:
        Steps(session, 1.0)
        with pytest.raises(JobMismatch, match=r"the mode is local:30s in the registered job and local:31s in this one"):
            join("local:31s")
        with pytest.raises(JobMismatch, match="the mode is local:30s in the registered job and local:30 in this"):
            join("local:30")


@pytest.mark.parametrize("mode", ["sync", "local:2", MODE])
def test_a_weight_of_rounds_is_refused_with_the_way_out(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session, pytest.raises(InvalidRequest, match="Leave it out, and give all"):
        Steps(session, 1.0, weight="samples")


# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_gradient_without_its_weight_or_with_one_that_is_none_is_refused(shared: Cluster, job: str) -> None:
    timed = replace(vector_job(job, "sync", cells=16, world_size=1), local=Local(1, seconds=30.0))
    with joined(shared.address, timed) as [worker]:
        for weight in (0.0, -1.0, 0.5, math.inf, math.nan):
            with pytest.raises(InvalidRequest, match="a gradient has a weight from 1 to 2\\^53 in mode local:30s"):
                worker.send(worker.message(0, 1, weight=weight))
        worker.send(worker.message(0, 1, weight=2.0))
        worker.send(worker.message(0, 1, weight=3.0))  # a repeat
    with joined(shared.address, vector_job(f"{job}-sync", "sync", cells=16, world_size=1)) as [worker]:
        with pytest.raises(InvalidRequest, match="all gradients weigh the same in mode sync, got the weight 2"):
            worker.send(worker.message(0, 1, weight=2.0))
        worker.send(worker.message(0, 1))


def test_a_job_of_timed_rounds_is_no_job_to_servers_that_know_only_steps() -> None:
    spec = replace(vector_job("j", "sync", 16, 1), local=Local(1, seconds=0.57))
    message = job_spec_message(spec)
    assert job_spec(message) == spec
    assert message.local.steps == 0, "which they refuse"
    message.local.steps = 3
    with pytest.raises(InvalidRequest, match="after so many steps, or after so long"):
        job_spec(message)


@pytest.mark.parametrize("rounds", [Local(1, seconds=0.57), Local(8)])
def test_servers_refuse_a_job_whose_rounds_weigh_samples(rounds: Local) -> None:
    message = job_spec_message(replace(vector_job("j", "sync", 16, 1), local=rounds))
    message.local.weighted_by_samples = True  # as workers of earlier versions may ask for it
    with pytest.raises(InvalidRequest, match=r"Leave out outer=\{'weight': 'samples'\}, and give all workers batches"):
        job_spec(message)


# -- when something fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", cases(["tcp"], ["grpc", "shm"]))
def test_with_calls_lost_unheard_and_repeated_every_round_counts_once_with_its_weight(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, clocks: Clocks, transport: str
) -> None:
    faults = RpcFaults(seed=3)
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)

    def work(rank: int) -> None:
        with cluster.connect(MODE, rank, 2, transport=transport) as session:
            cells = Steps(session, [1.0, 5.0][rank])
            for number in range(1, 9):
                for _ in range([2, 0][rank]):
                    cells.make()
                clocks.go_on(30)
                cells.make()
                assert cells.of_all() == -3.5 * number

    in_parallel(2, work)
    faults.finish()
    methods = ("Exchange",) if transport == "shm" else ("Push", "Pull")
    assert all(faults.counts[method, kind] for method in methods for kind in KINDS), faults.counts


def test_a_job_that_is_rolled_back_goes_on_with_the_steps_that_it_had_made(
    make_cluster: Any, shared: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by 15 s when it is looked at, rounds have the steps of local:2."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("ps_worker.model.local_round.time", SimpleNamespace(monotonic=lambda: 15.0 * next(ticks)))
    store, seen, lost = CheckpointStore(tmp_path), [], []

    def run(session: Session, each: Any = lambda number: None) -> list[torch.Tensor]:
        model = filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
        data = [drawn(number, 6) for number in range(4 * 42)]
        model, optimizer, loader = session.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            torch.utils.data.DataLoader(data, batch_size=4),  # type: ignore[arg-type]
            outer={"warm_up": 2},
        )
        for number, batch in enumerate(loader, 1):
            step(model, optimizer, batch)
            each(number)
        assert (session.clock, session.round) == (42, 22)
        return list(session.global_weights().values())

    def lose(number: int) -> None:
        """After step `number`. A checkpoint may be of a round that has to be made first; after one is there, a round
        is made before the shard ends, in which the next one is begun."""
        if lost or number < 13 or not number % 2:  # in the middle of a round alone
            return
        if seen:
            lost.append(number)
            cluster.start_again(1)
        with contextlib.suppress(AssertionError):
            until(lambda: store.names("default"), "a checkpoint", 1.0)
            seen.append(number)

    with shared.connect("local:2", job="undisturbed-timed") as session:
        undisturbed = run(session)
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="6steps", timing=QUICK)
    with cluster.connect(MODE, transport="tcp") as session:
        assert same(run(session, lose), undisturbed)
        assert lost
        assert scrape(session.metrics_address)["ps_worker_rejoins_total"] >= 1
