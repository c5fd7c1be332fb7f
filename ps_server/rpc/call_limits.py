"""Authenticates and limits every call, and cancels slow peers.

The caller is identified before a byte of its request is read. A peer that sends or reads too slowly is cut off, so that
it holds a thread for a limited time; the pools are larger than the number of requests that may wait in them
(core/thread_shares.py). Threads are made when they are needed: ordinary traffic makes a few.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from ps_frames.server import Cancellable, ServerCall
from ps_protocol.errors import Backlogged, Forbidden, Unauthenticated
from ps_protocol.job import MAX_NAME_LENGTH
from ps_runtime import audit
from ps_runtime.background import guarded, start
from ps_runtime.pools import FairPool, Pool
from ps_server.core.admission import HELD_SECONDS, WINDOW_BYTES, RequestKind, request_limits, waiting_threads
from ps_server.core.limits import Limits
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.permissions import ALL_PERMISSIONS, EVERYONE, METHODS, Principal
from ps_server.rpc.receiving import Receiving, Refused, kind_of

_LOOK_SECONDS = 0.05
_IDLE_SECONDS = 1.0  # the pause between two looks while nothing is watched
_RELEASE_SECONDS = 5.0  # after a request was broken off, until its memory goes back to the system

# Of HTTP/2, for clients' messages: with gRPC's default of 16 KiB a round of 256 MiB takes a tenth longer
FRAME_BYTES = 1 << 20
# A worker has at most ten at a time on a connection. gRPC hands out all calls on one thread, so a step waits behind
# all that others have begun: beside eight principals that cancel calls at once, 11 to 22 ms with 24 to 48 of these,
# 140 to 170 ms with 128 (`bench flood`).
STREAMS_OF_A_CONNECTION = 48
# Requests up to this size on a data connection need no place: each connection has one at a time, and 8,192 take 32 MiB.
# Most exchanges are as small, and a worker waits for each. What is kept of a connection's last exchange has a bound of
# its own: MOST_REPEATED.
SMALL_BYTES = 4096
TOLD_AT_ONCE = 20  # errors in a second, before requests are read; the others are kept back
PRESSED_SECONDS = 60.0  # after one was
LEAST_ANSWERS, SHARE_OF_ANSWERS = 2, 16  # of the threads that answer then, one caller has a sixteenth
UNKNOWN = "unknown"  # whose call shows nothing that is known
_MOST_MILLISECONDS = 2**31 - 1  # largest value of gRPC's options


@dataclass
class Admitted:
    """An admitted call: its caller and host, its method, its entry among the calls in flight, and its job once that is
    known.
    """

    caller: Principal
    method: str
    host: str
    call: CallInFlight
    job: str = ""

    def check(self, job: str) -> None:
        """Raises Forbidden if the caller may not call the method for that job."""
        if self.caller.permissions is not ALL_PERMISSIONS:
            self.caller.check(self.method, job)


# Set while its method runs, for what can only be checked once the request is read.
_CALL: ContextVar[Admitted | None] = ContextVar("call", default=None)


def check_job(job: str) -> None:
    """Raises Forbidden if the caller of the method that runs in this thread may not call it for that job."""
    call = _CALL.get()
    if call is not None:
        call.job = job
        call.check(job)


def may_see(job: str) -> bool:
    """Returns whether the caller of the method that runs in this thread may see that job."""
    return what_the_caller_sees()(job)


def what_the_caller_sees() -> Callable[[str], bool]:
    """Returns a function: whether the caller of the method that runs in this thread may see a job.

    The function may be called later, from any thread.
    """
    call = _CALL.get()

    def sees(job: str) -> bool:
        try:
            if call is not None:
                call.check(job)
        except Forbidden:
            return False
        return True

    return sees


def caller_name() -> str:
    """Returns the name of the caller of the method that runs in this thread; empty outside of one."""
    call = _CALL.get()
    return "" if call is None else call.caller.name


def note_event(kind: str, job: str, text: str) -> None:
    """Writes an event of a job to the audit log, with the caller of the method that runs in this thread."""
    call = _CALL.get()
    if kind == "waits":  # no caller makes a job wait: it is not an action to audit
        return
    if call is None:
        audit.note(kind, text, job=job)
    else:
        audit.note(kind, text, call.caller.name, call.host, job)


def host_of(peer: str) -> str:
    """Returns the host in gRPC's name of a peer. The port is left out: each connection has another one."""
    return peer.rpartition(":")[0] or peer


def in_pool(
    behaviour: Callable[..., Any], pool: ThreadPoolExecutor | None, non_blocking: bool = False
) -> Callable[..., Any]:
    """Returns a handler that runs in a pool. A non-blocking one gives its thread back at once.

    pool: None: the server's own
    """

    def handler(*arguments: Any) -> Any:
        return behaviour(*arguments)

    if pool is not None:
        handler.experimental_thread_pool = pool  # type: ignore[attr-defined]
    handler.experimental_non_blocking = non_blocking  # type: ignore[attr-defined]
    return handler


def grpc_options(limits: Limits) -> list[tuple[str, int]]:
    """Returns the limits that gRPC itself keeps, as options of a server."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        # A client queues what is more. Not fewer where --max-calls is lower: a heartbeat would wait behind those that
        # are refused.
        ("grpc.max_concurrent_streams", STREAMS_OF_A_CONNECTION),
        # Calls that wait for a thread. gRPC drops some at random above 1,000, a worker's among them.
        ("grpc.server.max_pending_requests", limits.all_calls),
        ("grpc.server.max_pending_requests_hard_limit", limits.all_calls),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.http2.settings_timeout", _milliseconds(limits.handshake_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        # The bytes of a stream that gRPC buffers before its request is read. The probe would have gRPC raise it to 4
        # MiB and more; it would have raised the size of frames too.
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", FRAME_BYTES),
    ]


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1000), _MOST_MILLISECONDS)


# -- calls in flight ---------------------------------------------------------------------------------------------------

# Calls are counted by principal and host, and all together. A call counts while it has a thread, as a push does until
# it is staged. One that only waits, as a pull does for other workers, counts by itself: otherwise the pulls of a crowd
# behind one address would keep its pushes out, for which they wait. So do heartbeats and watches, without which a
# worker would be taken for dead, or wait for workers that are there.

HEARTBEAT = "/ps_protocol.v1.MembershipService/Heartbeat"
WATCH = "/ps_protocol.v1.MembershipService/Watch"
BUSY_SECONDS = 0.5  # the pause before a call is made again that was refused for a limit
WAITING_FOR_EACH = 4  # calls that wait, or heartbeats, or watches, for each call of max-calls
_ACTIVE, _WAITING = "", "waiting"

Key = TypeVar("Key", bound=Hashable)
Count = tuple[str, str, str]  # principal, host, and the kind of calls that has a count of its own


class CallInFlight:
    """One call, until `end`. is_listed: whether it counts towards --max-all-calls"""

    def __init__(self, calls: CallsInFlight, count: Count, is_listed: bool) -> None:
        self._calls, self.count, self.is_listed, self.is_over = calls, count, is_listed, False

    def wait(self) -> None:
        """Records that the call waits from now on, and has no thread. If too many calls wait, it still counts as
        running.
        """
        if not self.is_over:
            self._calls.wait(self)

    def end(self) -> None:
        """Stops counting the call."""
        self._calls.end(self)


class CallsInFlight:
    """The calls of one server. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._counts: Counter[Count] = Counter()
        self._listed: Counter[str] = Counter()  # by principal, the calls that count towards --max-all-calls
        self._all = 0  # of these

    def statistics(self) -> dict[str, int]:
        """Returns how many calls are in flight, and how many callers have some."""
        with self._lock:
            callers = {(principal, host) for principal, host, _ in self._counts}
            return {"calls": sum(self._counts.values()), "callers": len(callers)}

    def begin(self, principal: str, host: str, method: str, is_listed: bool) -> CallInFlight:
        """Counts a call that begins. Raises Backlogged if there are too many: workers repeat the call after a pause.

        is_listed: it counts towards --max-all-calls
        """
        count = (principal, host, method if method in (HEARTBEAT, WATCH) else _ACTIVE)
        most, most_of_all = self._most(count), self._limits.all_calls
        with self._lock:
            if is_listed and self._all >= most_of_all:
                raise _busy(f"{most_of_all} calls are in flight here: max-all-calls is {most_of_all}")
            if is_listed and self._listed[principal] >= max(1, most_of_all // 2):
                raise _busy(
                    f"{principal} has {self._listed[principal]} calls in flight, half of what all may have: "
                    f"max-all-calls is {most_of_all}"
                )
            if self._counts[count] >= most:
                raise _busy(f"{principal} has {most} calls in flight: that is the limit max-calls")
            self._counts[count] += 1
            if is_listed:
                self._listed[principal] += 1
                self._all += 1
        return CallInFlight(self, count, is_listed)

    def wait(self, call: CallInFlight) -> None:
        """Counts a call as a waiting one, if the limit of these permits."""
        principal, host, kind = call.count
        waiting = (principal, host, _WAITING)
        with self._lock:
            if not call.is_over and kind == _ACTIVE and self._counts[waiting] < self._most(waiting):
                _take_one(self._counts, call.count)
                self._counts[waiting] += 1
                call.count = waiting

    def end(self, call: CallInFlight) -> None:
        """Stops counting a call."""
        with self._lock:
            call.is_over = True
            _take_one(self._counts, call.count)
            if call.is_listed:
                _take_one(self._listed, call.count[0])
                self._all -= 1

    def _most(self, count: Count) -> int:
        return self._limits.calls * (1 if count[2] == _ACTIVE else WAITING_FOR_EACH)


def _take_one(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _busy(text: str) -> Backlogged:
    error = Backlogged(text)
    error.retry_after = BUSY_SECONDS
    return error


class CallLimits:
    """Counts the calls in flight by principal, and cancels those whose peers are too slow. Thread-safe.

    thread:  the thread that cancels calls
    answers: a pool that sends answers that were not sent at once. One caller gets few of its threads
    """

    def __init__(
        self,
        authenticator: Authenticator,
        limits: Limits,
        is_shard: bool = True,
        release: Callable[[], None] = lambda: None,
        pool: int = MOST_OF_A_POOL,
    ) -> None:
        """
        is_shard: whether this process serves pushes
        release:  returns free memory to the system
        pool:     threads of each pool of calls

        Raises InvalidRequest if --max-receiving-bytes is too little.
        """
        self._authenticator = authenticator
        self._is_open = not authenticator.is_required  # every caller may do everything
        self._limits = limits
        self._look_soon = threading.Event()
        self._receiving = Receiving(request_limits(limits, is_shard, pool), self._look_soon.set)
        self._release = release
        self._lock = threading.Lock()
        self._in_flight = CallsInFlight(limits)
        self._due: dict[int, tuple[float, Cancellable]] = {}
        self._kept_back: deque[tuple[float, Callable[[], None]]] = deque()  # calls that are refused, and when
        self._second, self._in_second = -math.inf, 0  # since when refusals are counted, and how many there were
        self._pressed_until = -math.inf
        self._few, self._threads_waiting = waiting_threads(pool), Counter[RequestKind]()
        self.answers = FairPool(Pool(pool, "answers"), max(LEAST_ANSWERS, pool // SHARE_OF_ANSWERS))
        self._next = 0
        self._stopping = threading.Event()
        self._release_at = math.inf  # when memory that broken requests took is given back
        self.thread = threading.Thread(target=self._watch, name="slow-peers", daemon=True)
        start(self.thread)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._look_soon.set()
        self.thread.join()
        self.answers.stop()

    def statistics(self) -> dict[str, int]:
        """Returns how many calls are in flight, how many callers have some, and how many calls wait for their peers."""
        with self._lock:
            waits = len(self._due) + self._receiving.waits()
        return {**self._in_flight.statistics(), "waits": waits}

    def enter(self, method: str, call: ServerCall) -> Admitted:
        """Authenticates and counts a call that begins. Raises Unauthenticated, Forbidden, or Backlogged for too many
        calls.
        """
        host, allowed = host_of(call.peer()), METHODS.get(method)
        if allowed == EVERYONE:
            caller = Principal("anyone", frozenset())
        elif self._is_open:
            caller = Principal(f"the caller from {host}", ALL_PERMISSIONS)
        else:
            caller = self._identify(call, host)
        if allowed is None or not self._is_open:
            _check_allowed(caller, method, host)
        # Heartbeats and health checks do not count towards --max-all-calls: a caller that fills the server must not
        # make it, or a worker, look dead.
        is_listed = method != HEARTBEAT and allowed != EVERYONE
        counted = self._in_flight.begin(caller.name, host, method, is_listed)
        if not call.add_callback(counted.end):
            counted.end()
        return Admitted(caller, method, host, counted)

    def _identify(self, call: ServerCall, host: str) -> Principal:
        """Returns the caller of a method. Raises Unauthenticated."""
        try:
            return self._authenticator.identify(call)
        except Unauthenticated as error:
            # The entry does not name the method: an unknown caller could invent many
            audit.note(audit.REFUSED, str(error), UNKNOWN, host)
            raise

    @contextlib.contextmanager
    def running(self, admitted: Admitted) -> Iterator[None]:
        """Sets the call that this thread carries out, for `check_job` and the like."""
        token = _CALL.set(admitted)
        try:
            yield
        except Forbidden as error:
            job = admitted.job[:MAX_NAME_LENGTH]
            audit.note(audit.REFUSED, str(error), admitted.caller.name, admitted.host, job, admitted.method)
            raise
        finally:
            _CALL.reset(token)

    def receiving(self, method: str, caller: Principal, call: ServerCall) -> contextlib.AbstractContextManager[None]:
        """Holds a place while a request is received. The call is cancelled if that takes too long.

        A small request on a data connection needs no place.

        Raises Refused if too many wait for a place.
        """
        size = call.request_bytes
        if size is not None and size <= SMALL_BYTES:
            return self._within(self._limits.upload_seconds, call)
        # A frame announces its size, a gRPC message does not.
        kind = RequestKind.FRAMED if size is not None else kind_of(method)
        peer = call.peer()
        return self._receiving.place(kind, (caller.name, host_of(peer), peer), call)

    def receive_later(
        self,
        method: str,
        caller: Principal,
        call: ServerCall,
        submit: Callable[[Callable[[], object]], object],
        receive: Callable[[contextlib.AbstractContextManager[None]], None],
        refuse: Callable[[Refused], None],
    ) -> None:
        """Does the same as `receiving`, but no thread waits for the place: see Receiving.later."""
        peer = call.peer()
        self._receiving.later(kind_of(method), (caller.name, host_of(peer), peer), call, submit, receive, refuse)

    def may_wait(self, method: str) -> bool:
        """Returns whether a unary method's thread may wait until its request is read, and counts that thread.

        Returns False if too many threads wait already, or calls are being refused.

        gRPC's polling thread calls this, because a burst of calls arrives before the first of them runs.
        """
        kind = kind_of(method)
        with self._lock:
            if self._threads_waiting[kind] >= self._few or time.monotonic() < self._pressed_until:
                return False
            self._threads_waiting[kind] += 1
            return True

    def waited(self, method: str) -> None:
        """Stops counting a thread of `may_wait`: its request was read or refused."""
        with self._lock:
            self._threads_waiting[kind_of(method)] -= 1

    def sending(self, call: Cancellable) -> contextlib.AbstractContextManager[None]:
        """Returns a context that cancels the call if its caller does not read the answer in time."""
        return self._within(self._limits.stall_seconds, call)

    def skipping(self, call: Cancellable) -> contextlib.AbstractContextManager[None]:
        """Returns a context that cancels a refused call if its request, which nobody reads, does not arrive in time."""
        return self._within(self._limits.upload_seconds, call)

    def held_seconds(self, error: Exception) -> float:
        """Returns for how many seconds to delay the error of a call whose request was not read.

        Such a call costs its caller nothing: refused at once, it would be repeated at once, thousands of times a
        second. The first errors of each second are not delayed.
        """
        if isinstance(error, Refused):
            return error.held_seconds
        if not isinstance(error, (Backlogged, Unauthenticated)):
            return 0.0
        now = time.monotonic()
        with self._lock:
            if now >= self._second + 1.0:
                self._second, self._in_second = now, 0
            self._in_second += 1
            if self._in_second <= TOLD_AT_ONCE:
                return 0.0
            self._pressed_until = now + PRESSED_SECONDS
            return HELD_SECONDS

    def after(self, seconds: float, end: Callable[[], None]) -> None:
        """Ends a call after a delay, during which it holds no thread.

        The call ends at once if `seconds` is 0, or if a quarter of all calls that may be open is delayed already.

        end: ends the call
        """
        with self._lock:
            is_kept = seconds > 0 and len(self._kept_back) < self._limits.all_calls // 4
            if is_kept:
                self._kept_back.append((time.monotonic() + seconds, end))
        if is_kept:
            self._look_soon.set()
        else:
            end()

    @contextlib.contextmanager
    def _within(self, seconds: float, call: Cancellable) -> Iterator[None]:
        """Returns a context that cancels the call if its body takes longer than `seconds`."""
        with self._lock:
            self._next += 1
            number = self._next
            self._due[number] = (time.monotonic() + seconds, call)
        try:
            yield
        finally:
            with self._lock:
                self._due.pop(number, None)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            # A limit that begins during a long wait ends after it, or wakes this thread.
            self._look_soon.wait(_LOOK_SECONDS if self._is_watching() else _IDLE_SECONDS)
            self._look_soon.clear()
            guarded("slow-peers", self._look)

    def _is_watching(self) -> bool:
        with self._lock:
            return bool(self._due or self._kept_back or self._receiving.waits()) or self._release_at < math.inf

    def _look(self) -> None:
        now = time.monotonic()
        audit.flush()
        self._receiving.cut_off()
        if self._receiving.was_broken_off():
            self._release_at = min(self._release_at, now + _RELEASE_SECONDS)
        if now >= self._release_at:
            self._release_at = math.inf
            self._release()
        with self._lock:
            late = [call for due, call in self._due.values() if due <= now]
            ends = []
            while self._kept_back and self._kept_back[0][0] <= now:
                ends.append(self._kept_back.popleft()[1])
        for end in ends:
            guarded("slow-peers", end)
        for call in late:
            guarded("slow-peers", call.cancel)


def _check_allowed(caller: Principal, method: str, host: str) -> None:
    """Raises Forbidden unless a caller may call a method, and writes that to the audit log."""
    try:
        caller.check(method)
    except Forbidden as error:
        audit.note(audit.REFUSED, str(error), caller.name, host, about=method)
        raise
