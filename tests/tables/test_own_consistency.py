"""Tables that are looser than their job: rows are trained as they come, and all other weights in its mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_server.core.limits import Limits
from ps_server.ops import status
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.worker import incarnation_of
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.rollbacks import QUICK
from tests.tools.table_model import LookUps

IDS = torch.tensor([-1, 0, 7, 2**62, -(2**63)])
RATE = 0.5
SAMPLES, BATCH, PASSES, COMMON = 64, 4, 3, -5


class Both(nn.Module):
    """Rows and other weights whose gradients are ones: with SGD a row counts lookups, and a weight counts updates."""

    def __init__(self, consistency: str | None = "async", ids: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(3, initial="constant", scale=0.0, seed=0, consistency=consistency, ids=ids)
        self.top = nn.Parameter(torch.zeros(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.top.sum()  # type: ignore[no-any-return]

    def counted(self, ids: torch.Tensor) -> list[float]:
        """How often ids were looked up in steps that count, over the workers of an update."""
        rows = self.rows.rows(ids) / -RATE
        assert all(len(set(row)) == 1 for row in rows.tolist())
        return rows[:, 0].tolist()

    def updates(self) -> float:
        """How many updates the other weights have had."""
        [count] = set((self.top / -RATE).tolist())
        return count


class Worker(LookUps):
    """A worker that trains Both."""

    def __init__(self, session: ps_worker.Session, own: Both | None = None) -> None:
        self.own = own or Both()
        self.model, self.optimizer = session.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=RATE))


def await_applied(cluster: Cluster, job: str) -> None:
    """Waits until all that was pushed is in the rows."""
    rules = [rule for shard in cluster.shards for rule in shard.jobs()[job].state.rules.values()]
    until(lambda: not any(rule.waiting or rule.added for rule in rules))


def rows_on(cluster: Cluster, job: str) -> int:
    """How many rows there are."""
    return sum(len(table.rows) for shard in cluster.shards for table in shard.jobs()[job].state.tables.values())


# -- what it gives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize(("mode", "own"), [("sync", None), ("sync", "async"), ("sync", "ssp:1"), ("ssp:0", "async")])
def test_rows_are_trained_and_looked_up_while_the_step_waits_for_a_slow_worker(
    shared: Cluster, job: str, mode: str, own: str | None, transport: str
) -> None:
    workers: dict[int, Worker] = {}
    meet = threading.Barrier(2, timeout=60)

    def work(rank: int) -> tuple[list[float], float]:
        with shared.connect(mode, rank, 2, job=job, transport=transport) as session:
            worker = workers[rank] = Worker(session, Both(own))
            meet.wait()
            if rank == 1:  # the other one's step waits for this one
                until(lambda: shared.waits(job).get(0) == (1, [1]))
                ahead = workers[0].own.rows.local._ahead  # type: ignore[attr-defined]
                if own is None:
                    assert rows_on(shared, job) == 0
                    assert not any(pull.done() for pull in ahead.pulls)
                else:
                    until(lambda: all(pull.done() for pull in ahead.pulls))
                    assert rows_on(shared, job) == len(IDS)
            worker.own.rows.announce(IDS)
            worker.step(IDS)
            meet.wait()
            await_applied(shared, job)
            return worker.own.counted(IDS), worker.own.updates()

    both = in_parallel(2, work)
    # A mean of the two, or a step of each.
    assert [counted for counted, _ in both] == [[1.0 if own is None else 2.0] * 5] * 2
    assert [updates for _, updates in both] == [1.0 if mode == "sync" else 2.0] * 2


def test_status_says_which_tables_have_a_rule_of_their_own(shared: Cluster, job: str) -> None:
    for own, text in ((None, "  table rows: 5 rows"), ("ssp:3", "  table rows (ssp:3): 5 rows")):
        name = f"{job}{len(text)}"
        with shared.connect("sync", job=name) as session:
            Worker(session, Both(own)).step(IDS)
            await_applied(shared, name)
            lines = status.table(status.fetch(shared.address)).splitlines()
            assert [line for line in lines if line.startswith(text)], lines


def test_a_job_without_other_weights_steps_with_a_table_under_its_mode(shared: Cluster, job: str) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loose = ps_worker.Embedding(3, initial="constant", scale=0.0, consistency="async")
            self.own = ps_worker.Embedding(3, initial="constant", scale=0.0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.loose(ids).sum() + self.own(ids).sum()  # type: ignore[no-any-return]

    def work(rank: int) -> list[float]:
        with shared.connect("sync", rank, 2, job=job) as session:
            made = Tables()
            model, optimizer = session.prepare(made, torch.optim.SGD(made.parameters(), lr=RATE))
            if rank == 1:
                until(lambda: shared.waits(job).get(0) == (1, [1]))
            for _ in range(3):
                optimizer.zero_grad()
                model(IDS).backward()
                optimizer.step()
            assert session.clock == 3
            return (made.own.rows(IDS)[:, 0] / -RATE).tolist()

    assert in_parallel(2, work) == [[3.0] * 5] * 2


@pytest.mark.parametrize("mode", ["single", "async"])
def test_where_the_mode_is_no_stricter_it_does_nothing(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        worker = Worker(session)
        for _ in range(3):
            worker.step(IDS)
        assert worker.own.counted(IDS) == [3.0] * 5
        with shared.connect("single", job=job) as other:
            assert Worker(other, Both("async")).own.counted(IDS) == [0.0] * 5


# -- once, whatever happens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "own"), [("sync", "async"), ("sync", "ssp:2"), ("ssp:1", "async")])
def test_each_step_counts_once_though_a_worker_loses_its_place(cluster: Cluster, mode: str, own: str) -> None:
    steps, left = 12, threading.Event()

    def work(rank: int) -> tuple[int, int, list[float]]:
        """Steps that were acknowledged, and that were made; of rank 0, how often rows were trained when it is alone."""
        with cluster.connect(mode, rank, 2) as session:
            worker, acknowledged, made = Worker(session, Both(own)), 0, 0
            while session.clock < steps or not (rank or left.is_set()):
                place, clock, made = incarnation_of(session), session.clock, made + 1
                worker.own.rows.announce(IDS)
                worker.step(IDS[: 3 + rank])
                acknowledged += incarnation_of(session) == place
                if rank == 0 and clock < steps and clock % 4 == 1:
                    cluster.end_lease(1)
            if rank == 0:
                await_applied(cluster, "default")
                return acknowledged, made, worker.own.counted(IDS)
        left.set()
        return acknowledged, made, []

    (first, first_made, counted), (second, second_made, _) = in_parallel(2, work)
    assert counted[0] == counted[1] == counted[2], "no step is in some rows only"
    assert counted[4] == 0
    assert first + second <= counted[0] <= first_made + second_made
    assert second <= counted[3] <= second_made


def test_workers_come_and_go_and_each_step_counts_once(shared: Cluster, job: str) -> None:
    def connect() -> ps_worker.Session:
        return ps_worker.connect(shared.address, "sync", job=job, elastic=True)

    with connect() as session:
        worker = Worker(session)
        for _ in range(3):
            worker.step(IDS)
        came, done = threading.Event(), threading.Event()

        def visit() -> int:
            with connect() as other:
                visitor = Worker(other)
                assert visitor.own.counted(IDS)[0] >= 3
                came.set()
                for _ in range(4):
                    visitor.step(IDS)
            done.set()
            return 4

        def stay() -> int:
            made = 3
            while not done.is_set():
                worker.step(IDS)
                made += 1
            return made

        made = sum(in_parallel(2, lambda number: visit() if number else stay()))
        assert came.is_set()
        await_applied(shared, job)
        assert worker.own.counted(IDS) == [made] * 5


def test_a_gradient_that_is_left_out_leaves_no_trace(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        own = Both()
        model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE), non_finite="skip")
        for factor in (1.0, float("nan"), 1.0):
            optimizer.zero_grad()
            (model(IDS) * factor).backward()
            optimizer.step()
        assert session.clock == 3
        assert own.counted(IDS) == [2.0] * 5


def test_leased_batches_are_used_once(shared: Cluster, job: str) -> None:
    """The buckets and the table take the same batches, whoever brings them."""

    def work(rank: int) -> list[float]:
        with ps_worker.connect(shared.address, "sync", job=job, elastic=True) as session:
            return train(session, 2, lambda: None)[0]

    assert in_parallel(2, work) == [[2.0] * SAMPLES] * 2


# -- checkpoints -----------------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    """Each has an id of its own, and one that all have."""
    own = torch.arange(SAMPLES) * 2**40
    return TensorDataset(torch.stack([own, torch.full_like(own, COMMON)], 1))


def train(
    session: ps_worker.Session, passes: int, between: Callable[[], None], consistency: str = "async"
) -> tuple[list[float], float, float]:
    """Trains some passes; how often each sample was trained, how often the id was that all have, and the updates."""
    own = Both(consistency, ids=lambda batch: batch[0])
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
    model, optimizer, batches = session.prepare(own, optimizer, loader)
    for _ in range(passes):
        for (ids,) in batches:
            between()
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
    session.barrier()
    ids = torch.arange(SAMPLES) * 2**40
    until(lambda: own.counted(torch.tensor([COMMON])) == [SAMPLES * passes])
    return own.counted(ids), own.counted(torch.tensor([COMMON]))[0], own.updates()


@pytest.mark.parametrize(
    ("shards", "consistency", "cold"), cases([(2, "async", False)], [(3, "async", False), (2, "ssp:1", True)])
)
def test_a_lost_shard_takes_rows_and_weights_back_to_one_clock(
    make_cluster: Callable[..., Cluster], tmp_path: Path, shards: int, consistency: str, cold: bool
) -> None:
    """So that each sample is in the rows as often as in the weights, also where a shard has rows and no bucket."""
    more: dict[str, object] = {"limits": Limits(table_bytes=2_000), "cold_rows_dir": tmp_path / "cold"} if cold else {}
    directory = tmp_path / "checkpoints"
    options = {"checkpoint_dir": directory, "checkpoint_every": "3steps", "timing": QUICK, "shards": shards, **more}
    cluster, store = make_cluster(**options), CheckpointStore(directory)
    lost = threading.Event()

    def work(rank: int) -> tuple[tuple[list[float], float, float], int]:
        with cluster.connect("sync", rank, 2) as session:

            def between() -> None:
                if rank == 0 and not lost.is_set() and session.clock >= 8 and store.names("default"):
                    cluster.start_again(1)
                    lost.set()

            return train(session, PASSES, between, consistency), session.clock

    steps = PASSES * SAMPLES // BATCH // 2
    found = in_parallel(2, work)
    assert lost.is_set()
    assert found == [(([PASSES] * SAMPLES, PASSES * SAMPLES, steps), steps)] * 2


@pytest.mark.parametrize(("before", "after"), cases([(2, 3)], [(2, 1), (1, 2)]))
def test_a_job_goes_on_from_a_checkpoint_on_any_number_of_shards(
    make_cluster: Callable[..., Cluster], tmp_path: Path, before: int, after: int
) -> None:
    """The first checkpoints were made while workers trained, the last one when they had left."""
    cluster = make_cluster(shards=before, checkpoint_dir=tmp_path, checkpoint_every="2steps", timing=QUICK)

    def begin(rank: int) -> object:
        with cluster.connect("sync", rank, 2) as session:
            return train(session, 1, lambda: None)

    steps = SAMPLES // BATCH // 2
    in_parallel(2, begin)
    cluster.stop()
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("default", store.names("default")[-1])
    again = make_cluster(shards=after, checkpoint_dir=tmp_path, restore=True, timing=QUICK)

    def go_on(rank: int) -> tuple[list[float], float, float]:
        with again.connect("sync", rank, 2) as session:
            own = Both()
            session.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
            common = own.counted(torch.tensor([COMMON]))[0]
            assert session.clock == manifest.clock
            return own.counted(torch.arange(SAMPLES) * 2**40), common, own.updates()

    for counted, common, updates in in_parallel(2, go_on):
        assert manifest.clock == updates <= steps
        assert common == sum(counted) == 2 * BATCH * updates


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["sync", "", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "Async", "local:8", "single", 4])
def test_any_other_word_is_refused_with_what_was_expected_and_what_came(word: Any) -> None:
    for make in (ps_worker.Embedding, ps_worker.EmbeddingBag):
        with pytest.raises(InvalidRequest) as refused:
            make(3, consistency=word)
        assert "a table's consistency must be ssp:K (such as ssp:4) or async" in str(refused.value)
        assert repr(str(word)) in str(refused.value)


def refused(cluster: Cluster, job: str, mode: str, own: Any, **more: object) -> str:
    """What `prepare` says."""
    with (
        cluster.connect(mode, job=job, **more) as session,
        pytest.raises(InvalidRequest) as error,
    ):
        session.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
    return str(error.value)


@pytest.mark.parametrize(("mode", "own"), [("async", "ssp:4"), ("ssp:4", "ssp:3")])
def test_a_table_that_is_stricter_than_its_job_is_refused(shared: Cluster, job: str, mode: str, own: str) -> None:
    said = refused(shared, job, mode, Both(own))
    assert f"table 'rows': its consistency is {own}, which is stricter than the mode {mode}" in said


def test_a_job_with_a_quorum_has_one_rule_for_all(shared: Cluster, job: str) -> None:
    with (
        ps_worker.connect(shared.address, "sync", job=job, elastic=True, quorum=2) as session,
        pytest.raises(InvalidRequest, match="table 'rows': its consistency is async, and a job with a quorum has one"),
    ):
        Worker(session)


def test_a_job_in_which_nothing_is_under_its_mode_is_refused(shared: Cluster, job: str) -> None:
    own = Both()
    own.top.requires_grad_(False)
    with (
        shared.connect("sync", job=job) as session,
        pytest.raises(InvalidRequest, match=r"nothing is under the mode sync\. Name the mode that the tables are"),
    ):
        session.prepare(own, torch.optim.SGD(own.rows.parameters(), lr=RATE))


def test_workers_whose_tables_have_other_rules_are_refused_with_the_difference(shared: Cluster, job: str) -> None:
    def connect() -> ps_worker.Session:
        return ps_worker.connect(shared.address, "sync", job=job, elastic=True)

    with connect() as session:
        Worker(session)
        for own, said in ((None, "of the job"), ("ssp:2", "ssp:2")):
            with (
                connect() as other,
                pytest.raises(
                    JobMismatch, match=f"table 'rows' has consistency async in the registered job and {said}"
                ),
            ):
                Worker(other, Both(own))
