"""A connection that sends and receives frames, from and into memory that its caller names.

Only the kernel copies the bytes, and the GIL is released meanwhile. One thread receives. Any thread sends, one frame
after the other. Any thread may end both with `abort`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ps_protocol.framing import Buffer

_TLS_PIECE = 256 * 2**10  # sent or received in one turn: OpenSSL makes records of 16 KiB of it
_CLOSED = "the other end has closed the connection"
# A peer whose host is gone is noticed after about a minute.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4))


Moved = Callable[[], None]


def nothing() -> None:
    """Does nothing."""


class FrameSocket(Protocol):
    """A connection for frames. Methods raise OSError once it has ended.

    sending: the lock of the thread that sends a frame, from its first byte to its last
    """

    sending: threading.Lock

    def send(self, parts: Sequence[Buffer], moved: Moved = nothing) -> None:
        """Sends parts in order. Returns once the kernel has accepted them all. The caller holds `sending`.

        moved: called now and then, when a part of the bytes has left
        """

    def send_now(self, parts: Sequence[Buffer]) -> list[memoryview]:
        """Sends as much as fits without waiting. Returns the rest, which must be sent next. The caller holds
        `sending`."""

    def wait_for_room(self) -> None:
        """Waits until more can be sent, or the connection has ended. The caller holds `sending`."""

    def has_room(self) -> bool:
        """Whether a small frame can be sent without waiting: the kernel says so when a good part of its memory is free.
        The caller holds `sending`.
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
    """Returns the rest of parts after `count` bytes."""
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
        self.sending = threading.Lock()
        self._socket = connection
        self._look: Callable[[], None] = nothing
        self._sends_after = select.POLLOUT  # the event

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
            except BlockingIOError:  # the time of `watch` is over: it is for `look` to say whether that is too long
                continue
            moved()

    def send_now(self, parts: Sequence[Buffer]) -> list[memoryview]:
        left = _views(parts)
        while left:
            try:
                left = _without(left, self._socket.sendmsg(left, [], socket.MSG_DONTWAIT))
            except BlockingIOError:
                break
        return left

    def receive_into(self, target: memoryview, moved: Moved = nothing) -> None:
        while len(target):
            try:
                count = self._socket.recv_into(target, len(target), socket.MSG_WAITALL)
            except BlockingIOError:  # the time of `watch` is over
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
    """A connection with TLS. OpenSSL allows one thread at a time: none waits while it is there."""

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
        """Sends a beginning of a piece; returns how many bytes. Without `wait` there may be none."""
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
        except ssl.SSLWantWriteError:  # it asks for new keys, which workers do not, and does not take the answer
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
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # without a word of TLS: another thread may be there


def prepare(connection: socket.socket) -> None:
    """Sets what every data connection has: no waiting to fill packets, and probes of a peer that is silent."""
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
