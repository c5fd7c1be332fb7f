"""Tables that have rows before `prepare`: a job on servers begins with those of rank 0."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker
from ps_protocol.errors import LimitExceeded
from ps_server.core.limits import Limits
from ps_server.core.shard_table import ShardTable
from ps_server.ops import requests, status_text
from ps_server.shard.shard import Shard
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export
from ps_worker.strategies.job_training import JobTraining
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until

BEFORE, STEPS = 8, 16
UNSEEN = torch.arange(10_000, 10_010)

State = dict[str, torch.Tensor]


class Model(nn.Module):
    """Two tables, whose rows are each other's gradients; most tags wait for a while."""

    def __init__(self, **of_items: object) -> None:
        super().__init__()
        self.item = ps_worker.Embedding(4, scale=0.1, **of_items)  # type: ignore[arg-type]
        self.tags = ps_worker.EmbeddingBag(
            4, admit_after=3, expire_after=12, optimizer=ps_worker.RowWiseAdagrad(lr=0.1)
        )

    def forward(self, items: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return (self.item(items) * self.tags(tags)).sum()  # type: ignore[no-any-return]


class Run:
    """Training of a model, in steps that depend on their number. state: what it begins with"""

    def __init__(self, session: ps_worker.Session, state: State | None = None, **of_items: object) -> None:
        self.own, self.made = Model(**of_items), BEFORE if state is not None else 0
        if state is not None:
            self.own.load_state_dict(state)
        optimizer = torch.optim.Adam(self.own.parameters(), lr=0.1)
        self._model, self._optimizer = session.prepare(self.own, optimizer)

    def step(self) -> None:
        random = torch.Generator().manual_seed(self.made)
        items = torch.randint(0, 200, (30,), generator=random) * 2**40
        tags = torch.randint(-100, 100, (30, 3), generator=random)
        self._optimizer.zero_grad()
        self._model(items, tags).backward()
        self._optimizer.step()
        self.made += 1

    def until(self, step: int) -> State:
        """Trains up to a step; returns all that there is then."""
        while self.made < step:
            self.step()
        return self.own.state_dict()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def before() -> State:
    """What was trained in one process."""
    torch.manual_seed(3)
    with ps_worker.connect(mode="single") as session:
        return Run(session).until(BEFORE)


@pytest.fixture(scope="module")
def after(before: State) -> State:
    """What it comes to there."""
    with ps_worker.connect(mode="single") as session:
        return Run(session, before).until(STEPS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows travel in many messages."""
    monkeypatch.setattr("ps_worker.cluster.first_rows.MESSAGE_BYTES", 500)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the log says of rows from before."""
    with caplog.at_level(logging.WARNING, "ps_worker"):
        yield lambda: [text for text in caplog.messages if "from before" in text]


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_sync_goes_on_as_one_process_to_the_bit(
    shared: Cluster, job: str, before: State, after: State, small: None, transport: str, said: Callable[[], list[str]]
) -> None:
    """With the optimizers' state, what waits for admission, and the first values of the loaded seed."""
    with shared.connect("sync", job=job, transport=transport) as session:
        run = Run(session, before)
        assert same(run.own.state_dict(), before)
        assert same(run.until(STEPS), after)
    assert said() == []


def test_a_model_that_was_trained_in_the_same_process_goes_on(shared: Cluster, job: str, after: State) -> None:
    torch.manual_seed(3)
    with ps_worker.connect(mode="single") as session:
        run = Run(session)
        run.until(BEFORE)
    with shared.connect("sync", job=job) as session:
        optimizer = torch.optim.Adam(run.own.parameters(), lr=0.1)
        run._model, run._optimizer = session.prepare(run.own, optimizer)
        assert same(run.until(STEPS), after)


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:1"]))
def test_the_rows_of_rank_0_count_and_no_others(
    shared: Cluster, job: str, before: State, small: None, mode: str
) -> None:
    """Also where the other worker registers the job, with a seed of its own."""
    registered = threading.Event()

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rank == 0:
            assert registered.wait(60)
        with shared.connect(mode, rank, 2, job=job) as session:
            if rank == 1:
                threading.Thread(
                    target=lambda: (until(lambda: job in shared.coordinator.jobs()), registered.set())
                ).start()
            run = Run(session, before if rank == 0 else None)
            found = run.own.item.rows(UNSEEN), run.own.item.rows(torch.arange(200) * 2**40)
            session.barrier()
            run.made = BEFORE
            run.until(STEPS)
            return found

    for unseen, rows in in_parallel(2, work):
        expected = Model()
        expected.load_state_dict(before)
        assert torch.equal(unseen, expected.item.rows(UNSEEN))
        assert torch.equal(rows, expected.item.rows(torch.arange(200) * 2**40))


def test_a_rank_0_that_loses_its_place_in_the_middle_sends_all_again(
    cluster: Cluster, before: State, after: State, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ps_worker.cluster import first_rows

    calls, lock, encoded, came = 0, threading.Lock(), first_rows.encoded, []

    def breaking(*args: object) -> bytes:
        nonlocal calls
        with lock:
            calls += 1
            if calls == 30:
                came.extend(len(table.weights) for shard in cluster.shards for table in tables_of(shard))
                cluster.lose_place(0)
        return encoded(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(first_rows, "encoded", breaking)
    with cluster.connect("sync") as session:
        run = Run(session, before)
        assert sum(came) > 0, "some were there, and not all"
        assert sum(came) < len(run.own.item) + len(run.own.tags)
        assert same(run.own.state_dict(), before)
        assert same(run.until(STEPS), after)


def tables_of(shard: Shard) -> list[ShardTable]:
    return list(shard.jobs()["default"].partition.tables.values())


def test_a_worker_that_joins_later_brings_no_rows_and_the_log_says_so(
    shared: Cluster, job: str, before: State, said: Callable[[], list[str]]
) -> None:
    def connect() -> ps_worker.Session:
        return ps_worker.connect(shared.address, "async", job=job, elastic=True)

    with connect() as session:
        run = Run(session)
        expected = run.until(3)
        with connect() as other:
            assert same(Run(other, before).own.state_dict(), expected)
            assert len(said()) == 1
            assert said()[0] == (
                "the job was at clock 3 when this worker joined, and takes none of the rows that it has from before: "
                "those on the servers count (tables: 'item', 'tags')"
            )


def checkpoint(cluster: Cluster, step: Callable[[], None]) -> None:
    """Makes a checkpoint, of the next clock, and one step more."""
    job = cluster.coordinator.job("default")
    made = threading.Thread(target=job.checkpoint)
    tasks = [shard.jobs()["default"].snapshot_task for shard in cluster.shards]
    made.start()
    until(
        lambda: all(
            shard.jobs()["default"].snapshot_task is not before
            for shard, before in zip(cluster.shards, tasks, strict=True)
        )
    )
    step()
    step()  # with which the worker's state of the clock before is sent
    made.join(30)
    assert not made.is_alive()


def test_a_job_goes_on_from_its_checkpoint_and_not_from_a_workers_rows(
    make_cluster: Callable[..., Cluster], tmp_path: Path, before: State, after: State, said: Callable[[], list[str]]
) -> None:
    """On another number of shards, from a checkpoint with only what changed; and so does its export."""
    cluster = make_cluster(checkpoint_dir=tmp_path)
    with cluster.connect("sync") as session:
        run = Run(session, before)
        for _ in range(2):
            checkpoint(cluster, run.step)
        clocks = [CheckpointStore(tmp_path).manifest("default", name).clock for name in ("000001", "000002")]
        assert clocks == [1, 3]
    cluster.stop()
    export(tmp_path, "default", None, tmp_path / "out")
    clock = CheckpointStore(tmp_path).manifest("default", CheckpointStore(tmp_path).names("default")[-1]).clock
    assert said() == []
    cluster = make_cluster(shards=3, checkpoint_dir=tmp_path, restore=True)
    with cluster.connect("sync") as session:
        other = Run(session, before)
        other.made += session.clock
        assert session.clock >= 3
        assert same(other.until(STEPS), after)
    assert len(said()) == 1
    with ps_worker.connect(mode="single") as session:
        alone = Run(session, load_file(tmp_path / "out" / "model.safetensors"))
        alone.made = BEFORE + clock
        assert same(alone.until(STEPS), after)


def test_rows_of_another_optimizer_begin_without_its_state(shared: Cluster, job: str, before: State) -> None:
    def stepped(session: ps_worker.Session) -> State:
        own = Model()
        own.load_state_dict(before)
        model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
        model(torch.arange(100) * 2**40, torch.arange(300).view(100, 3)).backward()
        optimizer.step()
        return own.state_dict()

    with ps_worker.connect(mode="single") as session:
        expected = stepped(session)
    with shared.connect("sync", job=job) as session:
        assert same(stepped(session), expected)


def test_more_rows_than_a_shard_has_room_for_are_refused_and_nothing_is_taken(
    shared: Cluster, job: str, before: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards are asked before any gets a row: the other has room for its part."""
    from ps_worker.cluster import first_rows

    encoded, sent = first_rows.encoded, []

    def noting(*args: object) -> bytes:
        sent.append(args)
        return encoded(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(first_rows, "encoded", noting)
    model = Model()
    model.load_state_dict(before)
    count = len(model.item)
    share = -(-count // 2)
    with (
        shared.connect("sync", job=job) as session,
        pytest.raises(
            LimitExceeded,
            match=rf"table 'item' has \d+ rows from before on this shard, and has room for {share} here "
            rf"\(of max_rows {count} on all\): raise max_rows",
        ),
    ):
        Run(session, before, max_rows=count)
    assert sent == []
    with shared.connect("sync", job=f"{job}-2") as session:
        assert len(Run(session, before, max_rows=count + count // 5).own.item) == count
    assert sent


def test_a_prepare_that_fails_at_its_end_leaves_the_rows_to_the_model(
    shared: Cluster, job: str, before: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("at the end")

    own = Model()
    own.load_state_dict(before)
    with shared.connect("sync", job=job) as session:
        with monkeypatch.context() as patch:
            patch.setattr(JobTraining, "begin", fails)
            with pytest.raises(KeyError, match="at the end"):
                session.prepare(own, torch.optim.Adam(own.parameters(), lr=0.1))
        assert same(own.state_dict(), before)
        model, _ = session.prepare(own, torch.optim.Adam(own.parameters(), lr=0.1))
        assert same(own.state_dict(), before)
        assert model is own


def test_more_rows_than_memory_holds_go_to_the_file(
    make_cluster: Callable[..., Cluster], tmp_path: Path, small: None
) -> None:
    def trained(session: ps_worker.Session, own: Model, begin: int, end: int) -> State:
        model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
        for number in range(begin, end):
            random = torch.Generator().manual_seed(number)
            items = (1500 * torch.rand(400, generator=random) ** 2).long()
            optimizer.zero_grad()
            model(items, items.view(-1, 1) // 100).backward()
            optimizer.step()
        return own.state_dict()

    with ps_worker.connect(mode="single") as session:
        state = trained(session, Model(), 0, 10)
    alone, own = Model(), Model()
    for model in (alone, own):
        model.load_state_dict(state)
    with ps_worker.connect(mode="single") as session:
        expected = trained(session, alone, 10, 14)
    cluster = make_cluster(cold_rows_dir=tmp_path, limits=Limits(table_bytes=120_000))
    with cluster.connect("sync") as session:
        model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
        found = status_text.tables(requests.fetch(cluster.address), "default")["item"]
        assert int(found["file_row_count"]) > 100, "before anything is trained"
        assert same(own.state_dict(), state)
        for number in range(10, 14):
            random = torch.Generator().manual_seed(number)
            items = (1500 * torch.rand(400, generator=random) ** 2).long()
            optimizer.zero_grad()
            model(items, items.view(-1, 1) // 100).backward()
            optimizer.step()
        assert same(own.state_dict(), expected)


def test_a_feed_has_the_rows(shared: Cluster, job: str, before: State) -> None:
    with shared.connect("sync", job=job) as session:
        run = Run(session, before)
        ids = torch.cat([torch.arange(200) * 2**40, UNSEEN])
        with ps_worker.RowFeed("item", shared.address, job=job) as feed:
            feed.wait_for()
            assert torch.equal(feed.rows(ids), run.own.item.rows(ids))
            run.step()
            until(lambda: feed.version == 1)
            assert torch.equal(feed.rows(ids), run.own.item.rows(ids))


def test_a_feed_that_begins_meanwhile_waits_for_all_rows(
    shared: Cluster, job: str, before: State, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ps_worker.cluster import first_rows

    encoded, go_on, calls = first_rows.encoded, threading.Event(), []

    def held(*args: object) -> bytes:
        calls.append(args)
        if len(calls) > 20:
            assert go_on.wait(60)
        return encoded(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(first_rows, "encoded", held)
    ids = torch.cat([torch.arange(200) * 2**40, UNSEEN])

    def train() -> torch.Tensor:
        with shared.connect("sync", job=job) as session:
            found = Run(session, before).own.item.rows(ids)
            assert done.wait(60)
            return found

    def follow() -> torch.Tensor:
        until(lambda: len(calls) > 20)
        try:
            with ps_worker.RowFeed("item", shared.address, job=job) as feed:
                until(lambda: all(feeds_of(shard, job) for shard in shared.shards))
                assert feed.version == -1, "it has nothing yet"
                go_on.set()
                feed.wait_for()
                return feed.rows(ids)
        finally:
            go_on.set()
            done.set()

    done = threading.Event()
    there, here = in_parallel(2, lambda number: (train, follow)[number]())
    assert torch.equal(there, here)


def feeds_of(shard: Shard, job: str) -> int:
    return sum(len(table.feeds) for table in shard.jobs()[job].tables.values())
