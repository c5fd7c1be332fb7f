"""Messages with a payload: all fields but the last by protobuf, the payload by hand, never copied by protobuf.

A message of the contract that carries tensors has them in the field `payload`, number 15, which is the highest of the
message and so the last on the wire. The bytes are those of the generated classes, so any protobuf implementation can
read and write them; tests hold that. The payload is put behind the others and taken from them by hand, because parsing
a 4 MiB `bytes` field copies it, on the one thread that serves every call.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ps_protocol.errors import InvalidRequest

Buffer = bytes | bytearray | memoryview

PAYLOAD_FIELD = 15
_PAYLOAD_TAG = PAYLOAD_FIELD << 3 | 2  # length-delimited
_LENGTH_DELIMITED = 2
_LAST_FIELD = 2**29 - 1
_FIXED_SIZES = {1: 8, 5: 4}  # wire types of fixed64 and fixed32


class Message(Protocol):
    """A generated message."""

    def SerializeToString(self) -> bytes:
        """Its bytes, as every generated class has it."""


class Parts(NamedTuple):
    """A message whose payload is not copied: the bytes before the payload's elements, and the elements, where there is
    a payload."""

    head: bytes
    payload: Buffer | None = None

    def whole(self) -> bytes:
        """Returns the bytes of the message: one copy of the payload, into the result."""
        return self.head if self.payload is None else b"".join((self.head, self.payload))


def message_parts(message: Message, payload: Buffer | None = None) -> Parts:
    """Returns the message with this payload, as parts that follow each other on the wire.

    message: all fields but the payload, which is not set in it
    """
    head = message.SerializeToString()
    if payload is None:
        return Parts(head)
    return Parts(b"".join((head, bytes((_PAYLOAD_TAG,)), _varint(memoryview(payload).nbytes))), payload)


def split_head(head: Buffer, payload_bytes: int) -> bytes:
    """Returns the bytes of all fields but the payload, from those that come before the payload's elements.

    payload_bytes: of the elements; 0: there is no payload, or an empty one

    Raises InvalidRequest as `split_message`, and where another payload is announced.
    """
    view = memoryview(head)
    if not payload_bytes:
        fields, payload = split_message(head)
        if payload is not None and len(payload):
            raise InvalidRequest(f"the message holds a payload of {len(payload)} bytes where none was announced")
        return fields
    announced = bytes((_PAYLOAD_TAG,)) + _varint(payload_bytes)
    if bytes(view[-len(announced) :]) != announced:
        raise InvalidRequest(f"the message does not end with a payload of the {payload_bytes} bytes that come")
    fields, payload = split_message(view[: -len(announced)])
    if payload is not None:
        raise InvalidRequest("the message holds its payload twice")
    return fields


def split_message(data: Buffer) -> tuple[bytes, memoryview | None]:
    """Returns the bytes of all fields but the payload, and the payload as a view into `data`, None where there is none.

    Raises InvalidRequest for truncated bytes, lengths beyond the message, and a payload that comes twice. Whether the
    other fields are what they should be shows when the first part is parsed.
    """
    view = memoryview(data)
    payload = None
    head = bytearray()
    position = 0
    while position < len(view):
        start = position
        tag, position = _read_varint(view, position)
        length, position = _length(tag, view, position)
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


def _length(tag: int, view: memoryview, position: int) -> tuple[int, int]:
    """Returns the bytes of a field's content, and where it begins. A number is read already, so it has none."""
    if not 0 < tag >> 3 <= _LAST_FIELD:
        raise InvalidRequest(f"the message holds a field {tag >> 3}, which does not exist in protobuf")
    kind = tag & 7
    if kind == _LENGTH_DELIMITED:
        return _read_varint(view, position)
    if kind == 0:
        return 0, _read_varint(view, position)[1]
    if kind in _FIXED_SIZES:
        return _FIXED_SIZES[kind], position
    raise InvalidRequest(f"the message holds a field of wire type {kind}, which does not exist here")


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
