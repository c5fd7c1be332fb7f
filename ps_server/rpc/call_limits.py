"""Authenticates and limits every call, and cancels slow peers.

The caller is known before a byte of its request is read. A peer that sends or reads too slowly is cut off, so that it
holds one thread for a stated time at most; the pools are larger than what one caller may have in flight.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import grpc

from ps_protocol.errors import Forbidden, LimitExceeded
from ps_server.core.limits import Limits
from ps_server.rpc.auth import Authenticator, host_of
from ps_server.rpc.permissions import EVERYONE, METHODS, Principal

_LOOK_SECONDS = 0.25

# More than one caller may have in flight (Limits.calls), so that no slow peer holds all of them. Threads are made when
# they are needed: ordinary traffic makes a few.
CALL_THREADS = 1024

# Set while a method runs, for what can only be checked once its request is read.
_CALL: ContextVar[tuple[Principal, str] | None] = ContextVar("call", default=None)


def check_job(job: str) -> None:
    """Raises Forbidden if the caller of the method that runs in this thread may not call it for that job."""
    call = _CALL.get()
    if call is not None:
        caller, method = call
        caller.check(method, job)


def may_see(job: str) -> bool:
    """Returns whether the caller of the method that runs in this thread may be told of that job."""
    try:
        check_job(job)
    except Forbidden:
        return False
    return True


def caller_name() -> str:
    """Returns the name of the caller of the method that runs in this thread; empty outside of one."""
    call = _CALL.get()
    return "" if call is None else call[0].name


def in_pool(behaviour: Callable[..., Any], pool: ThreadPoolExecutor, non_blocking: bool = False) -> Callable[..., Any]:
    """Returns a handler that runs in a pool of its own, and, if non-blocking, gives its thread back at once."""

    def handler(*arguments: Any) -> Any:
        return behaviour(*arguments)

    handler.experimental_thread_pool = pool  # type: ignore[attr-defined]
    handler.experimental_non_blocking = non_blocking  # type: ignore[attr-defined]
    return handler


def grpc_options(limits: Limits) -> list[tuple[str, int]]:
    """Returns the limits that gRPC itself keeps, as options of a server."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.calls),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_seconds * 1000)),
    ]


class CallLimits:
    """Counts calls in and out, each under its principal, and watches over their waits. Thread-safe."""

    def __init__(self, authenticator: Authenticator, limits: Limits) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._lock = threading.Lock()
        self._in_flight: Counter[tuple[str, str]] = Counter()
        self._all = 0  # of these, all but the probes
        self._due: dict[int, tuple[float, grpc.ServicerContext]] = {}
        self._next = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slow-peers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join()

    def statistics(self) -> dict[str, int]:
        """Returns how many calls are in flight, callers that have some, and waits for peers."""
        with self._lock:
            return {
                "calls": sum(self._in_flight.values()),
                "callers": len(self._in_flight),
                "waits": len(self._due),
            }

    def enter(self, method: str, context: grpc.ServicerContext) -> Principal:
        """Counts a call in until it ends; returns its caller. Raises Unauthenticated, Forbidden, or LimitExceeded."""
        host = host_of(context.peer())
        probe = METHODS.get(method) == EVERYONE
        if probe:
            caller = Principal("anyone", frozenset())
        else:
            caller = self._authenticator.identify(context)
            caller.check(method)
        origin = (caller.name, host)
        with self._lock:
            # Probes are not counted among all: a caller that fills the server must not have it killed as dead.
            if not probe and self._all >= self._limits.all_calls:
                raise LimitExceeded(f"{self._all} calls are in flight here: max-all-calls is {self._limits.all_calls}")
            if self._in_flight[origin] >= self._limits.calls:
                raise LimitExceeded(
                    f"{caller.name} has {self._limits.calls} calls in flight: that is the limit max-calls"
                )
            self._in_flight[origin] += 1
            self._all += not probe

        def left() -> None:
            with self._lock:
                self._all -= not probe
                self._in_flight[origin] -= 1
                if not self._in_flight[origin]:
                    del self._in_flight[origin]

        if not context.add_callback(left):
            left()
        return caller

    @contextlib.contextmanager
    def running(self, caller: Principal, method: str) -> Iterator[None]:
        """Tells `check_job` the caller and the method of this thread."""
        token = _CALL.set((caller, method))
        try:
            yield
        finally:
            _CALL.reset(token)

    def receiving(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        """Limits a wait for a request: cancels the call if it takes too long."""
        return self._limited(context, self._limits.upload_seconds)

    def sending(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        """Limits the sending of an answer: cancels the call if its caller does not take it."""
        return self._limited(context, self._limits.stall_seconds)

    @contextlib.contextmanager
    def _limited(self, context: grpc.ServicerContext, seconds: float) -> Iterator[None]:
        with self._lock:
            self._next += 1
            number = self._next
            self._due[number] = (time.monotonic() + seconds, context)
        try:
            yield
        finally:
            with self._lock:
                self._due.pop(number, None)

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            now = time.monotonic()
            with self._lock:
                late = [context for due, context in self._due.values() if due <= now]
            for context in late:
                context.cancel()
