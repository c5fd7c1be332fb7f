"""A server's end of a data connection: the calls that one worker makes over a connection of frames.

A ticket binds a connection to the call that asked for it: to its caller, and to a worker in its place. Every request is
then handled behind the same permissions, limits and counters as one that comes by gRPC. Both kinds of calls are a
`ServerCall` to them. One thread of each connection receives requests and carries them out: none waits for another
worker. sender.py sends the answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ps_frames.loans import Loan
from ps_frames.sender import FrameSender, LentFrame
from ps_frames.sockets import FrameSocket
from ps_frames.wire import HEADER_BYTES, METHODS, TICKET_BYTES, Header, Kind, frame, read_header, write_header
from ps_protocol.errors import Code, InvalidRequest, PSError
from ps_protocol.framing import Buffer, Parts
from ps_protocol.identity import Identity
from ps_runtime.grpc_status import status_of

TICKET_SECONDS = 30.0
_TICKETS_OF_A_WORKER = 4
_MOST_TICKETS = 4_096  # as many workers as a job may have; of more, the oldest are good no longer
_SKIPPED_AT_ONCE = 2**16

Metadata = Sequence[tuple[str, str | bytes]]
AuthContext = Mapping[str, Sequence[bytes]]
LentMessage = tuple[Parts, Loan | None]
Answer = Parts | Callable[[], AbstractContextManager[LentMessage]]


class CallBroken(Exception):
    """The caller has gone, or its call was cancelled, while its request was received."""


class Cancellable(Protocol):
    """What ends where its caller sends or reads too slowly."""

    def cancel(self) -> None:
        """Cancels the call, from any thread."""


class ServerCall(Cancellable, Protocol):
    """A call as a server sees it, over gRPC or a data connection."""

    @property
    def worker(self) -> Identity | None:
        """The worker whose connection it came by; None: its connection may serve several."""

    @property
    def request_bytes(self) -> int | None:
        """The bytes of its request, where they are known before it is read."""

    @property
    def code(self) -> str:
        """The name of the code with which it fails; empty: it has not failed."""

    def peer(self) -> str:
        """Returns where it comes from, as gRPC names peers."""

    def invocation_metadata(self) -> Metadata:
        """Returns its metadata."""

    def auth_context(self) -> AuthContext:
        """Returns what TLS knows of the caller, by name."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has a callback when the call is over, however it ended; returns False if it already is."""

    def receive(self) -> bytes | Parts | None:
        """Returns its next request; None: there is no more. Raises CallBroken."""

    def fail(self, error: PSError) -> None:
        """Has the call end with an error, when its method returns or its stream ends."""


@dataclass(frozen=True)
class Opener:
    """The call that asked for a connection: what its caller showed, the worker that it named, and who it was."""

    worker: Identity
    host: str
    metadata: Metadata = field(repr=False)
    auth_context: AuthContext = field(repr=False)
    caller: str = ""


class Tickets:
    """The tickets that are good now. Thread-safe; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._good: dict[tuple[str, str, int, int], list[tuple[bytes, float, Opener]]] = {}  # the oldest first

    def issue(self, opener: Opener) -> bytes:
        """Returns a ticket for a worker. Its last few are good: a call may have been made twice, side by side."""
        ticket, worker = secrets.token_bytes(TICKET_BYTES), opener.worker
        name = worker.job, worker.run, worker.rank, worker.member
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


# -- memory for requests ---------------------------------------------------------------------------------------------


class ReceiveBuffers:
    """Lends memory for payloads by its size, again and again: to fill fresh memory costs a pass of its own (measured).

    It comes back by itself, when nothing refers to it any more. Thread-safe.

    Sizes are rounded up, by an eighth at most: rows have another size in each step, and find memory of the step before.

    keep: bytes that are kept for the next payloads; of more, those of the sizes that were used longest ago go
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: OrderedDict[int, list[np.ndarray]] = OrderedDict()  # by size, of which each list has some
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        self._lock = threading.RLock()  # memory comes back in whatever thread, in the middle of whatever it does

    def take(self, size: int) -> memoryview:
        """Returns memory of so many bytes, with anything in it."""
        rounded = _rounded(size)
        with self._lock:
            whole = self._take_free(rounded)
        if whole is None:
            whole = np.empty(rounded, np.uint8)
        lent = whole[:size]  # an array of its own, which lives as long as any view or tensor over it
        number = id(lent)
        with self._lock:
            self._lent[number] = weakref.ref(lent, lambda _: self._back(number, whole))
        return lent.data

    def _take_free(self, size: int) -> np.ndarray | None:
        free = self._free.get(size)
        if free is None:
            return None
        self._kept -= size
        whole = free.pop()
        if not free:
            del self._free[size]
        return whole

    def _back(self, number: int, whole: np.ndarray) -> None:
        with self._lock:
            self._lent.pop(number, None)
            self._free.setdefault(whole.nbytes, []).append(whole)
            self._free.move_to_end(whole.nbytes)
            self._kept += whole.nbytes
            while self._kept > self._keep:
                self._take_free(next(iter(self._free)))


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


# -- calls -----------------------------------------------------------------------------------------------------------


class FrameCall(ServerCall):
    """One call over a data connection."""

    def __init__(self, connection: ServerConnection, header: Header) -> None:
        self._connection = connection
        self._header = header
        self._is_read = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []  # None: it is over
        self._code: Code | None = None
        self._status = b""

    @property
    def worker(self) -> Identity:
        """The worker of the connection."""
        return self._connection.opener.worker

    @property
    def request_bytes(self) -> int:
        """The bytes of the request, which its header names."""
        return self._header.size

    @property
    def code(self) -> str:
        """The name of the code with which it fails; empty: it has not failed."""
        return "" if self._code is None else self._code.name

    def peer(self) -> str:
        """Returns the address of the connection's other end."""
        return f"{self._connection.opener.host}:data-{self._connection.number}"

    def invocation_metadata(self) -> Metadata:
        """Returns what the caller showed when it asked for the connection."""
        return self._connection.opener.metadata

    def auth_context(self) -> AuthContext:
        """Returns what TLS knew of the caller then."""
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
        self._connection.cancel()

    def fail(self, error: PSError) -> None:
        """Sets the error with which the call ends."""
        self._code, self._status = error.code, status_of(error).SerializeToString()

    # -- the request -------------------------------------------------------------------------------------------------

    def receive(self) -> Parts | None:
        """Returns the one request; None: it was returned before. Raises CallBroken if the connection ends meanwhile."""
        if self._is_read:
            return None
        self._is_read = True
        try:
            return self._connection.receive(self._header)
        except OSError:
            raise CallBroken from None

    def skip(self) -> None:
        """Discards the request, if it was not read: the call was refused before."""
        if not self._is_read:
            self._is_read = True
            self._connection.skip(self._header.size)

    # -- the answer --------------------------------------------------------------------------------------------------

    def send(self, answer: Answer | None) -> None:
        """Sends an answer, or one that is lent when its turn has come; None: there are no more."""
        if answer is None:
            self.end()
        elif isinstance(answer, Parts):
            self._connection.sender.put(self._frame(Kind.ANSWER, answer))
        else:
            self._connection.sender.lend(lambda: self._lent(answer))

    def end(self, answer: bytes | None = None) -> None:
        """Ends the call: with its only answer, with the error if one was set, or after the answers that were sent.

        Where the token or certificate of the connection's ticket is known no more, the whole connection ends: its
        worker calls by gRPC then, with what it shows now, and gets another ticket. A token that is renewed would end
        every worker otherwise.
        """
        if self._code is Code.UNAUTHENTICATED:
            self._connection.cancel()
        if answer is not None:
            last = self._frame(Kind.LAST, Parts(answer))
        else:
            last = self._frame(Kind.END if self._code is None else Kind.ERROR, Parts(self._status))
        self._connection.sender.put(last, self.over)

    def together(self) -> AbstractContextManager[None]:
        """Has what is sent meanwhile leave in one piece, if it is small."""
        return self._connection.sender.together()

    def _frame(self, kind: Kind, message: Parts) -> list[Buffer]:
        return frame(self._header.call, kind, message)

    @contextlib.contextmanager
    def _lent(self, answer: Callable[[], AbstractContextManager[LentMessage]]) -> Iterator[LentFrame]:
        with answer() as (message, loan):
            yield self._frame(Kind.ANSWER, message), loan

    def over(self) -> None:
        """Calls back all who asked for the end of the call, once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        self._connection.forget(self._header.call)
        for callback in callbacks or ():
            callback()


Method = Callable[[FrameCall], None]


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
    limited: Callable[[Cancellable], AbstractContextManager[None]]
    skipping: Callable[[Cancellable], AbstractContextManager[None]]
    message_bytes: int
    buffers: ReceiveBuffers


class ServerConnection(Cancellable):
    """One connection, from the good ticket on. `number` tells it from others."""

    def __init__(self, frames: FrameSocket, opener: Opener, serving: Serving, number: int) -> None:
        self.opener, self.number = opener, number
        self._frames, self._serving = frames, serving
        self.sender = FrameSender(frames, serving.senders, lambda: serving.limited(self))
        self._lock = threading.Lock()
        self._calls: dict[int, FrameCall] = {}

    def serve(self) -> None:
        """Carries out calls until the connection ends, in this thread."""
        header = memoryview(bytearray(HEADER_BYTES))
        try:
            self.sender.put([write_header(0, Kind.OPENED, 0)])
            while True:
                self._frames.receive_into(header)
                self._carry_out(read_header(header, self._serving.message_bytes))
        except (OSError, InvalidRequest, CallBroken):
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
        call = FrameCall(self, header)
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

    def cancel(self) -> None:
        """Ends the connection, from any thread; `serve` returns."""
        self._frames.abort()

    def _end(self) -> None:
        self.sender.end()
        self._frames.abort()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.over()
        with self._frames.sending:  # no thread is there any more
            self._frames.close()
