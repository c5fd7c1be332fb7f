"""Serves pushes and pulls: over gRPC, and over data connections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from ps_protocol.frames import KINDS
from ps_protocol.identity import Identity
from ps_protocol.messages import data, rows
from ps_protocol.messages.envelope import Origin, Request
from ps_protocol.v1 import data_pb2
from ps_runtime.pools import Pool
from ps_server.core.limits import Limits
from ps_server.core.thread_shares import MOST_OF_A_POOL
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
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.receive_buffers import ReceiveBuffers
from ps_server.rpc.streams import PullStream, Send
from ps_server.shard.shard import Shard
from ps_server.shard.waiting import Outbox

RECEIVE_BYTES = 64 * 2**20  # of memory for payloads that is kept for the next ones


class DataService:
    """Push, Pull and their like, with identity serializers: protobuf never sees a payload."""

    NAME = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name

    def __init__(self, shard: Shard, origin: Origin, threads: int = MOST_OF_A_POOL) -> None:
        """threads: of each of its pools"""
        self._shard = shard
        self._origin = origin
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

    def _origin_of(self, worker: Identity) -> Origin:
        return self._origin.of(worker.run or self._shard.run_of(worker.job))

    def _of_this_run(self, worker: Identity) -> Identity:
        """Returns a caller with the run of its job: a reader, which need not name it, gets one run's weights."""
        return worker if worker.run else replace(worker, run=self._shard.run_of(worker.job))

    def _outbox(self, context: Any, send: Send, write: Any) -> Outbox:
        """Returns where the answers to a pull go."""
        if isinstance(context, ConnectionCall):
            return FrameStream(send, context, write)
        return PullStream(send, context, self.senders, write)

    def _push(self, request: Request, context: grpc.ServicerContext) -> bytes:
        call = data.read_push(request)
        _check_caller(call.worker, context)
        staged = self._shard.push(call, caller_name())
        version = min((each.version for each in staged), default=0)
        return data.write_pushed(self._origin_of(call.worker), version, sum(each.duplicate for each in staged))

    def _push_rows(self, request: Request, context: grpc.ServicerContext) -> bytes:
        push = rows.read_push(request)
        _check_caller(push.worker, context)
        staged = self._shard.push_rows(push, caller_name())
        return rows.write_pushed(self._origin_of(push.worker), staged.version, staged.duplicate)

    def _push_table(self, request: Request, context: grpc.ServicerContext) -> bytes:
        push = rows.read_table_push(request)
        _check_caller(push.worker, context)
        staged = self._shard.push_rows(push, caller_name())
        duplicate, begun = staged.duplicate and staged.kept, staged.duplicate and not staged.kept
        answer = rows.TablePushed(staged.version, duplicate, begun, staged.seed)
        return rows.write_table_pushed(self._origin_of(push.worker), answer)

    def _attach(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        worker, offer = data.read_attach(request)
        check_job(worker.job)
        self._shard.attach(worker, offer)
        return data.write_attached(self._origin.of(worker.run))

    def _open(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        worker = data.read_open(request)
        check_job(worker.job)
        self._shard.check_worker(worker)
        shown = tuple((name, value) for name, value in context.invocation_metadata() or () if name == "authorization")
        opener = Opener(worker, context.peer(), shown, context.auth_context(), caller_name())
        ticket, origin = self._tickets.issue(opener), self._origin.of(worker.run)
        if self._listener is None:
            return data.write_opened(origin, ticket, 0, "", 0)
        places = self._listener.places
        return data.write_opened(origin, ticket, places.port, places.location, places.inode)

    def _admit(self, opener: Opener, end: Any) -> Any:
        return self._shard.connect(opener.worker, end)

    def _pull(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = data.read_pull(request)
        _check_caller(call.worker, context)
        call = replace(call, worker=self._of_this_run(call.worker))
        outbox = self._outbox(context, send, partial(data.write_pulled, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = data.read_exchange(request)
        _check_caller(push.worker, context)
        outbox = self._outbox(context, send, partial(data.write_exchanged, self._origin_of(push.worker)))
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_rows(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = rows.read_pull(request)
        _check_caller(call.worker, context)
        call = replace(call, worker=self._of_this_run(call.worker))
        outbox = self._outbox(context, send, partial(rows.write_pulled, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange_rows(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = rows.read_exchange(request)
        _check_caller(push.worker, context)
        outbox = self._outbox(context, send, partial(rows.write_exchanged, self._origin_of(push.worker)))
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_table(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = rows.read_table_pull(request)
        _check_caller(call.worker, context)
        outbox = self._outbox(context, send, partial(rows.write_pulled_table, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _pull_state(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        call = data.read_pull_state(request)
        _check_caller(call.worker, context)
        outbox = self._outbox(context, send, partial(data.write_state, self._origin_of(call.worker)))
        self._shard.pull_state(call, outbox, caller_name())


def _check_caller(worker: Identity, context: grpc.ServicerContext) -> None:
    """Raises Forbidden for a job that the caller may not use, or a worker that it is not."""
    check_job(worker.job)
    check_sender(context, worker)
