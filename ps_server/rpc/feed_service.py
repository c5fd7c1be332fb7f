"""Serves readers that follow a job while it trains. Their messages leave by threads of their own."""

from __future__ import annotations

from functools import partial

import grpc

from ps_protocol.convert import (
    job_spec_message,
    row_initializer_message,
    seconds,
    wire_format,
    wire_format_number,
)
from ps_protocol.framing import Parts, message_parts
from ps_protocol.v1 import feed_pb2
from ps_runtime.pools import Pool
from ps_server.core.requests import EditionCall, RowsWatch
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.call_limits import caller_name, check_job, in_pool
from ps_server.rpc.data_messages import Answers, parse
from ps_server.rpc.streams import PullStream, Send
from ps_server.shard.row_feeds import RowFeeds
from ps_server.shard.shard import Shard
from ps_server.shard.waiting import Answer, EditionPart, FeedPart, RoundBegin
from ps_server.shard.weight_feeds import WeightFeeds

PERIOD_SECONDS = 1.0


class FeedService:
    """Feeds of rows and of weights, with identity serializers: protobuf never sees a payload."""

    NAME = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name

    def __init__(self, shard: Shard, answers: Answers, threads: int = MOST_OF_A_POOL) -> None:
        """threads: of each of its pools"""
        self._shard, self._answers = shard, answers
        self._feeds: RowFeeds = shard.feeds
        self._weights: WeightFeeds = shard.weight_feeds
        self.senders = Pool(threads, "feed")
        self._pool = Pool(threads, "watch-rows")
        streams = {"WatchRows": self._watch_rows, "PullEdition": self._pull_edition}
        self._handlers = {
            name: grpc.unary_stream_rpc_method_handler(in_pool(behaviour, self._pool, non_blocking=True))
            for name, behaviour in streams.items()
        } | {"DescribeWeights": grpc.unary_unary_rpc_method_handler(in_pool(self._describe_weights, self._pool))}

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
        self._feeds.watch(call, PullStream(send, context, self.senders, partial(_response, answers)), caller_name())

    def _describe_weights(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        message = parse(feed_pb2.DescribeWeightsRequest, request)
        check_job(message.job)
        here = self._weights.describe(message.job, message.run)
        return feed_pb2.DescribeWeightsResponse(
            header=self._answers.of(here.run).header(here.lowest),
            highest_version=here.highest,
            timeline=here.timeline,
            shard_count=here.shards,
            buckets=here.buckets,
            has_one_version=here.has_one_version,
            edition_versions=here.editions,
            spec=job_spec_message(here.spec) if message.with_spec else None,
        ).SerializeToString()

    def _pull_edition(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        message = parse(feed_pb2.PullEditionRequest, request)
        check_job(message.job)
        wire = wire_format(message.wire_format, "wire format of an edition") or "float32"
        wanted = message.timeline, message.version, wire, tuple(message.buckets)
        call = EditionCall(message.job, message.run, *wanted)
        answers = self._answers.of(self._shard.run_of(call.job))
        outbox = PullStream(send, context, self.senders, partial(_edition_response, answers))
        self._weights.pull(call, outbox, caller_name())


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


def _edition_response(answers: Answers, part: Answer) -> Parts:
    """Returns a PullEditionResponse."""
    assert isinstance(part, EditionPart)
    response = feed_pb2.PullEditionResponse(header=answers.header(part.now))
    if part.begin is not None:
        begin = part.begin
        response.begin.CopyFrom(
            feed_pb2.EditionBegin(version=begin.version, timeline=begin.timeline, bucket_count=begin.buckets)
        )
    elif part.payload is not None:
        bucket = response.bucket
        bucket.bucket, bucket.version, bucket.checksum = part.bucket, part.version, part.checksum
        bucket.wire_format = wire_format_number(part.wire_format)
    return message_parts(response, part.payload)
