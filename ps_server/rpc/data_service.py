"""Serves pushes and pulls: over gRPC, and over data connections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from ps_protocol.frames import KINDS
from ps_protocol.v1 import data_pb2
from ps_runtime.pools import Pool
from ps_server.core.limits import Limits
from ps_server.core.requests import PullCall, PushCall, RowsPull, RowsPush, TablePull, TablePush
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc import data_messages, row_messages
from ps_server.rpc.call_limits import caller_name, check_job, in_pool
from ps_server.rpc.data_connections import (
    ConnectionCall,
    FrameStream,
    Opener,
    Serving,
    Tickets,
    check_sender,
    method,
)
from ps_server.rpc.data_listener import DataListener, Where
from ps_server.rpc.data_messages import Answers, Request
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.receive_buffers import ReceiveBuffers
from ps_server.rpc.streams import PullStream, Send
from ps_server.shard.shard import Shard
from ps_server.shard.waiting import Outbox

RECEIVE_BYTES = 64 * 2**20  # of memory for payloads that is kept for the next ones


class DataService:
    """Push, Pull and their like, with identity serializers: protobuf never sees a payload."""

    NAME = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name

    def __init__(self, shard: Shard, answers: Answers, threads: int = MOST_OF_A_POOL) -> None:
        """threads: of each of its pools"""
        self._shard = shard
        self._answers = answers
        self.senders = Pool(threads, "send")
        self._push_pool = Pool(threads, "push")
        self._pull_pool = Pool(threads, "pull")
        self._tickets = Tickets()
        self._listener: DataListener | None = None
        self._handlers = {
            name: grpc.unary_unary_rpc_method_handler(in_pool(behaviour, self._push_pool))
            for name, behaviour in (
                ("Push", self._push),
                ("PushRows", self._push_rows),
                ("PushTable", self._push_table),
                ("AttachSegment", self._attach),
                ("OpenDataConnection", self._open),
            )
        } | {
            name: grpc.unary_stream_rpc_method_handler(in_pool(behaviour, self._pull_pool, non_blocking=True))
            for name, behaviour in (
                ("Pull", self._pull),
                ("Exchange", self._exchange),
                ("PullState", self._pull_state),
                ("PullRows", self._pull_rows),
                ("PullTable", self._pull_table),
                ("ExchangeRows", self._exchange_rows),
            )
        }

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server. Pushes and pulls have pools of their own, so neither can starve the other."""
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.NAME, self._handlers),))

    def listen(self, calls: CallInterceptor, limits: Limits, where: Where, most: int) -> DataListener:
        """Takes data connections; see DataListener.listen. calls: what every call goes through; most: at a time"""
        methods = {
            kind: method(calls.guarded(f"/{self.NAME}/{name}", self._handlers[name])) for name, kind in KINDS.items()
        }
        buffers = ReceiveBuffers(RECEIVE_BYTES)
        watched = calls.limits.sending, calls.limits.skipping
        serving = Serving(methods, self.senders, *watched, limits.message_bytes, buffers)
        self._listener = DataListener(serving, self._tickets, self._admit, limits, most)
        self._listener.listen(where)
        return self._listener

    def stop(self) -> None:
        """Ends the connections, and the pools after what they are doing."""
        if self._listener is not None:
            self._listener.stop()
        for pool in (self._push_pool, self._pull_pool, self.senders):
            pool.shutdown(wait=True)

    def _answers_of(self, call: PushCall | PullCall | RowsPush | RowsPull | TablePull | TablePush) -> Answers:
        return self._answers.of(call.run or self._shard.run_of(call.job))

    def _outbox(self, context: Any, send: Send, write: Any) -> Outbox:
        """Returns where the answers to a pull go."""
        if isinstance(context, ConnectionCall):
            return FrameStream(send, context, write)
        return PullStream(send, context, self.senders, write)

    def _push(self, request: Request, context: grpc.ServicerContext) -> bytes:
        call = data_messages.push(request)
        _check_caller(call, context)
        return self._answers_of(call).pushed(self._shard.push(call, caller_name()))

    def _push_rows(self, request: Request, context: grpc.ServicerContext) -> bytes:
        push = row_messages.push(request)
        _check_caller(push, context)
        return row_messages.pushed(self._answers_of(push), self._shard.push_rows(push, caller_name()))

    def _push_table(self, request: Request, context: grpc.ServicerContext) -> bytes:
        push = row_messages.push_table(request)
        _check_caller(push, context)
        return row_messages.begun(self._answers_of(push), self._shard.push_rows(push, caller_name()))

    def _attach(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        worker, offer = data_messages.attach_request(request)
        check_job(worker.job)
        self._shard.attach(worker.job, worker.rank, worker.incarnation, offer, worker.key, worker.run)
        return self._answers.of(worker.run).attached()

    def _open(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        worker = data_messages.open_request(request)
        check_job(worker.job)
        self._shard.check_worker(worker.job, worker.rank, worker.incarnation, worker.key, worker.run)
        shown = tuple((name, value) for name, value in context.invocation_metadata() or () if name == "authorization")
        opener = Opener(worker, context.peer(), shown, context.auth_context(), caller_name())
        ticket = self._tickets.issue(opener)
        if self._listener is None:
            return self._answers.of(worker.run).opened(ticket, 0, "", 0)
        places = self._listener.places
        return self._answers.of(worker.run).opened(ticket, places.port, places.location, places.inode)

    def _admit(self, opener: Opener, end: Any) -> Any:
        worker = opener.worker
        return self._shard.connect(worker.job, worker.rank, worker.incarnation, end, worker.key, worker.run)

    def _pull(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull(request)
        _check_caller(call, context)
        call = replace(call, run=call.run or self._shard.run_of(call.job))  # a reader gets one run's weights
        outbox = self._outbox(context, send, self._answers_of(call).pulled)
        self._shard.pull(call, outbox, caller_name())

    def _exchange(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = data_messages.exchange(request)
        _check_caller(push, context)
        outbox = self._outbox(context, send, self._answers_of(push).exchanged)
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_rows(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = row_messages.pull(request)
        _check_caller(call, context)
        call = replace(call, run=call.run or self._shard.run_of(call.job))  # as _pull
        outbox = self._outbox(context, send, partial(row_messages.pulled, self._answers_of(call)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange_rows(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = row_messages.exchange(request)
        _check_caller(push, context)
        outbox = self._outbox(context, send, partial(row_messages.exchanged, self._answers_of(push)))
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_table(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = row_messages.pull_table(request)
        _check_caller(call, context)
        outbox = self._outbox(context, send, partial(row_messages.pulled_table, self._answers_of(call)))
        self._shard.pull(call, outbox, caller_name())

    def _pull_state(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull_state(request)
        _check_caller(call, context)
        outbox = self._outbox(context, send, self._answers_of(call).state)
        self._shard.pull_state(call, outbox, caller_name())


def _check_caller(
    call: PushCall | PullCall | RowsPush | RowsPull | TablePull | TablePush, context: grpc.ServicerContext
) -> None:
    """Raises Forbidden for a job that the caller may not use, or a worker that it is not."""
    check_job(call.job)
    check_sender(context, call.job, call.rank, call.incarnation)
