"""Serves readers that follow a job while it trains. Their messages leave by threads of their own."""

from __future__ import annotations

from functools import partial

import grpc

from ps_protocol.messages import rows
from ps_protocol.messages.envelope import Origin
from ps_protocol.v1 import feed_pb2
from ps_runtime.pools import Pool
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.call_limits import caller_name, check_job, in_pool
from ps_server.rpc.streams import PullStream, Send
from ps_server.shard.row_feeds import RowFeeds
from ps_server.shard.shard import Shard


class FeedService:
    """WatchRows, with identity serializers: protobuf never sees a payload."""

    NAME = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name

    def __init__(self, shard: Shard, origin: Origin, threads: int = MOST_OF_A_POOL) -> None:
        """threads: of each of its pools"""
        self._shard, self._origin = shard, origin
        self._feeds: RowFeeds = shard.feeds
        self.senders = Pool(threads, "feed")
        self._pool = Pool(threads, "watch-rows")
        handler = in_pool(self._watch_rows, self._pool, non_blocking=True)
        self._handlers = {"WatchRows": grpc.unary_stream_rpc_method_handler(handler)}

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.NAME, self._handlers),))

    def stop(self) -> None:
        """Ends the threads after what they are doing."""
        for pool in (self._pool, self.senders):
            pool.shutdown(wait=True)

    def _watch_rows(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        watch = rows.read_watch(request)
        check_job(watch.job)
        write = partial(rows.write_feed_part, self._origin.of(self._shard.run_of(watch.job)))
        self._feeds.watch(watch, PullStream(send, context, self.senders, write), caller_name())
