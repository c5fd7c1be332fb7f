"""The methods of FeedService, for shards and relays. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import grpc

from ps_protocol.v1 import feed_pb2
from ps_runtime.pools import Pool
from ps_server.rpc.call_limits import in_pool
from ps_server.rpc.streams import Send


class FeedMethods(ABC):
    """Registers the methods, with identity serializers: protobuf never sees a payload.

    senders: the threads that send messages
    """

    NAME = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name

    def __init__(self, threads: int, pool: str) -> None:
        """
        threads: the most threads of each of its pools
        pool:    the name of the threads that begin calls
        """
        self.senders, self._pool = Pool(threads, "feed"), Pool(threads, pool)
        streams = {"WatchRows": self.watch_rows, "PullEdition": self.pull_edition}
        self._handlers = {
            name: grpc.unary_stream_rpc_method_handler(in_pool(behaviour, self._pool, non_blocking=True))
            for name, behaviour in streams.items()
        } | {"DescribeWeights": grpc.unary_unary_rpc_method_handler(in_pool(self.describe_weights, self._pool))}

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.NAME, self._handlers),))

    def stop(self) -> None:
        """Ends the pools after their present work."""
        for pool in (self._pool, self.senders):
            pool.shutdown(wait=True)

    @abstractmethod
    def watch_rows(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        """Sends the changes of a table's rows."""

    @abstractmethod
    def describe_weights(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Returns the description of a job's weights, and of its newest edition."""

    @abstractmethod
    def pull_edition(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        """Sends an edition."""
