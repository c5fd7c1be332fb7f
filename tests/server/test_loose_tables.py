"""Checkpoints of a job of sync with a table that is looser: its rows are of the one clock that the job's weights have.

Each worker has an id of its own, whose row counts its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_protocol.errors import Backlogged, OutOfOrder, TryLater
from ps_protocol.job import JobSpec
from ps_protocol.modes import Consistency
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.commands import AddWorker
from ps_server.core.loose import LooseRule
from ps_server.core.partition import JobPartition
from ps_server.core.placement import Place
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest
from ps_tables.contributions import RowGradients
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.one_thread import one_thread
from tests.tools.raw_worker import vector_job
from tests.tools.table_shards import DIM, messages


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(params=[2, 5], ids=["2 shards", "5 shards"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OneProcess]:
    """The job has four buckets: of five shards one has rows alone."""
    running = OneProcess(tmp_path, request.param)
    yield running
    for job in running.coordinator.jobs().values():
        job.end()
    running.stop()


def job_spec(workers: int = 2, own: Consistency | None = Consistency(None)) -> JobSpec:  # noqa: B008 (a value)
    rows = TableSpec("t", DIM, Initializer("constant", 0.0), consistency=own)
    return replace(vector_job("job", "sync", CELLS, workers), tables=(JobTable(rows, "SGD", {"lr": 1.0}),))


class Worker(DirectWorker):
    """A worker whose rows are pushed by themselves, when it is told."""

    def __init__(self, cluster: OneProcess, rank: int, workers: int = 2) -> None:
        super().__init__(cluster, job_spec(workers), rank)

    def push_rows(self, clock: int | None = None) -> None:
        """Its step of a clock; None: of the last one that it has pushed to the buckets."""
        clock = self.clock if clock is None else clock
        rows = RowGradients(np.array([self.rank]), np.ones(1, np.int64), -torch.ones(1, DIM))
        for index, shard in self.cluster.shards.items():
            here = rows.part(shards_of(rows.ids, len(self.cluster.shards)) == index)
            for message in messages(self.rank, self.place.member.incarnation, clock, here, 1):
                shard.push_rows(replace(message, job="job", key=self.place.member.key, run=self.run))

    def finish(self) -> None:
        """Ends its step, and sends its state where it is asked for it."""
        self.pull()
        if self.in_checkpoint:
            self.save_state()


def joined(cluster: OneProcess, count: int = 2) -> list[Worker]:
    each = [Worker(cluster, rank, count) for rank in range(count)]
    each[0].initialise()
    return each


def train(each: list[Worker]) -> None:
    """One step of all."""
    for worker in each:
        worker.push()
        worker.push_rows()
    for worker in each:
        worker.finish()


def counted(cluster: OneProcess) -> dict[int, float]:
    """How many steps of each rank are in the rows."""
    found: dict[int, float] = {}
    for shard in cluster.shards.values():
        [table] = shard.jobs()["job"].state.tables.values()
        tensors = table.rows.snapshot()
        found |= dict(zip(tensors["ids"].tolist(), tensors["weights"][:, 0].tolist(), strict=True))
    return found


def rolled_back(cluster: OneProcess) -> dict[int, float]:
    """Loses a shard; how many steps of each rank are in the rows of the checkpoint."""
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    return counted(cluster)


def made(cluster: OneProcess, seconds: float = 60.0) -> Manifest:
    checkpoints = cluster.coordinator.job("job").checkpoints
    assert checkpoints is not None
    return checkpoints.request(seconds)


def test_a_checkpoint_has_rows_of_its_own_clock_though_a_worker_is_further_on(cluster: OneProcess) -> None:
    """One worker's rows come a step after its gradients: the other one has pushed rows of the next clock by then."""
    first, second = each = joined(cluster)
    train(each)

    def step() -> None:
        for worker in each:
            worker.push()
        first.push_rows()
        for worker in each:
            worker.finish()
        if second.clock > 2:
            second.push_rows(second.clock - 1)

    cluster.while_waiting(step)
    manifest = made(cluster)
    assert manifest.versions == (manifest.clock, manifest.clock)
    assert manifest.without == ()
    assert manifest.clocks == {0: manifest.clock, 1: manifest.clock}
    cluster.while_waiting()
    second.push_rows()
    assert counted(cluster) == {0: first.clock, 1: first.clock}, "and nothing is held any more"
    assert first.clock > manifest.clock
    assert rolled_back(cluster) == {0: manifest.clock, 1: manifest.clock}
    for worker in each:
        assert worker.rejoin().clock == manifest.clock
    train(each)
    assert counted(cluster) == {0: manifest.clock + 1, 1: manifest.clock + 1}


def test_what_stands_still_is_taken_when_all_rows_of_its_clock_have_come(cluster: OneProcess, tmp_path: Path) -> None:
    """Otherwise the rows of a worker that were on their way would be lost with a rollback."""
    first, second = each = joined(cluster)
    train(each)
    for worker in each:
        worker.push()
    first.push_rows()
    for worker in each:
        worker.finish()
    looks, store = 0, CheckpointStore(tmp_path)

    def look() -> None:
        nonlocal looks
        looks, cluster.clock.seconds = looks + 1, cluster.clock.seconds + 0.5
        if looks == 10:
            assert store.names("job") == []
            second.push_rows()

    cluster.while_waiting(look)
    manifest = made(cluster, 2.0)
    assert looks >= 10
    assert (manifest.clock, manifest.versions) == (2, (2, 2))
    assert rolled_back(cluster) == {0: 2, 1: 2}
    assert [worker.rejoin().clock for worker in each] == [2, 2]


def test_rows_that_never_come_fail_a_checkpoint_in_words(cluster: OneProcess) -> None:
    first, second = each = joined(cluster)
    for worker in each:
        worker.push()
    first.push_rows()

    def look() -> None:
        cluster.clock.seconds += 0.5

    cluster.while_waiting(look)
    with pytest.raises(TryLater):
        made(cluster, 2.0)
    second.push_rows()
    assert made(cluster, 2.0).clock == 1


def test_a_worker_that_is_gone_is_not_waited_for(cluster: OneProcess) -> None:
    """What it has pushed of the clock is in the checkpoint, and what the others have beyond waits for nothing then."""
    first, second, third = each = joined(cluster, 3)
    train(each)
    held = False

    def step() -> None:
        nonlocal held
        if not held:
            for worker in each:
                worker.push()
            first.push_rows()
            second.push_rows()
            for worker in (first, second):
                worker.finish()
        rules = [shard.jobs()["job"].state.tables.values() for shard in cluster.shards.values()]
        if not held and any(table.rule.held_after == 2 for [table] in rules if isinstance(table.rule, LooseRule)):  # type: ignore[misc]
            held = True
            third.leave()
        elif held:
            train([first, second])

    cluster.while_waiting(step)
    manifest = made(cluster)
    cluster.while_waiting()
    assert manifest.clock >= 2
    assert counted(cluster)[0] == first.clock
    then = rolled_back(cluster)
    assert (then[0], then[1]) == (manifest.clock, manifest.clock)


def snapshots(cluster: OneProcess, directory: Path, clock: int, name: str = "000007") -> Callable[[], list[object]]:
    """Has all shards take a snapshot of a clock; returns what waits for them."""
    CheckpointStore(directory).begin("job", name)
    for shard in cluster.shards.values():
        shard.begin_snapshot("job", name, clock)
    return lambda: [shard.await_snapshot("job", name, 0.0) for shard in cluster.shards.values()]


def test_rows_past_the_clock_of_a_checkpoint_are_kept_from_no_worker_for_good(
    cluster: OneProcess, tmp_path: Path
) -> None:
    """Another checkpoint takes the place of one that waits, and what that has held goes on."""
    first, second = each = joined(cluster)
    train(each)
    snapshots(cluster, tmp_path, 2)
    for worker in each:
        worker.push()
    first.push_rows()
    for worker in each:
        worker.push()
    first.push_rows()
    assert counted(cluster) == {0: 2, 1: 1}
    await_all = snapshots(cluster, tmp_path, 4, "000008")
    assert counted(cluster) == {0: 3, 1: 1}
    second.push_rows(2)
    second.push_rows(3)
    with pytest.raises(TryLater):
        await_all()
    train(each)
    train(each)
    await_all()
    assert counted(cluster) == {0: 5, 1: 5}


def test_a_clock_that_a_worker_has_pushed_beyond_is_refused(cluster: OneProcess, tmp_path: Path) -> None:
    first, _ = each = joined(cluster)
    train(each)
    for worker in each:
        worker.push()
    first.push_rows()
    for _ in range(2):  # and nothing is held by that
        with pytest.raises(OutOfOrder, match="is at version 2, and the checkpoint is of 1"):
            snapshots(cluster, tmp_path, 1)
    first.push()
    first.push_rows()
    assert counted(cluster)[0] == 3


def test_what_a_checkpoint_waits_for_is_taken_although_the_budget_is_full() -> None:
    """What is held takes room: without this the push that ends the wait would be told to try later for ever."""
    partition = JobPartition(job_spec(), [0], staged_limit=1, place=Place(0, 1, 2**20))
    for rank in range(3):
        partition.execute(AddWorker(rank, rank + 1, 0))
    [(index, table)] = partition.tables.items()

    def push(rank: int, clock: int) -> None:
        rows = RowGradients(np.array([rank]), np.ones(1, np.int64), -torch.ones(1, DIM))
        for message in messages(rank, rank + 1, clock, rows, 1):
            partition.execute(partition.tables.checker.push(message))
        apply()

    def apply() -> None:
        while (work := table.rule.next()) is not None:
            partition.done(index, work)

    push(0, 1)
    push(1, 1)
    table.rule.hold(1)
    push(0, 2)
    with pytest.raises(Backlogged, match="max-staged-bytes is 1"):
        push(1, 2)
    push(2, 1)
    assert table.rule.is_at(1)
    table.rule.hold(None)
    apply()
    push(2, 2)
    assert table.rule.clocks() == {0: 2, 1: 1, 2: 2}
