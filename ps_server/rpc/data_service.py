"""Serves pushes and pulls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from ps_protocol.v1 import data_pb2
from ps_server.core.requests import PullCall, PushCall
from ps_server.rpc import data_messages
from ps_server.rpc.call_limits import CALL_THREADS, caller_name, check_job, in_pool
from ps_server.rpc.data_messages import Answers
from ps_server.rpc.streams import PullStream, Send
from ps_server.shard.shard import Shard


class DataService:
    """Push, Pull and their like, with identity serializers: protobuf never sees a payload."""

    NAME = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name

    def __init__(self, shard: Shard, answers: Answers) -> None:
        self._shard = shard
        self._answers = answers
        self.senders = ThreadPoolExecutor(CALL_THREADS, "send")
        self._push_pool = ThreadPoolExecutor(CALL_THREADS, "push")
        self._pull_pool = ThreadPoolExecutor(CALL_THREADS, "pull")

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server. Pushes and pulls have pools of their own, so neither can starve the other."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(in_pool(method, self._push_pool))
            for name, method in (("Push", self._push), ("AttachSegment", self._attach))
        } | {
            name: grpc.unary_stream_rpc_method_handler(in_pool(method, self._pull_pool, non_blocking=True))
            for name, method in (
                ("Pull", self._pull),
                ("Exchange", self._exchange),
                ("PullState", self._pull_state),
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.NAME, handlers),))

    def stop(self) -> None:
        """Ends the pools after what they are doing."""
        for pool in (self._push_pool, self._pull_pool, self.senders):
            pool.shutdown(wait=True)

    def _answers_of(self, call: PushCall | PullCall) -> Answers:
        return self._answers.of(call.run or self._shard.run_of(call.job))

    def _push(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        call = data_messages.push(request)
        check_job(call.job)
        return self._answers_of(call).pushed(self._shard.push(call, caller_name()))

    def _attach(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        attached = data_messages.attach_request(request)
        check_job(attached[0])
        self._shard.attach(*attached)
        return self._answers.of(attached[-1]).attached()

    def _pull(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull(request)
        check_job(call.job)
        call = replace(call, run=call.run or self._shard.run_of(call.job))  # a reader gets one run's weights
        outbox = PullStream(send, context, self.senders, self._answers_of(call).pulled)
        self._shard.pull(call, outbox, caller_name())

    def _exchange(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = data_messages.exchange(request)
        check_job(push.job)
        outbox = PullStream(send, context, self.senders, self._answers_of(push).exchanged)
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_state(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull_state(request)
        check_job(call.job)
        outbox = PullStream(send, context, self.senders, self._answers_of(call).state)
        self._shard.pull_state(call, outbox, caller_name())
