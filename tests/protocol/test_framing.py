"""The bytes written and read by hand are protobuf's, both ways, and no bytes whatever get past as anything else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_frames.frames import HEADER_BYTES, Kind, frame, read_header
from ps_protocol.batches import DataRange
from ps_protocol.convert import AnsweringShard, Awaited, hyper_messages
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import PAYLOAD_FIELD, Parts, message_parts, split_message
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages import data as messages
from ps_protocol.messages.data import (
    BucketPush,
    BucketTimes,
    Notice,
    PullCall,
    PulledBucket,
    PushCall,
    PushedBucket,
    PushKind,
)
from ps_protocol.stage_spec import StageSpec
from ps_protocol.v1 import data_pb2, job_pb2, types_pb2

HEAD = data_pb2.PushRequest(
    header=data_pb2.PushHeader(
        worker=types_pb2.WorkerIdentity(job="job", rank=3, incarnation=7),
        clock=2**40,
        buckets=[data_pb2.BucketPush(bucket=300, kind=data_pb2.PUSH_KIND_GRADIENT, absent_slices=[0, 5])],
        groups=[job_pb2.GroupUpdate(group=1, hyper_parameters=hyper_messages({"lr": 0.5, "nesterov": True}))],
    )
)
PUSH = data_pb2.PushRequest(header=HEAD.header, payload=bytes(range(200)))
WHO = Identity("job", 3, 7)
ORIGIN = AnsweringShard(2, 2**63 - 1)
HEADER = types_pb2.ResponseHeader(shard_index=2, process=2**63 - 1)
# Of each message with a payload, all but that.
HEADS = [
    HEAD,
    data_pb2.PullResponse(header=HEADER, buckets=[data_pb2.PulledBucket(bucket=7, version=40)]),
    data_pb2.ExchangeRequest(push=HEAD.header, buckets=[1, 2], notify_bytes=7),
    data_pb2.ExchangeResponse(header=HEADER, buckets=[data_pb2.PulledBucket(bucket=7, version=40)]),
    data_pb2.PullStateResponse(header=HEADER, state=data_pb2.PulledState(bucket=1, state="exp_avg")),
]


# -- the same bytes as the generated classes -------------------------------------------------------------------------


def test_the_payload_is_the_last_field_of_every_message_that_has_one() -> None:
    carriers = [kind for kind in data_pb2.DESCRIPTOR.message_types_by_name.values() if "payload" in kind.fields_by_name]
    assert {kind.name for kind in carriers} == {head.DESCRIPTOR.name for head in HEADS}
    for kind in carriers:
        assert max(kind.fields_by_number) == kind.fields_by_name["payload"].number == PAYLOAD_FIELD


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.DESCRIPTOR.name)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14, 2**21 + 1])
def test_what_is_written_by_hand_is_what_the_generated_class_writes_and_the_reverse(head: Any, size: int) -> None:
    whole = type(head)()
    whole.CopyFrom(head)
    whole.payload = b"x" * size
    written = message_parts(head, whole.payload).whole()
    assert type(head).FromString(written) == whole
    if size or head.DESCRIPTOR.fields_by_name["payload"].containing_oneof:  # otherwise proto3 leaves it out
        assert written == whole.SerializeToString(deterministic=True)
        rest, payload = split_message(whole.SerializeToString())
        assert (type(head).FromString(rest), payload) == (head, whole.payload)


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: memoryview(b).cast("B")])
def test_a_payload_may_be_any_buffer_of_bytes_and_is_a_view_of_the_message(kind: Callable[[bytes], Any]) -> None:
    data = message_parts(HEAD, kind(b"payload")).whole()
    _, payload = split_message(data)
    assert payload == b"payload"
    assert payload.obj is data


def test_a_payload_that_lies_in_several_places_is_the_same_message() -> None:
    parts = message_parts(HEAD, b"pay", [b"", bytearray(b"lo"), memoryview(b"ad")])
    assert parts.whole() == message_parts(HEAD, b"payload").whole()
    whole = b"".join(frame(3, Kind.PUSH, message_parts(HEAD, b"payload")))
    assert b"".join(frame(3, Kind.PUSH, parts)) == whole
    numbers = memoryview(array("q", [1, 2]))  # of which len() counts the elements
    assert read_header(frame(3, Kind.PUSH, message_parts(HEAD, numbers))[0][:HEADER_BYTES], 1000).payload_bytes == 16


def test_fields_of_a_later_version_are_skipped_wherever_they_stand() -> None:
    number, text, eight_bytes, four_bytes = b"\x20\x96\x01", b"\x1a\x03abc", b"\x29" + bytes(8), b"\x35" + bytes(4)
    later = number + text + eight_bytes + four_bytes
    header, payload = b"\x0a\x02\x10\x05", b"\x7a\x02hi"
    for data in (later + header + payload, header + later + payload, payload + later + header + later):
        head, elements = split_message(data)
        assert (data_pb2.PushRequest.FromString(head).header.clock, elements) == (5, b"hi")
        assert data_pb2.PushRequest.FromString(data).payload == b"hi"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x0a", "ends inside a number"),
        (b"\x0a\x05\x10", "a field of 5 bytes was announced where 1 are left"),
        (b"\x0a\xff\xff\xff\xff\x7f", "was announced where 0 are left"),
        (b"\x0a" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x0a\x00\x7a\x00\x7a\x00", "payload twice"),
        (b"\x0a\x00\x0b", "wire type 3"),
        (b"\x0a\x00\x0f", "wire type 7"),
        (b"\x0a\x00\x02\x00", "field 0"),
        (b"\x0a\x00\x82\x80\x80\x80\x10\x00", "field"),
        (b"\x0a\x00\x21\x00", "a field of 8 bytes was announced where 1 are left"),
    ],
)
def test_broken_bytes_are_refused_with_what_is_wrong(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        split_message(data)


def compare_with_protobuf(data: bytes) -> None:
    """Whatever is accepted here, the generated class accepts, and finds the same in it."""
    try:
        head, payload = split_message(data)
        parsed = data_pb2.PushRequest.FromString(head)
    except (InvalidRequest, DecodeError):
        return
    message = data_pb2.PushRequest.FromString(data)
    assert message.header.SerializeToString(deterministic=True) == parsed.header.SerializeToString(deterministic=True)
    if message.WhichOneof("location") == "payload":
        assert message.payload == payload


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


@settings(max_examples=400)
@given(BYTES)
@example(b"\x7a\x01a\xfa\x00\x01b")  # a tag longer than it need be, which makes the payload come twice
def test_what_is_accepted_is_what_protobuf_finds(data: bytes) -> None:
    compare_with_protobuf(data)


# -- the values at both ends -----------------------------------------------------------------------------------------


def bucket_push(index: int, clock: int, empty: bool = False, **more: Any) -> BucketPush:
    return BucketPush(
        BucketSpec(index, "float32", "float32", False, 0, 50, ()), clock, empty, **{"absent": [], "groups": {}, **more}
    )


def pulled(message: Parts) -> list[PulledBucket]:
    """What the worker reads of a message with one bucket, as gRPC brings it."""
    return messages.read_pulled(*split_message(message.whole()), len)  # type: ignore[arg-type]


def test_a_push_is_written_by_the_worker_and_read_by_the_server_as_by_the_generated_class() -> None:
    step = bucket_push(300, 2**40, absent=[0, 5], groups={1: {"lr": 0.5, "nesterov": True}})
    written = messages.write_push(messages.push_of(WHO, 2**40, [step], memoryview(PUSH.payload))).whole()
    assert data_pb2.PushRequest.FromString(written) == PUSH
    call = messages.read_push(PUSH.SerializeToString())
    assert (call.worker, call.clock) == (WHO, 2**40)
    assert call.buckets == (PushedBucket(300, PushKind.GRADIENT, frozenset({0, 5})),)
    assert (call.groups, call.payload) == ({1: {"lr": 0.5, "nesterov": True}}, PUSH.payload)


def read(call: PushCall) -> PushCall:
    return messages.read_push(messages.write_push(call))


def test_a_push_is_read_as_it_was_written() -> None:
    elements, following = memoryview(b"abcd"), StageSpec(2, "SGD", (0, None), {0: {"lr": 0.5}}, frozenset({1}))
    initial = PushCall(WHO, 0, (PushedBucket(2, PushKind.INITIAL_VALUE),), elements)
    assert read(initial) == initial
    state = PushedBucket(1, PushKind.ASSIGN_STATE, frozenset({3, 1}), state="exp_avg")
    for bucket in (state, PushedBucket(1, PushKind.NEXT_OPTIMIZER, next_optimizer=following)):
        assert read(PushCall(WHO, 7, (bucket,), b"", stage=2)) == PushCall(WHO, 7, (bucket,), b"", stage=2)
    ranges = (DataRange(0, 1, 2, 3),)
    step = bucket_push(1, 5, groups={1: {"lr": 0.5}}, ranges=ranges, weight=3.0, stage=4)
    draft = messages.push_of(WHO, 5, [step], elements, PushKind.DRAFT, "bfloat16")
    assert read(draft) == draft
    assert (draft.groups, draft.ranges, draft.weight, draft.stage) == ({1: {"lr": 0.5}}, ranges, 3.0, 4)
    shared = messages.push_of(WHO, 5, [bucket_push(1, 5), bucket_push(4, 5, True)], None, finite={1})
    assert read(shared) == shared
    assert shared.buckets == (PushedBucket(1, PushKind.GRADIENT, finite=True), PushedBucket(4, PushKind.SKIP))
    assert shared.payload is None, "it is in the segment"


def test_a_pull_is_read_as_it_was_asked() -> None:
    plain, shared = PullCall(WHO, 12, (4, 2)), PullCall(WHO, 12, (4,), True, 100)
    for call in (plain, shared, PullCall(WHO, 12, (4, 5), whole=frozenset({5}), all_staged=True)):
        assert messages.read_pull(messages.write_pull(call)) == call
    assert data_pb2.PullRequest.FromString(messages.write_pull(plain)).clock == 12
    assert messages.read_pull_state(messages.write_pull_state(PullCall(WHO, 0, (4, 2)))) == PullCall(WHO, 0, (4, 2))


def test_an_exchange_is_of_one_worker_at_one_clock() -> None:
    push = messages.push_of(WHO, 5, [bucket_push(1, 5)], None, finite={1})
    pull = PullCall(WHO, 5, (1, 4), True, 100)
    assert messages.read_exchange(messages.write_exchange(push, pull)) == (push, pull)
    push = messages.push_of(WHO, 5, [bucket_push(1, 5), bucket_push(2, 5, True)], b"", PushKind.COMMIT)
    pull = PullCall(WHO, 5, (1, 2))
    assert messages.read_exchange(messages.write_exchange(push, pull)) == (push, pull)
    assert [bucket.kind for bucket in push.buckets] == [PushKind.COMMIT, PushKind.SKIP]


def test_a_pulled_bucket_is_read_as_it_was_sent_by_hand_and_by_the_generated_class() -> None:
    data = messages.write_pulled(
        ORIGIN, PulledBucket(7, 40, 0.25, payload=memoryview(b"weights!"), wire_format="float16")
    )
    [found] = pulled(data)
    assert (found.bucket, found.waited, found.waiting) == (7, 0.25, None)
    assert (found.payload, found.wire_format) == (b"weights!", "float16")
    message = data_pb2.PullResponse.FromString(data.whole())
    assert message.payload == b"weights!"
    assert message.header == types_pb2.ResponseHeader(shard_index=2, process=2**63 - 1, version=40)
    assert pulled(Parts(message.SerializeToString())) == [found]


def test_payloads_of_several_buckets_follow_each_other() -> None:
    buckets = [data_pb2.PulledBucket(bucket=index) for index in (5, 3)]
    message = data_pb2.PullResponse(buckets=buckets, payload=b"fiverest")
    found = messages.read_pulled(*split_message(message.SerializeToString()), lambda index, _: {5: 4, 3: 4}[index])
    assert [(bucket.bucket, bytes(bucket.payload)) for bucket in found] == [(5, b"five"), (3, b"rest")]


def test_the_notice_that_a_bucket_is_not_admitted_says_whom_it_waits_for_and_why() -> None:
    awaited = Awaited((1, 4), "worker 1 is at clock 3")
    for data, kind in (
        (messages.write_pulled(ORIGIN, PulledBucket(7, waiting=awaited)), data_pb2.PullResponse),
        (messages.write_exchanged(ORIGIN, PulledBucket(7, waiting=awaited)), data_pb2.ExchangeResponse),
    ):
        [found] = pulled(data)
        assert (found.bucket, found.waiting) == (7, awaited)
        assert kind.FromString(data.whole()).HasField("waiting")


def test_an_acknowledgement_says_the_version_and_how_many_buckets_were_repeats() -> None:
    data = messages.write_pushed(ORIGIN, 8, 1)
    response = data_pb2.PushResponse.FromString(data)
    assert (response.header.version, response.duplicate_count) == (8, 1)
    assert (response.header.shard_index, response.header.process) == (2, 2**63 - 1)


GRADIENT, COMMIT, ASSIGN = data_pb2.PUSH_KIND_GRADIENT, data_pb2.PUSH_KIND_COMMIT, data_pb2.PUSH_KIND_ASSIGN


def pushing(*kinds: Any, **fields: Any) -> data_pb2.PushHeader:
    buckets = [data_pb2.BucketPush(bucket=index, kind=kind) for index, kind in enumerate(kinds)]
    return data_pb2.PushHeader(**{"buckets": buckets, **fields})


SEGMENT = data_pb2.InSegment()


def pushed(header: data_pb2.PushHeader, payload: bytes | None = None, **location: Any) -> bytes:
    return message_parts(data_pb2.PushRequest(header=header, **location), payload).whole()


def exchanged(*kinds: Any, **location: Any) -> bytes:
    return data_pb2.ExchangeRequest(push=pushing(*kinds), **location).SerializeToString()


@pytest.mark.parametrize(
    ("read", "data", "said"),
    [
        (messages.read_push, pushed(pushing(0)), "kind of push: expected one of .1, 2, 3, 4, 5, 6, 7, 8., got 0"),
        (messages.read_push, pushed(pushing(9)), "kind of push: expected one of .1, 2, 3, 4, 5, 6, 7, 8., got 9"),
        (
            messages.read_push,
            pushed(pushing(GRADIENT, groups=[job_pb2.GroupUpdate(group=2)] * 2)),
            "group 2 comes twice",
        ),
        (messages.read_push, pushed(pushing(GRADIENT, COMMIT)), "bucket 1: a push carries .*, got commit"),
        (messages.read_push, pushed(pushing(GRADIENT), b"elements", in_segment=SEGMENT), "in the message, got both"),
        (messages.read_exchange, exchanged(ASSIGN), "bucket 0: an exchange carries commit, gradient, skip, got assign"),
        (
            messages.read_exchange,
            exchanged(COMMIT, in_segment=SEGMENT),
            "a segment carries gradient, skip, got commit",
        ),
        (messages.read_push, b"\x0a\x02\x0a\x05", "the bytes are no PushRequest"),
        (messages.read_pull, b"\x0a\x05", "the bytes are no PullRequest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_means_nothing_is_refused(read: Callable[[bytes], object], data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read(data)


def test_a_notice_says_which_buckets_are_there_and_how_long_pushes_have_been_staged() -> None:
    notice = Notice((PulledBucket(4, 3), PulledBucket(2, 5, save_state=True)))
    response = data_pb2.ExchangeResponse.FromString(messages.write_exchanged(ORIGIN, notice).whole())
    assert [(bucket.bucket, bucket.version, bucket.state_wanted) for bucket in response.buckets] == [
        (4, 3, False),
        (2, 5, True),
    ]
    assert (response.header.version, response.WhichOneof("location")) == (3, "in_segment")
    assert not response.HasField("staged_duration")
    assert messages.read_notice(messages.write_exchanged(ORIGIN, Notice((), 0.5)).whole(), True) == Notice((), 0.5)


# -- timelines ---------------------------------------------------------------------------------------------------------

TIMED = Identity("job", 1, 2, b"key", "run")
OF_TIMED = "0a130a036a6f621001180222036b65792a0372756e1005"  # as a message's first fields: the worker, and clock 5


def test_who_records_no_timeline_sends_and_gets_the_bytes_of_the_first_release() -> None:
    """As they were before there was a timeline: nothing of it costs a byte."""
    empty = [BucketPush(BucketSpec(4, "trained", "float32", False, 0, 4, ()), 5, True, [], {})]
    commit = messages.push_of(TIMED, 5, empty, b"", PushKind.COMMIT)
    shared = messages.push_of(TIMED, 5, empty, None, finite={4})
    pull, pulled = PullCall(TIMED, 5, (4,)), messages.write_pulled(ORIGIN, PulledBucket(7, 40))
    sent = {
        messages.write_pull(PullCall(TIMED, 5, (4, 6))).hex(): OF_TIMED + "1a020406",
        messages.write_pull(PullCall(TIMED, 5, (4,), True, 100)).hex(): OF_TIMED + "1a010422002864",
        messages.write_exchange(commit, pull).hex(): "0a1d" + OF_TIMED + "1a0408041003120104",
        messages.write_exchange(shared, pull).hex(): "0a1f" + OF_TIMED + "1a060804100320011201042200",
        pulled.whole().hex(): "0a0e080210ffffffffffffffff7f2028120408071028",
    }
    assert list(sent) == list(sent.values())


def test_times_come_back_as_they_were_noted_and_only_where_there_are_some() -> None:
    wanted = PullCall(WHO, 5, (1,), times_wanted=True)
    assert messages.read_pull(messages.write_pull(wanted)) == wanted
    push = messages.push_of(WHO, 5, [bucket_push(1, 5)], b"", PushKind.COMMIT)
    assert messages.read_exchange(messages.write_exchange(push, wanted))[1] == wanted
    times = BucketTimes(0.25, 1.5, 70.000001)
    data = messages.write_pulled(ORIGIN, PulledBucket(7, 40, payload=memoryview(b""), times=times))
    [found] = pulled(data)
    assert found.times == BucketTimes(0.25, 1.5, 70.000001)
    assert (
        messages.read_notice(messages.write_pulled(ORIGIN, Notice((PulledBucket(7),))).whole()).buckets[0].times is None
    )
    assert messages.read_notice(messages.write_pulled(ORIGIN, Notice(clock=3.5)).whole()).clock == 3.5
    assert messages.read_notice(messages.write_pulled(ORIGIN, Notice()).whole()).clock is None, "a shard of before"
