"""Where protobuf messages become the server's values, and back. No other module of the server reads a message's fields
or knows the generated classes, but for the stubs and servicers that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ps_protocol.convert import consistency_message, duration, job_spec_message, seconds
from ps_protocol.job import JobSpec
from ps_protocol.v1 import cluster_pb2, jobs_pb2, membership_pb2, rounds_pb2, shard_pb2, types_pb2
from ps_server.coordinator.rounds import ExchangeRequest, Standing
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.membership import JoinRequest, JoinResult
from ps_server.core.snapshot import Part, ShardSnapshot, VersionRange
from ps_server.core.statistics import JobStatistics, ShardJobStatistics, ShardStatistics, Wait, WorkerStatistics
from ps_server.rpc.lease_messages import loader_status

VALUES_BYTES = 8 * 2**20  # of values in one message: what several workers gave may be more than a message may have

# -- control ---------------------------------------------------------------------------------------------------------


def create_job_request(spec: JobSpec, buckets: list[int]) -> shard_pb2.CreateJobRequest:
    """Asks a shard to make room."""
    return shard_pb2.CreateJobRequest(spec=job_spec_message(spec), buckets=buckets)


def add_worker_request(
    job: str, rank: int, incarnation: int, clock: int | None, key: bytes
) -> shard_pb2.AddWorkerRequest:
    """Asks a shard to count a worker."""
    worker = types_pb2.WorkerIdentity(job=job, rank=rank, incarnation=incarnation, lease_key=key)
    return shard_pb2.AddWorkerRequest(worker=worker, clock=clock)


def remove_worker_request(job: str, rank: int, incarnation: int) -> shard_pb2.RemoveWorkerRequest:
    """Asks a shard to stop counting a worker."""
    worker = types_pb2.WorkerIdentity(job=job, rank=rank, incarnation=incarnation)
    return shard_pb2.RemoveWorkerRequest(worker=worker)


def join_request(request: membership_pb2.JoinRequest) -> JoinRequest:
    """Returns what a process asks for that wants to join."""
    where, launch = (request.pid, request.host, request.metrics_address), request.launch
    return JoinRequest(
        *(*where, request.previous_incarnation or None, request.clock, request.request_id),
        launch=launch.name,
        take_over=launch.takeover,
        waited=max(0.0, seconds(request.wait_duration)),
        launch_ranks=range(launch.first_rank, launch.first_rank + launch.rank_count),
    )


def join_response(job: str, result: JoinResult, lease: float, where: types_pb2.ShardMap) -> membership_pb2.JoinResponse:
    """A worker's place."""
    member, state = result.member, None
    if result.state is not None:
        clock, content = result.state
        state = membership_pb2.WorkerState(clock=clock, content=content)
    return membership_pb2.JoinResponse(
        worker=types_pb2.WorkerIdentity(
            job=job, rank=member.rank, incarnation=member.incarnation, lease_key=member.key
        ),
        clock=result.clock,
        lease_duration=duration(lease),
        shard_map=where,
        restore_count=result.restore_count,
        worker_state=state,
    )


def gather_request(request: rounds_pb2.GatherValuesRequest) -> ExchangeRequest:
    """What a worker gives to a round."""
    worker = request.worker
    who = worker.rank, worker.incarnation
    return ExchangeRequest(*who, request.round, request.clock, request.value, worker.lease_key)


def gather_responses(standing: Standing) -> Iterator[rounds_pb2.GatherValuesResponse]:
    """How a round stands. Its values in as many messages as they need, of which the last says that they are all."""
    response = rounds_pb2.GatherValuesResponse(
        round=standing.number, awaited_ranks=standing.waiting_for, step_wanted=standing.step_wanted
    )
    size = 0
    for rank, value in standing.found.values if standing.found is not None else ():
        if response.values and size + len(value) > VALUES_BYTES:
            yield response
            response, size = rounds_pb2.GatherValuesResponse(round=standing.number), 0
        response.values.add(rank=rank, value=value)
        size += len(value)
    if standing.found is not None:
        response.complete, response.refusal = True, standing.found.refused
    yield response


def begin_snapshot_request(job: str, name: str, clock: int | None) -> shard_pb2.BeginSnapshotRequest:
    """Asks a shard to take a checkpoint."""
    return shard_pb2.BeginSnapshotRequest(job=job, checkpoint=name, clock=clock)


def await_snapshot_request(job: str, name: str) -> shard_pb2.AwaitSnapshotRequest:
    """Asks a shard whether its part is on disk."""
    return shard_pb2.AwaitSnapshotRequest(job=job, checkpoint=name)


def await_snapshot_response(captured: ShardSnapshot) -> shard_pb2.AwaitSnapshotResponse:
    """Says that it is."""
    part = captured.part
    return shard_pb2.AwaitSnapshotResponse(
        file=part.file,
        size_bytes=part.bytes,
        sha256=bytes.fromhex(part.sha256),
        versions=_versions_message(captured.extent),
        stall_duration=duration(captured.held_up),
    )


def captured(response: shard_pb2.AwaitSnapshotResponse) -> ShardSnapshot:
    """A shard's part."""
    part = Part(response.file, response.size_bytes, response.sha256.hex())
    return ShardSnapshot(part, _versions(response.versions), seconds(response.stall_duration))


def _versions_message(versions: VersionRange) -> shard_pb2.VersionRange:
    return shard_pb2.VersionRange(
        min_version=versions.version_min, max_version=versions.version_max, clocks=versions.clocks
    )


def _versions(message: shard_pb2.VersionRange) -> VersionRange:
    return VersionRange(message.min_version, message.max_version, dict(message.clocks))


def shard_job_status(name: str, job: ShardJobStatistics) -> shard_pb2.ShardJobStatus:
    """How a job is on a shard."""
    return shard_pb2.ShardJobStatus(
        job=name,
        bucket_count=job.bucket_count,
        parameter_bytes=job.parameter_bytes,
        optimizer_bytes=job.optimizer_bytes,
        staged_bytes=job.staged_bytes,
        versions=_versions_message(VersionRange(job.version_min, job.version_max, dict(job.clocks))),
        waits=[
            shard_pb2.WaitStatus(
                rank=wait.rank,
                clock=wait.clock,
                bucket_count=wait.bucket_count,
                awaited_ranks=sorted(wait.waiting_for),
                reason=wait.reason,
                wait_duration=duration(wait.seconds),
            )
            for wait in job.waits
        ],
    )


def restore_job_request(
    spec: JobSpec, buckets: list[int], name: str, last_incarnation: int
) -> shard_pb2.RestoreJobRequest:
    """Asks a shard to go on from a checkpoint."""
    return shard_pb2.RestoreJobRequest(
        spec=job_spec_message(spec), buckets=buckets, checkpoint=name, last_incarnation=last_incarnation
    )


def restore_job_response(reached: VersionRange) -> shard_pb2.RestoreJobResponse:
    """Says how far the checkpoint is."""
    return shard_pb2.RestoreJobResponse(versions=_versions_message(reached))


def restored(response: shard_pb2.RestoreJobResponse) -> VersionRange:
    """How far the checkpoint is."""
    return _versions(response.versions)


def shard_statistics(response: shard_pb2.GetShardStatusResponse) -> ShardStatistics:
    """What a shard holds."""
    return ShardStatistics({job.job: _shard_job(job) for job in response.jobs})


def _shard_job(status: shard_pb2.ShardJobStatus) -> ShardJobStatistics:
    waits = tuple(
        Wait(
            wait.rank,
            wait.clock,
            wait.bucket_count,
            frozenset(wait.awaited_ranks),
            wait.reason,
            seconds(wait.wait_duration),
        )
        for wait in status.waits
    )
    return ShardJobStatistics(
        bucket_count=status.bucket_count,
        parameter_bytes=status.parameter_bytes,
        optimizer_bytes=status.optimizer_bytes,
        staged_bytes=status.staged_bytes,
        version_min=status.versions.min_version,
        version_max=status.versions.max_version,
        clocks=dict(status.versions.clocks),
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


def shard_map(shards: Mapping[int, RegisteredShard], placement: Sequence[int]) -> types_pb2.ShardMap:
    """Where the shards are, and which bucket is on which."""
    return types_pb2.ShardMap(
        shards=[types_pb2.ShardInfo(index=index, address=shard.address) for index, shard in sorted(shards.items())],
        bucket_shards=placement,
    )


def job_status(job: JobStatistics) -> cluster_pb2.JobStatus:
    """How a job is."""
    status = cluster_pb2.JobStatus(
        name=job.name,
        consistency=consistency_message(job.consistency),
        world_size=job.world_size,
        started=job.started,
        parameter_bytes=job.parameter_bytes,
        bucket_count=job.buckets,
        imbalance=job.imbalance,
        restore_count=job.restore_count,
        lost_step_count=job.lost_steps,
        redone_step_count=job.redone_steps,
        rejoining_ranks=job.rejoining,
        workers=[_worker_status(worker) for worker in job.workers],
        loaders=[loader_status(loader, progress) for loader, progress in job.loaders.items()],
    )
    if job.checkpoints is not None and job.checkpoints.name is not None:
        status.last_checkpoint.name, status.last_checkpoint.clock = job.checkpoints.name, job.checkpoints.clock
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
        lease_duration=duration(worker.lease_left),
    )
    if worker.since:
        status.join_time.FromMilliseconds(int(worker.since * 1e3))
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


def plain(message: Message) -> dict[str, Any]:
    """A message as plain data, by the names of its fields: durations in seconds, times as text, None where not set."""
    return {
        field.name: _plain(getattr(message, field.name))
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Duration):
        return seconds(value)
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
