"""How far workers may drift apart, proved by the data on a real cluster.

The model is a vector of zeros with a cell for each step of each worker. SGD with lr 1 and a gradient of -1 adds exactly
1 to the cell of the step, so what a worker reads tells whose steps are in. Nobody sleeps: slow workers are held back by
events, and the tests wait for what the servers say about themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from ps_protocol.errors import Fenced
from ps_server.ops import requests, status_text
from ps_worker import Session
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, joined, vector_job

WORKERS = 3
STEPS = 16
WAITING = 40  # pulls on one connection, which may have STREAMS_OF_A_CONNECTION calls at a time
BUCKET_BYTES = 64  # 16 cells: the vector lies on both shards


class Cells(nn.Module):
    """[WORKERS * STEPS] zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(WORKERS * STEPS))

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Marker:
    """A worker that marks its steps, and checks after each that it sees its own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        model = Cells()
        self.model, self.optimizer = session.prepare(model, model.optimizer(), bucket_bytes=BUCKET_BYTES)

    def step(self) -> list[int]:
        """Marks the next step; returns how many steps of each worker it then sees."""
        gradient = torch.zeros(WORKERS * STEPS)
        gradient[self.session.rank * STEPS + self.session.clock] = -1.0
        self.model.cells.grad = gradient
        self.optimizer.step()
        seen = self.seen()
        assert seen[self.session.rank] == self.session.clock, "a worker sees its own update"
        return seen

    def seen(self) -> list[int]:
        """How many steps of each worker are in; fails if one is in without those before it, or twice."""
        marks = self.model.cells.detach().view(WORKERS, STEPS)
        counts = [int(row.sum()) for row in marks]
        for row, count in zip(marks, counts, strict=True):
            assert torch.equal(row, (torch.arange(STEPS) < count).float()), f"steps are missing or doubled: {row}"
        return counts


@pytest.mark.parametrize("bound", cases([0, 4], [1]))
def test_ssp_workers_get_as_far_ahead_of_the_slowest_as_the_bound_and_no_further(
    shared: Cluster, job: str, bound: int
) -> None:
    may_step = threading.Semaphore(0)  # what the slow worker waits for
    finished = [0] * WORKERS
    slow = WORKERS - 1

    def work(rank: int) -> None:
        with shared.connect(f"ssp:{bound}", rank, WORKERS, job=job) as session:
            worker = Marker(session)
            for clock in range(1, STEPS + 1):
                if rank == slow:
                    may_step.acquire()
                seen = worker.step()
                assert min(seen) >= clock - bound, f"at clock {clock} worker {rank} saw {seen}"
                finished[rank] = clock

    def fast_wait_at(clock: int) -> bool:
        return shared.waits(job) == {rank: (clock, [slow]) for rank in range(WORKERS) if rank != slow}

    def conduct() -> None:
        for steps_of_slow in range(4):
            until(lambda n=steps_of_slow: fast_wait_at(n + bound + 1), "waiting for the slow worker")
            steps = [steps_of_slow + bound] * (WORKERS - 1) + [steps_of_slow]
            until(lambda steps=steps: finished == steps, "the steps of all")  # they are noted a moment later
            may_step.release()
        may_step.release(STEPS)

    in_parallel(WORKERS + 1, lambda index: work(index) if index < WORKERS else conduct())
    assert finished == [STEPS] * WORKERS


def test_async_never_waits(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[int]:
        with shared.connect("async", rank, 2, job=job) as session:
            worker = Marker(session)
            if rank == 0:
                before = seconds_waited()
                for _ in range(STEPS):
                    worker.step()
                assert shared.waits(job) == {}
                assert seconds_waited() == before
                done.set()
            assert done.wait(60)
            return worker.step() if rank else worker.seen()

    def seconds_waited() -> list[float]:
        """Of each shard; what was waited for rank 0's initial weights is in it."""
        name = f'ps_pull_wait_seconds_sum{{job="{job}",mode="async"}}'
        return [scrape(server.metrics_address).get(name, 0.0) for server in shared.servers]

    done = threading.Event()
    first, second = in_parallel(2, work)
    assert first == [STEPS, 0, 0]
    assert second == [STEPS, 1, 0], "the one that comes late finds all that the other did"


def test_sync_waits_for_every_live_worker_and_says_for_whom(shared: Cluster, job: str) -> None:
    may_step = threading.Event()

    def work(rank: int) -> torch.Tensor:
        with shared.connect("sync", rank, WORKERS, job=job) as session:
            model = Cells()
            model, optimizer = session.prepare(model, model.optimizer(), bucket_bytes=BUCKET_BYTES)
            if rank == 1:
                until(lambda: shared.waits(job) == {0: (1, [1]), 2: (1, [1])})
                reason = status_text.waits(requests.fetch(shared.address), job)[2][0]["reason"]
                assert "clock 1 of every live worker is needed" in reason
                assert "worker 1 is at clock 0" in reason
                assert f"worker 1 ({reason})" in status_text.table(requests.fetch(shared.address))
                assert torch.equal(model.cells, torch.zeros(WORKERS * STEPS))
                may_step.set()
            model.cells.grad = torch.full((WORKERS * STEPS,), -float(rank))
            optimizer.step()
            assert may_step.is_set(), f"worker {rank} went on without worker 1"
            return model.cells.detach().clone()

    for found in in_parallel(WORKERS, work):
        assert torch.equal(found, torch.ones(WORKERS * STEPS)), "the mean of 0, 1 and 2"


# -- waiting costs nobody else ---------------------------------------------------------------------------------------


def test_with_many_waiting_pulls_on_one_shard_pushes_still_go_through(
    make_cluster: Callable[..., Cluster], job: str
) -> None:
    cluster = make_cluster(shards=2, lease=600.0)  # these workers send no heartbeats
    with joined(cluster.address, vector_job(job, "ssp:0", cells=64, world_size=2)) as [fast, slow]:
        fast.step(-torch.ones(64))
        shard = fast.shard_of[0]
        mine = [bucket for bucket in fast.trained if fast.shard_of[bucket] == shard]
        calls = [fast.ask(1, mine) for _ in range(WAITING)]
        until(
            lambda: (
                sum(len(b.waiters) for b in cluster.shards[shard].jobs()[job].buckets.values()) == WAITING * len(mine)
            )
        )
        # Another job trains on the same shards, through and through.
        with cluster.connect("sync", job=f"{job}-beside") as session:
            worker = Marker(session)
            for clock in range(1, 9):
                assert worker.step() == [clock, 0, 0]
        assert all(not call.done() for call in calls)
        # And the pushes that they wait for are taken at once.
        slow.step(-torch.ones(64))
        for call in calls:
            answers = list(fast.answers(call))
            assert sorted(answer.buckets[0].bucket for answer in answers) == mine
            for answer in answers:
                values = torch.frombuffer(bytearray(answer.payload), dtype=torch.float32)
                assert torch.equal(values, torch.full_like(values, 2.0))


# -- the dead and the fenced -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "ssp:0"])
def test_a_dead_worker_is_waited_for_no_longer_than_its_lease(shared: Cluster, job: str, mode: str) -> None:
    def live() -> list[int]:
        with shared.connect(mode, 0, 2, job=job) as session:
            return Marker(session).step()  # prepared when rank 1 has joined

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live)
        spec = until(lambda: shared.coordinator.jobs().get(job)).spec
        with RawWorker(shared.address, spec, 1):  # joins, and never shows a sign of life
            until(lambda: shared.waits(job) == {0: (1, [1])}, "worker 0 to wait for the dead one")
            shared.end_lease(1, job)
            assert waiting.result(60) == [1, 0, 0], "whoever is left steps alone"


def test_a_fenced_worker_is_refused_and_changes_nothing(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "sync", cells=32, world_size=2)) as [_, old]:
        old.step(torch.ones(32))
        waiting = old.ask(1, [0])
        with RawWorker(shared.address, old.spec, 1) as new:
            assert new.incarnation > old.incarnation
            before = shared.state(job)
            with pytest.raises(Fenced, match=rf"incarnation {new.incarnation} is live.* {old.incarnation}"):
                old.send(old.message(0, 2))
            with pytest.raises(Fenced):
                old.send(old.message(0, 1))  # not even a repeat is answered: it is not its own any more
            with pytest.raises(Fenced):
                list(old.answers(waiting))
            with pytest.raises(Fenced):
                list(old.answers(old.ask(1, [0])))
            with pytest.raises(Fenced):
                old.heartbeat()
            old.leave()  # says goodbye to nobody: the new one stays
            assert shared.state(job) == before


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_session_that_is_replaced_while_it_waits_says_so(shared: Cluster, job: str, transport: str) -> None:
    told = threading.Event()

    def work(rank: int) -> None:
        if rank == 0:
            with shared.connect("sync", 0, 2, job=job, transport=transport) as session:
                worker = Marker(session)
                with pytest.raises(Fenced, match="worker 0 was replaced"):
                    worker.step()  # waits for rank 1, with several buckets on each shard
            told.set()
        else:
            spec = until(lambda: shared.coordinator.jobs().get(job)).spec
            with RawWorker(shared.address, spec, 1):
                until(lambda: shared.waits(job) == {0: (1, [1])})
                with RawWorker(shared.address, spec, 0) as new:
                    assert told.wait(TEST_SECONDS)  # or the old one would find its place free, and take it again
                    new.leave()

    in_parallel(2, work)
    requests.end_job(shared.address, job)


# -- exactly once ----------------------------------------------------------------------------------------------------


def test_a_repeated_push_is_acknowledged_once(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "async", cells=16, world_size=1)) as [worker]:
        push = worker.message(0, 1, torch.full((16,), -1.0).numpy().tobytes())
        assert not worker.send(push).duplicate_count
        worker.clock = 1
        assert worker.pull().tolist() == [1.0] * 16
        before = shared.state(job)
        for _ in range(3):
            answer = worker.send(push)
            assert answer.duplicate_count
            assert answer.header.version == 1
        assert shared.state(job) == before
        assert worker.pull().tolist() == [1.0] * 16


def test_of_many_repeats_at_once_one_counts(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "sync", cells=16, world_size=1)) as [worker]:
        for clock in range(1, 6):
            push = worker.message(0, clock, torch.full((16,), -1.0).numpy().tobytes())
            answers = in_parallel(8, lambda _, push=push: worker.send(push))
            assert [answer.duplicate_count for answer in answers].count(0) == 1
            worker.clock = clock
            assert worker.pull().tolist() == [float(clock)] * 16
