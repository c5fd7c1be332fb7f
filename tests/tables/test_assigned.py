"""Rows that a script gives a table on servers: before `prepare` they travel piece by piece, later with a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_server.storage.checkpoints import CheckpointStore
from ps_tables.contributions import RowValues
from ps_worker.cluster import first_rows
from ps_worker.cluster import row_transport as rows
from ps_worker.tables import given_rows as given
from ps_worker.tables.given_rows import GivenRows
from tests.chaos.cluster import free_ports
from tests.chaos.worker import incarnation_of
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.rollbacks import QUICK, await_first

DIM, COUNT, RATE = 4, 300, 0.5
IDS = torch.arange(COUNT) * 2**33 - 7
VECTORS = torch.arange(COUNT * DIM, dtype=torch.float32).view(COUNT, DIM)
SOME, VALUES = IDS[:3], VECTORS[:3] + 1000
BATCHES = 50
KEPT_BY = 20  # steps that a run makes before it waits for its first checkpoint


class Run:
    """Training of one table whose gradients are ones: with SGD a row goes down by RATE for each lookup."""

    def __init__(self, session: ps_worker.Session, table: ps_worker.Embedding | None = None) -> None:
        self.table = table or ps_worker.Embedding(DIM, initial="constant", scale=0.0, seed=0)
        optimizer = torch.optim.SGD(self.table.parameters(), lr=RATE)
        self.model, self.optimizer = session.prepare(nn.Sequential(self.table), optimizer)

    def step(self, ids: torch.Tensor = SOME) -> None:
        self.optimizer.zero_grad()
        self.model(ids).sum().backward()
        self.optimizer.step()

    def first(self, ids: torch.Tensor = SOME) -> list[float]:
        return self.table.rows(ids)[:, 0].tolist()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows travel in many messages, and vectors are read some at a time."""
    monkeypatch.setattr(rows, "MESSAGE_BYTES", 60)
    monkeypatch.setattr(given, "PIECE_BYTES", 7 * 4 * DIM)


# -- before prepare ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "transport"), crossed(["tensors", "file", "files", "array"], ["grpc", "tcp", "shm"]))
def test_a_job_begins_with_pretrained_rows_of_rank_0(
    shared: Cluster, job: str, small: None, tmp_path: Path, transport: str, kind: str
) -> None:
    def table(rank: int) -> ps_worker.Embedding:
        folder, factor = tmp_path / str(rank), rank + 1
        folder.mkdir()
        if kind == "tensors":
            return ps_worker.Embedding.from_pretrained(IDS, VECTORS * factor, freeze=False)
        if kind == "array":
            np.save(folder / "vectors.npy", VECTORS.numpy() * factor)
            mapped = np.load(folder / "vectors.npy", mmap_mode="r")
            return ps_worker.Embedding.from_pretrained(IDS.numpy(), mapped, freeze=False)
        if kind == "file":
            save_file({"ids": IDS, "weights": VECTORS * factor}, folder / "rows.safetensors")
            file = ps_worker.RowFile(folder / "rows.safetensors")
            return ps_worker.Embedding.from_pretrained(file, freeze=False)
        made = ps_worker.Embedding(DIM)
        for number, part in enumerate((slice(0, 100), slice(50, 300))):  # of what is in both, the second counts
            vectors = VECTORS[part] * factor - (100 * (number == 0))
            save_file({"ids": IDS[part], "weights": vectors}, folder / f"{number}.safetensors")
            made.assign(ps_worker.RowFile(folder / f"{number}.safetensors"))
        return made

    def work(rank: int) -> torch.Tensor:
        with shared.connect("sync", rank, 2, job=job, transport=transport) as session:
            run = Run(session, table(rank))
            assert len(run.table) == COUNT
            found = run.table.rows(IDS)
            run.step(SOME)
            assert torch.equal(run.table.rows(SOME), found[:3] - RATE)
            return found

    expected = VECTORS.clone()
    if kind == "files":
        expected[:50] -= 100
    for found in in_parallel(2, work):
        assert torch.equal(found, expected)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each piece has that was read."""
    pieces, found = GivenRows.pieces, list[int]()

    def noting(self: GivenRows) -> Iterator[RowValues]:
        for piece in pieces(self):
            found.append(len(piece))
            yield piece

    monkeypatch.setattr(GivenRows, "pieces", noting)
    return found


def test_one_piece_is_in_memory_at_a_time_and_only_rank_0_reads(
    shared: Cluster, job: str, small: None, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"ids": IDS, "weights": VECTORS}, tmp_path / "rows.safetensors")
    encoded, lock, held, most = first_rows.encoded, threading.Lock(), [0], [0]
    unary = first_rows._send

    def noting(tensors: dict[str, torch.Tensor], columns: dict[str, int]) -> bytes:
        made = encoded(tensors, columns)
        with lock:
            held[0] += len(made)
            most[0] = max(most[0], held[0])
        return made

    def sent(calls: Any, message: Any) -> tuple[bool, int]:
        answer = unary(calls, message)
        with lock:
            held[0] -= len(message.payload or b"")
        return answer

    monkeypatch.setattr(first_rows, "encoded", noting)
    monkeypatch.setattr(first_rows, "_send", sent)

    def work(rank: int) -> None:
        with shared.connect("sync", rank, 2, job=job) as session:
            file = ps_worker.RowFile(tmp_path / "rows.safetensors")
            Run(session, ps_worker.Embedding.from_pretrained(file, freeze=False))
            session.barrier()

    in_parallel(2, work)
    assert sum(read) == COUNT, "once, by one of them"
    assert max(read) == 7
    assert most[0] == 7 * (16 + 4 * DIM), "no more than the messages of a piece"
    assert held[0] == 0


def test_a_vector_that_is_not_finite_fails_prepare(shared: Cluster, job: str, small: None, tmp_path: Path) -> None:
    vectors = VECTORS.clone()
    vectors[200, 1] = float("inf")
    save_file({"ids": IDS, "weights": vectors}, tmp_path / "rows.safetensors")
    file = ps_worker.RowFile(tmp_path / "rows.safetensors")
    with (
        shared.connect("sync", job=job) as session,
        pytest.raises(InvalidRequest, match=rf"rows.safetensors: expected finite vectors .* of id {IDS[200]} is not"),
    ):
        Run(session, ps_worker.Embedding.from_pretrained(file))


def test_more_vectors_than_shards_have_room_for_fail_prepare_and_none_is_read(
    shared: Cluster, job: str, read: list[int]
) -> None:
    table = ps_worker.Embedding.from_pretrained(IDS, VECTORS, freeze=False, max_rows=COUNT // 2)
    with (
        shared.connect("sync", job=job) as session,
        pytest.raises(LimitExceeded, match=r"rows from before on this shard, and has room for 75 here"),
    ):
        Run(session, table)
    assert read == []


def test_a_rank_0_that_loses_its_place_in_the_middle_sends_all_vectors_again(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, calls = first_rows.encoded, []

    def breaking(*args: Any) -> bytes:
        calls.append(args)
        if len(calls) == 20:
            cluster.lose_place(0)
        return encoded(*args)

    monkeypatch.setattr(first_rows, "encoded", breaking)
    with cluster.connect("sync") as session:
        run = Run(session, ps_worker.Embedding.from_pretrained(IDS, VECTORS, freeze=False))
        assert len(calls) > 90
        assert len(run.table) == COUNT
        assert torch.equal(run.table.rows(IDS), VECTORS)


# -- during training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "transport"),
    crossed([torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam], ["grpc", "tcp", "shm"]),
)
def test_sync_trains_assigned_rows_as_one_process_to_the_bit(
    shared: Cluster, job: str, small: None, transport: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def trained(session: ps_worker.Session) -> tuple[list[torch.Tensor], int]:
        table = ps_worker.Embedding(DIM, seed=1, admit_after=2, ids=lambda batch: batch)
        model, stepper = session.prepare(nn.Sequential(table), optimizer(table.parameters(), lr=0.1))
        found = []
        for number in range(8):
            ids = IDS[torch.randint(0, 40, (20,), generator=torch.Generator().manual_seed(number))]
            if number in (3, 4):
                table.assign(IDS[30 : 35 + number], VECTORS[30 : 35 + number] / 64)
                table.assign(IDS[33:34], VECTORS[:1])
            found.append(table.rows(IDS))
            stepper.zero_grad()
            (model(ids) ** 2).sum().backward()
            table.announce(ids + 0)
            stepper.step()
        return [*found, table.rows(IDS)], len(table)

    with ps_worker.connect(mode="single") as session:
        expected = trained(session)
    with shared.connect("sync", job=job, transport=transport) as session:
        found = trained(session)
    assert found[1] == expected[1]
    for number, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_any_worker_assigns_and_others_see_it_after_its_step(shared: Cluster, job: str, mode: str) -> None:
    """The update begins from the rows: in sync with the mean of all gradients."""
    meet = threading.Barrier(2, timeout=60)

    def work(rank: int) -> None:
        with shared.connect(mode, rank, 2, job=job) as session:
            run = Run(session)
            meet.wait()
            if rank == 1:
                run.table.assign(SOME, VALUES)
            meet.wait()
            assert run.first() == ([0.0] * 3 if rank == 0 else VALUES[:, 0].tolist())
            meet.wait()
            if rank == 0 and mode != "sync":  # its update comes first
                run.step()
            meet.wait() if mode != "sync" else None
            if rank == 1 or mode == "sync":
                run.step()
            session.barrier()
            run.step(IDS[9:10])  # what comes then has both updates
            session.barrier()
            assert run.first() == (VALUES[:, 0] - RATE).tolist()

    in_parallel(2, work)


def test_a_worker_that_joins_a_running_job_takes_its_rows(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it assigns before its first step does not count, and from then on what it assigns does."""
    with shared.connect("async", job=job, elastic=True) as first:
        run = Run(first)
        run.step()
        with shared.connect("async", job=job, elastic=True) as second:
            late = Run(second)
            late.table.assign(SOME, VALUES)
            late.step()
            assert "is not taken over" in caplog.text
            assert late.first() == run.first() == [-2 * RATE] * 3  # a worker's own lookup waits for its push
            late.table.assign(SOME, VALUES)
            late.step()
            assert late.first() == run.first() == (VALUES[:, 0] - RATE).tolist()


def test_of_several_workers_that_set_a_row_the_lowest_rank_counts_in_sync(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[float]:
        with shared.connect("sync", rank, 2, job=job) as session:
            run = Run(session)
            run.table.assign(IDS[rank : rank + 2], torch.full((2, DIM), float(rank + 1)))
            run.step(IDS[50:51])
            return run.first()

    assert in_parallel(2, work) == [[1.0, 1.0, 2.0]] * 2


def test_a_table_that_is_not_trained_is_assigned(shared: Cluster, job: str) -> None:
    """By a step without a gradient of it, in or out of the optimizer."""
    with shared.connect("async", job=job) as session:
        frozen = ps_worker.Embedding.from_pretrained(SOME, VALUES)
        other = ps_worker.Embedding.from_pretrained(SOME, VALUES)
        top = nn.Linear(DIM, 1)
        own = nn.ModuleList([frozen, other, top])
        optimizer = torch.optim.SGD([*frozen.parameters(), *top.parameters()], lr=RATE)
        _, optimizer = session.prepare(own, optimizer)
        for table in (frozen, other):
            table.assign(IDS[2:4], -VALUES[:2])
        top(frozen(SOME) + other(SOME)).sum().backward()
        optimizer.step()
        for table in (frozen, other):
            assert torch.equal(table.rows(IDS[:4]), torch.cat([VALUES[:2], -VALUES[:2]]))
            assert len(table) == 4


@pytest.mark.parametrize(("message", "mode"), crossed([0, 2, 4, 6], ["sync", "async"]))
def test_assigned_rows_count_once_though_the_place_is_lost(
    cluster: Cluster, small: None, mode: str, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are sent, between their messages, or before the step that they go with."""
    sent, push = 0, rows.RowTransport._push

    def breaking(*args: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == message + 1 and armed:
            cluster.lose_place(0)
        return push(*args)

    armed = False
    monkeypatch.setattr(rows.RowTransport, "_push", breaking)
    with cluster.connect(mode, transport="grpc") as session:
        run = Run(session)
        run.step()
        sent, armed = 0, True
        run.table.assign(IDS[:8], VECTORS[:8] + 1000)
        if not message:
            cluster.lose_place(0)
        run.step()
        run.step()
        assert run.first(IDS[:8]) == [1000.0 + 4 * number - (number < 3) * 2 * RATE for number in range(8)]
        assert sent > message


def test_a_step_that_was_broken_off_between_its_rows_is_made_again(
    shared: Cluster, job: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the script has set other rows since."""
    push, calls = rows.RowTransport._push, 0

    def breaking(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("broken off")
        return push(*args)

    with shared.connect("sync", job=job) as session:
        run = Run(session)
        run.step()
        monkeypatch.setattr(rows.RowTransport, "_push", breaking)
        run.table.assign(IDS[:8], VECTORS[:8])
        with pytest.raises(RuntimeError, match="broken off"):
            run.step()
        run.table.assign(IDS[4:12], VECTORS[4:12] + 1000)
        run.step()
        expected = [float(VECTORS[number, 0]) + 1000 * (number >= 4) - RATE * (number < 3) for number in range(12)]
        assert run.first(IDS[:12]) == expected


def test_a_rollback_takes_assigned_rows_back_and_the_loop_sets_them_again(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="4steps", timing=QUICK)
    store, lost, at, seen = CheckpointStore(tmp_path), False, 0, list[tuple[int, float]]()
    with cluster.connect("sync") as session:
        run = Run(session)
        loader = session.prepare(torch.utils.data.DataLoader(list(range(2 * BATCHES)), batch_size=2))
        for _ in loader:
            value, clock = run.first()[0], session.clock  # a lookup may find out about the rollback
            seen.append((clock, value))
            if not clock:
                await_first(cluster)
            if clock == KEPT_BY:
                until(lambda: store.names("default"), "a checkpoint")
            at = at or (clock if store.names("default") else 0)
            if at and clock == at:
                run.table.assign(SOME, VALUES)
            run.step()
            if at and not lost:
                lost = True
                cluster.start_again(1)
                cluster.start_again(0)
    assert lost
    undisturbed = [-RATE * clock if clock <= at else 1000.0 - RATE * (clock - at) for clock in range(BATCHES)]
    assert all(value == undisturbed[clock] for clock, value in seen)
    assert len(seen) > BATCHES, "some steps were made again"


def test_more_than_a_step_takes_along_is_refused_and_nothing_is_set(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_worker.tables.server_rows.MAX_PUSHED_BYTES", 100 * (8 + 4 * DIM))
    with shared.connect("sync", job=job) as session:
        run = Run(session)
        run.table.assign(IDS[:100], VECTORS[:100])
        with pytest.raises(LimitExceeded, match=r"table '0': a step takes \d+ bytes of assigned rows along to a shard"):
            run.table.assign(IDS, VECTORS)
        with pytest.raises(InvalidRequest, match="finite vectors"):
            run.table.assign(SOME, VALUES / 0)
        run.step()
        assert run.first(IDS[3:100]) == VECTORS[3:100, 0].tolist()
        run.table.assign(IDS[100:150], VECTORS[100:150])
        run.step()
        assert len(run.table) == 150


def test_a_script_trains_on_without_rows_that_the_servers_have_refused(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.connect("sync", job=job) as session:
        run = Run(session)
        run.table.assign(IDS[:40], VECTORS[:40])
        with monkeypatch.context() as patch:
            patch.setattr("ps_server.core.shard_table.MAX_PUSHED_BYTES", 10 * (8 + 4 * DIM))
            with pytest.raises(LimitExceeded, match="a worker may assign"):
                run.step()
        assert run.first() == [0.0] * 3
        run.step()
        assert run.first() == [-RATE] * 3


def test_in_ddp_any_rank_assigns_and_all_replicas_have_it_with_the_step(nursery: Nursery, tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "PYTHONWARNINGS": "error"}
    script = ROOT / "tests" / "scripts" / "assign_rows.py"
    processes = [
        nursery.run(script, [], tmp_path / "log", PS_MODE="ddp", PS_RANK=str(rank), PS_WORLD_SIZE="2", **where)
        for rank in range(2)
    ]
    assert [process.wait(100) for process in processes] == [0] * 2, (tmp_path / "log").read_text()


def test_what_a_script_sets_at_the_end_of_a_batch_that_comes_again_does_not_count(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="4steps", timing=QUICK)
    store, lost, found = CheckpointStore(tmp_path), False, list[float]()
    with cluster.connect("sync") as session:
        run = Run(session)
        loader = session.prepare(torch.utils.data.DataLoader(list(range(2 * BATCHES)), batch_size=2))
        for _ in loader:
            if not session.clock:
                await_first(cluster)
            if session.clock == KEPT_BY:
                until(lambda: store.names("default"), "a checkpoint")
            names = store.names("default")
            # Of a step before the last one: from one of that, no batch would come again.
            if not lost and names and store.manifest("default", names[-1]).clock < session.clock:
                lost, place = True, incarnation_of(session)
                cluster.start_again(1)
                cluster.start_again(0)
                run.first()  # it finds out about the rollback
                assert incarnation_of(session) != place
                run.table.assign(SOME, VALUES)
            run.step()
            found.append(run.first()[0])
    assert lost
    assert max(found) <= 0.0
