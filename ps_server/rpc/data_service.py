"""Serves pushes and pulls: over gRPC, and over data connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from ps_frames.listener import DataListener, Where
from ps_frames.server import FrameCall, Opener, ReceiveBuffers, ServerCall, Serving, Tickets
from ps_frames.wire import KINDS
from ps_protocol.errors import Forbidden
from ps_protocol.framing import Parts
from ps_protocol.v1 import data_pb2
from ps_runtime.arrivals import HostLimits
from ps_runtime.pools import Pool
from ps_server.core.limits import Limits
from ps_server.core.requests import PullCall, PushCall, RowsPull, RowsPush, TablePull, TablePush
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc import data_messages, row_messages
from ps_server.rpc.auth import host_of
from ps_server.rpc.call_limits import caller_name, check_job, in_pool
from ps_server.rpc.data_messages import Answers, Request
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.streams import FrameStream, GrpcCall, PullStream, Send
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
        self._unary: dict[str, Callable[[Any, ServerCall], bytes]] = {
            "Push": self._push,
            "PushRows": self._push_rows,
            "PushTable": self._push_table,
            "AttachSegment": self._attach,
            "OpenDataConnection": self._open,
        }
        self._streams: dict[str, Callable[[Any, ServerCall, Send], None]] = {
            "Pull": self._pull,
            "Exchange": self._exchange,
            "PullState": self._pull_state,
            "PullRows": self._pull_rows,
            "PullTable": self._pull_table,
            "ExchangeRows": self._exchange_rows,
        }

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server. Pushes and pulls have pools of their own, so neither can starve the other."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(in_pool(_by_grpc(behaviour), self._push_pool))
            for name, behaviour in self._unary.items()
        } | {
            name: grpc.unary_stream_rpc_method_handler(in_pool(_by_grpc(behaviour), self._pull_pool, non_blocking=True))
            for name, behaviour in self._streams.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.NAME, handlers),))

    def listen(self, calls: CallInterceptor, limits: Limits, where: Where, most: int) -> DataListener:
        """Takes data connections; see DataListener.listen. calls: what every call goes through; most: at a time"""
        methods = {
            KINDS[name]: calls.unary(f"/{self.NAME}/{name}", behaviour)
            for name, behaviour in self._unary.items()
            if name in KINDS
        } | {KINDS[name]: calls.stream(f"/{self.NAME}/{name}", behaviour) for name, behaviour in self._streams.items()}
        buffers = ReceiveBuffers(RECEIVE_BYTES)
        watched = calls.limits.sending, calls.limits.skipping
        serving = Serving(methods, self.senders, *watched, limits.message_bytes, buffers)
        hosts = HostLimits(limits.connections_of_a_host, limits.new_connections)
        self._listener = DataListener(serving, self._tickets, self._admit, hosts, limits.handshake_seconds, most)
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

    def _outbox(self, call: ServerCall, send: Send, write: Callable[[Any], Parts]) -> Outbox:
        """Returns where the answers to a pull go."""
        if isinstance(call, FrameCall):
            return FrameStream(send, call, write)
        return PullStream(send, call, self.senders, write)

    def _push(self, request: Request, by: ServerCall) -> bytes:
        call = data_messages.push(request)
        _check_caller(call, by)
        return self._answers_of(call).pushed(self._shard.push(call, caller_name()))

    def _push_rows(self, request: Request, by: ServerCall) -> bytes:
        push = row_messages.push(request)
        _check_caller(push, by)
        return row_messages.pushed(self._answers_of(push), self._shard.push_rows(push, caller_name()))

    def _push_table(self, request: Request, by: ServerCall) -> bytes:
        push = row_messages.push_table(request)
        _check_caller(push, by)
        return row_messages.begun(self._answers_of(push), self._shard.push_rows(push, caller_name()))

    def _attach(self, request: bytes, by: ServerCall) -> bytes:
        worker, offer = data_messages.attach_request(request)
        check_job(worker.job)
        self._shard.attach(worker.job, worker.rank, worker.incarnation, offer, worker.key, worker.run)
        return self._answers.of(worker.run).attached()

    def _open(self, request: bytes, by: ServerCall) -> bytes:
        worker = data_messages.open_request(request)
        check_job(worker.job)
        self._shard.check_worker(worker.job, worker.rank, worker.incarnation, worker.key, worker.run)
        shown = tuple((name, value) for name, value in by.invocation_metadata() if name == "authorization")
        opener = Opener(worker, host_of(by.peer()), shown, by.auth_context(), caller_name())
        ticket = self._tickets.issue(opener)
        if self._listener is None:
            return self._answers.of(worker.run).opened(ticket, 0, "", 0)
        offer = self._listener.offer
        return self._answers.of(worker.run).opened(ticket, offer.port, offer.location, offer.inode)

    def _admit(self, opener: Opener, end: Callable[[], None]) -> Callable[[], None]:
        worker = opener.worker
        return self._shard.connect(worker.job, worker.rank, worker.incarnation, end, worker.key, worker.run)

    def _pull(self, request: Request, by: ServerCall, send: Send) -> None:
        call = data_messages.pull(request)
        _check_caller(call, by)
        call = replace(call, run=call.run or self._shard.run_of(call.job))  # a reader gets one run's weights
        outbox = self._outbox(by, send, self._answers_of(call).pulled)
        self._shard.pull(call, outbox, caller_name())

    def _exchange(self, request: Request, by: ServerCall, send: Send) -> None:
        push, pull = data_messages.exchange(request)
        _check_caller(push, by)
        outbox = self._outbox(by, send, self._answers_of(push).exchanged)
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_rows(self, request: Request, by: ServerCall, send: Send) -> None:
        call = row_messages.pull(request)
        _check_caller(call, by)
        call = replace(call, run=call.run or self._shard.run_of(call.job))  # as _pull
        outbox = self._outbox(by, send, partial(row_messages.pulled, self._answers_of(call)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange_rows(self, request: Request, by: ServerCall, send: Send) -> None:
        push, pull = row_messages.exchange(request)
        _check_caller(push, by)
        outbox = self._outbox(by, send, partial(row_messages.exchanged, self._answers_of(push)))
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_table(self, request: Request, by: ServerCall, send: Send) -> None:
        call = row_messages.pull_table(request)
        _check_caller(call, by)
        outbox = self._outbox(by, send, partial(row_messages.pulled_table, self._answers_of(call)))
        self._shard.pull(call, outbox, caller_name())

    def _pull_state(self, request: Request, by: ServerCall, send: Send) -> None:
        call = data_messages.pull_state(request)
        _check_caller(call, by)
        outbox = self._outbox(by, send, self._answers_of(call).state)
        self._shard.pull_state(call, outbox, caller_name())


def _by_grpc(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what gRPC calls with its own context."""

    def handler(request: bytes, context: grpc.ServicerContext, *send: Send) -> Any:
        return behaviour(request, GrpcCall(context), *send)

    return handler


def _check_caller(call: PushCall | PullCall | RowsPush | RowsPull | TablePull | TablePush, by: ServerCall) -> None:
    """Raises Forbidden for a job that the caller may not use, or a worker that it is not: a data connection is that of
    one worker."""
    check_job(call.job)
    worker = by.worker
    if worker is not None and (call.job, call.rank, call.incarnation) != (worker.job, worker.rank, worker.incarnation):
        raise Forbidden(
            f"this data connection is that of worker {worker.rank} of job {worker.job!r} in its place; the request "
            f"names worker {call.rank} of job {call.job!r}"
        )
