"""The view of a job of so many workers, as a coordinator sends it: no such number of processes is started for it."""

from __future__ import annotations

from typing import Any

from ps_protocol.v1 import cluster_pb2, figures_pb2, job_pb2, shard_pb2
from ps_server.rpc.plain import plain

SILENT = 17  # the rank of a worker that is silent, in jobs that have so many


def clock_of(rank: int) -> int:
    """Worker 3 is far behind the others, who are a few steps apart."""
    return 120 if rank == 3 else 180 + rank % 7


def worker(rank: int) -> cluster_pb2.WorkerStatus:
    values = [figures_pb2.LoggedValue(name=name, last=0.1483, mean=0.15) for name in ("accuracy", "loss", "lr")]
    figures = figures_pb2.WorkerFigures(step_count=150, values=values, total_step_count=400)
    figures.done_step_count = clock_of(rank)
    host = f"worker-{rank}.trainers.example.org"
    return cluster_pb2.WorkerStatus(rank=rank, clock=clock_of(rank), pid=4000 + rank, host=host, figures=figures)


def activity(rank: int) -> str:
    if rank == SILENT:
        return "silent, lease ends in 3 s"
    return "training" if rank == 3 else "waits 0.4 s for worker 3"


def shard(index: int, workers: int) -> cluster_pb2.ShardStatus:
    waits = [
        shard_pb2.WaitStatus(rank=rank, clock=clock_of(rank), awaited_ranks=[3], reason="ssp:4")
        for rank in range(workers)
        if rank != 3
    ]
    versions = shard_pb2.VersionRange(min_version=9_000, max_version=9_004)
    versions.clocks.update({rank: clock_of(rank) for rank in range(workers)})
    held = shard_pb2.ShardJobStatus(
        job="demo", bucket_count=6, parameter_bytes=50_000_000, optimizer_bytes=10**8, versions=versions, waits=waits
    )
    place = {"address": f"shard-{index}.servers.example.org:50051", "metrics_address": f"shard-{index}:9100"}
    return cluster_pb2.ShardStatus(index=index, pid=77, reachable=True, jobs=[held], **place)


def response(workers: int, shards: int = 2) -> cluster_pb2.WatchStatusResponse:
    """The view of a job of so many workers."""
    job = cluster_pb2.JobStatus(
        name="demo", world_size=workers, started=True, parameter_bytes=10**8, bucket_count=12, imbalance=1.0, run="1"
    )
    job.consistency.CopyFrom(job_pb2.Consistency(max_staleness=4))
    job.mode = "ssp:4"
    job.workers.extend(worker(rank) for rank in range(workers))
    view = cluster_pb2.JobView(
        job="demo",
        state="training",
        diagnosis="54 % of the workers' time is waiting, most of it for worker 3",
        steps_per_second=2.5 * workers,
        done_fraction=0.45,
        workers=[
            cluster_pb2.WorkerView(rank=rank, activity=activity(rank), steps_per_second=2.5) for rank in range(workers)
        ],
    )
    view.age_duration.seconds, view.left_duration.seconds, view.checkpoint_age_duration.seconds = 200, 130, 8
    made = cluster_pb2.WatchStatusResponse(jobs=[view])
    made.status.coordinator.address, made.status.coordinator.shard_count = "coordinator:50051", shards
    made.status.jobs.append(job)
    made.status.shards.extend(shard(index, workers) for index in range(shards))
    made.shards.extend(cluster_pb2.ShardView(index=index) for index in range(shards))
    return made


def seen(workers: int, shards: int = 2) -> dict[str, Any]:
    """The same as plain data."""
    return plain(response(workers, shards))
