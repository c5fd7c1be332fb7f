"""A server's end of a data connection: the calls that one worker makes over a connection of frames.

A ticket binds a connection to the gRPC call that asked for it: to its caller, and to one incarnation of a worker. Every
request then passes the same permissions, limits and counters as one that comes by gRPC: their code sees both kinds of
call as a `ServerCall`. A thread that reads (reading.py) receives a request and carries it out: no request waits for
another worker. Answers leave by `FrameSender`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from ps_frames.frames import (
    HEADER_BYTES,
    METHODS,
    FrameSocket,
    Header,
    Kind,
    frame,
    nothing,
    read_header,
    write_header,
)
from ps_frames.loans import Loan
from ps_protocol.errors import Code, InvalidRequest, PSError
from ps_protocol.framing import Buffer, Parts
from ps_protocol.identity import Identity
from ps_runtime.background import note_error
from ps_runtime.grpc_status import status_of

_SKIPPED_AT_ONCE = 2**16  # bytes of a discarded request that are received at a time

Metadata = Sequence[tuple[str, str | bytes]]
AuthContext = Mapping[str, Sequence[bytes]]
LentMessage = tuple[Parts, Loan | None]
Answer = Parts | Callable[[], AbstractContextManager[LentMessage]]


class LastAnswer(Parts):
    """An answer that is sent in one frame with the end of its call, which follows it."""


class CallBroken(Exception):
    """The caller has gone, or its call was cancelled, while its request was received."""


class Cancellable(Protocol):
    """A call or connection that is cancelled if its caller sends or reads too slowly."""

    def cancel(self) -> None:
        """Cancels the call, from any thread."""


class ServerCall(Cancellable, Protocol):
    """A call as a server sees it, over gRPC or a data connection."""

    @property
    def worker(self) -> Identity | None:
        """The worker to whom the connection belongs; None: the connection may serve several workers."""

    @property
    def request_bytes(self) -> int | None:
        """The bytes of the request; None if they are not known before it is read."""

    @property
    def kept(self) -> dict[str, Any] | None:
        """What methods keep for later calls of the same connection, by name; None: nothing can be kept."""

    @property
    def code(self) -> str:
        """The name of the error code with which the call fails; empty: it has not failed."""

    def peer(self) -> str:
        """Returns the caller's address, as gRPC writes it."""

    def invocation_metadata(self) -> Metadata:
        """Returns its metadata."""

    def auth_context(self) -> AuthContext:
        """Returns the properties of the caller's TLS certificate, by name."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Registers a function to call when the call is over, for any reason. Returns False if it is over already."""

    def receive(self) -> bytes | Parts | None:
        """Returns the next request; None: there are no more. Raises CallBroken."""

    def fail(self, error: PSError) -> None:
        """Sets the error with which the call ends, when its method returns or its stream ends."""


@dataclass(frozen=True)
class Opener:
    """The gRPC call that asked for a data connection: the worker that it named, and the caller's credentials."""

    worker: Identity
    host: str
    metadata: Metadata = field(repr=False)
    auth_context: AuthContext = field(repr=False)
    caller: str = ""


# -- memory for requests ---------------------------------------------------------------------------------------------


class ReceiveBuffers:
    """Lends memory for received payloads, and reuses it: to fill fresh memory takes an extra pass (measured).
    Thread-safe.

    Memory is free again when nothing refers to it any more. Sizes are rounded up by at most an eighth, because rows
    have another size in each step: so they find the memory of the step before.

    keep: the most free bytes that are kept; beyond it, sizes that were used longest ago are dropped
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: OrderedDict[int, list[np.ndarray]] = OrderedDict()  # by size, of which each list has some
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        # Reentrant: `_back` is the callback of a weak reference. Python may call it in any thread at any moment, also
        # while the thread holds the lock.
        self._lock = threading.RLock()

    def take(self, size: int) -> memoryview:
        """Returns `size` bytes of memory with undefined content."""
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
        self._last: LastAnswer | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []  # None: it is over
        self._code: Code | None = None
        self._status = b""

    @property
    def worker(self) -> Identity:
        """The worker of the connection."""
        return self._connection.opener.worker

    @property
    def kept(self) -> dict[str, Any]:
        """What methods keep for later calls of the connection, by name."""
        return self._connection.kept

    @property
    def request_bytes(self) -> int:
        """The bytes of the request, from the frame's header."""
        return self._header.size

    @property
    def code(self) -> str:
        """The name of the error code with which the call fails; empty: it has not failed."""
        return "" if self._code is None else self._code.name

    def peer(self) -> str:
        """Returns the address of the connection's other end."""
        return f"{self._connection.opener.host}:data-{self._connection.number}"

    def invocation_metadata(self) -> Metadata:
        """Returns the metadata of the gRPC call that asked for the connection."""
        return self._connection.opener.metadata

    def auth_context(self) -> AuthContext:
        """Returns the properties of the TLS certificate of the gRPC call that asked for the connection."""
        return self._connection.opener.auth_context

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Registers a function to call when the call is over. Returns False if it is over already."""
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
        """Discards the request if it was not read, because the call was refused first."""
        if not self._is_read:
            self._is_read = True
            self._connection.skip(self._header.size)

    # -- the answer --------------------------------------------------------------------------------------------------

    def send(self, answer: Answer | None) -> None:
        """Queues an answer. A lent answer is made when its turn comes. None: ends the call, with a LastAnswer that was
        sent before"""
        if answer is None:
            self.end()
        elif isinstance(answer, LastAnswer):
            self._last = answer
        elif isinstance(answer, Parts):
            self._connection.sender.put(frame(self._header.call, Kind.ANSWER, answer))
        else:
            self._connection.sender.lend(lambda: self._lent(answer))

    def end(self, answer: bytes | None = None) -> None:
        """Ends the call: with its only answer, with the error that was set, or after the answers that were sent.

        If the token or certificate of the connection's ticket is no longer valid, the whole connection is closed. The
        worker then calls by gRPC with its current credentials, and gets another ticket. Otherwise every renewed token
        would end its worker.
        """
        if self._code is Code.UNAUTHENTICATED:
            self._connection.cancel()
        kind, message = Kind.END if self._code is None else Kind.ERROR, Parts(self._status)
        if answer is not None:
            kind, message = Kind.LAST, Parts(answer)
        elif self._last is not None and self._code is None:
            kind, message = Kind.LAST, self._last
        self._connection.sender.put(frame(self._header.call, kind, message), self.over)

    def together(self) -> AbstractContextManager[None]:
        """Returns a context: small answers that are sent in it leave in one write."""
        return self._connection.sender.together()

    @contextlib.contextmanager
    def _lent(self, answer: Callable[[], AbstractContextManager[LentMessage]]) -> Iterator[LentFrame]:
        with answer() as (message, loan):
            yield frame(self._header.call, Kind.ANSWER, message), loan

    def over(self) -> None:
        """Calls the registered callbacks, once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        self._connection.forget(self._header.call)
        for callback in callbacks or ():
            callback()


Method = Callable[[FrameCall], None]


@dataclass(frozen=True)
class Serving:
    """What the connections of one shard share.

    methods:       the functions that carry out calls, by the kind of the request
    senders:       the threads that send
    limited:       returns a context for a send, which cancels the call if the send takes too long
    skipping:      the same for receiving a request that is discarded
    message_bytes: the most bytes of a message
    buffers:       memory for payloads
    """

    methods: Mapping[Kind, Method]
    senders: ThreadPoolExecutor
    limited: Callable[[Cancellable], AbstractContextManager[None]]
    skipping: Callable[[Cancellable], AbstractContextManager[None]]
    message_bytes: int
    buffers: ReceiveBuffers


class ServerConnection(Cancellable):
    """One data connection with a valid ticket.

    number: identifies it
    admit:  is called before the first request is read; returns whether the connection may go on. None: it was called
    kept:   what methods keep for later calls, by name
    """

    def __init__(self, frames: FrameSocket, opener: Opener, serving: Serving, number: int) -> None:
        self.opener, self.number = opener, number
        self.admit: Callable[[], bool] | None = None
        self.kept: dict[str, Any] = {}
        self._frames, self._serving = frames, serving
        self.sender = FrameSender(frames, serving.senders, lambda: serving.limited(self))
        self._lock = threading.Lock()
        self._calls: dict[int, FrameCall] = {}
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._received = 0  # bytes of the next header that have come

    def read(self) -> bool:
        """Carries out the next request, once its header has come, in this thread. Returns whether the connection goes
        on.
        """
        if self.admit is not None:
            admit, self.admit = self.admit, None
            if not admit():
                return False
            self.sender.put([write_header(0, Kind.OPENED, 0)])  # the ticket is good
        try:
            while True:
                self._received += self._frames.receive_now(self._header[self._received :])
                if self._received < HEADER_BYTES:
                    return True
                self._received = 0
                self._carry_out(read_header(self._header, self._serving.message_bytes))
                if not self._frames.has_bytes():
                    return True
        except (OSError, InvalidRequest, CallBroken):
            return False  # the worker has gone, or sends what is no frame

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
        """Receives the message of a frame. Its payload lies in memory of Serving.buffers."""
        head = bytearray(header.head)
        self._frames.receive_into(memoryview(head))
        if not header.payload_bytes:
            return Parts(bytes(head))
        payload = self._serving.buffers.take(header.payload_bytes)
        self._frames.receive_into(payload)
        return Parts(bytes(head), payload)

    def skip(self, count: int) -> None:
        """Receives and discards `count` bytes. The connection is closed if they take too long to arrive."""
        scratch = memoryview(bytearray(min(count, _SKIPPED_AT_ONCE)))
        with self._serving.skipping(self):
            while count:
                piece = scratch[:count]
                self._frames.receive_into(piece)
                count -= len(piece)

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._frames.fileno()

    def forget(self, call: int) -> None:
        """Removes a call that is over."""
        with self._lock:
            self._calls.pop(call, None)

    def cancel(self) -> None:
        """Breaks the connection off, from any thread; `read` then returns False."""
        self._frames.abort()

    def end(self) -> None:
        """Ends the calls under way, and closes the connection."""
        self.sender.end()
        self.kept = {}  # drops what methods have kept, such as the worker's mapped memory
        self._frames.abort()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.over()
        self.sender.close()


# -- sending the answers -----------------------------------------------------------------------------------------------

# The frames of a connection leave in order. Any thread may queue frames, and none waits. A frame that fits into the
# kernel's buffer is sent by the thread that queues it, the rest by a thread of a pool. Small frames that are queued
# together are sent together, because each piece wakes the other end: the end of a call, sent by itself, took 8 % of the
# CPU of a small step over TCP (measured).
#
# Payloads are lent, and sent without a copy. While the sender waits for the kernel, the shard may take its memory back
# (loans.py): a worker that reads slowly delays no update.

Frame = Sequence[Buffer]
LentFrame = tuple[Frame, Loan | None]
Lender = Callable[[], AbstractContextManager[LentFrame]]
Item = Frame | Lender
Then = Callable[[], None]

_TOGETHER_BYTES = 2**16  # most bytes of the small frames that are sent in one write behind another frame
_TOGETHER_PARTS = 128  # most parts of these frames: the kernel accepts 1024 parts in one write


def _each(thens: Sequence[Then]) -> None:
    for then in thens:
        then()


class FrameSender:
    """Sends frames on a connection until it ends. Thread-safe.

    pool:    threads that send what cannot be sent at once
    limited: returns a context that limits the time of a send
    """

    def __init__(
        self, frames: FrameSocket, pool: ThreadPoolExecutor, limited: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._frames = frames
        self._pool = pool
        self._limited = limited
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # held from the first byte of a frame to its last
        self._queue: deque[tuple[Item, Then]] = deque()
        self._is_busy = False  # a thread sends
        self._is_over = False

    def put(self, frame: Frame, then: Then = nothing) -> None:
        """Queues a frame; sends it in this thread if that needs no waiting. then: is called when the kernel has
        accepted the frame
        """
        if self._begins(frame, then) and not self._drain(waits=False):
            self._submit()

    def lend(self, lender: Lender) -> None:
        """Queues a frame that is made when its turn comes.

        lender: opens a context with the frame; its memory may be read until the context is closed
        """
        if self._begins(lender, nothing):
            self._submit()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A `with` block: small frames that are queued in it leave in one write."""
        with self._lock:
            begins, self._is_busy = not self._is_busy, True
        try:
            yield
        finally:
            if begins and not self._drain(waits=False):
                self._submit()

    def _begins(self, item: Item, then: Then) -> bool:
        """Queues an item; returns whether the caller must send, because no thread does."""
        with self._lock:
            if self._is_over:
                return False
            self._queue.append((item, then))
            begins, self._is_busy = not self._is_busy, True
            return begins

    def end(self) -> None:
        """Drops all queued frames. Nothing more is sent."""
        with self._lock:
            self._is_over = True
            self._queue.clear()

    def close(self) -> None:
        """Closes the connection, which has been aborted, once no thread sends any more."""
        with self._sending:
            self._frames.close()

    def _submit(self) -> None:
        with suppress(RuntimeError):  # the pool is shut down: the server is stopping
            self._pool.submit(self._drain, True)

    def _drain(self, waits: bool) -> bool:
        """Sends the queued items; returns whether all are sent. Without `waits` it sends only what fits and is not
        lent.
        """
        while True:
            with self._lock:
                if not self._queue:
                    self._is_busy = False
                    return True
                if not waits and callable(self._queue[0][0]):
                    return False
                item, behind, then = self._take()
            try:
                if not self._send(item, behind, then, waits):
                    return False
                then()
            except OSError:
                self._broken()
                return True
            except Exception:
                note_error("send")
                self._broken()
                return True

    def _take(self) -> tuple[Item, Frame, Then]:
        """Removes and returns what one write sends: the next item, the small frames behind it, and the callback. The
        caller holds the lock.
        """
        item, then = self._queue.popleft()
        behind: list[Buffer] = []
        thens, size = [then], 0
        while self._queue and not callable(self._queue[0][0]):
            frame = self._queue[0][0]
            size += sum(map(len, frame))
            if size > _TOGETHER_BYTES or len(behind) > _TOGETHER_PARTS:
                break
            behind += frame
            thens.append(self._queue.popleft()[1])
        return item, behind, then if len(thens) == 1 else partial(_each, thens)

    def _send(self, item: Item, behind: Frame, then: Then, waits: bool) -> bool:
        """Sends a frame, and those behind it. Without `waits`, what does not fit is put back, and False returned."""
        if callable(item):
            with item() as (frame, loan):
                self._send_all([*frame, *behind], loan)
            return True
        frames = [*item, *behind]
        if waits:
            self._send_all(frames)
            return True
        with self._sending:
            rest: Frame = self._frames.send_now(frames)
        if not rest:
            return True
        with self._lock:
            if not self._is_over:
                self._queue.appendleft((rest, then))
        return False

    def _send_all(self, frame: Frame, loan: Loan | None = None) -> None:
        """Sends frames, and gives way to the lender of their memory while the kernel takes no more."""
        with self._sending:
            left: Frame = self._frames.send_now(frame)
            if not left:
                return
            # The limit is for the whole rest: otherwise a peer that reads a little now and then would keep this thread.
            with self._limited():
                while left:
                    if loan is None:
                        self._frames.wait_for_room()
                    else:
                        left = loan.give_way(left, self._frames.wait_for_room)
                    left = self._frames.send_now(left)

    def _broken(self) -> None:
        """Ends the connection: after a part of a frame, the peer could not tell where the next frame begins."""
        self.end()
        self._frames.abort()
