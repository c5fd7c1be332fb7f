"""Clients that send one byte at a time, for as long as they are let."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.tools.http2 import DATA, PREFACE, SETTINGS, acknowledgement, call, call_fields, frame, frames, message_head

_PIECE = frame(DATA, 0, 1, b"x" * 16)


class Drops:
    """The bytes of one connection: these, over and over. first: what is sent at once."""

    def __init__(self, drops: bytes, first: bytes = b"") -> None:
        self.first = first
        self._drops, self._left = drops, b""

    def next(self, connection: socket.socket) -> bytes:
        """The next byte."""
        if not self._left:
            self._left = self._answer(connection) + self._drops
        drop, self._left = self._left[:1], self._left[1:]
        return drop

    def _answer(self, connection: socket.socket) -> bytes:
        """What has to be said to the server between two turns of the drops."""
        return b""


class CallDrops(Drops):
    """A call whose request says that it is `size` bytes long, from a client that keeps to HTTP/2: it acknowledges."""

    def __init__(self, path: str, size: int) -> None:
        first = frame(SETTINGS, 0, 0, b"") + call(1, call_fields(path)) + frame(DATA, 0, 1, message_head(size))
        super().__init__(_PIECE, PREFACE + first)
        self._received = bytearray()

    def _answer(self, connection: socket.socket) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._received += connection.recv(2**16, socket.MSG_DONTWAIT)
        return b"".join(map(acknowledgement, frames(self._received)))


class Dripping:
    """Connections on each of which one byte is sent every `pause` seconds, from one thread, inside a `with`."""

    def __init__(self, address: str, connections: list[Drops], pause: float = 0.05, source: str = "127.0.0.1") -> None:
        """source: our address."""
        host, _, port = address.rpartition(":")
        self._connections = [
            (socket.create_connection((host, int(port)), 20.0, (source, 0)), drops) for drops in connections
        ]
        for connection, drops in self._connections:
            with contextlib.suppress(OSError):  # hung up on already
                connection.sendall(drops.first)
        self._pause = pause
        self.turns = 0
        self.refused = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def _drip(self) -> None:
        open_ones = list(self._connections)
        while not self._stopping.wait(self._pause):
            for each in list(open_ones):
                connection, drops = each
                try:
                    connection.sendall(drops.next(connection))
                except OSError:  # the server has hung up
                    open_ones.remove(each)
                    self.refused += 1
            self.turns += 1

    def __enter__(self) -> Dripping:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        for connection, _ in self._connections:
            connection.close()
