"""Exchanges of one step after the other.

They mostly differ in their clock alone, or in hyper-parameters besides, as where a schedule changes the learning rate.

So a worker writes once, and a shard reads and checks once, what does not change. On the wire such a request stays the
message that every generated class writes: its first field is a header, whose fields come in the order of their numbers.
The first two are the worker and the clock; hyper-parameters follow the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from ps_protocol.convert import Request, group_update_messages, group_updates
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import LENGTH_DELIMITED, Parts, field_at, varint
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.messages.data import PullCall, PushCall, write_exchange
from ps_protocol.v1 import data_pb2

# Bytes of an exchange that a shard keeps for each connection: they name more than 1,500 buckets.
MOST_REPEATED = 2**14
_HEADER_TAG = _WORKER_TAG = 1 << 3 | LENGTH_DELIMITED
_CLOCK_TAG = 2 << 3
_LAST_CLOCK = 2**64 - 1

Groups = Mapping[int, HyperParameters]


@dataclass(frozen=True, repr=False)  # the header has the worker's key
class Repeated:
    """A request without its clock.

    before:         the bytes of its header before the clock's number
    buckets:        the bytes behind it, before the hyper-parameters
    groups:         the bytes of the hyper-parameters
    after:          the bytes behind these
    rest_of_header: how many of `after` belong to the header
    """

    before: bytes
    buckets: bytes
    groups: bytes
    after: bytes
    rest_of_header: int

    def at(self, clock: int) -> bytes | None:
        """Returns the bytes of the request at a clock; None if the clock does not fit into its 64 bits on the wire."""
        if clock > _LAST_CLOCK:
            return None
        number, before, buckets, groups = varint(clock), self.before, self.buckets, self.groups
        size = len(before) + len(number) + len(buckets) + len(groups) + self.rest_of_header
        return b"".join((bytes((_HEADER_TAG,)), varint(size), before, number, buckets, groups, self.after))

    def with_groups(self, groups: bytes) -> Repeated:
        """Returns the request with other hyper-parameters.

        groups: what `write_groups` returns
        """
        return replace(self, groups=groups)

    def changed(self, request: bytes, clock: int, before: bytes) -> tuple[Repeated, dict[int, HyperParameters]] | None:
        """Returns the request whose bytes at a clock these are, and its hyper-parameters, if it differs in nothing
        else. Otherwise returns None; so it does if these take so many more bytes, or fewer, that the number of them in
        front of the header has another length. Raises InvalidRequest as `read_groups`.

        before: this request at the clock
        """
        if len(request) > MOST_REPEATED:
            return None
        behind = len(self.after)
        made = self.with_groups(request[len(before) - behind - len(self.groups) : len(request) - behind])
        groups = read_groups(made.groups) if made.at(clock) == request else None
        return None if groups is None else (made, groups)


def write_groups(groups: Groups) -> bytes:
    """Returns the bytes of hyper-parameters in the header of a push."""
    return data_pb2.PushHeader(groups=group_update_messages(groups)).SerializeToString()


def read_groups(written: bytes) -> dict[int, HyperParameters] | None:
    """Reads hyper-parameters from bytes in the header of a push. Returns None if the bytes hold anything but groups, or
    groups otherwise than a generated class writes them. A field of a group that this code does not know is passed over,
    as `read_exchange` does.

    Raises InvalidRequest for a group, or a hyper-parameter of one, that comes twice.
    """
    try:
        header = data_pb2.PushHeader.FromString(written)
    except DecodeError:
        return None
    if data_pb2.PushHeader(groups=header.groups).SerializeToString() != written:
        return None
    return group_updates(header.groups)


def repeated_exchange(data: Request, push: PushCall) -> Repeated | None:
    """Returns a small ExchangeRequest without its clock. None if its elements come with it, or if it names leased data,
    which a next step has no more; and mostly if it is not as `write_exchange` writes it, which `says_no_more` makes
    sure of.

    push: what it pushes
    """
    head, payload = data[:2] if isinstance(data, Parts) else (data, None)
    if payload is not None or push.ranges or len(head) > MOST_REPEATED:
        return None
    view = memoryview(head)
    try:
        header, size, start = field_at(view, 0)
        worker, length, behind = field_at(view, start)
        clock, _, after = field_at(view, behind + length)
    except InvalidRequest:
        return None
    rest = data_pb2.PushHeader(weight=push.weight, stage=push.stage).ByteSize()
    end = start + size - rest
    groups = write_groups(push.groups) if push.groups else b""
    begin = end - len(groups)
    if (header, worker, clock) != (_HEADER_TAG, _WORKER_TAG, _CLOCK_TAG) or begin < after or head[begin:end] != groups:
        return None
    return Repeated(head[start : behind + length + 1], head[after:begin], groups, head[end:], rest)


def says_no_more(head: bytes, push: PushCall, pull: PullCall) -> bool:
    """Whether an ExchangeRequest is what `write_exchange` makes of what was read of it. Then it says nothing twice, and
    has no field that this code does not know."""
    return head == write_exchange(push, pull)
