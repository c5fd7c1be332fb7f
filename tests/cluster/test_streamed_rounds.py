"""Rounds whose model is pushed in fragments (mode local:H/F), in a cluster that changes: what counts, what is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_worker
from ps_server.ops import requests, status_text
from ps_worker import Session
from ps_worker.state import inner
from ps_worker.strategies import fragment_exchange
from tests.tools.cases import cases, crossed
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, scrape, until
from tests.tools.disturbed_rounds import Once, after_a_lost_shard, after_all_have_ended
from tests.tools.rollbacks import QUICK
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls
from tests.tools.small_models import drawn, same, step, weights_of
from tests.tools.small_steps import adamw, make_net

pytestmark = pytest.mark.usefixtures("soon_sure")

MakeCluster = Callable[..., Cluster]
Found = list[list[torch.Tensor]]  # of each worker the servers' weights, and its own

MODE = (
    "local:6/3"  # with the default delay of one step; after the warm-up of 2, fragments leave at 4, 6, 8, 10 and so on
)
OUTER: dict[str, Any] = {"warm_up": 2}
STEPS = 44
INT4 = {"gradient_wire": "int4", "weight_wire": "int4"}


def run(session: Session, each: Callable[[int], object] = lambda number: None, **more: Any) -> list[torch.Tensor]:
    """Trains on this worker's share of a loader's batches; the servers' weights at the end, and this worker's own."""
    model = make_net()
    size = 4 * STEPS * session.world_size
    loader: Any = DataLoader([drawn(number, 6) for number in range(size)], batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = session.prepare(model, adamw(model), loader, bucket_bytes=128, outer=OUTER, **more)
    for number, batch in enumerate(loader, 1):
        step(model, optimizer, batch)
        each(number)
    return [*(value.clone() for value in session.global_weights().values()), *weights_of(model)]


def both(cluster: Cluster, job: str = "default", transport: str = "auto", **more: Any) -> Found:
    """What two workers end with."""

    def work(rank: int) -> list[torch.Tensor]:
        with cluster.connect(MODE, rank, 2, job=job, transport=transport) as session:
            return run(session, **more)

    return in_parallel(2, work)


def alike(found: Found, expected: Found) -> bool:
    return all(same(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def undisturbed(shared: Cluster) -> Found:
    """What two workers end with that nothing disturbs."""
    return both(shared, "undisturbed-fragments", **INT4)


# -- each fragment counts once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", cases(["tcp"], ["grpc", "shm"]))
def test_with_calls_lost_unheard_and_repeated_every_fragment_counts_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, shared: Cluster, undisturbed: Found, transport: str
) -> None:
    expected = undisturbed if transport != "shm" else both(shared, "undisturbed-shm", "shm")
    faults = RpcFaults(seed=3)
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)
    found = both(cluster, transport=transport, **({} if transport == "shm" else INT4))
    faults.finish()
    assert alike(found, expected)
    methods = ("Exchange",) if transport == "shm" else ("Push", "Pull")
    assert all(faults.counts[method, kind] for method in methods for kind in KINDS), faults.counts


# -- workers come and go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost_at", "transport"),  # in the warm-up, between two fragments, with one under way, with one that is mixed in
    crossed([1, 5, 6, 7], ["grpc", "shm"]),
)
def test_a_worker_that_loses_its_place_goes_on_from_the_servers_weights_at_a_round(
    shared: Cluster, job: str, transport: str, lost_at: int
) -> None:
    """And all workers begin each round with the same weights, before and after it."""
    at_step: list[int] = []

    def is_back() -> bool:  # not that its next step goes on: that may need a push of worker 1
        return any(member.rank == 0 for member in shared.coordinator.job(job).workers.all())

    def work(rank: int) -> dict[int, list[torch.Tensor]]:
        with shared.connect(MODE, rank, 2, job=job, transport=transport) as session:
            began: dict[int, list[torch.Tensor]] = {}

            def each(number: int) -> None:
                if session.round not in began:  # nothing is under way
                    began[session.round] = list(session.global_weights().values())
                if rank == 0 and number == lost_at:
                    shared.end_lease(0, job)
                    at_step.append(session.round)
                if rank == 1 and at_step and session.round > at_step[0]:
                    until(is_back, "worker 0 in its new place")

            run(session, each)
            assert scrape(session.metrics_address)["ps_worker_rejoins_total"] == (rank == 0)
            return began

    first, second = in_parallel(2, work)
    assert at_step == [min(lost_at, 2)]
    both_began = first.keys() & second.keys()
    assert len(both_began) >= 5
    assert all(same(first[number], second[number]) for number in both_began)
    assert all(value.isfinite().all() for value in first[max(both_began)])


def test_who_dies_in_the_middle_of_a_round_is_waited_for_no_longer_than_its_lease(shared: Cluster, job: str) -> None:
    """What it has pushed of the round counts; the others finish it."""
    stopped, over = threading.Event(), threading.Event()

    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect(MODE, rank, 2, job=job) as session:
            model = make_net()
            model, optimizer = session.prepare(model, adamw(model), bucket_bytes=128, outer={"warm_up": 0})
            if rank == 0:
                for number in range(3):  # one fragment is mixed in, and the next one has not left
                    step(model, optimizer, drawn(number, 8, 6))
                stopped.set()
                assert over.wait(TEST_SECONDS)
                return []
            try:
                for number in range(14):
                    step(model, optimizer, drawn(100 + number, 8, 6))
                    if number == 2:
                        assert stopped.wait(TEST_SECONDS)
                        shared.end_lease(0, job)
                assert (session.clock, session.round) == (14, 2)
                return list(session.global_weights().values())
            finally:
                over.set()

    with ThreadPoolExecutor(2) as pool:
        survivor = pool.submit(work, 1)
        pool.submit(work, 0)
        assert all(value.isfinite().all() for value in survivor.result(TEST_SECONDS))


def test_a_newcomer_waits_for_the_end_of_the_round_and_has_the_servers_weights(shared: Cluster, job: str) -> None:
    joined, stepping = threading.Event(), threading.Event()
    ended: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        with ps_worker.connect(shared.address, MODE, job=job, elastic=True) as session:
            model = make_net()
            if index == 1:
                assert stepping.wait(TEST_SECONDS)
            model, optimizer = session.prepare(model, adamw(model), bucket_bytes=128, outer=OUTER)
            if index == 1:
                assert session.round >= 3
                assert session.clock == 3 + 6 * (session.round - 2), "the steps of the job, with the delay"
                assert same(session.global_weights().values(), weights_of(model))
                joined.set()
            number = 0
            while session.round < 8:
                step(model, optimizer, drawn(100 * index + number, 8, 6))
                number += 1
                if index == 0 and number == 5:  # a fragment of the third round is pushed
                    stepping.set()
                if index == 0 and number > 5 and not joined.is_set():
                    until(lambda: joined.is_set() or _is_counted(shared, job), "the newcomer is there, or counted")
            ended[index] = list(session.global_weights().values())

    in_parallel(2, work)
    assert same(ended[0], ended[1])


def _is_counted(cluster: Cluster, job: str) -> bool:
    return all(len(shard.jobs()[job].partition.roster) == 2 for shard in cluster.shards if job in shard.jobs())


def test_status_names_the_mode(shared: Cluster, job: str) -> None:
    with shared.connect(MODE, job=job) as session:
        model = make_net()
        session.prepare(model, adamw(model), bucket_bytes=128)
        [known] = [known for known in requests.fetch(shared.address)["jobs"] if known["name"] == job]
        assert (known["local_steps"], known["local_fragments"]) == (6, 3)
        assert f"job {job}: local:6/3, " in status_text.table(requests.fetch(shared.address))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def in_the_middle(at: int = 2) -> Callable[[Path, Callable[[], object]], Once]:
    """at: after which step of six; a fragment is pushed after even ones, and mixed in after odd ones"""
    return partial(Once, steps=6, at=at, after=8)


@pytest.fixture(scope="module")
def alone(shared: Cluster) -> list[torch.Tensor]:
    """What one worker ends with that nothing disturbs."""
    with shared.connect(MODE, job="undisturbed-alone") as session:
        return run(session)


@pytest.mark.parametrize(
    ("at", "transport"),
    cases([(2, "tcp")], [(3, "grpc"), (0, "shm"), (1, "tcp")]),  # under way, mixed in, the last one under way, the end
)
def test_a_job_that_lost_a_shard_ends_with_the_weights_of_an_undisturbed_run(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: list[torch.Tensor],
    at: int,
    transport: str,
) -> None:
    """From copies in memory of the worker's own weights and moments: they are too large for the checkpoint here."""
    monkeypatch.setattr(inner, "MOST_BYTES", 0)
    monkeypatch.setattr(inner, "COPIES", 20)  # on a busy machine several checkpoints in a row are not completed
    assert same(after_a_lost_shard(make_cluster, tmp_path, MODE, run, in_the_middle(at), transport), alone)


def test_two_workers_whose_shard_is_lost_end_with_the_weights_of_an_undisturbed_run(
    make_cluster: MakeCluster, tmp_path: Path, undisturbed: Found
) -> None:
    """In int4: what the wire has rounded off is rolled back, too."""
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="2steps", timing=QUICK)
    lost = in_the_middle()(tmp_path, lambda: cluster.start_again(1))

    def work(rank: int) -> list[torch.Tensor]:
        with cluster.connect(MODE, rank, 2) as session:
            return run(session, lost if rank == 0 else lambda number: None, **INT4)

    assert alike(in_parallel(2, work), undisturbed)
    assert lost.happened


@pytest.mark.parametrize("most_bytes", [0, 2**20])
def test_a_new_process_has_its_own_weights_and_moments_if_they_were_small(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: list[torch.Tensor],
    most_bytes: int,
) -> None:
    monkeypatch.setattr(inner, "MOST_BYTES", most_bytes)
    monkeypatch.setattr(fragment_exchange, "LEAVING_SECONDS", 0.1)  # for which it waits for servers that are gone
    found, fresh = after_all_have_ended(make_cluster, tmp_path, MODE, run, in_the_middle())
    assert (same(found, alone), fresh) == ((True, 0) if most_bytes else (False, 1))
