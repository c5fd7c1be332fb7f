"""Jobs begin, grow, shrink and end, one after another and side by side; what they held is given back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, NotFound, PSError, UnknownWorker
from ps_server.coordinator.state_file import StateFile
from ps_server.ops import requests, status_text
from ps_worker import Session
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, vector_job


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two shards, which each test leaves as empty as it found them."""
    running = Cluster()
    yield running
    running.stop()


def linear(value: float = 0.0, width: int = 4) -> nn.Module:
    """A vector of `width` equal weights."""
    model = nn.Linear(width, 1, bias=False)
    model.weight.data.fill_(value)
    return model


class Worker:
    """A session with a vector as its model; a step adds what it is given to every weight, averaged in sync."""

    def __init__(self, session: Session, value: float = 0.0, width: int = 4) -> None:
        self.session = session
        model = linear(value, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.model, self.optimizer = session.prepare(model, optimizer)

    def step(self, add: float) -> None:
        self.model.weight.grad = torch.full_like(self.model.weight, -add)
        self.optimizer.step()

    @property
    def value(self) -> float:
        """What every weight is."""
        [value] = set(self.model.weight.flatten().tolist())
        return value


def step_together(workers: list[Worker], *adds: float) -> None:
    """One sync step of all."""
    in_parallel(len(workers), lambda index: workers[index].step(adds[index]))


def holds_nothing(cluster: Cluster) -> bool:
    return not cluster.coordinator.jobs() and not any(shard.jobs() for shard in cluster.shards)


# -- begin and end ---------------------------------------------------------------------------------------------------


def test_one_job_after_another_may_have_the_same_name_and_another_model(cluster: Cluster) -> None:
    for width in (4, 7, 300):
        with cluster.connect("sync") as session:
            worker = Worker(session, value=float(width), width=width)
            worker.step(1.0)
            assert session.clock == 1
            assert worker.value == width + 1.0
        assert holds_nothing(cluster)


def test_jobs_side_by_side_do_not_touch_each_other(cluster: Cluster) -> None:
    modes = ["sync", "ssp:2", "async", "sync"]

    def work(index: int) -> float:
        job, rank = divmod(index, 2)
        with cluster.connect(modes[job], rank, 2, job=f"job-{job}") as session:
            worker = Worker(session, value=100.0 * job, width=10 + job)
            for _ in range(8):
                worker.step(1.0)
            until(lambda: session.clock == 8)
            both_done[job].wait(60)
            return worker.value

    both_done = [threading.Barrier(2) for _ in modes]
    values = in_parallel(2 * len(modes), work)
    for job, mode in enumerate(modes):
        most = 8 if mode == "sync" else 16  # sync adds the mean of two, the others add both
        for value in values[2 * job : 2 * job + 2]:
            assert 100.0 * job + 8 <= value <= 100.0 * job + most
    assert holds_nothing(cluster)


def test_a_finished_job_gives_its_memory_back(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        model = linear(width=1000)
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()), bucket_bytes=64)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        held = [
            weakref.ref(thing)
            for shard in cluster.shards
            for job in shard.jobs().values()
            for thing in (
                *(job, job.partition),
                *(bucket.unit.weights for bucket in job.buckets.values()),
                *(bucket.unit.weights.flat for bucket in job.buckets.values()),
            )
        ]
        assert len(held) > 100
    assert holds_nothing(cluster)

    def all_gone() -> bool:
        gc.collect()
        return all(reference() is None for reference in held)

    until(all_gone, "the job's tensors being freed")


def test_the_job_ends_with_the_last_worker_not_the_first(cluster: Cluster) -> None:
    first, second = in_parallel(2, lambda rank: Worker(cluster.connect("sync", rank, 2)))
    step_together([first, second], 1.0, 3.0)
    first.session.close()
    assert set(cluster.coordinator.jobs()) == {"default"}
    second.step(5.0)  # nobody waits for one that has left
    assert second.value == 2.0 + 5.0
    second.session.close()
    assert holds_nothing(cluster)


def test_a_job_that_is_ended_from_outside_tells_its_workers(cluster: Cluster) -> None:
    with cluster.connect("sync") as session:
        worker = Worker(session)
        worker.step(1.0)
        requests.end_job(cluster.address, "default")
        assert holds_nothing(cluster)
        with pytest.raises(PSError, match=r"no job 'default'|job 'default' ended"):
            worker.step(1.0)
        assert worker.value == 1.0
    with pytest.raises(NotFound, match="job 'default' ended"):
        requests.end_job(cluster.address, "default")


def test_a_waiting_worker_is_told_when_its_job_is_ended(cluster: Cluster) -> None:
    first, second = in_parallel(2, lambda rank: Worker(cluster.connect("sync", rank, 2)))

    def work(index: int) -> None:
        if index == 0:
            with pytest.raises(PSError, match=r"no job 'default'|job 'default' ended"):
                first.step(1.0)
        else:
            until(lambda: cluster.waits("default") == {0: (1, [1])})
            requests.end_job(cluster.address, "default")

    in_parallel(2, work)
    first.session.close()
    second.session.close()


# -- a declared world size -------------------------------------------------------------------------------------------


def test_training_begins_when_every_declared_worker_is_there(cluster: Cluster) -> None:
    begun = threading.Event()

    def work(rank: int) -> int:
        if rank == 1:
            until(
                lambda: (
                    "1 of 2 workers; waits for ranks 1 to join" in status_text.table(requests.fetch(cluster.address))
                )
            )
            assert not begun.is_set()
        with cluster.connect("async", rank, 2) as session:
            Worker(session)
            begun.set()
            return session.world_size

    assert in_parallel(2, work) == [2, 2]


def test_who_asks_amid_the_last_join_hears_that_training_begins_once_that_is_on_disk(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the coordinator might die and come back without the last worker, while the others train already."""
    cluster, save, heard = make_cluster(checkpoint_dir=tmp_path), StateFile.save, list[bool]()
    spec = vector_job("job", "sync", 16, 2)

    def ask() -> None:
        watchers = cluster.coordinator.job("job").watchers
        watchers.add(lambda roster: heard.append(roster is not None and roster[2]))()

    def ask_and_save(file: StateFile, *content: Any) -> None:
        ask()
        save(file, *content)

    with RawWorker(cluster.address, spec, 0):
        with monkeypatch.context() as patched:
            patched.setattr(StateFile, "save", ask_and_save)
            RawWorker(cluster.address, spec, 1).__exit__(None, None, None)
        ask()
    assert heard == [False, False, True]


def test_closing_a_session_ends_a_prepare_that_waits_for_others(cluster: Cluster) -> None:
    session = cluster.connect("sync", 0, 2)

    def work(index: int) -> None:
        if index == 0:
            with pytest.raises(UnknownWorker, match="closed while it waited"):
                Worker(session)
        else:
            served = [server.metrics_address for server in cluster.servers]
            pushes = 'ps_push_total{job="default",result="staged"}'
            until(lambda: sum(scrape(address).get(pushes, 0) for address in served) >= 1)
            session.close()  # rank 0 has sent its weights, and waits for rank 1

    in_parallel(2, work)
    assert holds_nothing(cluster)


def test_a_worker_that_starts_again_takes_its_place_and_goes_on(cluster: Cluster) -> None:
    first, old = in_parallel(2, lambda rank: Worker(cluster.connect("sync", rank, 2)))
    step_together([first, old], 1.0, 1.0)
    new = Worker(cluster.connect("sync", 1, 2), value=99.0)
    assert new.value == 1.0
    assert new.session.clock == 1
    step_together([first, new], 1.0, 3.0)
    assert first.value == new.value == 3.0
    for worker in (old, new, first):  # the old one's goodbye is nobody's
        worker.session.close()
    assert holds_nothing(cluster)


# -- elastic ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def join(cluster: Cluster) -> Callable[[], Worker]:
    """Joins an elastic sync job."""
    return lambda: Worker(cluster.connect("sync", elastic=True))


def test_an_elastic_job_gives_out_ranks_and_its_world_size_is_live(join: Callable[[], Worker]) -> None:
    workers = [join() for _ in range(3)]
    assert [worker.session.rank for worker in workers] == [0, 1, 2]
    for worker in workers:
        until(lambda w=worker: w.session.world_size == 3)
    workers[1].session.close()
    for worker in (workers[0], workers[2]):
        until(lambda w=worker: w.session.world_size == 2)
    workers[1] = join()
    assert workers[1].session.rank == 1, "the lowest free rank is given out again"
    for worker in workers:
        until(lambda w=worker: w.session.world_size == 3)
    for worker in workers:
        worker.session.close()


def test_a_joiner_starts_from_the_weights_and_the_clock_of_now(join: Callable[[], Worker]) -> None:
    first = join()
    for _ in range(5):
        first.step(1.0)
    second = join()
    assert second.value == 5.0
    assert second.session.clock == first.session.clock == 5
    step_together([first, second], 1.0, 3.0)
    assert first.value == second.value == 7.0
    assert second.session.clock == first.session.clock == 6
    first.session.close()
    second.step(10.0)
    assert second.value == 17.0
    third = join()
    assert third.session.rank == 0
    assert third.value == 17.0, "the new rank 0 takes over the weights, it does not begin anew"
    step_together([second, third], 0.0, 2.0)
    assert second.value == third.value == 18.0
    second.session.close()
    third.session.close()


@pytest.mark.parametrize("mode", ["ssp:1", "async"])
def test_workers_join_and_leave_in_other_modes_too(cluster: Cluster, mode: str) -> None:
    first = Worker(cluster.connect(mode, elastic=True))
    first.step(1.0)
    first.step(1.0)
    second = Worker(cluster.connect(mode, elastic=True))
    assert second.value == 2.0
    assert second.session.clock == 2
    second.step(1.0)
    first.step(1.0)
    assert first.value == 4.0
    first.session.close()
    for _ in range(4):
        second.step(1.0)  # who has left holds nobody back
    assert second.value == 8.0
    second.session.close()
    assert holds_nothing(cluster)


def test_an_elastic_job_has_no_declared_ranks(cluster: Cluster) -> None:
    with cluster.connect("sync", rank=7, world_size=9, elastic=True) as session:
        Worker(session)
        assert session.rank == 0
    with pytest.raises(InvalidRequest, match="elastic job needs a server; mode ddp has a fixed world size"):
        cluster.connect("ddp", elastic=True)
