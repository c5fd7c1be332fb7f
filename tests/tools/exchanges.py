"""Strategies for ExchangeRequests, and for messages that say the same in other bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ps_protocol.convert import group_update_messages
from ps_protocol.framing import field_at, varint
from ps_protocol.messages.repeated import Groups
from ps_protocol.v1 import data_pb2, job_pb2, types_pb2

GRADIENT, SKIP = data_pb2.PUSH_KIND_GRADIENT, data_pb2.PUSH_KIND_SKIP
SEGMENT = data_pb2.InSegment()
CLOCKS = st.integers(1, 2**64 - 1) | st.integers(1, 300)
INDICES = st.integers(0, 2**32 - 1)
NUMBERS = st.floats()  # any, with NaN
VALUES = st.none() | st.booleans() | NUMBERS | st.lists(NUMBERS, max_size=3).map(tuple)
GROUPS = st.dictionaries(INDICES, st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=3)
BUCKETS = st.builds(
    data_pb2.BucketPush,
    bucket=INDICES,
    kind=st.sampled_from([GRADIENT, SKIP]),
    finite=st.booleans(),
    absent_slices=st.sets(INDICES, max_size=3).map(sorted),
)
PUSHES = st.builds(
    data_pb2.PushHeader,
    worker=st.builds(types_pb2.WorkerIdentity, job=st.text(max_size=150), rank=INDICES, lease_key=st.just(b"secret")),
    clock=CLOCKS,
    buckets=st.lists(BUCKETS, max_size=20),
    groups=GROUPS.map(group_update_messages),
    weight=st.sampled_from([0.0, 3.0]),
    stage=st.sampled_from([0, 1, 300]),
)
EXCHANGES = st.builds(
    data_pb2.ExchangeRequest,
    push=PUSHES,
    buckets=st.lists(INDICES, max_size=9),
    in_segment=st.sampled_from([None, SEGMENT]),
)


def with_groups(request: data_pb2.ExchangeRequest, clock: int, groups: Groups) -> data_pb2.ExchangeRequest:
    """The same request at a clock, with these hyper-parameters."""
    made = data_pb2.ExchangeRequest()
    made.CopyFrom(request)
    made.push.clock = clock
    del made.push.groups[:]
    made.push.groups.extend(group_update_messages(groups))
    return made


def like(groups: Groups) -> st.SearchStrategy[Groups]:
    """Other values of the same groups."""
    return st.fixed_dictionaries({key: st.dictionaries(st.text(max_size=5), VALUES, max_size=3) for key in groups})


# -- other bytes -------------------------------------------------------------------------------------------------------

UNKNOWN = b"\x9a\x06\x05bytes"  # a field 99
PUSH_FIELD, GROUPS_FIELD = b"\x0a", b"\x22"
CLOCK, BUCKET, STAGE = b"\x10\x07", b"\x1a\x02\x10\x03", b"\x38\x05"  # fields of a push


@st.composite
def other_bytes(draw: st.DrawFn, request: data_pb2.ExchangeRequest) -> bytes:
    """Bytes of a request that no generated class writes. What they say may differ from the request, too."""
    header, *rest = fields(request.SerializeToString())
    found, longer = fields(content_of(header)), 0
    match draw(st.sampled_from(["twice", "unknown", "order", "parts", "length", "groups"])):
        case "twice":
            found = inserted(draw, found, draw(st.sampled_from([*found, CLOCK])))
        case "unknown":
            found, rest = inserted(draw, found, UNKNOWN), inserted(draw, rest, UNKNOWN)
        case "order":
            found, rest = draw(st.permutations(found)), draw(st.permutations(rest))
        case "parts":
            rest = inserted(draw, rest, delimited(PUSH_FIELD, draw(st.sampled_from([*found, CLOCK, b""]))))
        case "length":
            longer = draw(st.integers(1, 2))
        case "groups":
            found = [other_group(draw, each) if each[:1] == GROUPS_FIELD else each for each in found]
    return b"".join((delimited(PUSH_FIELD, b"".join(found), longer), *rest))


def inserted(draw: st.DrawFn, found: list[bytes], field: bytes) -> list[bytes]:
    place = draw(st.integers(0, len(found)))
    return [*found[:place], field, *found[place:]]


def other_group(draw: st.DrawFn, group: bytes) -> bytes:
    """A field of a group whose message has more in it, which may look like a group itself."""
    within, content = draw(st.sampled_from([UNKNOWN, b"\x7a\x02\x22\x00", b"\x08\x05"])), content_of(group)
    return delimited(GROUPS_FIELD, within + content if draw(st.booleans()) else content + within)


def content_of(field: bytes) -> bytes:
    """The content of a field."""
    return field[field_at(memoryview(field), 0)[2] :]


def fields(message: bytes) -> list[bytes]:
    """The fields of a message."""
    view, found, place = memoryview(message), [], 0
    while place < len(message):
        _, size, start = field_at(view, place)
        found.append(message[place : start + size])
        place = start + size
    return found


def delimited(tag: bytes, content: bytes, more: int = 0) -> bytes:
    """A field with a content. more: by how many bytes its length is longer than need be"""
    size = varint(len(content))
    return tag + (size[:-1] + bytes((size[-1] | 0x80,)) + b"\x80" * (more - 1) + b"\0" if more else size) + content


def pushing(**more: Any) -> data_pb2.PushHeader:
    bucket = data_pb2.BucketPush(kind=GRADIENT)
    return data_pb2.PushHeader(**{"worker": {"job": "job"}, "clock": 5, "buckets": [bucket], **more})


def exchanging(**more: Any) -> bytes:
    """The bytes of an ExchangeRequest into the segment; `more`: fields of its push."""
    return data_pb2.ExchangeRequest(push=pushing(**more), in_segment=SEGMENT).SerializeToString()


def group(key: int, **values: Any) -> job_pb2.GroupUpdate:
    [made] = group_update_messages({key: values})
    return made
