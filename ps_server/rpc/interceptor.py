"""Intercepts every method, over gRPC and data connections: errors become statuses, and each call is counted under the
standard names."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Histogram

from ps_frames.frames import nothing
from ps_frames.server import CallBroken, FrameCall, ServerCall
from ps_frames.server import Method as FrameMethod
from ps_protocol.errors import InvalidRequest, PSError, Unsupported, without_traceback
from ps_protocol.framing import Parts
from ps_runtime.metrics import LATENCY_BUCKETS
from ps_runtime.troubles import Troubles
from ps_server.rpc.call_limits import Admitted, CallLimits, caller_name
from ps_server.rpc.permissions import EVERYONE, METHODS, Principal
from ps_server.rpc.receiving import Refused
from ps_server.rpc.streams import GrpcCall, Send

log = logging.getLogger("ps_server")

Request = bytes | Parts  # as gRPC brings it, and as a data connection does


class CallMetrics:
    """grpc_server_*: the names and labels that dashboards for gRPC know."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started_total", "Calls started.", labels, registry=registry)
        self.handled = Counter(
            "grpc_server_handled_total", "Calls ended, by code.", (*labels, "grpc_code"), registry=registry
        )
        self.received = Counter("grpc_server_msg_received_total", "Messages received.", labels, registry=registry)
        self.sent = Counter("grpc_server_msg_sent_total", "Messages sent.", labels, registry=registry)
        self.seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time from a call's start to its end.",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )


class CallInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Wraps every method that is registered: no call gets past its limits.

    A PSError becomes its status. Any other exception is logged, and the caller gets INTERNAL without its text, which
    may hold private data. A unary request is read as a stream of one message (the same bytes). So the caller is
    identified and counted before its request is read, and the request is not parsed on gRPC's polling thread.
    """

    def __init__(self, registry: CollectorRegistry, limits: CallLimits, pool: ThreadPoolExecutor) -> None:
        """pool: the server's own, for methods without another pool"""
        self._metrics = CallMetrics(registry)
        self.limits = limits
        self._pool = pool
        self._wrapped: dict[str, grpc.RpcMethodHandler | None] = {}
        self._answered_later: dict[str, grpc.RpcMethodHandler] = {}  # unary methods, where many calls are made

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if method not in self._wrapped:  # runs on gRPC's one polling thread: a look-up, not work
            handler = continuation(handler_call_details)
            if handler is None:
                return None  # an unknown method: not remembered, for its name is the caller's choice
            if handler.unary_unary and _waits(method):
                self._answered_later[method] = self._without_a_thread(method, handler)
            self._wrapped[method] = self.guarded(method, handler)
        if method in self._answered_later and not self.limits.may_wait(method):
            return self._answered_later[method]
        return self._wrapped[method]

    def _without_a_thread(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Returns a handler of a unary method that holds no thread while its request waits or a refusal is delayed.

        To gRPC it is a method that answers in a stream: only such a method can give its thread back and answer later.
        The bytes are those of a unary answer. The message and the status go through gRPC's one polling thread one after
        the other, so a small call takes 0.05 to 0.2 ms longer. While there are few calls, a thread waits instead.
        """
        reader = _Reader(self.limits, method, handler.request_deserializer)
        behaviour = handler.unary_unary

        def answering(request: Any, context: grpc.ServicerContext, send: Send) -> None:
            response = behaviour(request, context)

            def answer() -> None:
                send(response)
                send(None)

            reader.limits.answers.submit(caller_name(), context.peer(), answer)

        _keep_pool(answering, behaviour)
        return grpc.stream_stream_rpc_method_handler(
            _stream_by_grpc(answering, self._metrics_of(method, "unary"), reader, self._pool),
            None,
            handler.response_serializer,
        )

    def guarded(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Returns a handler that admits a call before it carries it out."""
        reader = _Reader(self.limits, method, handler.request_deserializer)
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary_by_grpc(
                    handler.unary_unary,
                    self._metrics_of(method, "unary"),
                    reader,
                    read=partial(self.limits.waited, method) if _waits(method) else nothing,
                ),
                None,
                handler.response_serializer,
            )
        if handler.unary_stream:
            if not getattr(handler.unary_stream, "experimental_non_blocking", False):
                raise TypeError(f"{method} would hold a thread while it streams")
            return grpc.stream_stream_rpc_method_handler(
                _stream_by_grpc(handler.unary_stream, self._metrics_of(method, "server_stream"), reader, self._pool),
                None,
                handler.response_serializer,
            )
        if not handler.stream_stream:
            raise TypeError(f"{method} is of a kind that is not guarded here")
        return grpc.stream_stream_rpc_method_handler(
            _guard(handler.stream_stream, reader), None, handler.response_serializer
        )

    def unary(self, method: str, behaviour: Callable[[Parts, FrameCall], bytes]) -> FrameMethod:
        """Returns the function that carries out a method with one answer on data connections, with the same limits."""
        metrics, reader = self._metrics_of(method, "unary"), _Reader(self.limits, method, None)

        def carry_out(call: FrameCall) -> None:
            call.end(_answer(metrics, reader, call, lambda request: behaviour(request, call)))

        return carry_out

    def stream(self, method: str, behaviour: Callable[[Parts, FrameCall, Send], None]) -> FrameMethod:
        """Returns the function that carries out a method with a stream of answers on data connections, with the same
        limits.
        """
        metrics, reader = self._metrics_of(method, "server_stream"), _Reader(self.limits, method, None)

        def carry_out(call: FrameCall) -> None:
            answers = _Sending(call, call.send, metrics, self.limits)
            # The connection's own thread waits for the place: it has no other work.
            _answer_in_parts(answers, reader, None, lambda request, send: behaviour(request, call, send))

        return carry_out

    def _metrics_of(self, method: str, kind: str) -> _MethodMetrics:
        _, service, name = method.split("/")
        return _MethodMetrics(self._metrics, kind, service, name)


def _waits(method: str) -> bool:
    """Returns whether calls of a method wait for their request. Requests of methods that anybody may call are not read.

    For these methods no thread waits until the caller has read the answer, either: an unknown caller that reads none
    would otherwise occupy all those threads, and the server's probes would get no answer.
    """
    return METHODS.get(method) != EVERYONE


class _Reader:
    """Admits a call, and reads its one request.

    Requests of methods that anybody may call are not read, but answered as if they were empty: the server buffers
    nothing of an unknown caller. So a health check of one service gets the health of the whole server.
    """

    def __init__(self, limits: CallLimits, method: str, parse: Callable[[bytes], Any] | None) -> None:
        self.limits = limits
        self.method = method
        self._parse = parse
        self._is_read = _waits(method)

    def read(self, call: ServerCall, place: AbstractContextManager[None]) -> Any:
        """Returns the one request, which is received in a place. Raises InvalidRequest if it does not come or cannot be
        parsed."""
        if not self._is_read:
            return self.parse(b"")
        with place:
            raw = call.receive()
        if raw is None:
            raise InvalidRequest("the call ended before its request came")
        return self.parse(raw)

    def place(self, call: ServerCall, caller: Principal) -> AbstractContextManager[None]:
        """Returns a place for the request. This thread waits for it when it enters the context.

        A call whose bytes come too slowly is cancelled. Raises Refused if too many calls wait for a place.
        """
        return self.limits.receiving(self.method, caller, call)

    def place_later(
        self,
        call: ServerCall,
        caller: Principal,
        pool: ThreadPoolExecutor | None,
        receive: Callable[[AbstractContextManager[None]], None],
        refuse: Callable[[Refused], None],
    ) -> None:
        """Calls `receive` with a place once one is free, in a thread of the pool; or `refuse`. No thread waits.

        pool: None: `receive` waits for the place, in this thread
        """
        if pool is None or not self._is_read:
            receive(self.place(call, caller))
        else:
            self.limits.receive_later(self.method, caller, call, pool.submit, receive, refuse)

    def parse(self, raw: Request) -> Any:
        """Parses a request. Raises InvalidRequest for bytes that are none."""
        if self._parse is None:
            return raw
        assert isinstance(raw, bytes)  # as gRPC brings it
        try:
            return self._parse(raw)
        except DecodeError:
            raise InvalidRequest(f"the bytes are no request of {self.method.rpartition('/')[2]}") from None


class _MethodMetrics:
    """The metrics of one method, with their labels bound once."""

    def __init__(self, metrics: CallMetrics, kind: str, service: str, method: str) -> None:
        self._of = (kind, service, method)
        self._handled = metrics.handled
        self.started = metrics.started.labels(*self._of)
        self.received = metrics.received.labels(*self._of)
        self.sent = metrics.sent.labels(*self._of)
        self.seconds = metrics.seconds.labels(*self._of)
        self._faults = Troubles(log, "call")

    def fault(self, error: Exception) -> PSError:
        """Logs an error that is no PSError, the first time with its traceback; returns the error for the caller."""
        what = "a call of %s failed"
        self._faults.met("", what, self._of[-1], trace=error, level=logging.ERROR)
        return PSError("internal error; the server's log says more")

    def ended(self, code: str, begun: float) -> None:
        self._handled.labels(*self._of, code).inc()
        self.seconds.observe(time.perf_counter() - begun)


def _keep_pool(wrapped: Callable[..., Any], behaviour: Callable[..., Any]) -> None:
    for attribute in ("experimental_non_blocking", "experimental_thread_pool"):
        if hasattr(behaviour, attribute):
            setattr(wrapped, attribute, getattr(behaviour, attribute))


def _error_of(error: Exception, metrics: _MethodMetrics) -> PSError:
    """Returns the error for the caller, and drops the traceback of the one that a method raised.

    Else a call whose frames refer to the error would stay until the garbage collector runs. gRPC counts such calls, and
    refuses new ones on a connection that has STREAMS_OF_A_CONNECTION of them: a worker that asks again and again would
    shut itself out.
    """
    known = _known(error, metrics)
    without_traceback(error)
    return known


def _known(error: Exception, metrics: _MethodMetrics) -> PSError:
    if isinstance(error, Refused):
        return error.error
    if isinstance(error, PSError):
        return error
    # Generated servicers raise this for methods that they do not implement, as grpcio's own health service does. torch
    # raises the same class for an element type that it cannot compute with, and that is a fault of the handler.
    if isinstance(error, NotImplementedError) and str(error) == "Method not implemented!":
        return Unsupported("this server does not have that method")
    return metrics.fault(error)


def _refuse(call: ServerCall, error: Exception, metrics: _MethodMetrics, begun: float) -> None:
    """Ends a call with an error.

    Do not call it in the frame that caught the error. The error's traceback refers to that frame: the cycle would keep
    the request, megabytes of it, until the garbage collector runs.
    """
    known = _error_of(error, metrics)
    metrics.ended(known.code.name, begun)
    call.fail(known)


# -- calls of both kinds ---------------------------------------------------------------------------------------------


def _entered(reader: _Reader, call: ServerCall) -> Admitted:
    """Authenticates and counts a call. An error is raised at once, and counts towards the delay of later ones."""
    try:
        return reader.limits.enter(reader.method, call)
    except Exception as error:
        reader.limits.held_seconds(error)
        raise


def _received(reader: _Reader, call: ServerCall, read: Callable[[], None]) -> tuple[Admitted, Any]:
    """Returns the call and its request, for which this thread waits.

    read: called when the request is read or refused
    """
    try:
        admitted = _entered(reader, call)
        return admitted, reader.read(call, reader.place(call, admitted.caller))
    finally:
        read()


def _answer(
    metrics: _MethodMetrics,
    reader: _Reader,
    call: ServerCall,
    behaviour: Callable[[Any], Any],
    read: Callable[[], None] = nothing,
) -> Any | None:
    """Returns the answer to a call; None: the call fails. Raises CallBroken.

    read: is called when the request is read or the call is refused
    """
    begun = time.perf_counter()
    metrics.started.inc()
    try:
        admitted, request = _received(reader, call, read)
        metrics.received.inc()
        with reader.limits.running(admitted):
            response = behaviour(request)
    except CallBroken:  # the caller is gone, or was too slow
        metrics.ended("CANCELLED", begun)
        raise
    except Exception as error:
        _refuse(call, error, metrics, begun)
        return None
    metrics.sent.inc()
    metrics.ended("OK", begun)
    return response


class _Sending:
    """Sends and counts the messages of one call that answers in a stream.

    send: sends a message; None: the end
    """

    def __init__(self, call: ServerCall, send: Send, metrics: _MethodMetrics, limits: CallLimits) -> None:
        self.call, self.metrics = call, metrics
        self._send, self._limits = send, limits
        self._begun = time.perf_counter()
        self._finished = False
        metrics.started.inc()

    def send(self, message: Any) -> None:
        """Sends a message; None: the end."""
        if message is None:
            self._finished = True
            self._send(None)
            return
        self.metrics.sent.inc()
        self._send(message)

    def ended(self) -> None:
        """Counts a call that has ended."""
        self.metrics.ended("CANCELLED" if not self._finished else self.call.code or "OK", self._begun)

    def end(self, error: PSError) -> None:
        """Ends the call with an error."""
        self.call.fail(error)
        self.send(None)

    def refuse(self, error: Exception) -> None:
        """Ends a call whose request is not read; with a delay if its caller would repeat it at once."""
        self._limits.after(self._limits.held_seconds(error), partial(self.end, _error_of(error, self.metrics)))


def _answer_in_parts(
    answers: _Sending, reader: _Reader, pool: ThreadPoolExecutor | None, behaviour: Callable[[Any, Send], None]
) -> None:
    """Carries out a call whose answers are sent later, by any thread.

    pool: continues a call that had to wait for a place; None: this thread waits
    """
    call = answers.call

    def carry_out(admitted: Admitted, place: AbstractContextManager[None]) -> None:
        try:
            request = reader.read(call, place)
            answers.metrics.received.inc()
            with reader.limits.running(admitted):
                behaviour(request, answers.send)
            admitted.call.wait()
        except CallBroken:  # the caller is gone, or was too slow
            return
        except Refused as error:
            answers.refuse(error)
        except Exception as error:
            answers.end(_error_of(error, answers.metrics))

    if not call.add_callback(answers.ended):
        return
    try:
        admitted = reader.limits.enter(reader.method, call)
    except Exception as error:
        answers.refuse(error)
    else:
        reader.place_later(call, admitted.caller, pool, partial(carry_out, admitted), answers.refuse)


# -- calls by gRPC ---------------------------------------------------------------------------------------------------


def _unary_by_grpc(
    behaviour: Callable[..., Any], metrics: _MethodMetrics, reader: _Reader, read: Callable[[], None]
) -> Callable[..., Any]:
    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        call = GrpcCall(context, requests)
        response = None
        with contextlib.suppress(CallBroken):
            response = _answer(metrics, reader, call, lambda request: behaviour(request, context), read)
        if response is None:
            call.abort()
        return response

    _keep_pool(wrapped, behaviour)
    return wrapped


def _stream_by_grpc(
    behaviour: Callable[..., None], metrics: _MethodMetrics, reader: _Reader, server_pool: ThreadPoolExecutor
) -> Callable[..., None]:
    pool = getattr(behaviour, "experimental_thread_pool", server_pool)

    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext, send: Send) -> None:
        call = GrpcCall(context, requests)

        def limited(message: Any) -> None:
            if message is None:
                send(None)
                return
            with reader.limits.sending(call):
                send(message)

        answers = _Sending(call, limited, metrics, reader.limits)
        _answer_in_parts(answers, reader, pool, lambda request, counted: behaviour(request, context, counted))

    _keep_pool(wrapped, behaviour)
    wrapped.experimental_non_blocking = True  # type: ignore[attr-defined]
    return wrapped


def _guard(behaviour: Callable[..., Any], reader: _Reader) -> Callable[..., Any]:
    """Guards reflection: a stream each way, which a caller may not leave open for long."""

    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        call = GrpcCall(context, requests)

        def timely(caller: Principal) -> Iterator[Any]:
            while True:
                with reader.place(call, caller):
                    raw = call.receive()
                if raw is None:
                    return
                yield reader.parse(raw)

        try:
            yield from behaviour(timely(reader.limits.enter(reader.method, call).caller), context)
        except (PSError, Refused) as error:
            call.fail(error.error if isinstance(error, Refused) else error)
            call.abort()
        except CallBroken:
            call.abort()

    return wrapped
