"""Where protobuf messages become the server's values, and back. No other module of the server reads a message's fields
or knows the generated classes, but for the stubs and servicers that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ps_protocol.convert import job_spec_message
from ps_protocol.job import JobSpec
from ps_protocol.v1 import cluster_pb2, jobs_pb2, membership_pb2, rounds_pb2, shard_pb2, types_pb2
from ps_server.coordinator.rounds import ExchangeRequest, Standing
from ps_server.core.membership import JoinRequest, JoinResult
from ps_server.core.snapshot import Part, ShardSnapshot, VersionRange
from ps_server.core.statistics import JobStatistics, ShardJobStatistics, ShardStatistics, Wait, WorkerStatistics
from ps_server.rpc.lease_messages import loader_data, loader_status

VALUES_BYTES = 8 * 2**20  # of values in one message: what several workers gave may be more than a message may have

# -- control ---------------------------------------------------------------------------------------------------------


def create_job_request(spec: JobSpec, buckets: list[int]) -> shard_pb2.CreateJobRequest:
    """Asks a shard to make room."""
    return shard_pb2.CreateJobRequest(spec=job_spec_message(spec), buckets=buckets)


def admit_request(job: str, rank: int, incarnation: int, clock: int | None, key: bytes) -> shard_pb2.AddWorkerRequest:
    """Asks a shard to count a worker."""
    return shard_pb2.AddWorkerRequest(job=job, rank=rank, incarnation=incarnation, clock=clock, lease_key=key)


def retire_request(job: str, rank: int, incarnation: int) -> shard_pb2.RemoveWorkerRequest:
    """Asks a shard to stop counting a worker."""
    return shard_pb2.RemoveWorkerRequest(job=job, rank=rank, incarnation=incarnation)


def join_request(request: membership_pb2.JoinRequest) -> JoinRequest:
    """Returns what a process asks for that wants to join."""
    where = request.pid, request.host, request.metrics_address
    first, count = request.launch_first_rank, request.launch_rank_count
    return JoinRequest(
        *(*where, request.previous_incarnation or None, request.clock, request.attempt),
        launch=request.launch,
        take_over=request.take_over,
        waited=max(0.0, request.waited.ToNanoseconds() / 1e9),
        launch_ranks=range(first, first + count),
    )


def join_response(result: JoinResult, lease: float, where: types_pb2.ShardMap) -> membership_pb2.JoinResponse:
    """A worker's place."""
    member = result.member
    response = membership_pb2.JoinResponse(
        rank=member.rank,
        incarnation=member.incarnation,
        clock=result.clock,
        lease_key=member.key,
        shard_map=where,
        restore_count=result.restore_count,
    )
    response.lease.FromNanoseconds(int(lease * 1e9))
    if result.state is not None:
        response.worker_state_clock, response.worker_state = result.state
    return response


def exchange_request(request: rounds_pb2.GatherValuesRequest) -> ExchangeRequest:
    """What a worker gives to a round."""
    who = request.rank, request.incarnation
    return ExchangeRequest(*who, request.number, request.clock, request.value, request.lease_key)


def exchange_responses(standing: Standing) -> Iterator[rounds_pb2.GatherValuesResponse]:
    """How a round stands. Its values in as many messages as they need, of which the last says that they are all."""
    response = rounds_pb2.GatherValuesResponse(
        number=standing.number, waiting_for=standing.waiting_for, step_wanted=standing.step_wanted
    )
    size = 0
    for rank, value in standing.found.values if standing.found is not None else ():
        if response.values and size + len(value) > VALUES_BYTES:
            yield response
            response, size = rounds_pb2.GatherValuesResponse(number=standing.number), 0
        response.values.add(rank=rank, value=value)
        size += len(value)
    if standing.found is not None:
        response.complete, response.refused = True, standing.found.refused
    yield response


def begin_checkpoint_request(job: str, name: str, clock: int | None) -> shard_pb2.BeginSnapshotRequest:
    """Asks a shard to take a checkpoint."""
    return shard_pb2.BeginSnapshotRequest(job=job, name=name, clock=clock)


def await_checkpoint_request(job: str, name: str) -> shard_pb2.AwaitSnapshotRequest:
    """Asks a shard whether its part is on disk."""
    return shard_pb2.AwaitSnapshotRequest(job=job, name=name)


def await_checkpoint_response(captured: ShardSnapshot) -> shard_pb2.AwaitSnapshotResponse:
    """Says that it is."""
    part, reached = captured.part, captured.extent
    response = shard_pb2.AwaitSnapshotResponse(
        file=part.file,
        bytes=part.bytes,
        sha256=bytes.fromhex(part.sha256),
        version_min=reached.version_min,
        version_max=reached.version_max,
        clocks=reached.clocks,
    )
    response.held_up.FromNanoseconds(int(captured.held_up * 1e9))
    return response


def captured(response: shard_pb2.AwaitSnapshotResponse) -> ShardSnapshot:
    """A shard's part."""
    part = Part(response.file, response.bytes, bytes(response.sha256).hex())
    reached = VersionRange(response.version_min, response.version_max, dict(response.clocks))
    return ShardSnapshot(part, reached, response.held_up.ToNanoseconds() / 1e9)


def shard_job_status(name: str, job: ShardJobStatistics) -> shard_pb2.ShardJobStatus:
    """How a job is on a shard."""
    status = shard_pb2.ShardJobStatus(
        job=name,
        bucket_count=job.bucket_count,
        parameter_bytes=job.parameter_bytes,
        optimizer_bytes=job.optimizer_bytes,
        staged_bytes=job.staged_bytes,
        version_min=job.version_min,
        version_max=job.version_max,
        clocks=job.clocks,
    )
    for wait in job.waits:
        message = status.waits.add(
            rank=wait.rank,
            clock=wait.clock,
            bucket_count=wait.bucket_count,
            waiting_for=sorted(wait.waiting_for),
            reason=wait.reason,
        )
        message.waited.FromNanoseconds(int(wait.seconds * 1e9))
    return status


def restore_job_request(
    spec: JobSpec, buckets: list[int], name: str, last_incarnation: int
) -> shard_pb2.RestoreJobRequest:
    """Asks a shard to go on from a checkpoint."""
    return shard_pb2.RestoreJobRequest(
        spec=job_spec_message(spec), buckets=buckets, name=name, last_incarnation=last_incarnation
    )


def restore_job_response(reached: VersionRange) -> shard_pb2.RestoreJobResponse:
    """Says how far the checkpoint is."""
    return shard_pb2.RestoreJobResponse(
        version_min=reached.version_min, version_max=reached.version_max, clocks=reached.clocks
    )


def restored(response: shard_pb2.RestoreJobResponse) -> VersionRange:
    """How far the checkpoint is."""
    return VersionRange(response.version_min, response.version_max, dict(response.clocks))


def shard_statistics(response: shard_pb2.GetShardStatusResponse) -> ShardStatistics:
    """What a shard holds."""
    return ShardStatistics({job.job: _shard_job(job) for job in response.jobs})


def _shard_job(status: shard_pb2.ShardJobStatus) -> ShardJobStatistics:
    waits = tuple(
        Wait(
            wait.rank,
            wait.clock,
            wait.bucket_count,
            frozenset(wait.waiting_for),
            wait.reason,
            wait.waited.ToNanoseconds() / 1e9,
        )
        for wait in status.waits
    )
    return ShardJobStatistics(
        bucket_count=status.bucket_count,
        parameter_bytes=status.parameter_bytes,
        optimizer_bytes=status.optimizer_bytes,
        staged_bytes=status.staged_bytes,
        version_min=status.version_min,
        version_max=status.version_max,
        clocks=dict(status.clocks),
        waits=waits,
        waiting_pulls=sum(wait.bucket_count for wait in waits),
    )


def checkpoint_job_request(job: str) -> jobs_pb2.CheckpointJobRequest:
    """Asks the coordinator for a checkpoint."""
    return jobs_pb2.CheckpointJobRequest(job=job)


def drop_job_request(job: str) -> shard_pb2.DropJobRequest:
    """Asks a shard to forget a job."""
    return shard_pb2.DropJobRequest(job=job)


def register_shard_request(
    index: int, address: str, metrics_address: str, pid: int, process: int
) -> cluster_pb2.RegisterShardRequest:
    """Makes a shard known."""
    return cluster_pb2.RegisterShardRequest(
        index=index, address=address, metrics_address=metrics_address, pid=pid, process=process
    )


def watch_response(ranks: list[int], world_size: int, started: bool) -> membership_pb2.WatchResponse:
    """Who takes part now."""
    return membership_pb2.WatchResponse(ranks=ranks, world_size=world_size, started=started)


def shard_map(addresses: dict[int, str], placement: Sequence[int]) -> types_pb2.ShardMap:
    """Where the shards are, and which bucket is on which."""
    return types_pb2.ShardMap(
        shards=[types_pb2.ShardInfo(index=index, address=address) for index, address in sorted(addresses.items())],
        bucket_shards=placement,
    )


def job_status(job: JobStatistics) -> cluster_pb2.JobStatus:
    """How a job is."""
    status = cluster_pb2.JobStatus(
        name=job.name,
        mode=job.mode,
        world_size=job.world_size,
        started=job.started,
        parameter_bytes=job.parameter_bytes,
        bucket_count=job.buckets,
        imbalance=job.imbalance,
        restore_count=job.restore_count,
        lost_steps=job.lost_steps,
        redone_steps=job.redone_steps,
        awaited=job.rejoining,
        workers=[_worker_status(worker) for worker in job.workers],
        loaders=[loader_status(loader, progress) for loader, progress in job.loaders.items()],
    )
    if job.checkpoints is not None and job.checkpoints.name is not None:
        status.checkpoint, status.checkpoint_clock = job.checkpoints.name, job.checkpoints.clock
    return status


def _worker_status(worker: WorkerStatistics) -> cluster_pb2.WorkerStatus:
    status = cluster_pb2.WorkerStatus(
        rank=worker.rank,
        incarnation=worker.incarnation,
        clock=worker.clock,
        pid=worker.pid,
        host=worker.host,
        metrics_address=worker.metrics_address,
        launch=worker.launch,
    )
    if worker.since:
        status.since.FromMilliseconds(int(worker.since * 1e3))
    status.lease_left.FromNanoseconds(int(worker.lease_left * 1e9))
    return status


def shard_status_request() -> shard_pb2.GetShardStatusRequest:
    """Asks a shard what it holds."""
    return shard_pb2.GetShardStatusRequest()


def status_request() -> cluster_pb2.GetStatusRequest:
    """Asks the coordinator what is running."""
    return cluster_pb2.GetStatusRequest()


def end_job_request(job: str) -> jobs_pb2.EndJobRequest:
    """Asks the coordinator to end a job."""
    return jobs_pb2.EndJobRequest(job=job)


def status_data(response: cluster_pb2.GetStatusResponse) -> dict[str, Any]:
    """A GetStatusResponse as plain data: an object each process, and one each job."""
    processes: list[dict[str, Any]] = [
        {
            "role": "coordinator",
            "index": 0,
            "pid": response.pid,
            "address": response.address,
            "metrics": response.metrics_address,
            "shards": response.shard_count,
        }
    ]
    waits: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for shard in response.shards:
        jobs = [_shard_job_data(job) for job in shard.jobs]
        for job, found in zip(jobs, shard.jobs, strict=True):
            for wait in found.waits:
                waits.setdefault((job["job"], wait.rank), []).append(
                    {
                        "shard": shard.index,
                        "clock": wait.clock,
                        "buckets": wait.bucket_count,
                        "waiting_for": list(wait.waiting_for),
                        "reason": wait.reason,
                        "seconds": wait.waited.ToNanoseconds() / 1e9,
                    }
                )
        processes.append(
            {
                "role": "shard",
                "index": shard.index,
                "pid": shard.pid,
                "address": shard.address,
                "metrics": shard.metrics_address,
                "reachable": shard.reachable,
                "jobs": jobs,
            }
        )
    for status in response.jobs:
        processes += [
            {
                "role": "worker",
                "index": worker.rank,
                "pid": worker.pid,
                "address": worker.host,
                "metrics": worker.metrics_address,
                "job": status.name,
                "incarnation": worker.incarnation,
                "clock": worker.clock,
                "launch": worker.launch,
                "since": worker.since.ToJsonString() if worker.HasField("since") else None,
                "lease_left_seconds": worker.lease_left.ToNanoseconds() / 1e9,
                "waits": waits.get((status.name, worker.rank), []),
            }
            for worker in status.workers
        ]
    return {"processes": processes, "jobs": [_job_data(job) for job in response.jobs]}


def _shard_job_data(job: shard_pb2.ShardJobStatus) -> dict[str, Any]:
    return {
        "job": job.job,
        "buckets": job.bucket_count,
        "parameter_bytes": job.parameter_bytes,
        "optimizer_bytes": job.optimizer_bytes,
        "staged_bytes": job.staged_bytes,
        "version_min": job.version_min,
        "version_max": job.version_max,
        "clocks": {str(rank): clock for rank, clock in sorted(job.clocks.items())},
    }


def _job_data(job: cluster_pb2.JobStatus) -> dict[str, Any]:
    return {
        "name": job.name,
        "mode": job.mode,
        "world_size": job.world_size,
        "started": job.started,
        "ranks": [worker.rank for worker in job.workers],
        "parameter_bytes": job.parameter_bytes,
        "buckets": job.bucket_count,
        "imbalance": job.imbalance,
        "loaders": [loader_data(loader) for loader in job.loaders],
        "restore_count": job.restore_count,
        "lost_steps": job.lost_steps,
        "redone_steps": job.redone_steps,
        "awaited": list(job.awaited),
        "checkpoint": {"name": job.checkpoint, "clock": job.checkpoint_clock} if job.checkpoint else None,
    }
