"""Data connections: the calls that one worker makes over a connection of frames, each as if it came by gRPC.

A ticket binds a connection to the call that asked for it: to its caller, and to a worker in its place. Every request is
then handled by the method that gRPC would call, behind the same permissions, limits and counters (interceptor.py). They
see a `ConnectionCall` in place of gRPC's context. One thread of each connection receives requests and carries them out:
none waits for another worker. frame_sender.py sends the answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc

from ps_protocol.errors import Forbidden, InvalidRequest, PSError
from ps_protocol.frames import HEADER_BYTES, METHODS, TICKET_BYTES, Header, Kind, frame, read_header, write_header
from ps_protocol.framing import Parts
from ps_protocol.identity import Identity
from ps_runtime.frame_socket import FrameSocket
from ps_runtime.grpc_status import STATUS_KEY
from ps_server.rpc.auth import host_of
from ps_server.rpc.frame_sender import FrameSender, LentFrame
from ps_server.rpc.receive_buffers import ReceiveBuffers
from ps_server.rpc.streams import set_error
from ps_server.shard.loans import Loan
from ps_server.shard.waiting import Answer, Lent, Outbox

TICKET_SECONDS = 30.0
_TICKETS_OF_A_WORKER = 4
_MOST_TICKETS = 4_096  # as many workers as a job may have; of more, the oldest are good no longer
_SKIPPED_AT_ONCE = 2**16

LentMessage = tuple[Parts, Loan | None]


@dataclass(frozen=True)
class Opener:
    """The call that asked for a connection: what its caller showed, the worker that it named, and who it was."""

    worker: Identity
    peer: str
    metadata: tuple[tuple[str, Any], ...] = field(repr=False)
    auth_context: Mapping[str, Any] = field(repr=False)
    caller: str = ""


class Tickets:
    """The tickets that are good now. Thread-safe; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._good: dict[tuple[str, str, int], list[tuple[bytes, float, Opener]]] = {}  # the oldest first

    def issue(self, opener: Opener) -> bytes:
        """Returns a ticket for a worker. Its last few are good: a call may have been made twice, side by side."""
        ticket, worker = secrets.token_bytes(TICKET_BYTES), opener.worker
        name = worker.job, worker.run, worker.rank
        with self._lock:
            before = self._good.pop(name, [])[1 - _TICKETS_OF_A_WORKER :]
            self._good[name] = [*before, (_digest(ticket), self._clock() + TICKET_SECONDS, opener)]
            while len(self._good) > _MOST_TICKETS:
                del self._good[next(iter(self._good))]
        return ticket

    def redeem(self, ticket: bytes, is_of: Callable[[Opener], bool] = lambda _: True) -> Opener | None:
        """Uses a ticket up; returns the call that got it, or None if the ticket is not good.

        is_of: whether whoever shows the ticket is the one that got it; otherwise it stays good for that one
        """
        digest, now = _digest(ticket), self._clock()
        with self._lock:
            for name, given in list(self._good.items()):
                found = next((opener for known, until, opener in given if known == digest and now < until), None)
                if found is not None and not is_of(found):
                    return None
                if found is not None or given[-1][1] <= now:
                    del self._good[name]  # one connection is all that a worker needs
                if found is not None:
                    return found
        return None


def _digest(ticket: bytes) -> bytes:
    return hashlib.sha256(ticket).digest()  # compared in its place, so that how long that takes tells nothing


class _Aborted(Exception):
    """A call has ended with an error that its caller is to be told."""


class _Broken(grpc.RpcError):  # type: ignore[misc]  # grpcio ships no types
    """The connection ended while a request was received."""


class ConnectionCall:
    """One call: its request, read when it is asked for, and what gRPC's context of a call tells and takes."""

    def __init__(self, connection: DataConnection, header: Header) -> None:
        self.worker = connection.opener.worker
        self._connection = connection
        self._header = header
        self._is_read = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []  # None: it is over
        self._code: grpc.StatusCode | None = None
        self._trailers: tuple[tuple[str, bytes], ...] = ()

    # -- what gRPC's context has -------------------------------------------------------------------------------------

    def peer(self) -> str:
        """Returns where the call comes from: this connection."""
        return f"{host_of(self._connection.opener.peer)}:data-{self._connection.number}"

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """Returns what the caller showed when it asked for the connection."""
        return self._connection.opener.metadata

    def auth_context(self) -> Mapping[str, Any]:
        """Returns what TLS knew of it then."""
        return self._connection.opener.auth_context

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has a callback when the call is over; returns False if it already is."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def cancel(self) -> None:
        """Ends the whole connection: its caller sends or reads too slowly."""
        self._connection.abort()

    def code(self) -> grpc.StatusCode | None:
        """Returns the code that was set."""
        return self._code

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the code of the call's end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Does nothing: the trailing metadata have them, too."""

    def set_trailing_metadata(self, trailers: tuple[tuple[str, bytes], ...]) -> None:
        """Sets what is said with the end: the error."""
        self._trailers = trailers

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the method, and the call with the error that was set."""
        self._code = code
        raise _Aborted

    @property
    def request_bytes(self) -> int:
        """The bytes of the request, which are known before it is read."""
        return self._header.size

    # -- the request -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Parts]:
        return self

    def __next__(self) -> Parts:
        """Returns the one request."""
        if self._is_read:
            raise StopIteration
        self._is_read = True
        try:
            return self._connection.receive(self._header)
        except OSError:
            raise _Broken from None

    def skip(self) -> None:
        """Has the request go by, if it was not read: the call was refused before."""
        if not self._is_read:
            self._is_read = True
            self._connection.skip(self._header.size)

    # -- the answer --------------------------------------------------------------------------------------------------

    def send(self, answer: Parts | Callable[[], AbstractContextManager[LentMessage]] | None) -> None:
        """Sends an answer, or one that is lent when its turn has come; None: there are no more."""
        if answer is None:
            self.end()
        elif isinstance(answer, Parts):
            self._connection.sender.put(self._frame(Kind.ANSWER, answer))
        else:
            self._connection.sender.lend(lambda: self._lent(answer))

    def send_last(self, answer: bytes) -> None:
        """Sends the only answer of a call."""
        self._connection.sender.put(self._frame(Kind.LAST, Parts(answer)), self.over)

    def end(self) -> None:
        """Ends the call, with the error if one was set.

        Where the token or certificate of the connection's ticket is known no more, the whole connection ends: its
        worker calls by gRPC then, with what it shows now, and gets another ticket. A token that is renewed would end
        every worker otherwise.
        """
        if self._code is grpc.StatusCode.UNAUTHENTICATED:
            self._connection.abort()
        status = next((value for key, value in self._trailers if key == STATUS_KEY), None)
        frame = self._frame(Kind.END, Parts(b"")) if status is None else self._frame(Kind.ERROR, Parts(status))
        self._connection.sender.put(frame, self.over)

    def together(self) -> AbstractContextManager[None]:
        """Has what is sent meanwhile leave in one piece, if it is small."""
        return self._connection.sender.together()

    def _frame(self, kind: Kind, message: Parts) -> list[Any]:
        return frame(self._header.call, kind, message)

    @contextlib.contextmanager
    def _lent(self, answer: Callable[[], AbstractContextManager[LentMessage]]) -> Iterator[LentFrame]:
        with answer() as (message, loan):
            yield self._frame(Kind.ANSWER, message), loan

    def over(self) -> None:
        """Tells all that have to know that the call is over; once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        self._connection.forget(self._header.call)
        for callback in callbacks or ():
            callback()


class FrameStream(Outbox):
    """The answers to one pull on a data connection, as a shard hands them over. Closing calls back in whatever thread
    has sent the last one.

    send:  counts what is sent, and sends it
    write: what makes a message of an answer
    """

    def __init__(self, send: Callable[[Any], None], call: ConnectionCall, write: Callable[[Any], Parts]) -> None:
        self._send, self._call, self._write = send, call, write

    def tell(self, answer: Answer) -> None:
        """Sends an answer."""
        self._send(self._write(answer))

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]]) -> None:
        """Sends an answer that is made when its turn has come; its payload leaves from where it is."""

        @contextlib.contextmanager
        def written() -> Iterator[LentMessage]:
            with lent() as (answer, loan):
                yield self._write(answer), loan

        self._send(written)

    def tell_last(self, answer: Answer) -> None:
        """Sends an answer and the end of the call, in one piece."""
        with self._call.together():
            self.tell(answer)
            self.finish()

    def finish(self) -> None:
        """Ends the call after what was put before."""
        self._send(None)

    def fail(self, error: PSError) -> None:
        """Ends the call with an error, after what was put before."""
        set_error(self._call, error)
        self._send(None)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has a callback when the call is over, however it ended; at once if it already is."""
        if not self._call.add_callback(callback):
            callback()


Method = Callable[[ConnectionCall], None]


@dataclass(frozen=True)
class Serving:
    """What the connections of one shard share.

    methods:       what carries out a call, by the kind of its request
    senders:       threads that send
    limited:       returns what watches over a send: it cancels the call that it is given if that takes too long
    skipping:      likewise over the arrival of a request that is not read
    message_bytes: that a message may have
    buffers:       memory for payloads
    """

    methods: Mapping[Kind, Method]
    senders: ThreadPoolExecutor
    limited: Callable[[Any], AbstractContextManager[None]]
    skipping: Callable[[Any], AbstractContextManager[None]]
    message_bytes: int
    buffers: ReceiveBuffers


class DataConnection:
    """One connection, from the good ticket on. `number` tells it from others."""

    def __init__(self, frames: FrameSocket, opener: Opener, serving: Serving, number: int) -> None:
        self.opener, self.number = opener, number
        self._frames, self._serving = frames, serving
        self.sender = FrameSender(frames, serving.senders, lambda: serving.limited(self))
        self._lock = threading.Lock()
        self._calls: dict[int, ConnectionCall] = {}

    def serve(self) -> None:
        """Carries out calls until the connection ends, in this thread."""
        header = memoryview(bytearray(HEADER_BYTES))
        try:
            self.sender.put([write_header(0, Kind.OPENED, 0)])
            while True:
                self._frames.receive_into(header)
                self._carry_out(read_header(header, self._serving.message_bytes))
        except (OSError, InvalidRequest, _Broken):
            pass  # the worker has gone, or sends what is no frame
        finally:
            self._end()

    def _carry_out(self, header: Header) -> None:
        if header.kind is Kind.CANCEL:
            with self._lock:
                call = self._calls.get(header.call)
            if call is not None:
                call.over()
            return
        if header.kind not in METHODS:
            raise InvalidRequest(f"a frame of kind {header.kind.name} is not for a shard")
        call = ConnectionCall(self, header)
        with self._lock:
            if header.call in self._calls:
                raise InvalidRequest(f"call {header.call} is under way already")
            self._calls[header.call] = call
        self._serving.methods[header.kind](call)
        call.skip()

    def receive(self, header: Header) -> Parts:
        """Returns the message of a frame; its payload lies in memory that is lent."""
        head = bytearray(header.head)
        self._frames.receive_into(memoryview(head))
        if not header.payload_bytes:
            return Parts(bytes(head))
        payload = self._serving.buffers.take(header.payload_bytes)
        self._frames.receive_into(payload)
        return Parts(bytes(head), payload)

    def skip(self, count: int) -> None:
        """Lets so many bytes go by. The connection ends if they take too long to come."""
        scratch = memoryview(bytearray(min(count, _SKIPPED_AT_ONCE)))
        with self._serving.skipping(self):
            while count:
                piece = scratch[:count]
                self._frames.receive_into(piece)
                count -= len(piece)

    def forget(self, call: int) -> None:
        """Lets go of a call that is over."""
        with self._lock:
            self._calls.pop(call, None)

    def abort(self) -> None:
        """Ends the connection, from any thread; `serve` returns."""
        self._frames.abort()

    cancel = abort  # as what watches over slow peers calls it

    def _end(self) -> None:
        self.sender.end()
        self._frames.abort()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.over()
        with self._frames.sending:  # no thread is there any more
            self._frames.close()


# -- methods, from their handlers ------------------------------------------------------------------------------------


def method(handler: grpc.RpcMethodHandler) -> Method:
    """Returns what carries out a call by a guarded handler (CallInterceptor.guarded)."""
    if handler.stream_unary is not None:
        return _unary(handler.stream_unary)
    return _stream(handler.stream_stream)


def _unary(guarded: Callable[..., bytes]) -> Method:
    def carry_out(call: ConnectionCall) -> None:
        try:
            answer = guarded(call, call)
        except _Aborted:
            call.end()
        else:
            call.send_last(answer)

    return carry_out


def _stream(guarded: Callable[..., None]) -> Method:
    def carry_out(call: ConnectionCall) -> None:
        guarded(call, call, call.send)

    return carry_out


def check_sender(context: Any, sender: Identity) -> None:
    """Raises Forbidden for a request of another worker than the one whose connection it came by."""
    if isinstance(context, ConnectionCall):
        worker = context.worker
        if (sender.job, sender.rank, sender.incarnation) != (worker.job, worker.rank, worker.incarnation):
            raise Forbidden(
                f"this data connection is that of worker {worker.rank} of job {worker.job!r} in its place; the request "
                f"names worker {sender.rank} of job {sender.job!r}"
            )
