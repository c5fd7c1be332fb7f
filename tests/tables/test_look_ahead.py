"""Tables that know the ids of the next batch: a step brings its rows along, and the result stays what it is."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ps_worker
from ps_frames.frames import Kind
from ps_frames.server import FrameCall
from ps_protocol import row_ids
from ps_protocol.errors import InvalidRequest, PSError
from ps_server.shard.pulls import Pulls as PullsOfShard
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker.cluster import row_transport
from ps_worker.strategies.row_reads import RowReads
from tests.chaos.worker import incarnation_of
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.rollbacks import QUICK, await_first
from tests.tools.table_model import ITEMS, TableModel

SAMPLES, BATCH = 60, 6  # of one worker's loop: ten steps
IDS = torch.tensor([-1, 0, 7, 2**62, -(2**63)])
RATE = 0.5


def looking_ahead() -> TableModel:
    torch.manual_seed(0)
    model = TableModel()
    model.item.ids_of.of = lambda batch: batch[0]
    model.tags.ids_of.of = lambda batch: batch[1]
    return model


def plain() -> TableModel:
    torch.manual_seed(0)
    return TableModel()


def data(samples: int = SAMPLES) -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    items = ITEMS[torch.randint(0, len(ITEMS), (samples,), generator=random)]
    tags = torch.randint(-100, 100, (samples, 3), generator=random)
    return TensorDataset(items, tags, torch.rand(samples, generator=random))


class Pulls:
    """How many rows were pulled by themselves, of each lookup that had to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        pull = RowReads.pull_rows

        def counted(reads: RowReads, table: int, ids: Any, out: torch.Tensor, ends: Any) -> None:
            self.rows.append(len(ids))
            pull(reads, table, ids, out, ends)

        monkeypatch.setattr(RowReads, "pull_rows", counted)


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Pulls:
    return Pulls(monkeypatch)


def trained(
    session: ps_worker.Session,
    own: TableModel,
    passes: int = 2,
    loader: DataLoader[Any] | None = None,
    **options: object,
) -> dict[str, torch.Tensor]:
    """Trains for some passes over a loader; what was trained then. options: of prepare"""
    loader = loader if loader is not None else DataLoader(data(), batch_size=BATCH, shuffle=True)
    optimizer: Any = torch.optim.Adagrad(own.parameters(), lr=0.1)
    model, optimizer, batches = session.prepare(own, optimizer, loader, **options)
    for _ in range(passes):
        for item, tags, wanted in batches:
            optimizer.zero_grad()
            (model(item, tags) - wanted).square().mean().backward()
            optimizer.step()
        with torch.no_grad():  # an evaluation in between, of other ids
            model(ITEMS[:7], torch.arange(-100, -79).view(7, 3))
    return own.rows()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, rows in expected.items():
        assert torch.equal(found[name], rows), name


@pytest.mark.parametrize(
    ("mode", "transport", "wire"),
    cases(
        [("sync", "auto", "float32"), ("sync", "tcp", "bfloat16"), ("async", "shm", "float32")],
        [("sync", "grpc", "float32"), ("ssp:1", "tcp", "float32"), ("async", "grpc", "float16")],
    ),
)
def test_one_worker_ends_with_the_same_bits_and_pulls_only_what_it_cannot_know(
    shared: Cluster, job: str, mode: str, transport: str, wire: str, pulls: Pulls
) -> None:
    found = []
    for number, make in enumerate((plain, looking_ahead)):
        pulls.rows.clear()
        with shared.connect(mode, job=f"{job}-{number}"[-100:], transport=transport) as session:
            found.append(trained(session, make(), gradient_wire=wire, weight_wire=wire))
            steps = session.clock
        # Two tables: each batch; or the first of each pass. Then two evaluations, and the rows at the end.
        assert len(pulls.rows) == (2 * 2 if number else 2 * steps) + 2 * 2 + 2
    assert_equal(found[1], found[0])


def test_in_sync_two_workers_end_with_the_same_bits(shared: Cluster, job: str) -> None:
    def run(number: int) -> list[dict[str, torch.Tensor]]:
        models = [looking_ahead() if number else plain() for _ in range(2)]

        def work(rank: int) -> dict[str, torch.Tensor]:
            with shared.connect("sync", rank, 2, job=f"{job}-{number}"[-100:]) as session:
                return trained(session, models[rank])

        return in_parallel(2, work)

    (first, second), (expected, _) = run(1), run(0)
    assert_equal(first, expected)
    assert_equal(second, expected)


class Stream(IterableDataset[Any]):
    """The samples one after the other."""

    def __iter__(self) -> Iterator[Any]:
        yield from (data()[index] for index in range(SAMPLES))


@pytest.mark.parametrize("kind", ["workers", "stream"])
def test_any_loader_is_read_ahead(shared: Cluster, job: str, kind: str, pulls: Pulls) -> None:
    def loader() -> DataLoader[Any]:
        samples: Dataset[Any] = Stream() if kind == "stream" else data()
        return DataLoader(samples, batch_size=BATCH, num_workers=2 if kind == "workers" else 0)

    found = []
    for number, make in enumerate((plain, looking_ahead)):
        pulls.rows.clear()
        with shared.connect("sync", job=f"{job}-{number}"[-100:]) as session:
            found.append(trained(session, make(), 2, loader()))
            assert session.clock == 2 * SAMPLES // BATCH
    assert_equal(found[1], found[0])
    assert len(pulls.rows) == 2 * 2 + 2 * 2 + 2


def test_batches_that_the_script_changes_in_place_look_up_what_they_hold(shared: Cluster, job: str) -> None:
    """A batch is announced before the loop has it, and what it holds then may be another's ids later."""
    with shared.connect("sync", job=job) as session:
        own = Counting(ids=lambda batch: batch[0])
        optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4)
        model, optimizer, batches = session.prepare(own, optimizer, loader)
        for [ids] in batches:
            ids += 100
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
        assert own.counted(torch.arange(100, 112)) == [1.0] * 12
        assert own.counted(torch.arange(12)) == [0.0] * 12


class Ending(IterableDataset[Any]):
    """Two batches, of which the one behind them cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(8).view(2, 4)
        raise OSError("the file ends here")


def test_a_loader_that_fails_does_so_behind_the_batches_before(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        own = Counting(ids=lambda batch: batch)
        optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
        model, optimizer, batches = session.prepare(own, optimizer, DataLoader(Ending(), batch_size=None))
        rest = iter(batches)
        for _ in range(2):
            optimizer.zero_grad()
            model(next(rest)).backward()
            optimizer.step()
        with pytest.raises(OSError, match="the file ends here"):
            next(rest)
        assert own.counted(torch.arange(8)) == [1.0] * 8


def test_leased_batches_are_read_ahead_and_each_is_used_once(shared: Cluster, job: str, pulls: Pulls) -> None:
    with ps_worker.connect(shared.address, "async", job=job, elastic=True) as session:
        own = Counting(ids=lambda batch: batch[0])
        optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
        samples = DataLoader(TensorDataset(torch.arange(SAMPLES) * 2**40), batch_size=BATCH, shuffle=True)
        model, optimizer, batches = session.prepare(own, optimizer, samples)
        for _ in range(2):
            for [ids] in batches:
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()
        assert sum(pulls.rows) < SAMPLES, "most were looked ahead to"
        assert own.counted(torch.arange(SAMPLES) * 2**40) == [2.0] * SAMPLES


# -- by hand ---------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Rows whose gradients are ones: with SGD a row counts how often it was looked up."""

    def __init__(self, ids: Callable[[Any], Any] | None = None, layer: bool = False) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(3, initial="constant", scale=0.0, seed=0, ids=ids)
        self.layer = nn.Linear(1, 1) if layer else None  # a bucket beside the table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids).sum()
        return rows if self.layer is None else rows + 0 * self.layer(torch.ones(1)).sum()  # type: ignore[no-any-return]

    def counted(self, ids: torch.Tensor) -> list[float]:
        return (self.rows.rows(ids)[:, 0] / -RATE).tolist()


class Worker:
    """A worker that trains Counting, and says what comes next."""

    def __init__(self, session: ps_worker.Session, layer: bool = False) -> None:
        self.own = Counting(layer=layer)
        self.model, self.optimizer = session.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=RATE))

    def step(self, ids: torch.Tensor, following: torch.Tensor | list[torch.Tensor] | None = None) -> list[float]:
        """Makes a step; how often its ids had been looked up before, as it found them."""
        self.own.rows.announce(following)
        self.optimizer.zero_grad()
        rows = self.own.rows(ids)
        (self.model(ids) * 0 + rows.sum()).backward()
        self.optimizer.step()
        return [count / -RATE for count in rows[:, 0].tolist()]


@pytest.mark.parametrize(("transport", "layer"), crossed(["auto", "tcp", "grpc"], [True, False]))
def test_ids_that_were_not_announced_are_pulled_when_they_are_looked_up(
    shared: Cluster, job: str, transport: str, layer: bool, pulls: Pulls
) -> None:
    with shared.connect("sync", job=job, transport=transport) as session:
        worker = Worker(session, layer)
        assert worker.step(IDS[:3], following=IDS[1:]) == [0, 0, 0]
        pulls.rows.clear()
        assert worker.step(IDS, following=IDS[:0]) == [1, 1, 1, 0, 0]
        assert pulls.rows == [1, 1], "a lookup after the other, of the one id that was not announced"
        assert worker.step(IDS[3:], following=[IDS[:2], IDS[2:]]) == [1, 1]
        pulls.rows.clear()
        assert worker.step(IDS[2:], following=IDS[:1]) == [2, 2, 2]
        assert pulls.rows == []
        assert worker.step(IDS[1:3]) == [2, 3], "none of which was announced"
        assert worker.own.counted(IDS) == [2, 3, 4, 3, 3]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_is_looked_up_is_divided_among_the_shards_once(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ids of a batch become distinct ones. Requests and pushes go by that."""
    ids = torch.arange(1000) * 7

    def fails(*_: object) -> None:
        raise AssertionError("ids are divided anew")

    with shared.connect("sync", job=job, transport=transport) as session:
        own = Counting()
        model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
        with monkeypatch.context() as patch:
            patch.setattr(row_ids, "shards_of", fails)
            for following in (ids[::3], None, ids[10:20]):
                own.rows.announce(following)
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()
            assert own.counted(ids) == [3.0] * 1000


def test_an_exchange_goes_by_grpc_where_a_data_connection_has_ended(shared: Cluster, job: str, pulls: Pulls) -> None:
    with shared.connect("sync", job=job, transport="auto") as session:
        worker = Worker(session)
        worker.step(IDS, following=IDS)
        for calls in session._strategy._training.participation.connection._calls.values():  # type: ignore[attr-defined]
            assert calls._link is not None
            calls._link.close()
            until(lambda calls=calls: not calls.is_connected)  # type: ignore[misc]
        pulls.rows.clear()
        assert worker.step(IDS, following=IDS) == [1] * 5
        assert worker.step(IDS, following=IDS) == [2] * 5
        assert pulls.rows == []


def test_over_tcp_rows_are_asked_for_while_no_push_is_answered(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows of a step are several messages."""
    ids = torch.arange(4000)
    end, ask, in_time = FrameCall.end, PullsOfShard.ask, []
    asked, shards = threading.Event(), set()  # both shards were asked; those that were
    waiting: list[threading.Thread] = []

    def answered_later(call: FrameCall, *answer: bytes) -> None:
        def answer_after_pull() -> None:
            in_time.append(asked.wait(30.0))
            end(call, *answer)

        if call._header.kind is not Kind.PUSH_ROWS:
            end(call, *answer)
            return
        waiting.append(threading.Thread(target=answer_after_pull))
        waiting[-1].start()

    def noted(pulls: PullsOfShard, *arguments: Any) -> None:
        ask(pulls, *arguments)
        shards.add(pulls)
        if len(shards) == 2:
            asked.set()

    with shared.connect("sync", job=job, transport="tcp") as session:
        worker = Worker(session)
        worker.step(ids, following=ids)
        with monkeypatch.context() as patch:
            patch.setattr(row_transport, "MESSAGE_BYTES", 10_000)
            patch.setattr("ps_worker.cluster.calls.CALL_SECONDS", 90.0)  # until a push is given up
            patch.setattr(FrameCall, "end", answered_later)
            patch.setattr(PullsOfShard, "ask", noted)
            assert set(worker.step(ids, following=ids)) == {1}
        for thread in waiting:
            thread.join()
        assert len(in_time) > 4
        assert all(in_time)
        assert worker.own.counted(ids[:3]) == [2.0] * 3


def test_what_was_asked_for_is_as_of_its_step(shared: Cluster, job: str) -> None:
    """Another step without a lookup in between makes it too old."""
    with shared.connect("sync", job=job) as session:
        worker = Worker(session)
        worker.step(IDS, following=IDS)
        kept = worker.own.rows(IDS).sum()  # it was looked up before the step that follows
        kept.backward()
        worker.own.rows.announce(IDS)
        worker.optimizer.step()
        worker.optimizer.step()  # with no gradient
        assert worker.step(IDS) == [2] * 5
        assert worker.own.counted(IDS) == [3.0] * 5


def test_a_lookup_without_gradients_reads_rows_as_they_are_now(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[float]:
        with shared.connect("async", rank, 2, job=job) as session:
            worker = Worker(session)
            if rank == 0:
                worker.step(IDS, following=IDS)
            session.barrier()
            if rank == 1:
                worker.step(IDS)
                worker.own.counted(IDS)  # until its push is in the rows
            session.barrier()
            found = worker.own.counted(IDS)
            session.barrier()
            return found

    assert in_parallel(2, work) == [[2.0] * 5] * 2


def test_no_row_is_older_than_ssp_allows(shared: Cluster, job: str) -> None:
    """Looked up at clock c, a row has each worker's steps up to c - 1."""
    steps = 15

    def work(rank: int) -> list[bool]:
        with shared.connect("ssp:1", rank, 2, job=job) as session:
            worker = Worker(session)
            found = []
            for clock in range(steps):
                [seen, *_] = worker.step(IDS, following=IDS)
                found.append(2 * clock - 1 <= seen <= 2 * clock + 2)
            return found

    assert in_parallel(2, work) == [[True] * steps] * 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_that_were_asked_for_from_a_lost_place_are_read_from_the_next(cluster: Cluster, mode: str) -> None:
    with cluster.connect(mode) as session:
        worker = Worker(session)
        counts = [worker.step(IDS, following=IDS)[0] for _ in range(3)]
        place = incarnation_of(session)
        cluster.lose_place(0)
        seen = worker.own.rows(IDS)  # hears of it here, or in the step
        seen.sum().backward()
        worker.optimizer.step()
        while incarnation_of(session) == place:
            worker.step(IDS, following=IDS)
        counts.append(worker.step(IDS, following=IDS)[0])
        assert counts[:3] == [0, 1, 2]
        last = worker.step(IDS)[0]
        assert worker.own.counted(IDS) == [last + 1] * 5, "nothing is doubled, and no row is of another place"
        assert last + 1 <= session.clock


def test_rows_that_have_come_are_no_longer_there_once_the_job_has_ended(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        worker = Worker(session)
        worker.step(IDS, following=IDS)
        ahead = worker.own.rows.local._ahead  # type: ignore[union-attr]
        until(lambda: all(pull.done() for pull in ahead.pulls), "the rows")
        cluster.coordinator.job("default").end("a test has ended it")
        members = session._strategy._training.participation.membership  # type: ignore[attr-defined]
        until(lambda: (members.await_change(members.place), members.error)[1], "the end of this worker's part")
        with pytest.raises(PSError):
            worker.own.rows(IDS)


def test_a_rollback_reads_rows_and_batches_anew(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """In sync as undisturbed, to the bit: what was read ahead is forgotten with the steps."""

    def run(cluster: Cluster, lose: bool) -> dict[str, torch.Tensor]:
        store = CheckpointStore(tmp_path)
        with cluster.connect("sync") as session:
            own = looking_ahead()
            loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
            optimizer: Any = torch.optim.Adagrad(own.parameters(), lr=0.1)
            model, optimizer, batches = session.prepare(own, optimizer, loader)
            lost = not lose
            for _ in range(3):
                for item, tags, wanted in batches:
                    if lose and not session.clock:
                        await_first(cluster)
                    if not lost and session.clock >= 6:
                        until(lambda: store.names("default"), "a checkpoint")
                        cluster.start_again(1)
                        lost = True
                    optimizer.zero_grad()
                    (model(item, tags) - wanted).square().mean().backward()
                    optimizer.step()
            assert lost
            assert session.clock == 3 * SAMPLES // BATCH
            return own.rows()

    expected = run(make_cluster(), lose=False)
    found = run(make_cluster(checkpoint_dir=tmp_path, checkpoint_every="4steps", timing=QUICK), lose=True)
    assert_equal(found, expected)


# -- errors, and where it does nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (lambda batch: batch["item"], "raised TypeError: list indices"),
        (
            lambda batch: batch[0].float(),
            r"raised InvalidRequest: ids are a tensor of int64 or int32, got torch\.float32",
        ),
        (lambda batch: None, ""),
    ],
)
def test_a_hook_that_fails_is_named_with_its_table(shared: Cluster, job: str, ids: Any, match: str) -> None:
    with shared.connect("sync", job=job) as session:
        own = Counting(ids=ids)
        optimizer: Any = torch.optim.SGD(own.parameters(), lr=RATE)
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4)
        model, optimizer, batches = session.prepare(own, optimizer, loader)
        if match:
            with pytest.raises(InvalidRequest, match=rf"table 'rows': ids= of the next batch \(list\) {match}"):
                next(iter(batches))
            assert session.clock == 0
        for ids_of_batch in torch.arange(12).split(4) if match else (ids for [ids] in batches):
            model(ids_of_batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert own.counted(torch.arange(12)) == [1.0] * 12


def test_what_is_no_function_or_no_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ids must be a function from a batch to ids, got str"):
        ps_worker.Embedding(2, ids="item")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"ids are a tensor of int64 or int32, got torch\.float32"):
        ps_worker.EmbeddingBag(2).announce(torch.ones(3))


def test_in_one_process_it_is_accepted_and_does_nothing() -> None:
    def failing(batch: object) -> torch.Tensor:
        raise AssertionError

    found = []
    for make in (plain, looking_ahead):
        own = make()
        if make is looking_ahead:
            own.item.ids_of.of = failing
            own.item.announce(ITEMS)
        with ps_worker.connect(mode="single") as session:
            found.append(trained(session, own))
    assert_equal(found[1], found[0])


def test_a_copy_finds_its_ids_and_a_pickle_has_forgotten_how() -> None:
    own = Counting(ids=lambda batch: batch)
    assert copy.deepcopy(own).rows.ids_of.of is own.rows.ids_of.of
    assert pickle.loads(pickle.dumps(own)).rows.ids_of.of is None
