"""Frames of HTTP/2 by hand: just enough to be taken for a caller (RFC 9113)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
_HEAD_BYTES = 9


class Frame(NamedTuple):
    """A frame that the other end sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame (4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frames(received: bytearray) -> Iterator[Frame]:
    """Takes every whole frame off the bytes that have been received."""
    while len(received) >= _HEAD_BYTES:
        end = _HEAD_BYTES + int.from_bytes(received[:3], "big")
        if len(received) < end:
            return
        whole = Frame(
            received[3], received[4], int.from_bytes(received[5:_HEAD_BYTES], "big"), bytes(received[_HEAD_BYTES:end])
        )
        del received[:end]
        yield whole


def acknowledgement(received: Frame) -> bytes:
    """What a client that keeps to the rules answers to settings and pings at once; nothing to other frames."""
    if received.flags & ACK or received.kind not in (SETTINGS, PING):
        return b""
    return frame(received.kind, ACK, 0, received.payload if received.kind == PING else b"")


def call_fields(path: str) -> dict[str, str]:
    """The header fields of a gRPC call of a method by its path."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    return fields | {"content-type": "application/grpc", "te": "trailers"}


def call(stream: int, fields: Mapping[str, str]) -> bytes:
    """The frame that begins a call. Its fields are in no table and not Huffman coded (RFC 7541, 6.2.2)."""
    packed = b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, packed)


def message_head(size: int) -> bytes:
    """What stands before a gRPC message of `size` bytes, not compressed."""
    return b"\0" + struct.pack(">I", size)
