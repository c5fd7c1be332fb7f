"""What a shard is asked for editions, over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from ps_protocol.convert import job_spec, wire_format_number
from ps_protocol.errors import InvalidRequest, TryLater
from ps_protocol.framing import split_message
from ps_protocol.job import JobSpec
from ps_protocol.v1 import cluster_pb2, feed_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_runtime.retry import Peer

CALL_SECONDS = 10.0
_SERVICE = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name


class Cluster(NamedTuple):
    """Where shards are, by index, how many there are to be, and the jobs that the coordinator has."""

    addresses: dict[int, str]
    shards: int
    jobs: frozenset[str]


def cluster(server: str, access: Access) -> Cluster:
    """Asks a coordinator for its shards and jobs. Raises PSError.

    server: HOST:PORT
    access: needs the role of a reader
    """
    with open_channel(server, access) as channel:
        try:
            status = ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise Peer("coordinator", server, access).error(error) from None
    jobs = frozenset(each.name for each in status.jobs)
    return Cluster({each.index: each.address for each in status.shards}, status.coordinator.shard_count, jobs)


class Described(NamedTuple):
    """What a shard has of a job's weights: see DescribeWeightsResponse in feed.proto."""

    run: str
    lowest: int
    highest: int
    timeline: int
    shards: int
    buckets: tuple[int, ...]
    has_one_version: bool
    editions: tuple[int, ...]
    spec: JobSpec | None

    def may_have(self, version: int) -> bool:
        """Whether the shard has an edition of a version, or may still take one."""
        return version in self.editions or version >= self.highest


class ReceivedBucket(NamedTuple):
    """A bucket as it comes: its index, its version, its elements and their checksum."""

    number: int
    version: int
    payload: memoryview
    checksum: int


class ShardReader:
    """One shard. `cancel` may be called from any thread, all else is for one at a time."""

    def __init__(self, index: int, address: str, access: Access) -> None:
        self.index, self.address = index, address
        self.peer = Peer(f"shard {index}", address, access)
        self._channel = open_channel(address, access)
        self._describe = self._channel.unary_unary(f"/{_SERVICE}/DescribeWeights")
        self._pull = self._channel.unary_stream(f"/{_SERVICE}/PullEdition")
        self._call: Any = None
        self._is_cancelled = self._is_closed = False
        self._lock = threading.Lock()

    def describe(self, job: str, with_spec: bool) -> Described:
        """Asks what the shard has of a job's weights. Raises PSError."""
        request = feed_pb2.DescribeWeightsRequest(job=job, with_spec=with_spec).SerializeToString()
        if self._is_closed:
            raise self._cancelled()
        try:
            data = self._describe(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise self.peer.error(error) from None
        except ValueError:  # what gRPC raises where a channel is closed
            raise self._cancelled() from None
        answer = feed_pb2.DescribeWeightsResponse.FromString(data)
        return Described(
            answer.header.run,
            answer.header.version,
            answer.highest_version,
            answer.timeline,
            answer.shard_count,
            tuple(answer.buckets),
            answer.has_one_version,
            tuple(answer.edition_versions),
            job_spec(answer.spec) if answer.HasField("spec") else None,
        )

    def pull(
        self, request: feed_pb2.PullEditionRequest, take: Callable[[ReceivedBucket], None], alive: Callable[[int], None]
    ) -> None:
        """Receives buckets of an edition. Raises PSError, also when it is cancelled.

        take:  is handed each bucket
        alive: is told the lowest version of the shard's buckets whenever a message comes
        """
        with self._lock:
            if self._is_cancelled:
                raise self._cancelled()
            self._call = self._pull(request.SerializeToString())
        left = None
        try:
            for data in self._call:
                fields, payload = split_message(data)
                message = feed_pb2.PullEditionResponse.FromString(fields)
                alive(message.header.version)
                if message.HasField("begin"):
                    left = message.begin.bucket_count
                elif message.HasField("bucket"):
                    sent = message.bucket
                    left = 0 if left is None else left - 1
                    take(ReceivedBucket(sent.bucket, sent.version, payload or memoryview(b""), sent.checksum))
        except grpc.RpcError as error:
            raise self.peer.error(error) from None
        finally:
            self._call.cancel()
        if left:
            raise InvalidRequest(f"{self.peer}: the edition ended {left} buckets too early")

    def _cancelled(self) -> TryLater:
        return TryLater(f"{self.peer}: the call was cancelled")

    def allow(self) -> None:
        """Has pulls begin again after `cancel`, but not after `close`."""
        with self._lock:
            self._is_cancelled = self._is_closed

    def cancel(self) -> None:
        """Ends the pull that is under way, and any that begins before `allow`."""
        with self._lock:
            self._is_cancelled, call = True, self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        self.cancel()
        self._channel.close()


def edition_request(
    job: str, described: Described, version: int, wire: str, buckets: tuple[int, ...]
) -> feed_pb2.PullEditionRequest:
    """Returns the request for some buckets of an edition. described: by any shard; version: see PullEditionRequest"""
    return feed_pb2.PullEditionRequest(
        job=job,
        run=described.run,
        timeline=described.timeline,
        version=version,
        wire_format=wire_format_number(wire),
        buckets=buckets,
    )
