"""One job on one shard, without threads: a test does its work by hand, or the shard does it in the calls."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from ps_protocol.job import JobSpec
from ps_server.core.commands import AddWorker
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from tests.simulation.simulator import call_of, initial, job_spec, stage


def work_once(job: JobPartition, index: int) -> bool:
    """Does what comes next on one bucket; False if there is nothing to do."""
    bucket = job.buckets[index]
    item = bucket.rule.next()
    if item is None:
        return False
    if isinstance(item, Add):
        bucket.weights.add(item.contribution)
    else:
        bucket.weights.step()
    job.done(index, item)
    return True


def work(job: JobPartition, index: int) -> None:
    """Does everything there is to do on one bucket."""
    while work_once(job, index):
        pass


def running(mode: str = "sync", workers: int = 1, *, spec: JobSpec | None = None, **limits: float) -> JobPartition:
    """A job on one shard, with its initial weights, and workers 0 .. workers - 1 with incarnations from 1.

    spec:   another job than `job_spec(mode)`, with the same buckets
    limits: staged_limit and norm_limit of the partition
    """
    job = JobPartition(spec or job_spec(mode), [0, 1, 2], **limits)  # type: ignore[arg-type]
    for rank in range(workers):
        job.execute(AddWorker(rank, rank + 1, 0))
    for index in job.buckets:
        stage(job, initial(index))
    return job


def lone_shard(
    mode: str = "sync", workers: int = 2, *, spec: JobSpec | None = None, principal_limit: float = math.inf
) -> Shard:
    """A shard that works without threads, with a job like that of `running`; `spec`: another job."""
    made = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), principal_limit=principal_limit)
    made.create_job(spec or job_spec(mode), [0, 1, 2])
    for rank in range(workers):
        made.add_worker("sums", rank, rank + 1, 0)
    for index in range(3):
        made.push(call_of(initial(index)))
    return made
