"""A large job that is no longer on a shard takes no memory there, whatever the collector of Python does by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_server.shard.hosted import COLLECTED_BYTES
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import OwnThreads
from tests.tools.cluster import until
from tests.tools.raw_worker import vector_job

LARGE = replace(vector_job("job", "sync", COLLECTED_BYTES // 4, 1), bucket_bytes=COLLECTED_BYTES // 4)
SMALL = replace(vector_job("job", "sync", COLLECTED_BYTES // 32, 1), bucket_bytes=COLLECTED_BYTES // 32)


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(ShardMetrics(CollectorRegistry()), OwnThreads())
    gc.disable()
    yield shard
    gc.enable()
    shard.stop()


def weights_of(shard: Shard) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(bucket.unit.weights.flat) for bucket in shard.jobs()["job"].buckets.values()]


def dropped(shard: Shard) -> None:
    """It has ended."""
    shard.drop_job("job", "1")


def replaced(shard: Shard) -> None:
    """A later run of it is made, whose coordinator could not drop the one before."""
    shard.create_job(LARGE, range(4), "2")


@pytest.mark.parametrize("goes", [dropped, replaced])
def test_a_job_gives_its_memory_back_when_it_goes(shard: Shard, goes: Callable[[Shard], None]) -> None:
    shard.create_job(LARGE, range(4), "1")
    before = weights_of(shard)
    assert len(before) == 4
    goes(shard)
    # A thread of the shard may look at the job at this moment.
    until(lambda: [weights() for weights in before] == [None] * 4, "the end of its weights")


def test_small_jobs_give_it_back_together(shard: Shard) -> None:
    """No job causes a search through all objects of the process by itself: all threads wait for one."""
    before = []
    for run in range(10):
        shard.create_job(SMALL, range(4), str(run))
        before += weights_of(shard)
        shard.drop_job("job", str(run))
        if run == 1:
            assert sum(weights() is not None for weights in before) >= 4
    until(lambda: sum(weights() is not None for weights in before) <= 16, "the end of most jobs' weights")
