"""The coordinator's service for shards and operators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.v1 import cluster_pb2, cluster_pb2_grpc
from ps_protocol.versions import check_shard_version
from ps_runtime.pools import Pool
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.statistics import ShardStatistics
from ps_server.rpc import view_messages
from ps_server.rpc.call_limits import caller_name, in_pool, may_see, what_the_caller_sees
from ps_server.rpc.streams import GrpcCall, ResponseStream, Send
from ps_server.rpc.views import Views, ViewStream


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):  # type: ignore[misc,unused-ignore]
    """The coordinator's methods for shards and operators.

    views:   makes the answers for watchers
    senders: the threads that send them
    """

    NAME = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name

    def __init__(self, coordinator: Coordinator, views: Views, senders: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._views = views
        self._senders = senders
        self._pool = Pool(max(4, coordinator.shard_directory.count), "status")
        setattr(self, "WatchStatus", in_pool(self._watch_status, None, non_blocking=True))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, server)

    def stop(self) -> None:
        """Ends the threads that query shards. No call is answered afterwards."""
        self._pool.shutdown()

    def RegisterShard(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_shard_version(request.protocol_version)
        self._coordinator.shard_directory.register(
            *(request.index, request.address, request.metrics_address, request.pid, request.process),
            restart_count=request.restart_count,
            memory_place=request.memory_place,
        )
        return cluster_pb2.RegisterShardResponse(
            shard_count=self._coordinator.shard_directory.count, stopping=self._coordinator.stopping
        )

    def ReportShardEnd(self, request: Any, context: grpc.ServicerContext) -> Any:
        if not request.process:
            raise InvalidRequest("a report of a shard's end names its process, got none")
        known = self._coordinator.shard_directory.report_end(request.index, request.process)
        return cluster_pb2.ReportShardEndResponse(known=known)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        shards = sorted(self._coordinator.shards().items())
        jobs = self._coordinator.statistics().jobs
        answers = self._pool.map(_ask_statistics, (shard for _, shard in shards))
        return cluster_pb2.GetStatusResponse(
            coordinator=self._views.about(),
            shards=[view_messages.shard_status(shard, statistics, 0.0, may_see) for shard, statistics in answers],
            jobs=[view_messages.job_status(job) for name, job in sorted(jobs.items()) if may_see(name)],
        )

    def _watch_status(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        stream = ResponseStream(send, GrpcCall(context), self._senders)
        ViewStream(self._views, stream, what_the_caller_sees(), request, caller_name()).begin()


def _ask_statistics(shard: RegisteredShard) -> tuple[RegisteredShard, ShardStatistics | None]:
    try:
        return shard, shard.api.statistics()
    except PSError:
        return shard, None
