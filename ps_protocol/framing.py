"""Messages with a payload. Protobuf writes all fields but the last; the payload is appended without a copy.

A message of the contract that carries tensors has them in the field `payload`, number 15. It is the highest field of
the message, so it is the last on the wire. The bytes are those that the generated classes produce, so any protobuf
implementation can read and write them; tests hold that. This module appends and detaches the payload itself because
parsing a 4 MiB `bytes` field copies it, on the one thread that serves every call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ps_protocol.errors import InvalidRequest

Buffer = bytes | bytearray | memoryview

PAYLOAD_FIELD = 15
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | 2  # length-delimited
LENGTH_DELIMITED = 2
_MAY_HAVE_PAYLOAD = re.compile(rb"[\x7a\xfa]")  # the first byte of its tag, also of one that is longer than need be
_LAST_FIELD = 2**29 - 1
_FIXED_SIZES = {1: 8, 5: 4}  # wire types of fixed64 and fixed32


class Message(Protocol):
    """A generated message."""

    def SerializeToString(self) -> bytes:
        """Returns the bytes of the message, as every generated class does."""


class Parts(NamedTuple):
    """A message whose payload is not copied.

    head:    the bytes before the elements of the payload
    payload: the elements, or the first of them
    more:    the elements that follow, where they lie in several places
    """

    head: bytes
    payload: Buffer | None = None
    more: tuple[Buffer, ...] = ()

    def whole(self) -> bytes:
        """Returns the bytes of the message. Copies the payload once, into the result."""
        return self.head if self.payload is None else b"".join((self.head, self.payload, *self.more))


def message_parts(message: Message, payload: Buffer | None = None, more: Sequence[Buffer] = ()) -> Parts:
    """Returns a message with a payload, as parts that follow each other on the wire.

    message: all fields but the payload, which is not set in it
    more:    the payload's elements that follow, where they lie in several places
    """
    head = message.SerializeToString()
    if payload is None:
        return Parts(head)
    size = sum(memoryview(part).nbytes for part in (payload, *more))
    return Parts(b"".join((head, bytes((_PAYLOAD_TAG,)), varint(size))), payload, tuple(more))


def split_head(head: Buffer, payload_bytes: int) -> bytes:
    """Returns the bytes of all fields but the payload. The argument is the part before the payload's elements.

    payload_bytes: size of the elements; 0: the payload is missing or empty

    Raises InvalidRequest as `split_message` does, and if the head announces another size. A head that cannot have a
    payload is returned unread: its errors appear when protobuf parses it.
    """
    if not payload_bytes and not _MAY_HAVE_PAYLOAD.search(head):
        return bytes(head)
    view = memoryview(head)
    if not payload_bytes:
        fields, payload = split_message(head)
        if payload is not None and len(payload):
            raise InvalidRequest(f"the message holds a payload of {len(payload)} bytes where none was announced")
        return fields
    announced = bytes((_PAYLOAD_TAG,)) + varint(payload_bytes)
    if bytes(view[-len(announced) :]) != announced:
        raise InvalidRequest(f"the message does not end with a payload of the {payload_bytes} bytes that come")
    fields, payload = split_message(view[: -len(announced)])
    if payload is not None:
        raise InvalidRequest("the message holds its payload twice")
    return fields


def split_message(data: Buffer) -> tuple[bytes, memoryview | None]:
    """Returns the bytes of all fields but the payload, and the payload as a view into `data`; None without a payload.

    Raises InvalidRequest for truncated bytes, lengths beyond the message, and a second payload. Errors within the other
    fields appear when protobuf parses the first part.
    """
    view = memoryview(data)
    payload = None
    head = bytearray()
    position = 0
    while position < len(view):
        start = position
        tag, length, position = field_at(view, position)
        if length > len(view) - position:
            raise InvalidRequest(f"a field of {length} bytes was announced where {len(view) - position} are left")
        end = position + length
        if tag != _PAYLOAD_TAG:
            head += view[start:end]
        elif payload is None:
            payload = view[position:end]
        else:
            raise InvalidRequest("the message holds its payload twice")
        position = end
    return bytes(head), payload


def field_at(view: memoryview, position: int) -> tuple[int, int, int]:
    """Returns the tag of a field, the size of its content, and its position."""
    tag, position = varint_at(view, position)
    return tag, *_length(tag, view, position)


def _length(tag: int, view: memoryview, position: int) -> tuple[int, int]:
    """Returns the size of a field's content, and its position. A varint is already read, so its size is 0."""
    if not 0 < tag >> 3 <= _LAST_FIELD:
        raise InvalidRequest(f"the message holds a field {tag >> 3}, which does not exist in protobuf")
    kind = tag & 7
    if kind == LENGTH_DELIMITED:
        return varint_at(view, position)
    if kind == 0:
        return 0, varint_at(view, position)[1]
    if kind in _FIXED_SIZES:
        return _FIXED_SIZES[kind], position
    raise InvalidRequest(f"the message holds a field of wire type {kind}, which does not exist here")


def varint(value: int) -> bytes:
    """Returns a number as it is on the wire."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_at(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position behind it. Raises InvalidRequest if there is none."""
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
