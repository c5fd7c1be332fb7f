"""A worker without a session whose gradients and weights lie in a segment: every message by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from ps_protocol.segment_layout import SegmentMap, SegmentOffer, segment_plan
from ps_protocol.v1 import data_pb2
from ps_protocol.v1.data_pb2_grpc import DataServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.grpc_status import error_from
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.raw_worker import CALL_SECONDS, RawWorker, vector_job


class SharingWorker:
    """A worker of a job with one vector of `cells`, in a cluster of one shard. Shares `segment` with it, as `memory`.

    server: HOST:PORT of coordinator and shard
    """

    def __init__(
        self,
        server: str,
        job: str,
        cells: int,
        rank: int = 0,
        world_size: int = 1,
        directory: Path = DEFAULT_SHARED_DIRECTORY,
    ) -> None:
        self.raw = RawWorker(server, vector_job(job, "sync", cells, world_size), rank)
        if rank == 0:
            self.raw.initialise()
        plan = segment_plan(self.raw.layout)
        self._channel = open_channel(server)
        self._stub = DataServiceStub(self._channel)
        self.segment = LocalSegment(plan.size, directory)
        with self.segment:
            self.attach(self.segment.offer)
        self.memory = SegmentMap(self.segment.memory, plan)

    def attach(self, offer: SegmentOffer) -> None:
        """Asks the shard to map what is offered. Raises the PSError that it answers with."""
        request = data_pb2.AttachSegmentRequest(
            worker=self.raw.identity(),
            location=offer.location,
            nonce=offer.nonce,
            socket_inode=offer.socket_inode,
        )
        try:
            self._stub.AttachSegment(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, "shard") from None

    def exchange(self, clock: int, pushed: list[int], pulled: list[int], **other: Any) -> Any:
        """Begins a call that pushes and pulls buckets; `other`: what it says of the worker."""
        push = data_pb2.PushHeader(worker=self.raw.identity(**other), clock=clock)
        for index in pushed:
            push.buckets.add(bucket=index, kind=data_pb2.PUSH_KIND_GRADIENT)
        request = data_pb2.ExchangeRequest(push=push, buckets=pulled, in_segment=data_pb2.InSegment())
        return self._stub.Exchange(request, timeout=CALL_SECONDS)

    def headers(self, call: Any) -> list[data_pb2.PulledBucket]:
        """Of all buckets that the call brings. Raises the PSError that it ended with."""
        try:
            return [bucket for message in call for bucket in message.buckets]
        except grpc.RpcError as error:
            raise error_from(error, "shard") from None

    def __enter__(self) -> SharingWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.raw.__exit__(None, None, None)
