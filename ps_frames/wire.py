"""The frames of a data connection, which interleave the messages of several calls.

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

import enum
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

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
    PUSH = 2  # a request, which begins a call; so do the next ones
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
class Offer:
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
        """The size of the payload's elements in bytes."""
        return self.size - self.head


def write_header(call: int, kind: Kind, head: int, payload: int = 0) -> bytes:
    """Returns the bytes of a header.

    head: bytes of the message before the elements of its payload
    payload: bytes of these elements
    """
    return _HEADER.pack(call, head + payload, head, kind)


def frame(call: int, kind: Kind, message: Parts) -> list[Buffer]:
    """Returns a frame as parts that follow each other on the wire. The payload is not copied."""
    payload = b"" if message.payload is None else message.payload
    return [write_header(call, kind, len(message.head), len(payload)) + message.head, payload]


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
