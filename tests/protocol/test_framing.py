"""The bytes written and read by hand are protobuf's, both ways, and no bytes whatever get past as anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_protocol.convert import hyper_messages
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import read_message, write_message
from ps_protocol.layout import BucketSpec
from ps_protocol.v1 import data_pb2, job_pb2, types_pb2
from ps_server.core.commands import Staged
from ps_server.core.consistency import Admission
from ps_server.core.requests import PullCall, PushKind
from ps_server.rpc import data_messages
from ps_server.shard.waiting import Notice, PulledBucket
from ps_worker.cluster import convert as worker_messages
from ps_worker.values import BucketPush, Identity

PUSH = data_pb2.PushRequest(
    header=data_pb2.PushHeader(
        worker=types_pb2.WorkerIdentity(job="job", rank=3, incarnation=7),
        bucket=300,
        clock=2**40,
        kind=data_pb2.PUSH_KIND_GRADIENT,
        absent_segments=[0, 5],
        groups=[job_pb2.GroupUpdate(group=1, hyper_parameters=hyper_messages({"lr": 0.5, "nesterov": True}))],
    ),
    payload=bytes(range(200)),
)
WHO = Identity("job", 3, 7)


# -- the same bytes as the generated classes -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14, 2**21 + 1])
def test_what_is_written_by_hand_is_what_the_generated_class_writes(size: int) -> None:
    payload = bytes(size)
    message = data_pb2.PushRequest(header=PUSH.header, payload=payload)
    written = write_message(PUSH.header, payload)
    assert data_pb2.PushRequest.FromString(written) == message
    if size:  # proto3 leaves an empty field out
        assert written == message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14, 2**21 + 1])
def test_what_the_generated_class_writes_is_read_by_hand(size: int) -> None:
    message = data_pb2.PushRequest(header=PUSH.header, payload=b"x" * size)
    header, payload = read_message(message.SerializeToString())
    assert data_pb2.PushHeader.FromString(bytes(header)) == PUSH.header
    assert bytes(payload) == message.payload


def test_a_header_alone_has_an_empty_payload() -> None:
    header, payload = read_message(write_message(PUSH.header))
    assert (bytes(header), bytes(payload)) == (PUSH.header.SerializeToString(), b"")


def test_a_payload_is_a_view_of_the_message_and_not_a_copy() -> None:
    data = write_message(PUSH.header, b"payload")
    _, payload = read_message(data)
    assert payload.obj is data


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: memoryview(b).cast("B")])
def test_a_payload_may_be_any_buffer_of_bytes(kind: Callable[[bytes], Any]) -> None:
    _, payload = read_message(write_message(PUSH.header, kind(b"payload")))
    assert bytes(payload) == b"payload"


def test_fields_of_a_later_version_are_skipped_wherever_they_stand() -> None:
    number, text, eight_bytes, four_bytes = b"\x10\x96\x01", b"\x1a\x03abc", b"\x21" + bytes(8), b"\x2d" + bytes(4)
    later = number + text + eight_bytes + four_bytes
    header, payload = b"\x0a\x02\x10\x05", b"\x7a\x02hi"
    for data in (later + header + payload, header + later + payload, payload + later + header + later):
        found = read_message(data)
        assert (bytes(found[0]), bytes(found[1])) == (b"\x10\x05", b"hi")
        assert data_pb2.PushRequest.FromString(data).payload == b"hi"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no header"),
        (b"\x7a\x02hi", "no header"),
        (b"\x0a", "ends inside a number"),
        (b"\x0a\x05\x10", "a field of 5 bytes was announced where 1 are left"),
        (b"\x0a\xff\xff\xff\xff\x7f", "was announced where 0 are left"),
        (b"\x0a" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x0a\x00\x0a\x00", "header or payload twice"),
        (b"\x0a\x00\x7a\x00\x7a\x00", "header or payload twice"),
        (b"\x0a\x00\x0b", "wire type 3"),
        (b"\x0a\x00\x0f", "wire type 7"),
        (b"\x0a\x00\x02\x00", "field 0"),
        (b"\x0a\x00\x82\x80\x80\x80\x10\x00", "field"),
        (b"\x0a\x00\x21\x00", "a field of 8 bytes was announced where 1 are left"),
    ],
)
def test_broken_bytes_are_refused_with_what_is_wrong(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_message(data)


def test_every_truncation_of_a_message_is_refused_or_read_as_protobuf_reads_it() -> None:
    whole = PUSH.SerializeToString()
    for end in range(len(whole)):
        compare_with_protobuf(whole[:end])


def compare_with_protobuf(data: bytes) -> None:
    """Whatever is accepted here, the generated class accepts, and finds the same in it."""
    try:
        header, payload = read_message(data)
        parsed = data_pb2.PushHeader.FromString(bytes(header))
    except (InvalidRequest, DecodeError):
        return
    message = data_pb2.PushRequest.FromString(data)
    assert message.header.SerializeToString(deterministic=True) == parsed.SerializeToString(deterministic=True)
    assert message.payload == bytes(payload)


# Bytes as random as may be, and bytes that look like a message: fields of ours and of others, with lengths that lie.
NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 200)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def delimited(tag: int, body: bytes, lie: int) -> bytes:
    return varint(tag) + varint(max(0, len(body) + lie)) + body


HEADERS = st.sampled_from([PUSH.header.SerializeToString(), b"", b"\x20\x01", b"\x12\x03abc"])
FIELDS = st.one_of(
    st.builds(delimited, st.just(0x0A), HEADERS | st.binary(max_size=8), st.sampled_from([0, 0, 0, -1, 1])),
    st.builds(delimited, st.just(0x7A), st.binary(max_size=8), st.sampled_from([0, 0, 0, -1, 1])),
    st.builds(delimited, NUMBERS, st.binary(max_size=8), st.sampled_from([0, 0, 0, 1, 2**60])),
    st.builds(lambda tag, value: varint(tag) + varint(value), NUMBERS, NUMBERS),
    st.binary(max_size=12),
)
BYTES = st.binary(max_size=64) | st.lists(FIELDS, max_size=5).map(b"".join)


@settings(max_examples=1000)
@given(BYTES)
@example(b"\x0a\x00\x8a\x00\x00")  # a tag longer than it need be, which makes the header come twice
def test_what_is_accepted_is_what_protobuf_finds(data: bytes) -> None:
    compare_with_protobuf(data)


@settings(max_examples=300)
@given(BYTES)
def test_no_bytes_make_the_server_fail_in_another_way_than_it_should(data: bytes) -> None:
    for read in (
        data_messages.push,
        data_messages.pull,
        data_messages.shared_push,
        data_messages.attach_request,
    ):
        with contextlib.suppress(InvalidRequest):
            read(data)


# -- the values at both ends -----------------------------------------------------------------------------------------


def test_the_server_reads_a_push_as_the_generated_class_wrote_it() -> None:
    found = data_messages.push(PUSH.SerializeToString())
    assert (found.job, found.rank, found.incarnation) == ("job", 3, 7)
    assert (found.bucket, found.clock, found.kind) == (300, 2**40, PushKind.GRADIENT)
    assert (found.absent, found.groups) == ({0, 5}, {1: {"lr": 0.5, "nesterov": True}})
    assert bytes(found.payload) == PUSH.payload


def test_the_generated_class_reads_a_push_as_the_worker_wrote_it() -> None:
    bucket = BucketSpec(300, "float32", "float32", False, 0, 50, ())
    step = BucketPush(bucket, 2**40, False, [0, 5], {1: {"lr": 0.5, "nesterov": True}})
    written = worker_messages.gradient_push(WHO, step, memoryview(PUSH.payload))
    assert data_pb2.PushRequest.FromString(written) == PUSH


def test_an_initial_value_and_a_step_without_gradient_say_what_they_are() -> None:
    first = data_messages.push(worker_messages.initial_push(WHO, 2, memoryview(b"abcd")))
    assert (first.kind, first.bucket, bytes(first.payload)) == (PushKind.INITIAL_VALUE, 2, b"abcd")
    bucket = BucketSpec(1, "float32", "float32", False, 0, 50, ())
    nothing = data_messages.push(worker_messages.gradient_push(WHO, BucketPush(bucket, 5, True, [], {}), None))
    assert (nothing.kind, nothing.clock, bytes(nothing.payload)) == (PushKind.SKIP, 5, b"")


def test_a_pull_is_read_as_it_was_asked() -> None:
    request = worker_messages.pull_request(WHO, 12, [4, 2])
    assert data_messages.pull(request) == PullCall("job", 3, 7, 12, (4, 2), WHO.key)
    assert data_pb2.PullRequest.FromString(request).clock == 12
    request = worker_messages.pull_request(WHO, 12, [4], 100)
    assert data_messages.pull(request) == PullCall("job", 3, 7, 12, (4,), WHO.key, 100)


def test_a_pull_that_comes_with_pushes_is_of_the_same_worker_at_the_same_clock() -> None:
    bucket = BucketSpec(1, "float32", "float32", False, 0, 50, ())
    request = worker_messages.push_pull(WHO, 5, [BucketPush(bucket, 5, False, [], {})], {1}, [1, 4], 100)
    push, pull = data_messages.push_pull(request)
    assert (push.job, push.rank, push.incarnation, push.clock, push.key) == ("job", 3, 7, 5, WHO.key)
    assert [(found.index, found.finite) for found in push.buckets] == [(1, True)]
    assert pull == PullCall("job", 3, 7, 5, (1, 4), WHO.key, 100)


def test_a_pulled_bucket_is_read_as_it_was_sent_by_hand_and_by_the_generated_class() -> None:
    data = data_messages.pull_response(PulledBucket(7, 40, 0.25, payload=memoryview(b"weights!")))
    found = worker_messages.pulled(data)
    assert (found.bucket, found.version, found.waited, found.waiting) == (7, 40, 0.25, None)
    assert bytes(found.payload) == b"weights!"
    message = data_pb2.PullResponse.FromString(data)
    assert message.payload == b"weights!"
    assert worker_messages.pulled(message.SerializeToString()) == found


def test_the_notice_that_a_bucket_is_not_admitted_says_whom_it_waits_for_and_why() -> None:
    admission = Admission(False, (1, 4), "worker 1 is at clock 3")
    data = data_messages.pull_response(PulledBucket(7, waiting=admission))
    assert worker_messages.pulled(data).waiting == ((1, 4), "worker 1 is at clock 3")
    assert data_pb2.PullResponse.FromString(data).header.HasField("waiting")


def test_an_acknowledgement_says_the_version_and_whether_it_was_a_repeat() -> None:
    response = data_pb2.PushResponse.FromString(data_messages.push_response(Staged(9, duplicate=True)))
    assert (response.version, response.duplicate) == (9, True)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (data_pb2.PushHeader(bucket=1), "kind of push: expected one of .1, 2, 3, 4, 5., got 0"),
        (data_pb2.PushHeader(kind=9), "kind of push: expected one of .1, 2, 3, 4, 5., got 9"),  # type: ignore[arg-type]
        (data_pb2.PushHeader(kind=1, groups=[job_pb2.GroupUpdate(group=2)] * 2), "group 2 comes twice"),  # type: ignore[arg-type]
    ],
)
def test_a_header_that_means_nothing_is_refused(message: Message, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        data_messages.push(write_message(message, b""))


def test_a_header_that_is_no_header_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="the bytes are no PushHeader"):
        data_messages.push(b"\x0a\x02\x0a\x05")
    with pytest.raises(InvalidRequest, match="the bytes are no PullRequest"):
        data_messages.pull(b"\x0a\x05")


def test_a_notice_says_which_buckets_are_there_and_how_long_pushes_have_been_staged() -> None:
    notice = Notice((PulledBucket(4, 3), PulledBucket(2, 5, save_state=True)))
    response = data_pb2.PullResponse.FromString(data_messages.pull_shared_response(notice))
    assert [(header.bucket, header.version, header.checkpoint) for header in response.headers] == [
        (4, 3, False),
        (2, 5, True),
    ]
    assert not response.HasField("staged_seconds")
    response = data_pb2.PullResponse.FromString(data_messages.pull_shared_response(Notice((), 0.5)))
    assert (len(response.headers), response.staged_seconds) == (0, 0.5)
