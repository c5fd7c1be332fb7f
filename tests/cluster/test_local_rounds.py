"""Rounds of local steps in a cluster that changes: what workers do that leave, die, join or cannot be heard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker
from ps_server.ops import requests, status_text
from ps_worker import Session
from ps_worker.state import inner
from tests.tools import counted_rounds
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, scrape, until
from tests.tools.counted_rounds import MODE, Use, train, wrong
from tests.tools.disturbed_rounds import Once, after_a_lost_shard, after_all_have_ended
from tests.tools.forkserver import Nursery
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls
from tests.tools.small_models import drawn, same, step, weights_of
from tests.tools.small_steps import adamw, make_net

pytestmark = pytest.mark.usefixtures("soon_sure")

MakeCluster = Callable[..., Cluster]


def elastic(cluster: Cluster, job: str, mode: str = MODE, **more: Any) -> Session:
    return ps_worker.connect(cluster.address, mode, job=job, elastic=True, **more)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_sample_is_used_once_while_workers_leave_die_and_join_in_mid_round(
    shared: Cluster, nursery: Nursery, job: str, tmp_path: Path, transport: str
) -> None:
    left, joined = threading.Event(), threading.Event()
    ended: list[dict[str, torch.Tensor]] = []

    def leaves(session: Session) -> list[Use]:
        uses = train(session, lambda taken, use: not (taken >= 5 and session.clock % 3 == 1))
        assert session.clock == 3 * session.round + 1, "in the middle of a round"
        session.close()
        left.set()
        return uses

    def stays(session: Session, is_late: bool) -> list[Use]:
        def each(taken: int, use: Use) -> bool:
            if is_late:
                joined.set()
            elif left.is_set():
                assert joined.wait(TEST_SECONDS), "or the job might end before"
            return True

        uses = train(session, each)
        ended.append(session.global_weights())
        return uses

    def work(index: int) -> list[Use]:
        if index == 2:  # joins late
            assert left.wait(TEST_SECONDS)
        with elastic(shared, job, transport=transport) as session:
            return leaves(session) if index == 1 else stays(session, index == 2)

    log = tmp_path / "log"
    victim = nursery.run(Path(counted_rounds.__file__), [shared.address, job, transport, 5], log)

    def lines() -> list[list[int]]:
        whole = (line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n"))  # it may die in one
        return [[int(word) for word in line.split()] for line in whole if line[:1].isdigit()]

    def kill(_: int) -> list[Use]:
        until(lambda: log.exists() and len(lines()) == 5, "the victim's fifth batch")
        members = shared.coordinator.job(job).workers  # without it the first might come to the end before the second
        until(lambda: left.is_set() or len(members.all()) == 3, "the two others")
        victim.kill()
        victim.wait(30)
        shared.end_lease(lines()[-1][1], job)
        return []

    try:
        until(lambda: log.exists() and lines(), "the victim trains before the others come")
        results = in_parallel(4, lambda index: (work if index < 3 else kill)(index))
    finally:
        victim.kill()
    uses = [use for result in results for use in result]
    victims = [(rank, number) for _, rank, number in lines()]
    assert ended
    weights = newest(ended)
    lost = {(use.rank, use.round_number) for use in uses if weights["marks"][use.rank, use.round_number] == 0}
    assert lost, "the worker that left had begun a round"
    found = wrong(weights, [*uses, *_of_victim(weights, uses, victims)])
    assert not found, found


def newest(ended: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Of the weights that workers ended with, those of the last round: another one may have noted its own later."""
    return max(ended, key=lambda found: float((found["marks"] > 0).sum()))


def _of_victim(weights: dict[str, torch.Tensor], uses: list[Use], rounds: list[tuple[int, int]]) -> list[Use]:
    """The samples of the process that was killed: those that no other worker has, in its rounds that count."""
    others = {use.sample for use in uses if weights["marks"][use.rank, use.round_number] > 0}
    marks = {float(weights["marks"][rank, number]) for rank, number in rounds} - {0.0}
    missing = [sample for sample in range(len(weights["cells"])) if sample not in others]
    found = []
    for sample in missing:
        value = float(weights["cells"][sample])
        rank, number = next(
            (each for each in rounds if abs(float(weights["marks"][each]) - value) < 1e-6), (rounds[0][0], 0)
        )
        assert not marks or number, f"sample {sample} has {value}, which is of no round of the victim"
        found.append(Use(sample, rank, number))
    counted = [number for number in rounds if float(weights["marks"][number]) > 0]
    assert len(missing) == counted_rounds.BATCH * len(counted), "as many as it took in rounds that count"
    return found


def incarnations(cluster: Cluster, job: str, rank: int) -> set[int]:
    """Of a worker, as the shards have it."""
    rosters = [dict(shard.jobs()[job].partition.roster) for shard in cluster.shards]
    return {roster[rank].incarnation for roster in rosters if rank in roster}


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_worker_that_loses_its_place_in_mid_round_goes_on_and_its_batches_come_again(
    shared: Cluster, job: str, transport: str
) -> None:
    """Not all of them to itself: the others have leased some by then."""
    ended: list[dict[str, torch.Tensor]] = []
    lost: list[Use] = []
    trains = [threading.Event(), threading.Event()]

    def work(index: int) -> list[Use]:
        with elastic(shared, job, transport=transport) as session:

            def each(taken: int, use: Use) -> bool:
                trains[index].set()
                trains[1 - index].wait()  # one that joins while the other is away would be given its rank
                if index == 0 and taken >= 5 and session.clock % 3 == 2 and not lost:
                    lost.append(use)
                    before = incarnations(shared, job, session.rank)
                    shared.end_lease(session.rank, job)
                    # On all shards, or the round might be half pushed.
                    until(lambda: not before & incarnations(shared, job, session.rank), "the end of its place")
                return True

            uses = train(session, each)
            ended.append(session.global_weights())
            assert index == 1 or scrape(session.metrics_address)["ps_worker_rejoins_total"] == 1
            return uses

    uses = [use for result in in_parallel(2, work) for use in result]
    assert lost
    found = wrong(newest(ended), uses)
    assert not found, found


@pytest.mark.parametrize("transport", cases(["tcp"], ["grpc", "shm"]))
def test_with_calls_lost_unheard_and_repeated_every_round_counts_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    faults = RpcFaults(seed=3)
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)
    ended: list[dict[str, torch.Tensor]] = []

    def work(_: int) -> list[Use]:
        with elastic(cluster, "default", transport=transport) as session:
            uses = train(session)
            ended.append(session.global_weights())
            return uses

    uses = [use for result in in_parallel(2, work) for use in result]
    faults.finish()
    found = wrong(newest(ended), uses)
    assert not found, found
    methods = ("Exchange",) if transport == "shm" else ("Push", "Pull")
    assert all(faults.counts[method, kind] for method in methods for kind in KINDS), faults.counts


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_newcomer_begins_at_a_round_with_the_steps_of_the_job(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with elastic(shared, job) as first:
        model = make_net()
        model, optimizer = first.prepare(model, adamw(model), outer={"warm_up": 2})
        for number in range(9):
            step(model, optimizer, drawn(number, 8, 6))
        assert (first.clock, first.round) == (9, 4)
        with elastic(shared, job) as second:
            joined = make_net()
            joined, _ = second.prepare(joined, adamw(joined), outer={"warm_up": 2})
            assert (second.clock, second.round) == (8, 4)
            assert same(second.global_weights().values(), first.global_weights().values())
            assert same(second.global_weights().values(), weights_of(joined))
            assert scrape(second.metrics_address)["ps_worker_fresh_inner_state_total"] == 1
            assert scrape(second.metrics_address)["ps_worker_clock"] == 8
            assert "begins without its state" in caplog.text
        assert scrape(first.metrics_address)["ps_worker_fresh_inner_state_total"] == 0
        [known] = [known for known in requests.fetch(shared.address)["jobs"] if known["name"] == job]
        assert known["local_steps"] == 3
        assert f"job {job}: local:3, " in status_text.table(requests.fetch(shared.address))


# -- inner state -------------------------------------------------------------------------------------------------------


def run(session: Session, each: Callable[[int], object] = lambda number: None) -> list[torch.Tensor]:
    """The servers' weights after 44 steps on a loader's batches: 16 rounds."""
    model = make_net()
    data = [drawn(number, 6) for number in range(4 * 44)]
    model, optimizer, loader = session.prepare(
        model,
        adamw(model),
        torch.utils.data.DataLoader(data, batch_size=4),
        outer={"warm_up": 2},  # type: ignore[arg-type]
    )
    for number, batch in enumerate(loader, 1):
        step(model, optimizer, batch)
        each(number)
    return list(session.global_weights().values())


def in_the_middle(directory: Path, what: Callable[[], object]) -> Once:
    return Once(directory, what, steps=3, at=2, after=10)


@pytest.fixture(scope="module")
def undisturbed(shared: Cluster) -> list[torch.Tensor]:
    with shared.connect(MODE, job="undisturbed-local") as session:
        return run(session)


def test_who_survives_a_rollback_goes_on_to_the_bit_from_a_copy_in_memory(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[torch.Tensor]
) -> None:
    monkeypatch.setattr(inner, "MOST_BYTES", 0)
    monkeypatch.setattr(inner, "COPIES", 20)  # on a busy machine several checkpoints in a row are not completed
    assert same(after_a_lost_shard(make_cluster, tmp_path, MODE, run, in_the_middle), undisturbed)


@pytest.mark.parametrize("most_bytes", [0, 2**20])
def test_a_new_process_has_the_state_of_its_optimizer_if_that_was_small(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[torch.Tensor],
    most_bytes: int,
) -> None:
    monkeypatch.setattr(inner, "MOST_BYTES", most_bytes)
    found, fresh = after_all_have_ended(make_cluster, tmp_path, MODE, run, in_the_middle)
    assert (same(found, undisturbed), fresh) == ((True, 0) if most_bytes else (False, 1))
