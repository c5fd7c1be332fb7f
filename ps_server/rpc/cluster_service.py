"""Serves what shards and operators ask of the coordinator, and the health of each server."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ps_protocol.errors import PSError
from ps_protocol.v1 import control_pb2, control_pb2_grpc
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.job import CoordinatedJob
from ps_server.coordinator.shards import RegisteredShard
from ps_server.rpc import convert, lease_messages
from ps_server.rpc.call_limits import may_see

CONTROL_SERVICES = {name: service.full_name for name, service in control_pb2.DESCRIPTOR.services_by_name.items()}


class ClusterService(control_pb2_grpc.ClusterServiceServicer):  # type: ignore[misc,unused-ignore]
    """What shards and operators ask of the coordinator."""

    def __init__(self, coordinator: Coordinator, address: str, metrics_address: str) -> None:
        self._coordinator = coordinator
        self._address = address
        self._metrics_address = metrics_address
        self._pool = ThreadPoolExecutor(max(4, coordinator.shard_count), "status")

    def RegisterShard(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._coordinator.register_shard(
            request.index, request.address, request.metrics_address, request.pid, request.process
        )
        return control_pb2.RegisterShardResponse(
            shard_count=self._coordinator.shard_count, stopping=self._coordinator.stopping
        )

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        shards = sorted(self._coordinator.shards().items())
        answers = list(self._pool.map(lambda item: _ask_status(*item), shards))
        for shard in answers:  # the shards have told the coordinator, which may see everything
            seen = [job for job in shard.jobs if may_see(job.job)]
            del shard.jobs[:]
            shard.jobs.extend(seen)
        return control_pb2.GetStatusResponse(
            address=self._address,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
            shard_count=self._coordinator.shard_count,
            shards=answers,
            jobs=[_job_status(job) for name, job in sorted(self._coordinator.jobs().items()) if may_see(name)],
        )


def _ask_status(index: int, shard: RegisteredShard) -> Any:
    status = control_pb2.ShardStatus(
        index=index, address=shard.address, metrics_address=shard.metrics_address, pid=shard.pid
    )
    try:
        status.jobs.extend(convert.shard_job_status(job) for job in shard.api.statistics().jobs.values())
        status.reachable = True
    except PSError:
        status.reachable = False
    return status


def _job_status(job: CoordinatedJob) -> Any:
    _, world_size, started = job.roster()
    status = control_pb2.JobStatus(
        name=job.spec.name,
        mode=str(job.spec.consistency),
        world_size=world_size,
        started=started,
        parameter_bytes=job.bytes,
        bucket_count=len(job.placement),
        imbalance=job.imbalance,
        restore_count=job.restore_count,
        lost_steps=job.lost_steps,
        redone_steps=job.redone_steps,
        awaited=sorted(job.membership.awaited),
    )
    last = job.checkpoints.last if job.checkpoints is not None else None
    if last is not None:
        status.checkpoint, status.checkpoint_clock = last.name, last.clock
    now = time.monotonic()
    for member in job.members():
        worker = status.workers.add(
            rank=member.rank,
            incarnation=member.incarnation,
            clock=member.clock,
            pid=member.pid,
            host=member.host,
            metrics_address=member.metrics_address,
            launch=member.launch,
        )
        if member.since:
            worker.since.FromMilliseconds(int(member.since * 1e3))
        worker.lease_left.FromTimedelta(timedelta(seconds=max(0.0, member.expires - now)))
    status.loaders.extend(lease_messages.loader_status(loader, how) for loader, how in job.data.progress().items())
    return status


def add_health(server: grpc.Server, pool: ThreadPoolExecutor, services: list[str]) -> health.HealthServicer:
    """The standard health service, which answers while pushes and pulls keep their own pools busy; and reflection."""
    servicer = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=pool)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer
