"""Bucket messages on the wire: a small protobuf header, then the payload as the last field, never copied by protobuf.

The bytes are those of the generated classes PushRequest and PullResponse (header = field 1, payload = field 15), so
any protobuf implementation can read and write them; tests hold that. Here they are put together and taken apart by
hand, because parsing a 4 MiB `bytes` field copies it, on the one thread that serves every call.
"""

from __future__ import annotations

from typing import Protocol

from ps_protocol.errors import InvalidRequest

Buffer = bytes | bytearray | memoryview

_HEADER_TAG = 1 << 3 | 2  # field 1, length-delimited
_PAYLOAD_TAG = 15 << 3 | 2  # field 15, length-delimited
_LENGTH_DELIMITED = 2
_LAST_FIELD = 2**29 - 1
_FIXED_SIZES = {1: 8, 5: 4}  # wire types of fixed64 and fixed32


class Header(Protocol):
    """A generated header message."""

    def SerializeToString(self) -> bytes:
        """Its bytes, as every generated class has it."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise InvalidRequest("the message ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InvalidRequest("the message holds a number longer than 64 bits")


def write_message(header: Header, payload: Buffer | None = None) -> bytes:
    """Returns the message with this header and payload: one copy of the payload, into the result."""
    head = header.SerializeToString()
    parts: list[Buffer] = [bytes((_HEADER_TAG,)), _varint(len(head)), head]
    if payload is not None:
        parts += [bytes((_PAYLOAD_TAG,)), _varint(memoryview(payload).nbytes), payload]
    return b"".join(parts)


def read_message(data: bytes) -> tuple[memoryview, memoryview]:
    """Returns header bytes and payload of a message, as views into it: nothing is copied.

    Unknown fields are skipped, as protobuf does. Raises InvalidRequest for truncated bytes, lengths beyond the message,
    and a header or payload that comes twice.
    """
    view = memoryview(data)
    header = payload = None
    position = 0
    while position < len(view):
        tag, position = _read_varint(view, position)
        if not 0 < tag >> 3 <= _LAST_FIELD:
            raise InvalidRequest(f"the message holds a field {tag >> 3}, which does not exist in protobuf")
        if tag & 7 == _LENGTH_DELIMITED:
            length, position = _read_varint(view, position)
        elif tag & 7 == 0:
            _, position = _read_varint(view, position)
            length = 0
        elif tag & 7 in _FIXED_SIZES:
            length = _FIXED_SIZES[tag & 7]
        else:
            raise InvalidRequest(f"the message holds a field of wire type {tag & 7}, which does not exist here")
        if length > len(view) - position:
            raise InvalidRequest(f"a field of {length} bytes was announced where {len(view) - position} are left")
        if tag in (_HEADER_TAG, _PAYLOAD_TAG):
            if (header if tag == _HEADER_TAG else payload) is not None:
                raise InvalidRequest("the message holds its header or payload twice")
            field = view[position : position + length]
            header, payload = (field, payload) if tag == _HEADER_TAG else (header, field)
        position += length
    if header is None:
        raise InvalidRequest("the message has no header")
    return header, payload if payload is not None else view[:0]
