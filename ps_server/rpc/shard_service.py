"""Serves what the coordinator asks of a shard."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import grpc

from ps_protocol.convert import job_spec
from ps_protocol.v1 import control_pb2, control_pb2_grpc
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.core.validation import check_job_spec
from ps_server.rpc import convert, lease_messages
from ps_server.rpc.call_limits import may_see
from ps_server.shard.job import HostedJob
from ps_server.shard.shard import Shard

AWAIT_SECONDS = 5.0


class ShardService(control_pb2_grpc.ShardServiceServicer):  # type: ignore[misc,unused-ignore]
    """What the coordinator asks of a shard."""

    def __init__(self, shard: Shard, limits: Limits = DEFAULTS) -> None:
        self._shard = shard
        self._limits = limits

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        control_pb2_grpc.add_ShardServiceServicer_to_server(self, server)

    def CreateJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = job_spec(request.spec)
        check_job_spec(spec, self._limits)
        self._shard.create_job(spec, list(request.buckets))
        return control_pb2.CreateJobResponse()

    def DropJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._shard.drop_job(request.job)
        return control_pb2.DropJobResponse()

    def AdmitWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        clock = request.clock if request.HasField("clock") else None
        frontier = self._shard.admit(request.job, request.rank, request.incarnation, clock, request.lease_key)
        return control_pb2.AdmitWorkerResponse(frontier=frontier)

    def RetireWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._shard.retire(request.job, request.rank, request.incarnation)
        return control_pb2.RetireWorkerResponse()

    def GetCommittedData(self, request: Any, context: grpc.ServicerContext) -> Any:
        return lease_messages.committed_response(*self._shard.committed(request.job))

    def BeginCheckpoint(self, request: Any, context: grpc.ServicerContext) -> Any:
        clock = request.clock if request.HasField("clock") else None
        self._shard.begin_checkpoint(request.job, request.name, clock)
        return control_pb2.BeginCheckpointResponse()

    def AwaitCheckpoint(self, request: Any, context: grpc.ServicerContext) -> Any:
        captured = self._shard.await_checkpoint(request.job, request.name, AWAIT_SECONDS)
        return convert.await_checkpoint_response(captured)

    def RestoreJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = job_spec(request.spec)
        check_job_spec(spec, self._limits)
        reached = self._shard.restore_job(spec, list(request.buckets), request.name, request.last_incarnation)
        return convert.restore_job_response(reached)

    def GetShardStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        jobs = [_shard_job_status(name, job) for name, job in sorted(self._shard.jobs().items()) if may_see(name)]
        return control_pb2.GetShardStatusResponse(jobs=jobs)


def _shard_job_status(name: str, job: HostedJob) -> Any:
    now = time.monotonic()
    with job.lock:
        low, high = job.state.versions()
        status = control_pb2.ShardJobStatus(
            job=name,
            bucket_count=len(job.buckets),
            parameter_bytes=job.state.parameter_bytes,
            optimizer_bytes=job.state.optimizer_bytes,
            staged_bytes=job.state.staged_bytes,
            version_min=low,
            version_max=high,
            clocks=job.state.clocks(),
        )
        waits: dict[int, Any] = {}
        for bucket in job.buckets.values():
            for waiter in bucket.waiters:
                wait = waits.setdefault(waiter.pull.rank, control_pb2.WaitStatus(rank=waiter.pull.rank))
                wait.clock = waiter.pull.clock
                wait.bucket_count += 1
                wait.waiting_for[:] = sorted({*wait.waiting_for, *waiter.verdict.waiting_for})
                wait.reason = waiter.verdict.reason
                wait.waited.FromTimedelta(timedelta(seconds=now - waiter.pull.since))
    status.waits.extend(wait for _, wait in sorted(waits.items()))
    return status
