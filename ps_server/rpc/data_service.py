"""Serves pushes and pulls: over gRPC, and over data connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import grpc

from ps_frames.frames import KINDS
from ps_frames.listener import DataListener, Tickets, Where
from ps_frames.server import FrameCall, LastAnswer, LentMessage, Opener, ReceiveBuffers, ServerCall, Serving
from ps_protocol.convert import AnsweringShard, Request
from ps_protocol.errors import Forbidden, InvalidRequest, PSError
from ps_protocol.framing import Parts
from ps_protocol.identity import Identity
from ps_protocol.messages import data, repeated, rows
from ps_protocol.messages.data import PullCall, PushCall
from ps_protocol.messages.repeated import Groups, Repeated
from ps_protocol.messages.rows import RowsPull
from ps_protocol.v1 import data_pb2
from ps_runtime.arrivals import HostLimits
from ps_runtime.pools import Pool
from ps_server.core.limits import Limits
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.call_limits import caller_name, check_job, host_of, in_pool
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.streams import GrpcCall, PullStream, Send
from ps_server.shard.outbox import Answer, Lent, Outbox
from ps_server.shard.pushes import Checked
from ps_server.shard.shard import Shard

RECEIVE_BYTES = 64 * 2**20  # of memory for payloads that is kept for the next ones
_LAST_EXCHANGE = "last exchange"  # what is kept for a connection
P = TypeVar("P", PullCall, RowsPull)


class DataService:
    """The methods of DataService, with identity serializers: protobuf never sees a payload."""

    NAME = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name

    def __init__(self, shard: Shard, origin: AnsweringShard, threads: int = MOST_OF_A_POOL) -> None:
        """threads: the most threads of each of its three pools, which push, pull and send"""
        self._shard = shard
        self._origin = origin
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
        """Accepts data connections; see DataListener.listen.

        calls: wraps every method
        most:  the most connections at a time"""
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

    def close_connections(self) -> None:
        """Closes the data connections."""
        if self._listener is not None:
            self._listener.stop()

    def stop(self) -> None:
        """Ends the pools after their present work. No call may come afterwards."""
        for pool in (self._push_pool, self._pull_pool, self.senders):
            pool.shutdown(wait=True)

    def _origin_of(self, worker: Identity) -> AnsweringShard:
        return self._origin.of(worker.run or self._shard.run_of(worker.job))

    def _of_this_run(self, call: P) -> P:
        """Returns a pull with the run of its job. A reader need not name a run, and then gets the weights of one run
        only.
        """
        worker = call.worker
        return call if worker.run else replace(call, worker=replace(worker, run=self._shard.run_of(worker.job)))

    def _outbox(self, call: ServerCall, send: Send, write: Callable[[Any], Parts]) -> Outbox:
        """Returns the outbox for the answers to a pull."""
        if isinstance(call, FrameCall):
            return FrameStream(send, call, write)
        return PullStream(send, call, self.senders, write)

    def _push(self, request: Request, by: ServerCall) -> bytes:
        call = data.read_push(request)
        _check_caller(call.worker, by)
        staged = self._shard.push(call, caller_name())
        version = min((each.version for each in staged), default=0)
        return data.write_pushed(self._origin_of(call.worker), version, sum(each.duplicate for each in staged))

    def _push_rows(self, request: Request, by: ServerCall) -> bytes:
        push = rows.read_push(request)
        _check_caller(push.worker, by)
        staged = self._shard.push_rows(push, caller_name())
        return rows.write_pushed(self._origin_of(push.worker), staged.version, staged.duplicate)

    def _push_table(self, request: Request, by: ServerCall) -> bytes:
        push = rows.read_table_push(request)
        _check_caller(push.worker, by)
        staged = self._shard.push_rows(push, caller_name())
        duplicate, begun = staged.duplicate and staged.kept, staged.duplicate and not staged.kept
        answer = rows.TablePushed(staged.version, duplicate, begun, staged.seed)
        return rows.write_table_pushed(self._origin_of(push.worker), answer)

    def _attach(self, request: bytes, by: ServerCall) -> bytes:
        worker, offer = data.read_attach(request)
        check_job(worker.job)
        self._shard.attach(worker, offer)
        return data.write_attached(self._origin.of(worker.run))

    def _open(self, request: bytes, by: ServerCall) -> bytes:
        worker = data.read_open(request)
        check_job(worker.job)
        self._shard.check_worker(worker)
        shown = tuple((name, value) for name, value in by.invocation_metadata() if name == "authorization")
        opener = Opener(worker, host_of(by.peer()), shown, by.auth_context(), caller_name())
        ticket, origin = self._tickets.issue(opener), self._origin.of(worker.run)
        if self._listener is None:
            return data.write_opened(origin, ticket, 0, "", 0)
        offer = self._listener.offer
        return data.write_opened(origin, ticket, offer.port, offer.location, offer.inode)

    def _admit(self, opener: Opener, end: Callable[[], None]) -> Callable[[], None]:
        return self._shard.connect(opener.worker, end)

    def _pull(self, request: Request, by: ServerCall, send: Send) -> None:
        call = data.read_pull(request)
        _check_caller(call.worker, by)
        call = self._of_this_run(call)
        outbox = self._outbox(by, send, partial(data.write_pulled, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange(self, request: Request, by: ServerCall, send: Send) -> None:
        kept = by.kept
        last: _KnownExchange | None = None if kept is None else kept.get(_LAST_EXCHANGE)
        known = None if last is None else last.next(request)
        if known is None:
            push, pull = data.read_exchange(request)
            _check_caller(push.worker, by)
            again = None if kept is None else repeated.repeated_exchange(request, push)
            write = partial(data.write_exchanged, self._origin_of(push.worker))
            known = _KnownExchange(again, push, pull, write, Checked())
        else:
            check_job(known.push.worker.job)
        outbox = self._outbox(by, send, known.write)
        self._shard.exchange(known.push, known.pull, outbox, caller_name(), known.checked)
        # Now that it is carried out: one that is refused may come again. What needs a check each time is not kept: only
        # what was checked is known to name no more than its job has.
        if kept is not None and known.request is not None and known.checked.job is not None:
            kept[_LAST_EXCHANGE] = known

    def _pull_rows(self, request: Request, by: ServerCall, send: Send) -> None:
        call = rows.read_pull(request)
        _check_caller(call.worker, by)
        call = self._of_this_run(call)
        outbox = self._outbox(by, send, partial(rows.write_pulled, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _exchange_rows(self, request: Request, by: ServerCall, send: Send) -> None:
        push, pull = rows.read_exchange(request)
        _check_caller(push.worker, by)
        outbox = self._outbox(by, send, partial(rows.write_exchanged, self._origin_of(push.worker)))
        self._shard.exchange(push, pull, outbox, caller_name())

    def _pull_table(self, request: Request, by: ServerCall, send: Send) -> None:
        call = rows.read_table_pull(request)
        _check_caller(call.worker, by)
        outbox = self._outbox(by, send, partial(rows.write_pulled_table, self._origin_of(call.worker)))
        self._shard.pull(call, outbox, caller_name())

    def _pull_state(self, request: Request, by: ServerCall, send: Send) -> None:
        call = data.read_pull_state(request)
        _check_caller(call.worker, by)
        outbox = self._outbox(by, send, partial(data.write_state, self._origin_of(call.worker)))
        self._shard.pull_state(call, outbox, caller_name())


@dataclass(frozen=True)
class _KnownExchange:
    """An exchange of a data connection. That of the next step mostly differs from it in its clock alone, or in
    hyper-parameters besides.

    request:     None: it is not kept
    write:       makes a message of an answer
    is_compared: it was found once that its bytes say no more than `push` and `pull`. Those of the steps that follow
                 differ in what is read of them alone
    """

    request: Repeated | None
    push: PushCall
    pull: PullCall
    write: Callable[[Any], Parts]
    checked: Checked
    is_compared: bool = False

    def next(self, request: Request) -> _KnownExchange | None:
        """Returns this exchange at the next clock, with the hyper-parameters of then; None if that is not what is asked
        for. Raises InvalidRequest as `read_exchange`."""
        head, payload = request[:2] if isinstance(request, Parts) else (request, None)
        again, clock = self.request, self.push.clock + 1
        values: Groups = self.push.groups
        if again is None or payload is not None:
            return None
        same = again.at(clock)
        if same is None:
            return None
        if head != same:
            try:
                changed = again.changed(head, clock, same)
            except InvalidRequest:
                if self.is_compared:
                    raise
                return None  # the groups may lie elsewhere in other code's requests: it is read in full
            if changed is None or changed[1].keys() != values.keys():
                return None
            again, values = changed
        push, pull = replace(self.push, clock=clock, groups=values), replace(self.pull, clock=clock)
        # Checked once, when an exchange first repeats the one before: where steps differ in more, each check would be
        # wasted. The exchanges that follow have their hyper-parameters in the same place, and the same bytes elsewhere.
        if not self.is_compared and not (
            repeated.says_no_more(head, push, pull) and repeated.write_groups(values) == again.groups
        ):
            return None
        return replace(self, request=again, push=push, pull=pull, is_compared=True)


def _by_grpc(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method for gRPC: its context becomes a GrpcCall."""

    def handler(request: bytes, context: grpc.ServicerContext, *send: Send) -> Any:
        return behaviour(request, GrpcCall(context), *send)

    return handler


def _check_caller(caller: Identity, by: ServerCall) -> None:
    """Raises Forbidden for a job that the caller may not use.

    Also for another worker than that of the data connection: each connection belongs to one worker.
    """
    check_job(caller.job)
    of = by.worker
    if of is None:
        return
    named = caller.job, caller.rank, caller.incarnation, caller.member
    if named != (of.job, of.rank, of.incarnation, of.member):
        raise Forbidden(
            f"this data connection is that of {_spoken(of)} in its place; the request names {_spoken(caller)}"
        )


def _spoken(worker: Identity) -> str:
    member = f", member {worker.member}," if worker.member else ""
    return f"worker {worker.rank}{member} of job {worker.job!r}"


class FrameStream(Outbox):
    """The outbox for the answers to one pull on a data connection.

    The callback of `on_close` runs in the thread that has sent the last answer.

    send:  counts and sends a message
    write: encodes an answer as a message
    """

    def __init__(self, send: Callable[[Any], None], call: FrameCall, write: Callable[[Any], Parts]) -> None:
        self._send, self._call, self._write = send, call, write

    def tell(self, answer: Answer) -> None:
        """Sends an answer."""
        self._send(self._write(answer))

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        """Sends an answer that is made when its turn has come, without a copy of its payload.

        A small answer is sent at once, in this thread, if the socket has room; otherwise a copy of it is sent later.
        """
        if is_small:
            with lent() as (answer, _):
                message = self._write(answer)
                self._send(message if message.payload is None else Parts(message.head, bytes(message.payload)))
            return

        @contextlib.contextmanager
        def written() -> Iterator[LentMessage]:
            with lent() as (answer, loan):
                yield self._write(answer), loan

        self._send(written)

    def tell_last(self, answer: Answer) -> None:
        """Sends an answer and the end of the call, in one frame."""
        self._send(LastAnswer(*self._write(answer)))
        self._send(None)

    def together(self) -> AbstractContextManager[None]:
        """Returns a context: small answers, and the end, that are sent inside it leave in one write."""
        return self._call.together()

    def finish(self) -> None:
        """Ends the call after the answers before it."""
        self._send(None)

    def fail(self, error: PSError) -> None:
        """Ends the call with an error, after the answers before it."""
        self._call.fail(error)
        self._send(None)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls back when the call is over, however it ended; at once if it already is."""
        if not self._call.add_callback(callback):
            callback()
