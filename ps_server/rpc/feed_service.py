"""Serves readers that follow a job while it trains. Their messages leave by threads of their own."""

from __future__ import annotations

from functools import partial

import grpc

from ps_protocol.convert import (
    row_initializer_message,
    seconds,
    wire_format_number,
)
from ps_protocol.framing import Parts, message_parts
from ps_protocol.v1 import feed_pb2
from ps_runtime.pools import Pool
from ps_server.core.requests import RowsWatch
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.call_limits import caller_name, check_job, in_pool
from ps_server.rpc.data_messages import Answers, parse
from ps_server.rpc.streams import GrpcCall, PullStream, Send
from ps_server.shard.row_feeds import RowFeeds
from ps_server.shard.shard import Shard
from ps_server.shard.waiting import Answer, FeedPart, RoundBegin

PERIOD_SECONDS = 1.0


class FeedService:
    """WatchRows, with identity serializers: protobuf never sees a payload."""

    NAME = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name

    def __init__(self, shard: Shard, answers: Answers, threads: int = MOST_OF_A_POOL) -> None:
        """threads: of each of its pools"""
        self._shard, self._answers = shard, answers
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
        call = _call(request)
        check_job(call.job)
        answers = self._answers.of(self._shard.run_of(call.job))
        self._feeds.watch(
            call, PullStream(send, GrpcCall(context), self.senders, partial(_response, answers)), caller_name()
        )


def _call(request: bytes) -> RowsWatch:
    """Reads a WatchRowsRequest."""
    message = parse(feed_pb2.WatchRowsRequest, request)
    period = seconds(message.period_duration) if message.HasField("period_duration") else PERIOD_SECONDS
    return RowsWatch(message.job, message.table, message.cursor, period)


def _response(answers: Answers, part: Answer) -> Parts:
    """Returns a WatchRowsResponse."""
    assert isinstance(part, FeedPart)
    response = feed_pb2.WatchRowsResponse(
        header=answers.header(part.version),
        begin=_begin(part.begin) if part.begin is not None else None,
        removed_count=part.removed,
        row_count=part.rows,
        wire_format=wire_format_number(part.wire_format),
        cursor=part.cursor,
    )
    return message_parts(response, part.payload)


def _begin(begin: RoundBegin) -> feed_pb2.RoundBegin:
    return feed_pb2.RoundBegin(
        full=begin.full,
        version=begin.version,
        shard_count=begin.shards,
        dim=begin.table.dim,
        initializer=row_initializer_message(begin.table.initializer),
    )
