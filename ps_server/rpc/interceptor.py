"""Intercepts every method, over gRPC and data connections: errors become statuses, and each call is counted under the
standard names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Histogram

from ps_frames.server import CallBroken, FrameCall, ServerCall
from ps_frames.server import Method as FrameMethod
from ps_protocol.errors import InvalidRequest, PSError, Unsupported
from ps_protocol.framing import Parts
from ps_runtime.metrics import LATENCY_BUCKETS
from ps_runtime.troubles import Troubles
from ps_server.rpc.call_limits import Admitted, CallLimits
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

    A PSError becomes its status; anything else is logged here and leaves as INTERNAL without its text, which may hold
    what is none of the caller's business. A unary request is read as a stream of one message (the same bytes): so the
    caller is known, and counted, before its request is read, and the request is not parsed on gRPC's polling thread.
    """

    def __init__(self, registry: CollectorRegistry, limits: CallLimits) -> None:
        self._metrics = CallMetrics(registry)
        self.limits = limits
        self._wrapped: dict[str, grpc.RpcMethodHandler | None] = {}

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
            self._wrapped[method] = self.guarded(method, handler)
        return self._wrapped[method]

    def guarded(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Returns a handler that lets a call in before it carries it out."""
        reader = _Reader(self.limits, method, handler.request_deserializer)
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary_by_grpc(handler.unary_unary, self._metrics_of(method, "unary"), reader),
                None,
                handler.response_serializer,
            )
        if handler.unary_stream:
            if not getattr(handler.unary_stream, "experimental_non_blocking", False):
                raise TypeError(f"{method} would hold a thread while it streams")
            return grpc.stream_stream_rpc_method_handler(
                _stream_by_grpc(handler.unary_stream, self._metrics_of(method, "server_stream"), reader),
                None,
                handler.response_serializer,
            )
        if not handler.stream_stream:
            raise TypeError(f"{method} is of a kind that is not guarded here")
        return grpc.stream_stream_rpc_method_handler(
            _guard(handler.stream_stream, reader), None, handler.response_serializer
        )

    def unary(self, method: str, behaviour: Callable[[Parts, FrameCall], bytes]) -> FrameMethod:
        """Returns what carries out a method with one answer on data connections, guarded in the same way."""
        metrics, reader = self._metrics_of(method, "unary"), _Reader(self.limits, method, None)

        def carry_out(call: FrameCall) -> None:
            call.end(_answer(metrics, reader, call, lambda request: behaviour(request, call)))

        return carry_out

    def stream(self, method: str, behaviour: Callable[[Parts, FrameCall, Send], None]) -> FrameMethod:
        """Returns what carries out a method with a stream of answers on data connections, likewise."""
        metrics, reader = self._metrics_of(method, "server_stream"), _Reader(self.limits, method, None)

        def carry_out(call: FrameCall) -> None:
            _answer_in_parts(metrics, reader, call, call.send, lambda request, send: behaviour(request, call, send))

        return carry_out

    def _metrics_of(self, method: str, kind: str) -> _MethodMetrics:
        _, service, name = method.split("/")
        return _MethodMetrics(self._metrics, kind, service, name)


class _Reader:
    """Lets a call in, and reads its one request.

    What anybody may ask is not read: it is answered as if it were empty, so that nothing is taken in from an unknown
    caller. A probe for one service is told how the whole server is.
    """

    def __init__(self, limits: CallLimits, method: str, parse: Callable[[bytes], Any] | None) -> None:
        self.limits = limits
        self.method = method
        self._parse = parse
        self._is_read = METHODS.get(method) != EVERYONE

    def enter(self, call: ServerCall) -> Admitted:
        """Counts the call in."""
        return self.limits.enter(self.method, call)

    def read(self, call: ServerCall, caller: Principal) -> Any:
        """Returns the one request. Raises InvalidRequest if it does not come or cannot be parsed."""
        if not self._is_read:
            return self.parse(b"")
        raw = self.next(call, caller)
        if raw is None:
            raise InvalidRequest("the call ended before its request came")
        return self.parse(raw)

    def next(self, call: ServerCall, caller: Principal) -> Request | None:
        """Returns the request that comes next; None at the end.

        A call that keeps it back for too long is cancelled. Raises Refused if too many such calls are in the way.
        """
        with self.limits.receiving(self.method, caller, call):
            return call.receive()

    def parse(self, raw: Request) -> Any:
        """Returns the request that bytes hold. Raises InvalidRequest if they hold none."""
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
        """Logs an error that is no PSError, once with its traceback; returns what the caller is told."""
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
    """Has a call end with an error.

    Not in the frame that caught it: one that keeps the error, whose traceback names the frame, would keep the request
    too, megabytes of it, until the collector of cycles comes by.
    """
    known = _error_of(error, metrics)
    metrics.ended(known.code.name, begun)
    call.fail(known)


# -- calls of both kinds ---------------------------------------------------------------------------------------------


def _answer(metrics: _MethodMetrics, reader: _Reader, call: ServerCall, behaviour: Callable[[Any], Any]) -> Any | None:
    """Returns the answer to a call; None: the call is to fail. Raises CallBroken."""
    begun = time.perf_counter()
    metrics.started.inc()
    try:
        caller = reader.enter(call).caller
        request = reader.read(call, caller)
        metrics.received.inc()
        with reader.limits.running(caller, reader.method, call):
            response = behaviour(request)
    except CallBroken:
        metrics.ended("CANCELLED", begun)
        raise
    except Exception as error:
        _refuse(call, error, metrics, begun)
        return None
    metrics.sent.inc()
    metrics.ended("OK", begun)
    return response


def _answer_in_parts(
    metrics: _MethodMetrics,
    reader: _Reader,
    call: ServerCall,
    send: Send,
    behaviour: Callable[[Any, Send], None],
) -> None:
    """Carries out a call whose answers are sent later, by any thread."""
    begun = time.perf_counter()
    finished = False
    metrics.started.inc()

    def counted(message: Any) -> None:
        nonlocal finished
        finished = finished or message is None
        if message is None:
            send(None)
            return
        metrics.sent.inc()
        with reader.limits.sending(call):
            send(message)

    def ended() -> None:
        metrics.ended("CANCELLED" if not finished else call.code or "OK", begun)

    def end(error: PSError) -> None:
        call.fail(error)
        counted(None)

    if not call.add_callback(ended):
        return
    try:
        admitted = reader.enter(call)
        request = reader.read(call, admitted.caller)
        metrics.received.inc()
        with reader.limits.running(admitted.caller, reader.method, call):
            behaviour(request, counted)
        admitted.call.wait()
    except CallBroken:
        return
    except Refused as error:
        reader.limits.after(error.held_seconds, partial(end, error.error))
    except Exception as error:
        end(_error_of(error, metrics))


# -- calls by gRPC ---------------------------------------------------------------------------------------------------


def _unary_by_grpc(behaviour: Callable[..., Any], metrics: _MethodMetrics, reader: _Reader) -> Callable[..., Any]:
    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        call = GrpcCall(context, requests)
        response = _answer(metrics, reader, call, lambda request: behaviour(request, context))
        if response is None:
            call.abort()
        return response

    _keep_pool(wrapped, behaviour)
    return wrapped


def _stream_by_grpc(behaviour: Callable[..., None], metrics: _MethodMetrics, reader: _Reader) -> Callable[..., None]:
    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext, send: Send) -> None:
        def carry_out(request: Any, counted: Send) -> None:
            behaviour(request, context, counted)

        _answer_in_parts(metrics, reader, GrpcCall(context, requests), send, carry_out)

    _keep_pool(wrapped, behaviour)
    return wrapped


def _guard(behaviour: Callable[..., Any], reader: _Reader) -> Callable[..., Any]:
    """Guards reflection: a stream each way, which a caller may not leave open for long."""

    def wrapped(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        call = GrpcCall(context, requests)

        def timely(caller: Principal) -> Iterator[Any]:
            while (raw := reader.next(call, caller)) is not None:
                yield reader.parse(raw)

        try:
            yield from behaviour(timely(reader.enter(call).caller), context)
        except (PSError, Refused) as error:
            call.fail(error.error if isinstance(error, Refused) else error)
            call.abort()

    return wrapped
