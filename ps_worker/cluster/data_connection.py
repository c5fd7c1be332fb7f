"""A data connection to one shard: calls of push and pull over frames, side by side.

Requests leave in the thread that makes the call, payloads from where they are. One thread receives: it has the payload
of an answer put where the call wants it, and tells the call. When the connection ends, whatever the reason, every call
fails that has no answer yet. Its caller may repeat it by gRPC.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import grpc

from ps_protocol.errors import InvalidRequest, TryLater
from ps_protocol.frames import HEADER_BYTES, Header, Kind, frame, read_header
from ps_protocol.framing import Parts
from ps_protocol.job import MAX_MESSAGE_BYTES
from ps_runtime.background import start
from ps_runtime.frame_socket import FrameSocket, nothing
from ps_runtime.grpc_status import STATUS_KEY

_LOOK_SECONDS = 1.0
_SMALL_BYTES = 4096  # that surely fit where there is room
_OF_SHARDS = (Kind.ANSWER, Kind.LAST, Kind.END, Kind.ERROR)


class DataCallError(grpc.RpcError):  # type: ignore[misc]  # grpcio ships no types
    """A call that failed, as gRPC's own error tells it."""

    def __init__(self, code: grpc.StatusCode, details: str, status: bytes = b"") -> None:
        super().__init__(details)
        self._code, self._details, self._status = code, details, status

    def code(self) -> grpc.StatusCode:
        """Returns the code, as every error of a call has it."""
        return self._code

    def details(self) -> str:
        """Returns the text."""
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Returns what says more: the shard's own error, if it sent one."""
        return ((STATUS_KEY, self._status),) if self._status else ()


class Answers(Protocol):
    """What takes the answers of one call, in the thread that receives. What it raises ends the call alone, but between
    `place` and `take` only the connection can fail."""

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns where the payload of the answer that comes belongs; None: where it may be overwritten soon."""

    def take(self, payload: memoryview | None) -> bool:
        """Takes the answer; returns whether no more are needed."""


class OneAnswer(Answers):
    """Keeps the answer of a call that has one."""

    def __init__(self) -> None:
        self.message = b""

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        self.message = head
        return None

    def take(self, payload: memoryview | None) -> bool:
        return True


class EachAnswer(Answers):
    """Hands each answer to a function, in memory that stays."""

    def __init__(self, read: Callable[[bytes, memoryview | None], None]) -> None:
        self._read = read
        self._head = b""

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        self._head = head
        return memoryview(bytearray(payload_bytes))

    def take(self, payload: memoryview | None) -> bool:
        self._read(self._head, payload)
        return False


class Call:
    """A call under way. `done` has no value; it fails with DataCallError, or what its answers raised.

    due: when its time is over, in seconds of time.monotonic; never, while its request waits for others to leave
    """

    def __init__(self, answers: Answers, seconds: float) -> None:
        self.done: Future[None] = Future()
        self.answers = answers
        self.due = math.inf
        self._seconds = seconds

    def progressed(self) -> None:
        """Begins its time anew: a part of its request has left, or of its answer has come."""
        self.due = time.monotonic() + self._seconds


class DataConnection:
    """An open connection. Methods may be called from any thread.

    thread: the one that receives; it ends soon after `close`
    """

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._next = 0
        self._ended: DataCallError | None = None
        self._scratch = bytearray()
        frames.watch(_LOOK_SECONDS, self._look)
        self.thread = threading.Thread(target=self._receive, name="data", daemon=True)
        try:
            start(self.thread)
        except TryLater:
            frames.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether calls may be made."""
        return self._ended is None

    def call(self, kind: Kind, request: Parts, answers: Answers, seconds: float) -> Call:
        """Makes a call: sends its request. Waits while others send, and while the kernel takes the bytes.

        seconds: in which nothing of it moves, after which the connection is given up
        """
        number, call = self._begin(answers, seconds)
        try:
            with self._frames.sending:
                call.progressed()
                self._frames.send(frame(number, kind, request), call.progressed)
        except OSError:
            self._frames.abort()  # the thread that receives ends all calls, this one among them
        return call

    def call_now(self, kind: Kind, request: Parts, answers: Answers, seconds: float) -> Call | None:
        """Makes a call if its request is small and can be sent at once; returns None if not."""
        if len(request.head) > _SMALL_BYTES or not self._frames.sending.acquire(blocking=False):
            return None
        try:
            if self._ended is not None:
                raise self._ended
            if not self._frames.has_room():
                return None
            number, call = self._begin(answers, seconds)
            call.progressed()
            try:
                if self._frames.send_now(frame(number, kind, request)):
                    self._frames.abort()  # what the kernel said has changed: a part of a frame makes the rest worthless
            except OSError:
                self._frames.abort()
            return call
        finally:
            self._frames.sending.release()

    def unary(self, kind: Kind, request: Parts, seconds: float) -> bytes:
        """Makes a call and returns its one answer. Raises DataCallError."""
        answer = OneAnswer()
        self.call(kind, request, answer, seconds).done.result()
        return answer.message

    def close(self) -> None:
        """Ends the connection. When its calls have failed, nothing lands any more."""
        self._frames.abort()

    def _begin(self, answers: Answers, seconds: float) -> tuple[int, Call]:
        call = Call(answers, seconds)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._next += 1
            self._calls[self._next] = call
            return self._next, call

    # -- the thread that receives ------------------------------------------------------------------------------------

    def _receive(self) -> None:
        error = DataCallError(grpc.StatusCode.UNAVAILABLE, "the data connection ended")
        header = memoryview(bytearray(HEADER_BYTES))
        try:
            while True:
                self._frames.receive_into(header)
                self._take(read_header(header, MAX_MESSAGE_BYTES))
        except TimeoutError:
            error = DataCallError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer over the data connection")
        except Exception as broken:
            error = DataCallError(grpc.StatusCode.UNAVAILABLE, f"the data connection ended: {broken}")
        self._frames.abort()
        with self._lock:
            self._ended = error
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.done.set_exception(error)
        with self._frames.sending:  # the thread that was sending has got its error
            self._frames.close()

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = any(call.due <= now for call in self._calls.values())
        if late:
            raise TimeoutError

    def _take(self, header: Header) -> None:
        if header.kind not in _OF_SHARDS:
            raise InvalidRequest(f"a frame of kind {header.kind.name} is not for a worker")
        with self._lock:
            call = self._calls.get(header.call)
        if call is None or call.done.done():  # it needs no more, or failed
            self._skip(header.size)
            return
        call.progressed()
        if header.kind in (Kind.END, Kind.ERROR):
            self._end(header, call)
            return
        head = bytes(self._filled(memoryview(bytearray(header.head)), call))
        try:
            place = call.answers.place(head, header.payload_bytes)
        except Exception as error:
            self._skip(header.payload_bytes)
            self._fail(header.call, call, error)
            return
        payload = None
        if header.payload_bytes:
            payload = self._filled(place if place is not None else self._scratch_of(header.payload_bytes), call)
        try:
            is_over = call.answers.take(payload)
        except Exception as error:
            self._fail(header.call, call, error)
            return
        if is_over or header.kind is Kind.LAST:
            self._forget(header.call)
            call.done.set_result(None)

    def _end(self, header: Header, call: Call) -> None:
        message = bytes(self._filled(memoryview(bytearray(header.size))))
        if header.kind is Kind.END:
            self._forget(header.call)
            call.done.set_result(None)
            return
        code, details = _status(message)
        self._fail(header.call, call, DataCallError(code, details, message))

    def _fail(self, number: int, call: Call, error: Exception) -> None:
        self._forget(number)
        call.done.set_exception(error)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._calls.pop(number, None)

    def _filled(self, target: memoryview, call: Call | None = None) -> memoryview:
        """Receives a part of a frame. Answers to other calls queue behind it, so their time is extended by as long.

        call: that it is for
        """
        began = time.monotonic()
        self._frames.receive_into(target, nothing if call is None else call.progressed)
        took = time.monotonic() - began
        if took > _LOOK_SECONDS:
            with self._lock:
                for other in self._calls.values():
                    other.due += took
        return target

    def _scratch_of(self, size: int) -> memoryview:
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._filled(self._scratch_of(min(size, 2**16))))


def _status(message: bytes) -> tuple[grpc.StatusCode, str]:
    from google.rpc import status_pb2

    status = status_pb2.Status.FromString(message)
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return codes.get(status.code, grpc.StatusCode.UNKNOWN), status.message
