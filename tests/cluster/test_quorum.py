"""Sync with a quorum on a real cluster: no worker waits for a late one, and what comes late counts in the next update.

The model is a vector with a cell for each step of each worker, stepped by 1 against the sign of its gradient: so a cell
counts the updates that its step is in, whatever else is in them. Slow workers are held back by events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_server.ops import requests, status_text
from ps_worker import Session
from tests.chaos.oracle import SIGNS
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, joined, vector_job
from tests.tools.rollbacks import QUICK

WORKERS, STEPS = 4, 8
BUCKET_BYTES = 64  # 16 cells: the vector lies on both shards
LATE = WORKERS - 1


class Marker:
    """A worker that marks its steps, and reads whose steps are in."""

    def __init__(self, session: Session) -> None:
        self.session, self.steps = session, 0
        model = nn.Module()
        model.cells = nn.Parameter(torch.zeros(WORKERS * STEPS))
        optimizer = torch.optim.RMSprop(model.parameters(), **SIGNS)
        self.model, self.optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES)

    def step(self) -> list[int]:
        """Marks the next step; returns how many steps of each worker it then sees."""
        gradient = torch.zeros(WORKERS * STEPS)
        gradient[self.session.rank * STEPS + self.steps] = -1.0
        self.steps += 1
        self.model.cells.grad = gradient
        self.optimizer.step()
        return self.seen()

    def seen(self) -> list[int]:
        """How many steps of each worker are in."""
        return marks(self.model.cells.detach())


def marks(cells: torch.Tensor) -> list[int]:
    """How many steps of each worker are in weights; fails if one is in twice."""
    rows = cells.view(WORKERS, STEPS)
    assert bool(((rows == 0) | (rows == 1)).all()), f"steps are doubled: {rows}"
    return [int(row.sum()) for row in rows]


def late_counts(cluster: Cluster, job: str) -> dict[int, float]:
    """By rank, the contributions to a bucket that came late."""
    found = dict.fromkeys(range(WORKERS), 0.0)
    for server in cluster.servers:
        for name, value in scrape(server.metrics_address).items():
            if name.startswith("ps_late_contributions_total") and f'job="{job}"' in name:
                found[int(name.partition('rank="')[2].partition('"')[0])] += value
    return found


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_the_others_go_on_without_a_late_worker_whose_steps_count_in_the_next_updates(
    shared: Cluster, job: str, transport: str
) -> None:
    may_come, has_come = threading.Event(), threading.Event()
    together = threading.Barrier(LATE, timeout=90)

    def work(rank: int) -> None:
        more = {"job": job, "transport": transport, "quorum": "all-1"}
        with shared.connect("sync", rank, WORKERS, **more) as session:
            worker = Marker(session)
            if rank == LATE:
                late(worker)
            else:
                in_time(rank, worker)
            if rank == 0:  # alone: what others have left behind is in its updates
                until(lambda: len(shared.coordinator.job(job).workers.all()) == 1, "the others to leave")
                worker.step()
                worker.step()
                own, *others = worker.step()
                # It waits for no update of its own where what the late one left has made one meanwhile.
                assert own >= 5 + 2, "nothing is dropped"
                assert others == [5, 5, 2], "nothing is dropped"
                assert late_counts(shared, job)[LATE] == 2 * 2, "two steps of two buckets"

    def in_time(rank: int, worker: Marker) -> None:
        for step in range(1, 5):
            seen = worker.step()
            assert seen[:LATE] == [step] * LATE, "an update has three of the four"
            assert seen[LATE] == 0
        together.wait()
        may_come.set()
        assert has_come.wait(90)
        # The late one has gone on, and waits with its next step: it is in the open update already.
        until(lambda: list(shared.waits(job)) == [LATE], "its second push")
        assert late_counts(shared, job)[LATE] == 0, "no update has it yet"
        together.wait()
        seen = worker.step()
        assert seen[LATE] == 1, "its first step, in the update after those that it missed"
        together.wait()

    def late(worker: Marker) -> None:
        assert may_come.wait(90)
        assert worker.step() == [4, 4, 4, 0], (
            "it goes on at once, with the weights of all updates, before its own counts"
        )
        has_come.set()
        worker.step()

    in_parallel(WORKERS, work)


def test_a_worker_that_died_is_not_waited_for_and_what_it_brought_counts(shared: Cluster, job: str) -> None:
    spec = vector_job(job, "sync quorum 2", cells=16, world_size=3)
    with joined(shared.address, spec) as [first, second, third]:
        first.send(first.message(0, 1, torch.full((16,), -1.0).numpy().tobytes()))
        first.clock = 1
        call = first.ask(1, [0])
        until(lambda: shared.waits(job).get(0) == (1, [1, 2]), "the first to wait for any of the others")
        shared.end_lease(1, job)
        until(lambda: shared.waits(job).get(0) == (1, [2]), "the two that are live to be needed")
        third.send(third.message(0, 1, torch.full((16,), -3.0).numpy().tobytes()))
        [answer] = first.answers(call)
        assert torch.frombuffer(bytearray(answer.payload), dtype=torch.float32).tolist() == [2.0] * 16, "their mean"
        first.send(first.message(0, 2, torch.full((16,), -1.0).numpy().tobytes()))
        shared.end_lease(2, job)
        first.clock = 2
        assert first.pull().tolist() == [3.0] * 16, "of fewer than a quorum all are waited for"
    del second


def test_a_worker_in_a_round_helps_those_behind_it_to_their_quorum(shared: Cluster, job: str) -> None:
    """Each counts its own steps: one that is ahead in them may be the one that is waited for."""
    may_begin = threading.Event()

    def work(rank: int) -> float:
        with shared.connect("sync", rank, 3, job=job, quorum="all-1") as session:
            worker = Marker(session)
            if rank == 2:
                assert may_begin.wait(90)
            for step in range(3 if rank == 2 else 6):
                worker.step()
                if step == 5:
                    may_begin.set()
            return session.mean(float(rank))

    assert in_parallel(3, work) == [1.0] * 3


def test_a_late_worker_that_got_newer_weights_by_then_is_late_no_more(shared: Cluster, job: str) -> None:
    """Its next step has to meet newer ones again, not those that it had."""
    spec = vector_job(job, "sync quorum 2", cells=16, world_size=3)
    with joined(shared.address, spec) as [first, second, third]:

        def push(worker: RawWorker, clock: int) -> None:
            worker.send(worker.message(0, clock, torch.full((16,), -1.0).numpy().tobytes()))
            worker.clock = clock

        push(first, 1)
        push(second, 1)
        assert first.pull().tolist() == [1.0] * 16
        push(third, 1)
        push(first, 2)
        assert first.pull().tolist() == [2.0] * 16
        assert third.pull().tolist() == [2.0] * 16, "an update was made since it might have gone on"
        push(third, 2)
        call = third.ask(2, [0])
        until(lambda: shared.waits(job).get(2) == (2, [0, 1]), "the third to wait for any of the others")
        push(second, 2)
        [answer] = third.answers(call)
        assert torch.frombuffer(bytearray(answer.payload), dtype=torch.float32).tolist() == [3.0] * 16


def test_status_says_the_quorum_and_unlike_workers_are_told(shared: Cluster, job: str) -> None:
    spec = vector_job(job, "sync quorum all-1 grace 0.5", cells=16, world_size=2)
    with joined(shared.address, spec):
        assert f"job {job}: sync, quorum all-1, grace 0.5 s, 2 of 2 workers" in status_text.table(
            requests.fetch(shared.address)
        )
        with pytest.raises(JobMismatch, match=r"the mode is sync, quorum all-1, .* in the registered job and sync in"):
            RawWorker(shared.address, vector_job(job, "sync", cells=16, world_size=2), 0)


def test_after_its_quorum_an_update_waits_for_the_grace_and_no_longer(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "sync quorum 1 grace 0.3", cells=16, world_size=2)) as [one, _]:
        one.send(one.message(0, 1, torch.full((16,), -1.0).numpy().tobytes()))
        one.clock = 1
        assert one.pull().tolist() == [1.0] * 16, "the shard's timer ends it, though the other never comes"


@pytest.mark.parametrize("way", cases(["lost"], ["stop"]))
def test_a_job_comes_back_from_its_checkpoint_bucket_by_bucket(
    make_cluster: Callable[..., Cluster], tmp_path: Path, way: str
) -> None:
    """As in ssp: the other shard keeps what it has. Where servers stop, what they have acknowledged is in."""
    cluster = make_cluster(lease=60.0, checkpoint_dir=tmp_path, timing=QUICK)
    spec = vector_job("default", "sync quorum 2", cells=32, world_size=3)
    with joined(cluster.address, spec) as [first, second, third]:
        workers, lost = [first, second, third], first.shard_of.index(1)

        def push(rank: int, clock: int) -> None:
            for bucket in first.trained:
                workers[rank].send(workers[rank].message(bucket, clock, torch.full((16,), -1.0).numpy().tobytes()))

        push(0, 1)
        push(1, 1)
        push(2, 1)  # waits for another
        first.clock = 1
        assert first.pull().tolist() == [1.0] * 32
        job = cluster.coordinator.job("default")
        if way == "stop":
            assert job.checkpoints is not None
            job.checkpoints.request_final(30.0)
        else:
            job.checkpoint()
        cluster.start_again(1)
        until(lambda: not job.workers.all(), "the rollback")
        for worker in workers:
            worker.join()
        pulled = first.pull()
        [here] = [bucket for bucket in first.trained if first.shard_of[bucket] == 0]
        assert pulled.view(2, 16)[lost].tolist() == [2.0 if way == "stop" else 1.0] * 16
        # The push that waited counts once this shard hears that its worker has left, and no join waits for that.
        until(lambda: first.pull().view(2, 16)[here].tolist() == [2.0] * 16, "the shard that stayed drops nothing")


@pytest.mark.parametrize(
    ("mode", "quorum", "workers", "said"),
    [
        ("ssp:2", "2", 3, "--quorum is for sync"),
        ("async", "all-1", 3, "--quorum is for sync"),
        ("sync", "3", 3, "a quorum of 3 makes no sense among 3 workers: an update waits for 1 to 2 of them"),
        ("sync", "all-3", 3, "a quorum of all-3 makes no sense among 3 workers"),
        ("sync", "all-1", 1, "there are no others"),
        ("sync", "0", 3, "quorum must be a number of workers from 1 on, or all-N"),
        ("sync", "most", 3, "quorum must be a number of workers from 1 on, or all-N"),
    ],
)
def test_a_quorum_that_makes_no_sense_is_refused_in_words(mode: str, quorum: str, workers: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ps_worker.connect("127.0.0.1:1", mode, rank=0, world_size=workers, quorum=quorum)
