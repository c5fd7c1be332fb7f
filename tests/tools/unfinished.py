"""Calls whose request never ends: all of it is sent but for its last bytes, as fast as the server takes it in. Or it is
cancelled there and then.

A client of HTTP/2 that keeps to the rules of flow control, so that what the server holds is what it let in.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from tests.tools.http2 import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    acknowledgement,
    call,
    call_fields,
    frame,
    frames,
    message_head,
)

_INITIAL_WINDOW_SIZE = 4  # among the settings
_LARGEST_FRAME = 16_384
_AHEAD_BYTES = 2**18  # that wait for a socket
_CANCEL = struct.pack(">I", 8)  # the code of RST_STREAM
_FILLER = frame(0xF0, 0, 0, bytes(8_000))  # of a kind that nobody knows: it has to be read, and means nothing


@dataclass
class _Stream:
    """One call: how much the server lets it send, and what is left of its request."""

    window: int
    left: int
    is_begun: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Connection:
    """One connection, with its calls by number."""

    socket: socket.socket
    unparsed: bytearray = field(default_factory=bytearray)
    unsent: deque[bytes] = field(default_factory=deque)
    unsent_bytes: int = 0
    window: int = 65_535
    initial_window: int = 65_535
    number: int = 1
    streams: dict[int, _Stream] = field(default_factory=dict)

    def put(self, data: bytes) -> None:
        if data:
            self.unsent.append(data)
            self.unsent_bytes += len(data)


class Unfinished:
    """Calls without an end on some connections, from one thread, inside a `with`. What is cut off is begun again."""

    def __init__(
        self,
        address: str,
        paths: tuple[str, ...],
        size: int,
        kept_back: int = 1024,
        calls: int = 1,
        sources: tuple[str, ...] = ("127.0.0.1",),
        token: str | None = None,
        piece: int = _LARGEST_FRAME,
        filled: bool = False,
        cancels: bool = False,
    ) -> None:
        """
        paths:     of the methods that are called in turn
        size:      of each request, as its own header says
        kept_back: how much of it is never sent; all of it: not even that header
        calls:     on each connection; there is one from each of the sources
        piece:     bytes of a frame
        filled:    each frame is followed by one of 8,000 bytes that means nothing
        cancels:   a call is cancelled as soon as all that is ever sent of it is on its way, and another one begun
        """
        bearer = {} if token is None else {"authorization": f"Bearer {token}"}
        self._fields = itertools.cycle([call_fields(path) | bearer for path in paths])
        self._size, self._sent_size = size, max(0, size + 5 - kept_back) if kept_back <= size else 0
        self._calls, self._piece, self._filled, self._cancels = calls, piece, filled, cancels
        self.begun = 0
        self.lasted: list[float] = []  # seconds, of each call that was answered
        self.sent_bytes = 0
        host, _, port = address.rpartition(":")
        self._connections = [
            _Connection(socket.create_connection((host, int(port)), 20.0, (source, 0))) for source in sources
        ]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unfinished", daemon=True)

    def __enter__(self) -> Unfinished:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        for connection in self._connections:
            connection.socket.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                connection.socket.setblocking(False)
                connection.put(PREFACE + frame(SETTINGS, 0, 0, b""))
                for _ in range(self._calls):
                    self._begin(connection)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while not self._stopping.is_set():
                for connection in self._connections:
                    self._fill(connection)
                    if self._cancels:
                        self._cancel(connection)
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
                    with contextlib.suppress(KeyError):
                        selector.modify(connection.socket, events, connection)
                for key, events in selector.select(0.05):
                    try:
                        if events & selectors.EVENT_WRITE:
                            self._write(key.data)
                        if events & selectors.EVENT_READ:
                            self._read(key.data)
                    except OSError:  # hung up on
                        selector.unregister(key.fileobj)

    def _begin(self, connection: _Connection) -> None:
        connection.put(call(connection.number, next(self._fields)))
        connection.streams[connection.number] = _Stream(connection.initial_window, self._sent_size)
        connection.number += 2
        self.begun += 1

    def _fill(self, connection: _Connection) -> None:
        for number, stream in connection.streams.items():
            while connection.unsent_bytes < _AHEAD_BYTES:
                length = min(self._piece, stream.left, stream.window, connection.window)
                if length <= 0 or (not stream.is_begun and length < 5):
                    break
                head = b"" if stream.is_begun else message_head(self._size)
                connection.put(frame(DATA, 0, number, head + bytes(length - len(head))))
                if self._filled:
                    connection.put(_FILLER)
                stream.is_begun = True
                stream.left -= length
                stream.window -= length
                connection.window -= length
                self.sent_bytes += length

    def _cancel(self, connection: _Connection) -> None:
        if connection.unsent_bytes < _AHEAD_BYTES:
            for number in [number for number, stream in connection.streams.items() if not stream.left]:
                connection.put(frame(RST_STREAM, 0, number, _CANCEL))
                self._end(connection, number)

    def _write(self, connection: _Connection) -> None:
        while connection.unsent:
            first = connection.unsent.popleft()
            with contextlib.suppress(BlockingIOError):
                sent = connection.socket.send(first)
                connection.unsent_bytes -= sent
                if sent == len(first):
                    continue
                first = first[sent:]
            connection.unsent.appendleft(first)
            return

    def _read(self, connection: _Connection) -> None:
        data = connection.socket.recv(2**16)
        if not data:
            raise ConnectionResetError
        connection.unparsed += data
        for received in frames(connection.unparsed):
            self._hear(connection, received)

    def _hear(self, connection: _Connection, received: Frame) -> None:
        kind, flags, number, payload = received
        connection.put(acknowledgement(received))
        if kind == SETTINGS and not flags & ACK:
            settings = dict(struct.iter_unpack(">HI", payload))
            window = settings.get(_INITIAL_WINDOW_SIZE, connection.initial_window)
            for stream in connection.streams.values():
                stream.window += window - connection.initial_window
            connection.initial_window = window
        elif kind == WINDOW_UPDATE:
            grown = int.from_bytes(payload, "big")
            if number == 0:
                connection.window += grown
            elif number in connection.streams:
                connection.streams[number].window += grown
        elif number in connection.streams and kind == HEADERS and flags & END_STREAM:
            self.lasted.append(time.monotonic() - connection.streams[number].since)
            self._end(connection, number)
        elif number in connection.streams and kind == RST_STREAM:  # by gRPC: calls that have ended count for a while
            self._end(connection, number)

    def _end(self, connection: _Connection, number: int) -> None:
        del connection.streams[number]
        self._begin(connection)
