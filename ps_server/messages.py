"""Where protobuf messages become the server's values, and back. No other module of the server reads a message's fields
or knows the generated classes, but for the stubs and servicers that carry them."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import read_message, write_message
from ps_protocol.job import HyperParameters, JobSpec
from ps_protocol.job_messages import hyper_parameters, job_spec, job_spec_message, known
from ps_protocol.v1 import control_pb2, data_pb2, job_pb2
from ps_server.capture import Captured
from ps_server.checkpoints import Part
from ps_server.core.bucket import Verdict
from ps_server.core.membership import Newcomer, Seat
from ps_server.core.pushes import Push, PushKind, SharedBucket, SharedPush, Staged
from ps_server.core.snapshot import Extent
from ps_server.lease_messages import loader_data, ranges_of

_PUSH_KINDS: dict[int, PushKind] = {
    data_pb2.PUSH_KIND_GRADIENT: PushKind.GRADIENT,
    data_pb2.PUSH_KIND_INITIAL_VALUE: PushKind.INITIAL_VALUE,
    data_pb2.PUSH_KIND_SKIP: PushKind.SKIP,
}


# -- the data path ---------------------------------------------------------------------------------------------------


def push(data: bytes) -> Push:
    """The push that the bytes of a PushRequest hold; its payload is a view into them."""
    raw, payload = read_message(data)
    header = data_pb2.PushHeader()
    _parse(header, raw)
    return Push(
        job=header.worker.job,
        rank=header.worker.rank,
        incarnation=header.worker.incarnation,
        bucket=header.bucket,
        clock=header.clock,
        kind=known(_PUSH_KINDS, header.kind, "kind of push"),
        payload=payload,
        absent=frozenset(header.absent_segments),
        groups=_group_updates(header.groups),
        key=header.worker.lease_key,
        ranges=ranges_of(header.ranges),
    )


def push_response(staged: Staged) -> bytes:
    """The bytes of the answer to a push."""
    return data_pb2.PushResponse(version=staged.version, duplicate=staged.duplicate).SerializeToString()


def attach_request(data: bytes) -> tuple[str, int, int, str, bytes, bytes]:
    """Job, rank, incarnation, location, nonce and lease key of an AttachSegmentRequest."""
    request = data_pb2.AttachSegmentRequest()
    _parse(request, data)
    worker = request.worker
    return worker.job, worker.rank, worker.incarnation, request.location, request.nonce, worker.lease_key


def shared_push(data: bytes) -> SharedPush:
    """What the bytes of a PushSharedRequest hold. Raises InvalidRequest for a bucket or a group that comes twice."""
    request = data_pb2.PushSharedRequest()
    _parse(request, data)
    return _shared_push(request)


def push_pull(data: bytes) -> tuple[SharedPush, list[int]]:
    """What is pushed and which buckets are pulled by a PushPullSharedRequest. Raises as `shared_push`."""
    request = data_pb2.PushPullSharedRequest()
    _parse(request, data)
    return _shared_push(request.push), list(request.buckets)


def _shared_push(request: data_pb2.PushSharedRequest) -> SharedPush:
    buckets = tuple(SharedBucket(b.bucket, b.skip, frozenset(b.absent_segments), b.finite) for b in request.buckets)
    if len({bucket.index for bucket in buckets}) != len(buckets):
        raise InvalidRequest("a push names each bucket at most once")
    worker, groups, ranges = request.worker, _group_updates(request.groups), ranges_of(request.ranges)
    who = worker.job, worker.rank, worker.incarnation
    return SharedPush(*who, request.clock, buckets, groups, worker.lease_key, ranges=ranges)


def shared_push_response(duplicates: int) -> bytes:
    """The bytes of the answer to a shared push."""
    return data_pb2.PushSharedResponse(duplicate_count=duplicates).SerializeToString()


def _group_updates(updates: Any) -> dict[int, HyperParameters]:
    groups: dict[int, HyperParameters] = {}
    for update in updates:
        if update.group in groups:
            raise InvalidRequest(f"group {update.group} comes twice")
        groups[update.group] = hyper_parameters(update.hyper_parameters)
    return groups


def pull(data: bytes) -> tuple[str, int, int, int, list[int], bytes]:
    """Job, rank, incarnation, clock, buckets and lease key of a PullRequest."""
    request = data_pb2.PullRequest()
    _parse(request, data)
    worker = request.worker
    return worker.job, worker.rank, worker.incarnation, request.clock, list(request.buckets), worker.lease_key


def pull_response(
    bucket: int,
    version: int,
    waited: float,
    waiting: Verdict | None,
    payload: memoryview | None,
    checkpoint: bool = False,
) -> bytes:
    """The bytes of one message of a pull's stream: a bucket, or the word that it is not admitted yet."""
    return write_message(_pull_header(bucket, version, waited, waiting, checkpoint), payload)


def shared_pull_response(
    bucket: int,
    version: int,
    waited: float,
    waiting: Verdict | None,
    payload: memoryview | None,
    checkpoint: bool = False,
) -> bytes:
    """A PullSharedResponse with one header. Joined bytes of several are one response with all of their headers."""
    header = _pull_header(bucket, version, waited, waiting, checkpoint)
    return data_pb2.PullSharedResponse(headers=[header]).SerializeToString()


def _pull_header(
    bucket: int, version: int, waited: float, waiting: Verdict | None, checkpoint: bool
) -> data_pb2.PullHeader:
    header = data_pb2.PullHeader(bucket=bucket, version=version, waited_seconds=waited, checkpoint=checkpoint)
    if waiting is not None:
        header.waiting.CopyFrom(data_pb2.WaitNotice(ranks=waiting.waiting_for, reason=waiting.reason))
    return header


def _parse(message: Any, raw: bytes | memoryview) -> None:
    try:
        message.ParseFromString(bytes(raw))
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {message.DESCRIPTOR.name}") from error


# -- control ---------------------------------------------------------------------------------------------------------


def create_job_request(spec: JobSpec, buckets: list[int]) -> control_pb2.CreateJobRequest:
    """Asks a shard to make room."""
    return control_pb2.CreateJobRequest(spec=job_spec_message(spec), buckets=buckets)


def admit_request(
    job: str, rank: int, incarnation: int, clock: int | None, key: bytes
) -> control_pb2.AdmitWorkerRequest:
    """Asks a shard to count a worker."""
    return control_pb2.AdmitWorkerRequest(job=job, rank=rank, incarnation=incarnation, clock=clock, lease_key=key)


def retire_request(job: str, rank: int, incarnation: int) -> control_pb2.RetireWorkerRequest:
    """Asks a shard to stop counting a worker."""
    return control_pb2.RetireWorkerRequest(job=job, rank=rank, incarnation=incarnation)


def newcomer(request: control_pb2.JoinJobRequest) -> Newcomer:
    """Who asks to join."""
    where = request.pid, request.host, request.metrics_address
    return Newcomer(*where, request.previous_incarnation or None, request.clock, request.attempt)


def join_response(seat: Seat, lease: float, where: job_pb2.ShardMap) -> control_pb2.JoinJobResponse:
    """A worker's place."""
    member = seat.member
    response = control_pb2.JoinJobResponse(
        rank=member.rank,
        incarnation=member.incarnation,
        clock=seat.clock,
        lease_key=member.key,
        shard_map=where,
        restore_count=seat.restore_count,
    )
    response.lease.FromNanoseconds(int(lease * 1e9))
    if seat.state is not None:
        response.worker_state_clock, response.worker_state = seat.state
    return response


def begin_checkpoint_request(job: str, name: str, clock: int | None) -> control_pb2.BeginCheckpointRequest:
    """Asks a shard to take a checkpoint."""
    return control_pb2.BeginCheckpointRequest(job=job, name=name, clock=clock)


def await_checkpoint_request(job: str, name: str) -> control_pb2.AwaitCheckpointRequest:
    """Asks a shard whether its part is on disk."""
    return control_pb2.AwaitCheckpointRequest(job=job, name=name)


def await_checkpoint_response(captured: Captured) -> control_pb2.AwaitCheckpointResponse:
    """Says that it is."""
    part, reached = captured.part, captured.extent
    response = control_pb2.AwaitCheckpointResponse(
        file=part.file,
        bytes=part.bytes,
        sha256=bytes.fromhex(part.sha256),
        version_min=reached.version_min,
        version_max=reached.version_max,
        clocks=reached.clocks,
    )
    response.held_up.FromNanoseconds(int(captured.held_up * 1e9))
    return response


def captured(response: control_pb2.AwaitCheckpointResponse) -> Captured:
    """A shard's part."""
    part = Part(response.file, response.bytes, bytes(response.sha256).hex())
    reached = Extent(response.version_min, response.version_max, dict(response.clocks))
    return Captured(part, reached, response.held_up.ToNanoseconds() / 1e9)


def restore_job_request(
    spec: JobSpec, buckets: list[int], name: str, last_incarnation: int
) -> control_pb2.RestoreJobRequest:
    """Asks a shard to go on from a checkpoint."""
    return control_pb2.RestoreJobRequest(
        spec=job_spec_message(spec), buckets=buckets, name=name, last_incarnation=last_incarnation
    )


def restore_job_response(reached: Extent) -> control_pb2.RestoreJobResponse:
    """Says how far the checkpoint is."""
    return control_pb2.RestoreJobResponse(
        version_min=reached.version_min, version_max=reached.version_max, clocks=reached.clocks
    )


def restored(response: control_pb2.RestoreJobResponse) -> Extent:
    """How far the checkpoint is."""
    return Extent(response.version_min, response.version_max, dict(response.clocks))


def progress(response: control_pb2.GetShardStatusResponse, name: str, aggregate: bool) -> int:
    """How far a job is on a shard: its highest version in sync, else its highest clock."""
    found = (
        max([job.version_max] if aggregate else job.clocks.values(), default=0)
        for job in response.jobs
        if job.job == name
    )
    return max(found, default=0)


def checkpoint_job_request(job: str) -> control_pb2.CheckpointJobRequest:
    """Asks the coordinator for a checkpoint."""
    return control_pb2.CheckpointJobRequest(job=job)


def job_spec_data(spec: JobSpec) -> dict[str, Any]:
    """A job's spec as plain data for a file."""
    return json_format.MessageToDict(job_spec_message(spec), preserving_proto_field_name=True)


def job_spec_from_data(data: Any) -> JobSpec:
    """The spec that a file holds. Raises InvalidRequest if it holds none."""
    try:
        return job_spec(json_format.ParseDict(data, job_pb2.JobSpec()))
    except json_format.ParseError as error:
        raise InvalidRequest(f"no job's spec: {error}") from None


def drop_job_request(job: str) -> control_pb2.DropJobRequest:
    """Asks a shard to forget a job."""
    return control_pb2.DropJobRequest(job=job)


def register_shard_request(
    index: int, address: str, metrics_address: str, pid: int, process: int
) -> control_pb2.RegisterShardRequest:
    """Makes a shard known."""
    return control_pb2.RegisterShardRequest(
        index=index, address=address, metrics_address=metrics_address, pid=pid, process=process
    )


def watch_response(ranks: list[int], world_size: int, started: bool) -> control_pb2.WatchJobResponse:
    """Who takes part now."""
    return control_pb2.WatchJobResponse(ranks=ranks, world_size=world_size, started=started)


def shard_map(addresses: dict[int, str], placement: list[int]) -> job_pb2.ShardMap:
    """Where the shards are, and which bucket is on which."""
    return job_pb2.ShardMap(
        shards=[job_pb2.ShardInfo(index=index, address=address) for index, address in sorted(addresses.items())],
        bucket_shards=placement,
    )


def shard_status_request() -> control_pb2.GetShardStatusRequest:
    """Asks a shard what it holds."""
    return control_pb2.GetShardStatusRequest()


def status_request() -> control_pb2.GetStatusRequest:
    """Asks the coordinator what is running."""
    return control_pb2.GetStatusRequest()


def end_job_request(job: str) -> control_pb2.EndJobRequest:
    """Asks the coordinator to end a job."""
    return control_pb2.EndJobRequest(job=job)


def status_data(response: control_pb2.GetStatusResponse) -> dict[str, Any]:
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
                "lease_left_seconds": worker.lease_left.ToNanoseconds() / 1e9,
                "waits": waits.get((status.name, worker.rank), []),
            }
            for worker in status.workers
        ]
    return {"processes": processes, "jobs": [_job_data(job) for job in response.jobs]}


def _shard_job_data(job: control_pb2.ShardJobStatus) -> dict[str, Any]:
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


def _job_data(job: control_pb2.JobStatus) -> dict[str, Any]:
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
