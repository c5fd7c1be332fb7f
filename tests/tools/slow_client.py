"""A client that sends one byte at a time, for as long as it is let: just enough of HTTP/2 to be taken for a caller."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
_FIRST_FRAME = 500


def frame(kind: int, flags: int, stream: int, payload: bytes, says: int | None = None) -> bytes:
    """A frame (RFC 9113, 4.1). `says`: the length in its header, where that is not the payload's."""
    length = len(payload) if says is None else says
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_field(name: str, value: str) -> bytes:
    """A header field that is in no table (RFC 7541, 6.2.2), not Huffman coded; both shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def opening(path: str, size: int) -> bytes:
    """What stands before the bytes of a request: a connection's first settings, a call, and the length of what follows.

    The call is of a method by its path; its request says that it is `size` bytes long, and its frame that those which
    any server takes in follow.
    """
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    headers = b"".join(header_field(name, value) for name, value in fields.items())
    message = b"\0" + struct.pack(">I", size)
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(SETTINGS, 1, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, headers)
        + frame(DATA, 0, 1, message, says=min(len(message) + size, _FIRST_FRAME))
    )


class Dripping:
    """Connections on each of which one byte is sent every `pause` seconds, from one thread, inside a `with`."""

    def __init__(
        self, address: str, count: int, prefix: bytes, drops: bytes, pause: float = 0.05, source: str = "127.0.0.1"
    ) -> None:
        """prefix: sent at once on each; drops: what is sent byte by byte, over and over; source: our address."""
        host, _, port = address.rpartition(":")
        self._sockets = [socket.create_connection((host, int(port)), 20.0, (source, 0)) for _ in range(count)]
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # hung up on already
                connection.sendall(prefix)
        self._drops, self._pause = drops, pause
        self.sent = 0
        self.refused = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def _drip(self) -> None:
        open_ones = list(self._sockets)
        for drop in itertools.cycle(self._drops):
            if self._stopping.wait(self._pause):
                return
            for connection in list(open_ones):
                try:
                    connection.sendall(bytes((drop,)))
                    self.sent += 1
                except OSError:  # the server has hung up
                    open_ones.remove(connection)
                    self.refused += 1

    def __enter__(self) -> Dripping:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        for connection in self._sockets:
            connection.close()
