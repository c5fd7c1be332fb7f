"""Serves readers that follow a job while it trains. Threads of its own send their messages."""

from __future__ import annotations

from functools import partial

import grpc

from ps_protocol.convert import AnsweringShard
from ps_protocol.messages import editions, rows
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.call_limits import caller_name, check_job
from ps_server.rpc.feed_methods import FeedMethods
from ps_server.rpc.streams import GrpcCall, PullStream, Send
from ps_server.shard.row_feeds import RowFeeds
from ps_server.shard.shard import Shard
from ps_server.shard.weight_feeds import WeightFeeds


class FeedService(FeedMethods):
    """Feeds of rows and of weights."""

    def __init__(self, shard: Shard, origin: AnsweringShard, threads: int = MOST_OF_A_POOL) -> None:
        """threads: the most threads of each of its pools"""
        super().__init__(threads, "watch-rows")
        self._shard, self._origin = shard, origin
        self._feeds: RowFeeds = shard.feeds
        self._weights: WeightFeeds = shard.weight_feeds

    def watch_rows(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        watch = rows.read_watch(request)
        check_job(watch.job)
        write = partial(rows.write_feed_part, self._origin.of(self._shard.run_of(watch.job)))
        self._feeds.watch(watch, PullStream(send, GrpcCall(context), self.senders, write), caller_name())

    def describe_weights(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = editions.read_weights_asked(request)
        check_job(asked.job)
        return editions.write_weights_here(self._origin, self._weights.describe(asked, caller_name()))

    def pull_edition(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = editions.read_edition_call(request)
        check_job(call.job)
        write = partial(editions.write_edition_part, self._origin.of(self._shard.run_of(call.job)))
        self._weights.pull(call, PullStream(send, GrpcCall(context), self.senders, write), caller_name())
