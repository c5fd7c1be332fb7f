"""A data connection to one shard: concurrent calls of push and pull over frames.

The calling thread sends a request; its payload is not copied. One thread at a time receives: it writes the payload of
an answer to the memory that the call names, and notifies the call. That is a thread that waits for answers
(attending.py), or else one that the connections of all shards share (reading.py). If the connection ends, for any
reason, every unanswered call fails. Its caller may repeat it by gRPC.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from google.rpc import code_pb2

from ps_frames.frames import (
    HEADER_BYTES,
    ConnectionOffer,
    FrameSocket,
    Header,
    Kind,
    frame,
    frames_over,
    nothing,
    read_header,
    receive_exactly,
    write_header,
)
from ps_frames.reading import ReadingThreads
from ps_protocol.errors import InvalidRequest, PSError, TryLater, Unreachable
from ps_protocol.framing import Parts
from ps_protocol.job import MAX_MESSAGE_BYTES
from ps_runtime.background import start
from ps_runtime.credentials import Access
from ps_runtime.grpc_status import FAILURES, CallFailed, failure_in
from ps_runtime.local_sockets import connect, is_private_socket, opened, peer_of
from ps_runtime.signals import is_held_back
from ps_runtime.tls_contexts import client_context, tls_socket
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_worker")

CONNECT_SECONDS = 2.0  # a port that a firewall closes gives no answer, and gRPC is there meanwhile
AGAIN_SECONDS = 5.0  # from one try to the next; twice as long after each that fails
AGAIN_AT_MOST_SECONDS = 80.0

# A worker receives from all shards with so many threads; with one for each shard, sixteen shards took sixteen. To land
# an answer is a copy in memory, for which two cores are enough.
MOST_READERS = 4

_LOOK_SECONDS = 1.0
_HELD_SECONDS = 5.0  # the longest time for which an answer that is coming in delays a signal
_AT_ONCE = 16  # answers of one connection, before others that wait for the same thread have their turn
_SMALL_BYTES = 4096  # that surely fit where there is room
_OF_SHARDS = (Kind.ANSWER, Kind.LAST, Kind.END, Kind.ERROR)


class Answers(Protocol):
    """Receives the answers of one call, in the receiving thread. An error that it raises ends only this call; between
    `place` and `take` only the connection can fail.
    """

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns memory for the payload of the answer that is coming; None: it may be received in memory that is soon
        reused.
        """

    def take(self, payload: memoryview | None) -> bool:
        """Processes the answer. Returns whether it was the last one that is needed."""


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
    """Passes each answer to a function, in memory that is not reused."""

    def __init__(self, read: Callable[[bytes, memoryview | None], None]) -> None:
        self._read = read
        self._head = b""

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        self._head = head
        return memoryview(bytearray(payload_bytes))

    def take(self, payload: memoryview | None) -> bool:
        self._read(self._head, payload)
        return False


class ClientCall:
    """A call under way. The result of `done` is None; it fails with CallFailed, or with what `answers` raised.

    due: its timeout, in seconds of time.monotonic; infinite while its request waits for others to be sent
    """

    def __init__(self, answers: Answers, seconds: float) -> None:
        self.done: Future[None] = Future()
        self.answers = answers
        self.due = math.inf
        self._seconds = seconds

    def progressed(self) -> None:
        """Restarts the timeout: a part of the request was sent, or of the answer received."""
        self.due = time.monotonic() + self._seconds


def reading_threads() -> ReadingThreads:
    """Returns the threads that receive for the connections of one worker."""
    return ReadingThreads("receive", Troubles(log, None), MOST_READERS, _LOOK_SECONDS)


class ClientConnection:
    """An open connection. Methods may be called from any thread.

    is_open: calls may be made
    reading: the threads that receive
    Raises TryLater if they take no more connections; this one is closed then.
    """

    def __init__(self, frames: FrameSocket, reading: ReadingThreads) -> None:
        self._frames = frames
        self._lock = threading.Lock()
        self._calls: dict[int, ClientCall] = {}
        self._next = 0
        self._error: CallFailed | None = None  # the first, which has broken the connection
        self._ended: CallFailed | None = None
        self.is_open = True
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._received = 0  # bytes of the next header
        self._scratch = bytearray()
        self._reading = reading
        self._is_attended = False
        self._is_reading = False  # `read` runs
        self._lingers = nothing  # of `read`
        frames.watch(_LOOK_SECONDS, self._silent)
        try:
            self._watched = reading.add(frames.fileno(), self.read, self._end_calls, self._look_beside)
        except TryLater:
            frames.close()
            raise

    def call(self, kind: Kind, request: Parts, answers: Answers, seconds: float) -> ClientCall:
        """Sends a request. Waits while other threads send, and until the kernel has accepted the bytes.

        seconds: the connection is closed if the call makes no progress for so long
        """
        number, call = self._begin(answers, seconds)
        try:
            with self._frames.sending:
                call.progressed()
                self._frames.send(frame(number, kind, request), call.progressed)
        except OSError:
            self._frames.abort()  # the thread that receives ends all calls, this one among them
        return call

    def call_now(self, kind: Kind, request: Parts, answers: Answers, seconds: float) -> ClientCall | None:
        """Sends a request if it is small and can be sent without waiting; otherwise returns None."""
        if len(request.head) > _SMALL_BYTES or not self._frames.sending.acquire(blocking=False):
            return None
        try:
            if self._ended is not None:
                raise self._ended.anew()
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
        """Makes a call and returns its only answer. Raises CallFailed.

        seconds: as in `call`
        """
        answer = OneAnswer()
        self.call(kind, request, answer, seconds).done.result()
        return answer.message

    def close(self) -> None:
        """Ends the connection, and fails its calls. Once they have failed, no answer is written to memory any more."""
        self._frames.abort()
        # An interrupt may have left it to this thread, which does not come back: others notice the end.
        if not self._is_reading:
            self.give_back(goes_on=True)

    def _begin(self, answers: Answers, seconds: float) -> tuple[int, ClientCall]:
        call = ClientCall(answers, seconds)
        with self._lock:
            if self._ended is not None:
                raise self._ended.anew()
            self._next += 1
            self._calls[self._next] = call
            number = self._next
        if not self._is_attended:
            self._reading.want(self._watched)
        return number, call

    # -- who receives ------------------------------------------------------------------------------------------------

    def attend(self, is_attended: bool) -> None:
        """Sets whether a thread is about to `take_over`. If so, no other thread is woken for answers; if not,
        one is.
        """
        self._is_attended = is_attended
        if self._calls and not is_attended:
            self._reading.want(self._watched)
        elif is_attended and not self._calls:
            self._reading.rest(self._watched)

    @property
    def descriptor(self) -> int:
        """The descriptor on which a thread that has taken it over waits."""
        return self._watched.descriptor

    @property
    def is_taken(self) -> bool:
        """Whether this thread has taken it over."""
        return self._watched.reader == threading.get_ident()

    def take_over(self) -> bool:
        """Makes this thread receive, with `read`, until `give_back`. Returns False if a thread receives now, or if the
        connection has ended."""
        return not self._is_reading and self._reading.take_over(self._watched)

    def give_back(self, goes_on: bool) -> None:
        """Makes other threads receive again from a connection that this thread has taken over. goes_on: the last result
        of `read`
        """
        self._reading.give_back(self._watched, goes_on, self._calls)

    def _look_beside(self) -> None:
        """Is called about once a second by a thread that receives for others. Has one receive where none does, and ends
        the connection if a call has waited too long."""
        if self._calls:
            self._reading.want(self._watched)
        self._end_if_late()

    # -- the thread that receives ------------------------------------------------------------------------------------

    def read(self, is_enough: Callable[[], bool] = lambda: False, lingers: Callable[[], None] = nothing) -> bool:
        """Takes the answers that have come, or as many as are enough; of a stream that does not run dry some of them,
        as other connections wait. Returns whether the connection goes on.

        lingers: called about once a second in the middle of an answer that takes longer
        """
        if self._error is not None:  # it may be in the middle of a frame
            return False
        self._is_reading, self._lingers, taken = True, lingers, 0
        try:
            while True:
                count = self._frames.receive_now(self._header[self._received :])
                if not count:
                    return True
                self._received += count
                if self._received == HEADER_BYTES:
                    self._received = 0
                    self._take(read_header(self._header, MAX_MESSAGE_BYTES))
                    taken += 1
                    if (taken >= _AT_ONCE or is_enough()) and not self._frames.has_bytes():
                        return True
        except TimeoutError:
            self._note(_late())
        except Exception as broken:
            self._note(CallFailed(code_pb2.UNAVAILABLE, f"the data connection ended: {broken}"))
        except BaseException:  # in the middle of a frame: nothing behind it can be read
            self._note(CallFailed(code_pb2.UNAVAILABLE, "the data connection ended: its reader was interrupted"))
            raise
        finally:
            self._is_reading, self._lingers = False, nothing
        return False

    def _end_calls(self) -> None:
        """Fails the calls that are left, and closes the connection."""
        self._frames.abort()
        with self._lock:
            self.is_open = False
            error = self._ended = self._error or CallFailed(code_pb2.UNAVAILABLE, "the data connection ended")
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.done.set_exception(error.anew())
        with self._frames.sending:  # the thread that was sending has got its error
            self._frames.close()

    def _end_if_late(self) -> None:
        """Ends the connection if a call has waited too long. For any thread."""
        try:
            self._look()
        except TimeoutError:
            self._note(_late())
            self._frames.abort()

    def _note(self, error: CallFailed) -> None:
        """Records the error with which calls end, unless an earlier one has broken the connection."""
        with self._lock:
            self._error = self._error or error

    def _silent(self) -> None:
        """Is called in the middle of a frame after each second without bytes."""
        _end_if_held()
        self._lingers()
        self._look()

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
        head, size = bytes(self._filled(memoryview(bytearray(header.head)), call)), header.payload_bytes
        try:
            place = call.answers.place(head, size)
        except Exception as error:
            self._skip(size)
            self._fail(header.call, call, error)
            return
        payload = None
        if size:
            payload = self._filled(place if place is not None else self._scratch_of(size), call)
        try:
            is_over = call.answers.take(payload)
        except Exception as error:
            self._fail(header.call, call, error)
            return
        if is_over or header.kind is Kind.LAST:
            self._forget(header.call)
            call.done.set_result(None)

    def _end(self, header: Header, call: ClientCall) -> None:
        message = bytes(self._filled(memoryview(bytearray(header.size))))
        if header.kind is Kind.END:
            self._forget(header.call)
            call.done.set_result(None)
            return
        self._fail(header.call, call, failure_in(message))

    def _fail(self, number: int, call: ClientCall, error: Exception) -> None:
        self._forget(number)
        call.done.set_exception(error)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._calls.pop(number, None)

    def _filled(self, target: memoryview, call: ClientCall | None = None, since: float | None = None) -> memoryview:
        """Receives a part of a frame. Answers to other calls queue behind it, so their time is extended by as long.

        call:  the call to which this frame belongs
        since: when the frame began to come in, if parts of it have come before
        """
        began = time.monotonic()
        first = began if since is None else since

        def moved() -> None:
            if call is not None:
                call.progressed()
            lasted = time.monotonic() - first
            if lasted > _HELD_SECONDS:
                _end_if_held()
            if lasted > _LOOK_SECONDS:
                self._lingers()

        self._frames.receive_into(target, moved)
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
        began = time.monotonic()
        while size:
            size -= len(self._filled(self._scratch_of(min(size, 2**16)), since=began))


def _end_if_held() -> None:
    """Ends the connection if a signal waits for the end of the answer that comes in: half of one cannot be left."""
    if is_held_back():
        raise InterruptedError("a signal came while its reader waited for the rest of an answer")


def _late() -> CallFailed:
    return CallFailed(code_pb2.DEADLINE_EXCEEDED, "no answer over the data connection")


# -- as long as a worker has its place -------------------------------------------------------------------------------


class DataLink:
    """Keeps a data connection to a shard open. Methods may be called from any thread.

    make:    opens a connection, in one attempt. Raises PSError or CallFailed
    closing: the owner sets it before `close`
    """

    def __init__(self, make: Callable[[], ClientConnection], peer: str, closing: threading.Event) -> None:
        self._make, self._peer, self._closing = make, peer, closing
        self._lock = threading.Lock()
        self._data: ClientConnection | None = None
        self._is_opening = False
        self._opener: threading.Thread | None = None
        self._pause = AGAIN_SECONDS
        self._next = time.monotonic() + self._pause

    @property
    def current(self) -> ClientConnection | None:
        """The connection; None if there is none now. After it has ended, another is opened in the background."""
        data = self._data
        if data is not None and data.is_open:
            return data
        with self._lock:
            if not self._is_opening and not self._closing.is_set() and time.monotonic() >= self._next:
                self._is_opening = True
                opener = threading.Thread(target=self._open_again, name="data-open", daemon=True)
                try:
                    start(opener)
                except TryLater:
                    self._is_opening, self._next = False, time.monotonic() + self._pause
                else:
                    self._opener = opener
        return None

    def open(self) -> None:
        """Opens the connection, in one attempt. Raises Unreachable if none is possible, other PSErrors if there is none
        now.
        """
        self._opened(self._make())

    def _open_again(self) -> None:
        try:
            self._opened(self._make())
        except (PSError, *FAILURES):
            self._pause = min(2 * self._pause, AGAIN_AT_MOST_SECONDS)
        else:
            self._pause = AGAIN_SECONDS
            log.info("%s: a data connection is open again", self._peer)
        finally:
            with self._lock:
                self._is_opening, self._next = False, time.monotonic() + self._pause

    def _opened(self, data: ClientConnection) -> None:
        self._data = data
        if self._closing.is_set():
            data.close()

    @property
    def threads(self) -> list[threading.Thread]:
        """The thread that opens it again, if there was one; it ends soon after `close`."""
        return [] if self._opener is None else [self._opener]

    def close(self) -> None:
        """Ends the connection, and fails its calls. Once they have failed, no answer is written to memory any more."""
        if self._data is not None:
            self._data.close()


# -- opening ---------------------------------------------------------------------------------------------------------


def open_data_connection(
    offer: ConnectionOffer, address: str, access: Access, directory: Path | None, peer: str, reading: ReadingThreads
) -> ClientConnection:
    """Opens the connection that a shard offers.

    address:   that of the shard's gRPC port
    directory: the directory of unix sockets on this host; None: use TCP only
    reading:   the threads that receive

    Raises Unreachable if no connection is possible, TryLater if it cannot be opened now.
    """
    connection: socket.socket | None = None
    if not offer.port and directory is None:
        raise Unreachable(f"{peer} takes no data connection: it has no port for them (--no-data-port)")
    try:
        if directory is not None:
            connection = _connect_here(directory, offer.location, offer.inode)
        if connection is None:
            connection = _connect_tcp(address, offer.port, access)
        connection.sendall(write_header(0, Kind.OPEN, len(offer.ticket)) + offer.ticket)
        first = receive_exactly(connection, HEADER_BYTES, time.monotonic() + CONNECT_SECONDS)
        kind = read_header(first, 0).kind
        if kind is not Kind.OPENED:
            raise InvalidRequest(f"expected a frame OPENED, got {kind.name}")
        return ClientConnection(frames_over(connection), reading)
    except (OSError, InvalidRequest) as error:
        if connection is not None:
            connection.close()
        raise TryLater(f"{peer} takes no data connection: {error}") from None


def _connect_here(directory: Path, location: str, inode: int) -> socket.socket | None:
    """Returns a connection to the socket that a shard of this host says is its own; None if it is not there."""
    if not location or Path(location).name != location:
        return None
    with contextlib.suppress(OSError), opened(directory, location) as file:
        status = os.fstat(file)
        if not is_private_socket(status) or status.st_ino != inode:
            return None
        connection = connect(file, CONNECT_SECONDS)
        if peer_of(connection).uid == os.geteuid():
            return connection
        connection.close()
    return None


def _connect_tcp(address: str, port: int, access: Access) -> socket.socket:
    host = address.rpartition(":")[0].strip("[]")
    if not port:
        raise InvalidRequest("it has no port for them (--no-data-port)")
    plain = socket.create_connection((host, port), CONNECT_SECONDS)
    if access.tls is None:
        return plain
    try:
        return tls_socket(client_context(access.tls), plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
