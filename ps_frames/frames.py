"""The frames of a data connection, which interleave the messages of several calls, and the sockets that carry them.

A frame is a header of 20 bytes and a message of the contract, as `framing` writes it: all fields but the payload, then
the payload. All numbers are little-endian:

    call    uint32   chosen by the worker, which opened the connection; a number is not used twice
    size    uint64   bytes of the message
    head    uint32   bytes of the message before the elements of its payload; `size` without a payload
    kind    uint8    the kind of frame; 3 bytes of zeros follow

With `head` a receiver reads the fields first. They tell it the destination of the payload, and the kernel then writes
the payload there directly: recv_into saves a copy of each bucket.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts

_HEADER = struct.Struct("<IQIB3x")
HEADER_BYTES = _HEADER.size

TICKET_BYTES = 32
# The largest part of a message before its payload: leased ranges, groups and buckets of one step. A request about one
# bucket has some 200 bytes.
MAX_HEAD_BYTES = 16 * 2**20


class Kind(enum.IntEnum):
    """The kind of a frame. Workers send kinds below 16, shards the others."""

    OPEN = 1  # the first frame: a ticket instead of a message
    PUSH = 2  # a request, which begins a call, like all further kinds below 16 but CANCEL
    PULL = 3
    EXCHANGE = 4
    PULL_STATE = 5
    CANCEL = 6  # the worker cancels the call; no message
    PUSH_ROWS = 7
    PULL_ROWS = 8
    PULL_TABLE = 9
    EXCHANGE_ROWS = 10
    PUSH_TABLE = 11
    OPENED = 16  # the shard accepts the ticket; no message
    ANSWER = 17  # an answer; another one, END or ERROR follows
    LAST = 18  # the last answer
    END = 19  # the call has ended; no message
    ERROR = 20  # the call has failed: a google.rpc.Status


# The methods of DataService on a data connection, by the kind of their requests.
METHODS = {
    Kind.PUSH: "Push",
    Kind.PULL: "Pull",
    Kind.EXCHANGE: "Exchange",
    Kind.PULL_STATE: "PullState",
    Kind.PUSH_ROWS: "PushRows",
    Kind.PULL_ROWS: "PullRows",
    Kind.PULL_TABLE: "PullTable",
    Kind.EXCHANGE_ROWS: "ExchangeRows",
    Kind.PUSH_TABLE: "PushTable",
}
KINDS = {method: kind for kind, method in METHODS.items()}


@dataclass(frozen=True)
class ConnectionOffer:
    """How a worker may open a data connection to a shard: the answer to OpenDataConnection.

    port:     the TCP port; 0: there is none
    location: the name of the unix socket in the shared directory; empty: there is none
    inode:    the inode number of the socket
    ticket:   the bytes to show on the connection
    """

    port: int = 0
    location: str = ""
    inode: int = 0
    ticket: bytes = field(default=b"", repr=False)


class Header(NamedTuple):
    """The header of a frame; sizes in bytes."""

    call: int
    size: int
    head: int
    kind: Kind

    @property
    def payload_bytes(self) -> int:
        """The total size of the payload's elements, in bytes."""
        return self.size - self.head


def write_header(call: int, kind: Kind, head: int, payload: int = 0) -> bytes:
    """Returns the bytes of a header.

    head: bytes of the message before the elements of its payload
    payload: bytes of these elements
    """
    return _HEADER.pack(call, head + payload, head, kind)


def frame(call: int, kind: Kind, message: Parts) -> list[Buffer]:
    """Returns a frame as parts that follow each other on the wire. The payload is not copied."""
    payload = [] if message.payload is None else [message.payload, *message.more]
    head = len(message.head)
    size = head + sum(memoryview(part).nbytes for part in payload)  # len() counts elements, and not bytes
    return [_HEADER.pack(call, size, head, kind) + message.head, *payload]


def read_header(data: bytes | bytearray | memoryview, largest: int) -> Header:
    """Reads a header of HEADER_BYTES.

    largest: the most bytes that a message may have

    Raises InvalidRequest for an unknown kind, and for impossible sizes.
    """
    call, size, head, number = _HEADER.unpack(data)
    try:
        kind = Kind(number)
    except ValueError:
        raise InvalidRequest(f"expected a kind of frame, got {number}") from None
    if size > largest:
        raise InvalidRequest(f"a message may have {largest} bytes here, and a frame announces {size}")
    if head > min(size, MAX_HEAD_BYTES):
        raise InvalidRequest(
            f"a message of {size} bytes has up to {min(size, MAX_HEAD_BYTES)} before its payload, got {head}"
        )
    return Header(call, size, head, kind)


# -- the sockets that carry frames -------------------------------------------------------------------------------------

# A socket sends and receives frames from and into memory that its caller names. Only the kernel copies the bytes, and
# the GIL is released meanwhile. One thread receives. Any thread sends, one frame after the other. Any thread may end
# both with `abort`.


_TLS_PIECE = 256 * 2**10  # sent or received in one turn: OpenSSL makes records of 16 KiB of it
_CLOSED = "the other end has closed the connection"
# A peer whose host is gone is noticed after about a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4))


Moved = Callable[[], None]


def nothing() -> None:
    """Does nothing."""


class FrameSocket(Protocol):
    """A connection for frames. Methods raise OSError once it has ended.

    One thread at a time may send, a frame from its first byte to its last.
    """

    def send(self, parts: Sequence[Buffer], moved: Moved = nothing) -> None:
        """Sends parts in order. Returns once the kernel has accepted them all.

        moved: called now and then, when a part of the bytes has left
        """

    def send_now(self, parts: Sequence[Buffer]) -> list[memoryview]:
        """Sends as much as fits without waiting. Returns the rest, which must be sent next."""

    def wait_for_room(self) -> None:
        """Waits until more can be sent, or the connection has ended."""

    def has_room(self) -> bool:
        """Whether a small frame can be sent without waiting: the socket is writable when enough of its send buffer is
        free.
        """

    def receive_into(self, target: memoryview, moved: Moved = nothing) -> None:
        """Fills the target with the next bytes.

        moved: called now and then, when a part of the bytes has arrived
        """

    def receive_now(self, target: memoryview) -> int:
        """Fills a part of the target with bytes that have come. Returns how many these were; 0: none have."""

    def has_bytes(self) -> bool:
        """Whether bytes have come that the descriptor does not show: TLS has received them, and keeps them."""

    def fileno(self) -> int:
        """Returns the descriptor."""

    def watch(self, seconds: float, look: Callable[[], None]) -> None:
        """Sets a function that the receiving thread calls after each `seconds` seconds without bytes, and `moved` about
        as often while bytes arrive. An error that it raises ends the receiving."""

    def abort(self) -> None:
        """Ends the connection, from any thread. Threads that send or receive get an error."""

    def close(self) -> None:
        """Closes the connection once no thread uses it."""


def _views(parts: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in parts if len(part)]


def _without(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Returns the parts without their first `sent` bytes."""
    for position, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[position + 1 :]]
        sent -= len(part)
    return []


class _Socket(FrameSocket):
    """A socket of frames, with TLS or without: the part that both have in common."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection over."""
        prepare(connection)
        self._socket = connection
        self._look: Callable[[], None] = nothing
        self._sends_after = select.POLLOUT  # the event of poll after which more can be sent

    def has_room(self) -> bool:
        return _is_ready(self._socket, select.POLLOUT, 0)

    def wait_for_room(self) -> None:
        _is_ready(self._socket, self._sends_after)

    def has_bytes(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class PlainSocket(_Socket):
    """A connection without TLS: TCP, or a unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection over."""
        super().__init__(connection)
        connection.settimeout(None)

    def send(self, parts: Sequence[Buffer], moved: Moved = nothing) -> None:
        left = _views(parts)
        while left:
            try:
                left = _without(left, self._socket.sendmsg(left))
            except BlockingIOError:
                # No byte has left for the seconds of `watch`. Whether that is too long, `look` decides, which the
                # receiving thread calls.
                continue
            moved()

    def send_now(self, parts: Sequence[Buffer]) -> list[memoryview]:
        left = _views(parts)
        while left:
            try:
                sent = self._socket.sendmsg(left, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            left = [] if len(left) == 1 and sent == len(left[0]) else _without(left, sent)
        return left

    def receive_into(self, target: memoryview, moved: Moved = nothing) -> None:
        while len(target):
            try:
                count = self._socket.recv_into(target, len(target), socket.MSG_WAITALL)
            except BlockingIOError:  # no byte has come for the seconds of `watch`
                self._look()
                continue
            if not count:
                raise ConnectionResetError(_CLOSED)
            target = target[count:]
            moved()

    def receive_now(self, target: memoryview) -> int:
        try:
            count = self._socket.recv_into(target, len(target), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError(_CLOSED)
        return count

    def watch(self, seconds: float, look: Callable[[], None]) -> None:
        self._look = look
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class TlsSocket(_Socket):
    """A connection with TLS. OpenSSL allows one thread at a time in a connection, so no thread waits inside OpenSSL."""

    _socket: ssl.SSLSocket

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Takes the connection over, after its handshake."""
        super().__init__(connection)
        connection.setblocking(False)
        self._turn = threading.Lock()
        self._look_milliseconds: float | None = None

    def send(self, parts: Sequence[Buffer], moved: Moved = nothing) -> None:
        for part in self.send_now(parts):
            for piece in _pieces(part):
                left = piece
                while len(left):
                    left = left[self._send_some(left, wait=True) :]
                    moved()

    def send_now(self, parts: Sequence[Buffer]) -> list[memoryview]:
        left = _views(parts)
        while left:
            count = self._send_some(left[0][:_TLS_PIECE], wait=False)
            if not count:
                break
            left = _without(left, count)
        return left

    def _send_some(self, piece: memoryview, wait: bool) -> int:
        """Sends the first bytes of a piece; returns their number, which may be 0 without `wait`."""
        while True:
            try:
                with self._turn:
                    return self._socket.send(piece)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                self._sends_after = select.POLLIN if isinstance(wanted, ssl.SSLWantReadError) else select.POLLOUT
                if not wait:
                    return 0
                self.wait_for_room()

    def receive_into(self, target: memoryview, moved: Moved = nothing) -> None:
        while len(target):
            try:
                with self._turn:
                    count = self._socket.recv_into(target, min(len(target), _TLS_PIECE))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                event = select.POLLIN if isinstance(wanted, ssl.SSLWantReadError) else select.POLLOUT
                if not _is_ready(self._socket, event, self._look_milliseconds):
                    self._look()
                continue
            if not count:
                raise ConnectionResetError(_CLOSED)
            target = target[count:]
            moved()

    def receive_now(self, target: memoryview) -> int:
        try:
            with self._turn:
                count = self._socket.recv_into(target, len(target))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLWantWriteError:
            # The peer has asked for new keys, and does not read the answer. Workers never ask for new keys.
            raise ConnectionResetError("the other end does not read") from None
        if not count:
            raise ConnectionResetError(_CLOSED)
        return count

    def has_bytes(self) -> bool:
        with self._turn:
            return self._socket.pending() > 0

    def watch(self, seconds: float, look: Callable[[], None]) -> None:
        self._look, self._look_milliseconds = look, seconds * 1000

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            # TLS sends no close_notify: another thread may be inside OpenSSL.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def prepare(connection: socket.socket) -> None:
    """Sets the options of every TCP connection: packets leave at once, and a silent peer is probed."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def receive_exactly(connection: socket.socket, count: int, until: float) -> bytes:
    """Returns the next bytes of a connection that carries no frames yet.

    until: the deadline, in seconds of time.monotonic

    Raises OSError: TimeoutError after the deadline, ConnectionResetError if the peer has closed.
    """
    received = b""
    while len(received) < count:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionResetError(_CLOSED)
        received += piece
    return received


def frames_over(connection: socket.socket) -> FrameSocket:
    """Wraps an open socket so that it carries frames: over TLS if it is an SSLSocket, otherwise in plaintext."""
    return TlsSocket(connection) if isinstance(connection, ssl.SSLSocket) else PlainSocket(connection)


def _is_ready(connection: socket.socket, event: int, milliseconds: float | None = None) -> bool:
    """Waits until a connection is ready; returns False if the time is over before."""
    poll = select.poll()
    poll.register(connection.fileno(), event)
    return bool(poll.poll(milliseconds))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _pieces(part: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(part), _TLS_PIECE):
        yield part[start : start + _TLS_PIECE]
