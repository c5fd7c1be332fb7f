"""Tables whose rows are on parameter servers, trained as a script trains them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, JobMismatch, NonFiniteGradient, UnknownWorker, Unsupported
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export
from tests.chaos.cluster import free_ports
from tests.chaos.worker import incarnation_of
from tests.tools.cable import BEATS, LEASE
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.heartbeats import come_back_soon
from tests.tools.rollbacks import QUICK, await_first
from tests.tools.table_model import STEPS, LookUps, TableModel, batches, train

SCRIPT = ROOT / "tests" / "scripts" / "train_tables.py"
IDS = torch.tensor([-1, 0, 7, 2**62, -(2**63)])
RATE = 0.5


class Sums(nn.Module):
    """Rows whose gradients are ones: with SGD a row counts how often it was looked up."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(dim, initial="constant", scale=0.0, seed=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum()  # type: ignore[no-any-return]


class Worker(LookUps):
    """A worker that trains Sums."""

    def __init__(self, session: ps_worker.Session, **options: object) -> None:
        self.own = Sums()
        self.model, self.optimizer = session.prepare(
            self.own, torch.optim.SGD(self.own.parameters(), lr=RATE), **options
        )

    def counted(self, ids: torch.Tensor) -> list[float]:
        """How often ids were looked up in steps that count, over the workers of an update."""
        rows = self.own.rows.rows(ids) / -RATE
        assert all(len(set(row)) == 1 for row in rows.tolist())
        return rows[:, 0].tolist()


class Run:
    """Training of TableModel, step by step. state: what it begins with"""

    def __init__(self, session: ps_worker.Session, state: dict[str, torch.Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.own, self._session = TableModel(), session
        optimizer = torch.optim.Adagrad(self.own.parameters(), lr=0.1)
        if state is not None:
            self.own.load_state_dict(state)
        self._model, self._optimizer = session.prepare(self.own, optimizer)
        self._batches = list(batches())

    def step(self, number: int | None = None) -> None:
        item, tags, wanted = self._batches[self._session.clock if number is None else number]
        self._optimizer.zero_grad()
        (self._model(item, tags) - wanted).square().mean().backward()
        self._optimizer.step()

    def until(self, clock: int) -> dict[str, torch.Tensor]:
        """Trains up to a clock; what was trained then."""
        while self._session.clock < clock:
            self.step()
        return self.own.rows()


def rows_on(cluster: Cluster, job: str) -> list[int]:
    """How many rows each shard has."""
    return [
        sum(len(table.weights) for table in shard.jobs()[job].partition.tables.values()) for shard in cluster.shards
    ]


def is_applied(cluster: Cluster, job: str = "default") -> bool:
    """Whether all that was pushed is in the rows."""
    rules = [rule for shard in cluster.shards for rule in shard.jobs()[job].partition.rules.values()]
    return not any(rule.waiting or rule.added for rule in rules)


def test_sync_ends_with_the_bits_of_ddp(cluster: Cluster, nursery: Nursery, tmp_path: Path) -> None:
    """Rows alone: what shards do to buckets, fused kernels round in another way."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "PS_SERVER": cluster.address}
    runs = [(mode, rank) for mode in ("ddp", "sync") for rank in range(2)]
    processes = [
        nursery.run(
            SCRIPT, [tmp_path, "frozen"], tmp_path / "log", PS_MODE=mode, PS_RANK=str(rank), PS_WORLD_SIZE="2", **where
        )
        for mode, rank in runs
    ]
    assert [process.wait(100) for process in processes] == [0] * 4, (tmp_path / "log").read_text()
    expected, *others = (load_file(tmp_path / f"{mode}-{rank}.safetensors") for mode, rank in runs)
    for rows in others:
        assert all(torch.equal(rows[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("mode", "transport", "wire"),
    cases(
        [("sync", "grpc", "float32"), ("sync", "tcp", "bfloat16"), ("ssp:2", "shm", "float16")],
        [("sync", "shm", "float32"), ("async", "tcp", "float32")],
    ),
)
def test_two_workers_train_as_one_process(shared: Cluster, job: str, mode: str, transport: str, wire: str) -> None:
    def made() -> TableModel:
        torch.manual_seed(0)
        return TableModel()

    with ps_worker.connect(mode="single", job=job) as session:
        alone = made()
        train(session, alone)
    models = [made(), made()]

    def work(rank: int) -> dict[str, torch.Tensor]:
        with shared.connect(mode, rank, 2, job=job, transport=transport) as session:
            train(session, models[rank], gradient_wire=wire, weight_wire=wire)
            return models[rank].rows()

    both = in_parallel(2, work)
    if mode != "sync":  # each worker's step is an update of its own
        assert both[0]["item"].isfinite().all()
        assert not torch.equal(both[0]["item"], made().item.rows(torch.arange(50) * 2**40))
        return
    for name, expected in alone.rows().items():
        assert torch.equal(both[0][name], both[1][name])
        assert torch.allclose(both[0][name], expected, atol=1e-5 if wire == "float32" else 0.05), name


@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:1", "async"]))
def test_each_step_counts_once_though_a_worker_loses_its_place(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    come_back_soon(monkeypatch, BEATS)
    cluster = make_cluster(lease=LEASE)
    steps, left = 12, threading.Event()

    def work(rank: int) -> tuple[int, int, list[float]]:
        """Steps that were acknowledged, and that were made; of rank 0, how often rows were trained when it is alone."""
        with cluster.connect(mode, rank, 2) as session:
            worker, acknowledged, made = Worker(session), 0, 0
            # Where a lookup takes another place, the step goes on at its clock: rank 1 may get further than the last.
            while session.clock < steps or not (rank or left.is_set()):
                place, clock, made = incarnation_of(session), session.clock, made + 1
                worker.step(IDS[: 3 + rank])
                acknowledged += incarnation_of(session) == place
                if rank == 0 and clock < steps and clock % 4 == 1:
                    cluster.end_lease(1)  # which hears of it in its next step, or when it looks rows up
            if rank == 0:
                until(lambda: is_applied(cluster))
                return acknowledged, made, worker.counted(IDS)
        left.set()
        return acknowledged, made, []

    (first, first_made, counted), (second, second_made, _) = in_parallel(2, work)
    assert counted[0] == counted[1] == counted[2], "no step is in some rows only"
    assert counted[4] == 0
    if mode == "sync":  # an update is a mean of ones, with one worker or two
        assert max(first, second) <= counted[0] <= first_made + 1
    else:
        assert first + second <= counted[0] <= first_made + second_made
        assert second <= counted[3] <= second_made


def test_what_is_only_looked_up_makes_no_rows(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session:
        worker = Worker(session)
        worker.model(torch.arange(1000))
        with torch.no_grad():
            worker.model(torch.arange(1000, 2000))
        assert worker.own.rows.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
        assert rows_on(shared, job) == [0, 0]
        worker.step(torch.arange(100))
        until(lambda: sum(rows_on(shared, job)) == 100)
        assert min(rows_on(shared, job)) > 30, "each shard has its part"


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_large_batch_travels_in_several_messages(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_worker.cluster.row_transport.MESSAGE_BYTES", 500)
    monkeypatch.setattr("ps_server.shard.pulls.MESSAGE_BYTES", 500)
    ids = torch.arange(-500, 500) * 3
    with shared.connect("sync", job=job, transport=transport) as session:
        worker = Worker(session)
        worker.step(torch.cat([ids, ids[:10]]))
        assert worker.counted(ids) == [2.0] * 10 + [1.0] * 990


@pytest.mark.parametrize("is_room", [True, False])
def test_batches_that_grow_find_larger_memory_or_travel_in_messages(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, is_room: bool
) -> None:
    ids = torch.arange(-100_000, 100_000) * 3
    with shared.connect("sync", job=job, transport="shm") as session:
        worker = Worker(session)
        if not is_room:
            monkeypatch.setattr("ps_worker.cluster.local_segment.free_bytes", lambda: 2**16)
        for count in (1, 100, 200_000, 10):  # of rows: more than a MiB
            worker.step(ids[:count])
        assert worker.counted(ids[:1]) == [4.0]
        assert worker.counted(ids[[9, 99, 199_999]]) == [3.0, 2.0, 1.0]


def test_a_step_of_one_optimizer_leaves_the_tables_of_others_out(shared: Cluster, job: str) -> None:
    first, second = Sums(), Sums()
    with shared.connect("sync", job=job) as session:
        optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (first, second)]
        *_, one, two = session.prepare(first, second, *optimizers)
        for optimizer, model in ((one, first), (two, second), (two, second)):
            optimizer.zero_grad()
            model(IDS).backward()
            optimizer.step()
        assert (first.rows.rows(IDS)[0, 0], second.rows.rows(IDS)[0, 0]) == (-RATE, -2 * RATE)


def test_a_gradient_that_is_not_finite_is_refused_and_the_next_one_counts(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        worker = Worker(session)
        worker.step(IDS)
        (worker.model(IDS) * float("inf")).backward()
        with pytest.raises(NonFiniteGradient, match="table 'rows' is not finite; it was not pushed"):
            worker.optimizer.step()
        assert session.clock == 1
        worker.step(IDS)
        assert worker.counted(IDS) == [2.0] * 5


def test_such_a_step_is_left_out_where_the_script_says_so(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        worker = Worker(session, non_finite="skip")
        (worker.model(IDS) * float("nan")).backward()
        worker.optimizer.step()
        worker.step(IDS)
        assert session.clock == 2
        assert worker.counted(IDS) == [1.0] * 5


def test_a_worker_that_waits_for_rows_says_for_whom(cluster: Cluster) -> None:
    def work(rank: int) -> None:
        with cluster.connect("ssp:0", rank, 2) as session:
            worker = Worker(session)
            if rank == 0:
                until(lambda: cluster.waits("default").get(1) == (1, [0]))
            worker.step(IDS)
            assert worker.counted(IDS) >= [1.0] * 5

    in_parallel(2, work)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_script_counts_saves_and_copies_the_rows(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session:
        run = Run(session)
        assert (len(run.own.item), len(run.own.tags)) == (0, 0)
        run.until(7)
        state = {name: tensor.clone() for name, tensor in run.own.state_dict().items()}
        copied = copy.deepcopy(run.own)
        assert len(run.own.item) == len(copied.item) > 10
        expected, pickled = run.own.rows(), pickle.loads(pickle.dumps(run.own))
        then = run.until(8)
    for again in (copied, pickled):
        assert all(torch.equal(rows, expected[name]) for name, rows in again.rows().items()), "and not those of now"
    with ps_worker.connect(mode="single") as session:
        run = Run(session, state)
        assert all(torch.equal(rows, expected[name]) for name, rows in run.own.rows().items())
        run.step(7)
        assert torch.allclose(run.own.rows()["tags"], then["tags"], atol=1e-6), "with the optimizer's state of rows"


def test_workers_whose_tables_differ_are_refused_with_the_difference(shared: Cluster, job: str) -> None:
    def connect() -> ps_worker.Session:
        return ps_worker.connect(shared.address, "async", job=job, elastic=True)

    with connect() as session:
        Worker(session)
        with connect() as other:
            model = Sums(5)
            with pytest.raises(JobMismatch, match="table 'rows' has dim 3 in the registered job and 5"):
                other.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        with connect() as other:
            model = Sums()
            model.rows = ps_worker.Embedding(3, initial="constant", scale=1.0)
            with pytest.raises(JobMismatch, match=r"table 'rows' has scale of initial values 0\.0"):
                other.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))


def test_what_cannot_be_done_with_rows_on_servers_is_said(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        worker = Worker(session)
        with pytest.raises(Unsupported, match="load_state_dict cannot replace them"):
            worker.own.load_state_dict(worker.own.state_dict())
        with pytest.raises(InvalidRequest, match="ids are a tensor of int64 or int32"):
            worker.model(torch.ones(3))
    with pytest.raises(UnknownWorker, match="the session is closed, and the rows"):
        worker.model(IDS)
    with (
        shared.connect("sync", job=job) as session,
        pytest.raises(Unsupported, match="on the servers of another session already"),
    ):
        session.prepare(worker.own, torch.optim.SGD(worker.own.parameters(), lr=RATE))


def checkpoint(cluster: Cluster, step: Callable[[], None]) -> None:
    """Makes a checkpoint, which in sync is of the next clock, and one step more."""
    made = threading.Thread(target=cluster.coordinator.job("default").checkpoint)
    made.start()
    until(lambda: all(shard.jobs()["default"].snapshot_task is not None for shard in cluster.shards))
    step()
    step()  # with which the worker's state of the clock before is sent
    made.join(30)
    assert not made.is_alive()


@pytest.mark.parametrize(("mode", "before", "after"), cases([("sync", 2, 3)], [("sync", 2, 2), ("async", 3, 1)]))
def test_rows_are_in_checkpoints_and_go_on_on_any_number_of_shards(
    make_cluster: Callable[..., Cluster], tmp_path: Path, mode: str, before: int, after: int
) -> None:
    """As undisturbed to the bit, with the optimizers' state and what is not admitted yet."""
    with make_cluster().connect(mode) as session:
        expected = Run(session).until(STEPS)
    cluster = make_cluster(shards=before, checkpoint_dir=tmp_path)
    with cluster.connect(mode) as session:
        run = Run(session)
        run.until(7)
        checkpoint(cluster, run.step)
    cluster.stop()
    with make_cluster(shards=after, checkpoint_dir=tmp_path, restore=True).connect(mode) as session:
        run = Run(session)
        assert session.clock >= 7
        rows = run.until(STEPS)
    assert all(torch.equal(rows[name], tensor) for name, tensor in expected.items())


def test_an_export_has_the_rows_and_trains_on_in_one_process(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(shards=2, checkpoint_dir=tmp_path / "checkpoints", timing=QUICK)
    with cluster.connect("async") as session:
        run = Run(session)
        expected = run.until(7)
        checkpoint(cluster, lambda: None)
        then = run.until(8)
    export(tmp_path / "checkpoints", "default", "000001", tmp_path / "out")
    found = load_file(tmp_path / "out" / "tables" / "item.safetensors")
    assert 10 < len(found["ids"]) == len(found["weights"])
    with ps_worker.connect(mode="single") as session:
        run = Run(session, load_file(tmp_path / "out" / "model.safetensors"))
        assert torch.equal(run.own.item.rows(found["ids"]), found["weights"])
        rows = run.own.rows()
        assert all(torch.equal(rows[name], tensor) for name, tensor in expected.items())
        run.step(7)
        assert torch.allclose(run.own.rows()["tags"], then["tags"], atol=1e-6), "with the optimizer's state of rows"


def test_in_sync_a_lost_shard_takes_rows_back_to_the_one_clock_of_the_checkpoint(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="4steps", timing=QUICK)
    store, steps, lost = CheckpointStore(tmp_path), 20, threading.Event()
    meet = threading.Barrier(2, timeout=60)

    def work(rank: int) -> tuple[list[float], int]:
        with cluster.connect("sync", rank, 2) as session:
            worker = Worker(session)
            await_first(cluster)
            while session.clock < steps:
                if rank == 0 and session.clock >= 6 and not lost.is_set():
                    until(lambda: store.names("default"), "a checkpoint")
                    cluster.start_again(1)
                    lost.set()
                worker.step(IDS)
            [found] = requests.fetch(cluster.address)["jobs"]
            meet.wait()
            return [count / session.clock for count in worker.counted(IDS)], found["restore_count"]

    assert in_parallel(2, work) == [([1.0] * 5, 1)] * 2
