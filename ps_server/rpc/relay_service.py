"""Serves the readers of a relay: editions, and the status that they request first. Needs no torch."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NoReturn

import grpc

from ps_protocol.convert import AnsweringShard, consistency_message
from ps_protocol.errors import Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.messages import editions
from ps_protocol.v1 import cluster_pb2, cluster_pb2_grpc, shard_pb2
from ps_runtime.version import version
from ps_server.relay.followed import FollowedJob
from ps_server.relay.kept import KeptEdition
from ps_server.relay.relayed import Relayed
from ps_server.rpc.call_limits import caller_name, check_job, in_pool, may_see
from ps_server.rpc.feed_methods import FeedMethods
from ps_server.rpc.feed_status import feed_message
from ps_server.rpc.streams import GrpcCall, PullStream, Send


class RelayFeedService(FeedMethods):
    """Serves editions. A relay has no rows."""

    def __init__(self, relayed: Relayed, origin: AnsweringShard, threads: int) -> None:
        """threads: the most threads of each of its two pools. One begins calls, the other sends editions"""
        super().__init__(threads, "relay")
        self._relayed, self._origin = relayed, origin

    def watch_rows(self, request: bytes, context: grpc.ServicerContext, send: Send) -> NoReturn:
        raise Unsupported("a relay has no rows of tables: follow them at the servers")

    def describe_weights(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = editions.read_weights_asked(request)
        check_job(asked.job)
        return editions.write_weights_here(self._origin, self._relayed.describe(asked, caller_name()))

    def pull_edition(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = editions.read_edition_call(request)
        check_job(call.job)
        write = partial(editions.write_edition_part, self._origin.of(call.run))
        self._relayed.pull(call, PullStream(send, GrpcCall(context), self.senders, write), caller_name())


class RelayClusterService(cluster_pb2_grpc.ClusterServiceServicer):  # type: ignore[misc,unused-ignore]
    """Serves GetStatus, by which a reader finds the shards: the answer names this relay as the only one.

    address, metrics_address: of this relay
    """

    NAME = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name

    def __init__(self, relayed: Relayed, address: str, metrics_address: str) -> None:
        self._relayed = relayed
        self._about = cluster_pb2.CoordinatorStatus(
            address=address,
            metrics_address=metrics_address,
            pid=os.getpid(),
            shard_count=1,
            software_version=version(),
            upstream=relayed.upstream.servers,
        )
        setattr(self, "WatchStatus", in_pool(self._watch_status, None, non_blocking=True))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, server)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        about, visible = self._about, [name for name in self._relayed.jobs() if may_see(name)]
        followed = [job for job in self._relayed.followed() if may_see(job.name)]
        # Each job's edition is read once: a job that ends meanwhile loses it.
        held = [(job, kept) for job in followed if (kept := job.newest) is not None]
        specs = {job.name: kept.arrays.contents.spec for job, kept in held}
        shard = cluster_pb2.ShardStatus(
            index=0,
            address=about.address,
            metrics_address=about.metrics_address,
            pid=about.pid,
            reachable=True,
            jobs=[_held(job, kept) for job, kept in held],
        )
        jobs = [_job(name, specs.get(name)) for name in visible]
        return cluster_pb2.GetStatusResponse(coordinator=about, shards=[shard], jobs=jobs)

    def _watch_status(self, request: Any, context: grpc.ServicerContext, send: Send) -> NoReturn:
        raise Unsupported("a relay is not watched: ask the cluster that it follows")


def _job(name: str, spec: JobSpec | None) -> cluster_pb2.JobStatus:
    message = cluster_pb2.JobStatus(name=name)
    if spec is not None:
        message.mode = spec.mode
        message.consistency.CopyFrom(consistency_message(spec.consistency))
    return message


def _held(job: FollowedJob, kept: KeptEdition) -> shard_pb2.ShardJobStatus:
    """Returns the status of a job whose editions this relay has in one wire format. kept: its newest edition"""
    edition = kept.arrays
    return shard_pb2.ShardJobStatus(
        job=job.name,
        run=edition.run,
        bucket_count=len(edition.contents.buckets),
        parameter_bytes=kept.nbytes,
        versions=shard_pb2.VersionRange(min_version=edition.version, max_version=max(edition.version, job.latest)),
        feed=feed_message(job.figures),
    )
