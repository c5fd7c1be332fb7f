"""One job's buckets on one shard, without its threads: a test does their work by hand."""

from __future__ import annotations

from ps_server.core.commands import AddWorker
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from tests.simulation.simulator import initial, job_spec, stage


def work(job: JobPartition, index: int) -> None:
    """Does everything there is to do on one bucket."""
    bucket = job.buckets[index]
    while (item := bucket.rule.next()) is not None:
        if isinstance(item, Add):
            bucket.weights.add(item.contribution)
        else:
            bucket.weights.step()
        job.done(index, item)


def running(mode: str = "sync", workers: int = 1, **more: object) -> JobPartition:
    """A job on one shard, with its initial weights, and workers 0 .. workers - 1 with incarnations from 1."""
    job = JobPartition(job_spec(mode, **more), [0, 1, 2])  # type: ignore[arg-type]
    for rank in range(workers):
        job.execute(AddWorker(rank, rank + 1, 0))
    for index in job.buckets:
        stage(job, initial(index))
    return job
