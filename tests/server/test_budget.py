"""What may be staged on a shard is bounded in bytes, and whoever is waited for is never sent away."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ps_protocol.errors import Backlogged
from ps_protocol.layout import ParameterSpec
from ps_protocol.messages.data import PushCall
from ps_server.core.budget import derived_limit
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.limits import Limits
from ps_server.core.partition import JobPartition
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.partitions import job_spec, stage, work_once
from tests.tools.partitions import push as one_push
from tests.tools.raw_worker import RawWorker, vector_job

BUCKETS, SIZE = 5, 64  # bytes of a bucket
CLOCKS = 3


def job(mode: str, workers: int, limit: int | None, start: int = 0) -> JobPartition:
    """A shard with all buckets of a job, the weights there, and every worker live that has joined at that clock."""
    vectors = tuple(ParameterSpec(f"p{i}", (SIZE // 4,), "float32", 0) for i in range(BUCKETS))
    made = JobPartition(replace(job_spec(mode, bucket_bytes=SIZE), parameters=vectors), range(BUCKETS), limit)
    for rank in range(workers):
        made.execute(AddWorker(rank, rank + 1, start))
    for bucket in made.buckets.values():
        bucket.rule.initialised = True
    return made


def push(shard: JobPartition, rank: int, clock: int, index: int) -> bool:
    """Pushes; False if there is no room."""
    try:
        stage(shard, one_push(index, clock, rank, rank + 1, payload=bytes(SIZE)))
    except Backlogged:
        return False
    return True


@given(
    mode=st.sampled_from(["sync", "ssp:0", "ssp:2", "async"]),
    workers=st.integers(1, 4),
    limit=st.sampled_from([1, SIZE, 2 * SIZE, 7 * SIZE, None]),
    dead=st.booleans(),
    start=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_with_any_budget_all_get_on_in_every_mode(
    mode: str, workers: int, limit: int | None, dead: bool, start: int, seed: int
) -> None:
    """Workers push in any order, as few as one bucket at a time; some are sent away, and nobody for ever.

    Also where all have come back at a clock that the buckets have not reached.
    """
    shard, pick = job(mode, workers, limit, start), random.Random(seed)
    clock, last = dict.fromkeys(range(workers), start + 1), start + CLOCKS
    # Each worker sticks to its order, as one whose few pushes in flight are refused does: it has nothing else to send.
    left = {rank: pick.sample(range(BUCKETS), BUCKETS) for rank in range(workers)}
    if dead and workers > 1:
        victim = pick.randrange(workers)
        for index in left.pop(victim)[: pick.randrange(BUCKETS)]:
            push(shard, victim, start + 1, index)
        shard.execute(RemoveWorker(victim, victim + 1))
    while any(clock[rank] <= last for rank in left):
        moved = False
        for rank in pick.sample(sorted(left), len(left)):
            if clock[rank] > last:
                continue
            if left[rank] and push(shard, rank, clock[rank], left[rank][0]):
                left[rank].pop(0)
                moved = True
            if not left[rank] and all(
                shard.units[i].admit_all([(rank, clock[rank])])[0].admitted for i in range(BUCKETS)
            ):
                clock[rank] += 1
                left[rank] = pick.sample(range(BUCKETS), BUCKETS)
                moved = True
                if clock[rank] > last:
                    shard.execute(RemoveWorker(rank, rank + 1))
        # Beyond the limit there is at most what comes next, one a bucket; and what has shown that updates were empty.
        assert shard.staged_bytes <= shard.staged_limit + (1 + (start > 0)) * BUCKETS * SIZE
        for index in pick.sample(range(BUCKETS), BUCKETS):
            while pick.random() < 0.7 and work_once(shard, index):
                moved = True
        if not moved:
            moved = any(work_once(shard, index) for index in range(BUCKETS))
        assert moved, f"stuck at clocks {clock}, {left} left"


def test_in_sync_all_but_the_one_that_is_waited_for_are_held_to_the_budget() -> None:
    shard = job("sync", 3, 2 * SIZE)
    assert push(shard, 1, 1, 0)
    assert push(shard, 2, 1, 1)
    assert not push(shard, 1, 1, 2)
    assert not push(shard, 2, 1, 0)
    assert all(push(shard, 0, 1, index) for index in range(BUCKETS)), "all wait for worker 0: it is never sent away"
    assert work_once(shard, 0)  # worker 0's
    assert work_once(shard, 0)  # worker 1's, which was held back for it
    assert push(shard, 2, 1, 0), "now it comes next"


def test_unless_a_limit_says_otherwise_the_budget_grows_with_the_job() -> None:
    assert derived_limit(1000, 16, 4) == 1000, "as much as the weights"
    assert job("sync", 4, None).staged_limit == 2 * 4 * SIZE, "at least two buckets for each worker"
    assert job("sync", 4, 100).staged_limit == 100


def test_workers_that_are_sent_away_come_back_and_the_result_is_exact(make_cluster: Callable[..., Cluster]) -> None:
    workers, steps, vectors = 3, 6, 8
    cluster = make_cluster(shards=2, limits=Limits(staged_bytes=1))
    refused = 'ps_push_refused_total{job="default",reason="BACKLOGGED"}'

    def train(rank: int) -> torch.Tensor:
        model = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(vectors))
        with cluster.connect("sync", rank, workers, transport="grpc") as session:
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = session.prepare(model, plain, bucket_bytes=SIZE)
            for step in range(steps):
                if step == 0 and rank == 0:  # the others come first: all that they push waits for this one
                    until(lambda: sum(scrape(s.metrics_address).get(refused, 0) for s in cluster.servers) > 0)
                for parameter in model:
                    parameter.grad = torch.full_like(parameter, float(rank))
                optimizer.step()
            return torch.cat([parameter.detach().clone() for parameter in model])

    for weights in in_parallel(workers, train):
        assert torch.equal(weights, torch.full((16 * vectors,), -float(steps)))


def test_a_refused_push_is_not_kept(make_cluster: Callable[..., Cluster]) -> None:
    """What is refused is megabytes: it is gone with its call, and waits for no collector of cycles."""
    cluster = make_cluster(shards=1, limits=Limits(staged_bytes=1), lease=120.0)  # nobody sends a heartbeat
    spec = vector_job("refused", "sync", cells=32, world_size=2)
    with RawWorker(cluster.address, spec, 0) as first, RawWorker(cluster.address, spec, 1) as second:
        first.initialise()
        second.send(second.message(0, 1))  # waits for the first worker's, and takes all the room
        gc.collect()
        before = _pushes()
        gc.disable()
        try:
            for _ in range(5):
                with pytest.raises(Backlogged):
                    second.send(second.message(1, 1))
            until(lambda: _pushes() <= before, "the end of every push")
        finally:
            gc.enable()


def _pushes() -> int:
    return sum(type(held) is PushCall for held in gc.get_objects())
