"""The boundary of every gRPC method: errors become statuses, and each call is counted under the standard names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from ps_protocol.errors import PSError
from ps_server.metrics import LATENCY_BUCKETS
from ps_server.streams import set_error

log = logging.getLogger("ps_server")


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


class Boundary(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Wraps every unary and server-streaming method that is registered.

    A PSError becomes its status; anything else is logged here and leaves as INTERNAL without its text, which may hold
    what is none of the caller's business.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = CallMetrics(registry)
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
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        _, service, name = method.split("/")
        if handler.unary_unary:
            wrapped = _observe_unary(handler.unary_unary, _Labels(self._metrics, "unary", service, name))
            return grpc.unary_unary_rpc_method_handler(
                wrapped, handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream and getattr(handler.unary_stream, "experimental_non_blocking", False):
            labels = _Labels(self._metrics, "server_stream", service, name)
            return grpc.unary_stream_rpc_method_handler(
                _observe_stream(handler.unary_stream, labels),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler  # reflection's streams: not ours, and never on the data path


class _Labels:
    """The metrics of one method, with their labels bound once."""

    def __init__(self, metrics: CallMetrics, kind: str, service: str, method: str) -> None:
        self._of = (kind, service, method)
        self._handled = metrics.handled
        self.started = metrics.started.labels(*self._of)
        self.received = metrics.received.labels(*self._of)
        self.sent = metrics.sent.labels(*self._of)
        self.seconds = metrics.seconds.labels(*self._of)

    def ended(self, code: str, begun: float) -> None:
        self._handled.labels(*self._of, code).inc()
        self.seconds.observe(time.perf_counter() - begun)


def _keep_pool(wrapped: Callable[..., Any], behaviour: Callable[..., Any]) -> None:
    for attribute in ("experimental_non_blocking", "experimental_thread_pool"):
        if hasattr(behaviour, attribute):
            setattr(wrapped, attribute, getattr(behaviour, attribute))


def _error_of(error: Exception) -> PSError:
    if isinstance(error, PSError):
        return error
    log.error("a call failed", exc_info=error)
    return PSError("internal error; the server's log says more")


def _observe_unary(behaviour: Callable[..., Any], labels: _Labels) -> Callable[..., Any]:
    def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
        begun = time.perf_counter()
        labels.started.inc()
        labels.received.inc()
        try:
            response = behaviour(request, context)
        except Exception as error:
            known = _error_of(error)
            labels.ended(known.code.name, begun)
            set_error(context, known)
            context.abort(known.code, str(known))  # raises, as gRPC wants it
        labels.sent.inc()
        labels.ended("OK", begun)
        return response

    _keep_pool(wrapped, behaviour)
    return wrapped


def _observe_stream(behaviour: Callable[..., Any], labels: _Labels) -> Callable[..., Any]:
    def wrapped(request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        begun = time.perf_counter()
        finished = False
        labels.started.inc()
        labels.received.inc()

        def counted(message: Any) -> None:
            nonlocal finished
            finished = finished or message is None
            if message is not None:
                labels.sent.inc()
            send(message)

        def ended() -> None:
            code = context.code()
            labels.ended("CANCELLED" if not finished else code.name if code else "OK", begun)

        context.add_callback(ended)
        try:
            behaviour(request, context, counted)
        except Exception as error:
            set_error(context, _error_of(error))
            counted(None)

    _keep_pool(wrapped, behaviour)
    return wrapped
