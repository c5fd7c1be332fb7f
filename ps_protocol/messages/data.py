"""Pushes and pulls of buckets, and the answers of shards: as values, with functions that write and read their messages.

A read request is not checked: the code that uses its content checks it. Payloads are written and read without a copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from ps_protocol.batches import DataRange
from ps_protocol.convert import (
    AnsweringShard,
    Awaited,
    Request,
    data_range_messages,
    data_ranges,
    duration,
    group_update_messages,
    group_updates,
    identity,
    identity_message,
    known,
    next_optimizer,
    next_optimizer_message,
    parse,
    read,
    seconds,
    whole,
    wire_format,
    wire_format_number,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.segment_layout import SegmentOffer
from ps_protocol.stage_spec import StageSpec
from ps_protocol.v1 import data_pb2

NO_PAYLOAD = memoryview(b"")
_VERSION = attrgetter("version")

# -- pushes ------------------------------------------------------------------------------------------------------------


class PushKind(enum.Enum):
    """The content of a pushed bucket."""

    GRADIENT = "gradient"
    INITIAL_VALUE = "initial_value"
    SKIP = "skip"
    DRAFT = "draft"  # a gradient that may still change: kept until its commit
    COMMIT = "commit"  # of the draft of the same clock
    ASSIGN = "assign"
    ASSIGN_STATE = "assign_state"
    NEXT_OPTIMIZER = "next_optimizer"


_PUSH_KINDS: dict[int, PushKind] = {
    number: PushKind[name.removeprefix("PUSH_KIND_")] for name, number in data_pb2.PushKind.items() if number
}
_PUSH_KIND_NUMBERS: dict[PushKind, Any] = {kind: number for number, kind in _PUSH_KINDS.items()}
_IN_PUSH = frozenset(PushKind) - {PushKind.COMMIT}
_IN_EXCHANGE = frozenset({PushKind.GRADIENT, PushKind.SKIP, PushKind.COMMIT})
_IN_SEGMENT = frozenset({PushKind.GRADIENT, PushKind.SKIP})


class PushedBucket(NamedTuple):
    """One bucket of a push.

    absent:         positions of slices without a gradient; in an assignment, of slices that it does not change
    finite:         the worker has checked the gradient for infinities and NaNs
    state:          the name of the optimizer state that is assigned
    wire_format:    that of a gradient; empty: the bucket's own type
    next_optimizer: the stage that the bucket enters; None: it stays in its stage
    """

    bucket: int
    kind: PushKind
    absent: frozenset[int] = frozenset()
    finite: bool = False
    state: str = ""
    wire_format: str = ""
    next_optimizer: StageSpec | None = None


@dataclass(frozen=True)
class PushCall:
    """Buckets that a worker pushes at its clock.

    payload: of all buckets, one after the other: gradients in the job's wire format, all else in the bucket's own
             type; None: the gradients lie in the worker's segment
    groups:  hyper-parameters to use from this clock on
    ranges:  the leased data that the step used
    weight:  of the gradients in the mean of their update; 0: all gradients have the same weight
    stage:   the script's stage, to which `groups` and an assigned state belong
    """

    worker: Identity
    clock: int
    buckets: tuple[PushedBucket, ...]
    payload: Buffer | None
    groups: Mapping[int, HyperParameters] = field(default_factory=dict)
    ranges: tuple[DataRange, ...] = ()
    weight: float = 0.0
    stage: int = 0


@dataclass(frozen=True)
class BucketPush:
    """One bucket's part of a worker's step, before pushes are gathered into calls. Those that differ in their clock
    and hyper-parameters alone are equal.

    absent: positions of slices without a gradient in this step
    empty:  no slice has one, and no payload is sent. If `absent` names all slices, the bucket counts as zero in the
            mean; if it names none, the mean leaves the worker's step out
    groups: hyper-parameters of the groups that have parameters in the bucket
    ranges, weight, stage: see PushCall
    """

    bucket: BucketSpec
    clock: int = field(compare=False)
    empty: bool
    absent: Sequence[int]
    groups: dict[int, HyperParameters] = field(compare=False)
    ranges: Sequence[DataRange] = ()
    weight: float = 0.0
    stage: int = 0


def groups_of(pushes: Sequence[BucketPush]) -> dict[int, HyperParameters]:
    """Returns the hyper-parameters that the message of a step's pushes names."""
    groups: dict[int, HyperParameters] = {}
    for push in pushes:
        groups.update(push.groups)
    return groups


def push_of(
    worker: Identity,
    clock: int,
    pushes: Sequence[BucketPush],
    payload: Buffer | None,
    kind: PushKind = PushKind.GRADIENT,
    wire_format: str = "",
    finite: Set[int] = frozenset(),
) -> PushCall:
    """Returns the call that pushes buckets of one step.

    payload:           None: the gradients lie in the segment
    kind, wire_format: for all buckets that are not empty
    finite:            the indices of buckets whose gradients were checked for infinities and NaNs
    """
    buckets = (
        PushedBucket(
            push.bucket.index,
            PushKind.SKIP if push.empty else kind,
            frozenset(push.absent),
            push.bucket.index in finite,
            wire_format="" if push.empty else wire_format,
        )
        for push in pushes
    )
    return PushCall(
        worker,
        clock,
        tuple(buckets),
        payload,
        groups_of(pushes),
        tuple(pushes[0].ranges) if pushes else (),
        pushes[0].weight if pushes else 0.0,
        pushes[0].stage if pushes else 0,
    )


def write_push(call: PushCall) -> Parts:
    """Writes a PushRequest."""
    request = data_pb2.PushRequest(header=_header(call))
    if call.payload is None:
        request.in_segment.SetInParent()
    return message_parts(request, call.payload or None)


def read_push(data: Request) -> PushCall:
    """Reads a PushRequest. The payload is not copied."""
    request, payload = read(data_pb2.PushRequest, data)
    call = _push(request.header, request.HasField("in_segment"), payload)
    _allow(call, _IN_PUSH, "a push")
    return call


def _header(call: PushCall) -> data_pb2.PushHeader:
    return data_pb2.PushHeader(
        worker=identity_message(call.worker),
        clock=call.clock,
        buckets=[
            data_pb2.BucketPush(
                bucket=bucket.bucket,
                kind=_PUSH_KIND_NUMBERS[bucket.kind],
                absent_slices=sorted(bucket.absent),
                finite=bucket.finite,
                state=bucket.state,
                wire_format=wire_format_number(bucket.wire_format),
                next_optimizer=None if bucket.next_optimizer is None else next_optimizer_message(bucket.next_optimizer),
            )
            for bucket in call.buckets
        ],
        groups=group_update_messages(call.groups),
        ranges=data_range_messages(call.ranges),
        weight=call.weight,
        stage=call.stage,
    )


def _push(header: data_pb2.PushHeader, in_segment: bool, payload: Buffer | None) -> PushCall:
    """Reads the call from a message. Raises InvalidRequest for a group that comes twice, and for elements both in the
    segment and in the message.
    """
    if in_segment and payload is not None:
        raise InvalidRequest("elements are in the segment or in the message, got both")
    call = PushCall(
        worker=identity(header.worker),
        clock=header.clock,
        buckets=tuple(_pushed_bucket(bucket) for bucket in header.buckets),
        payload=None if in_segment else payload or b"",
        groups=group_updates(header.groups),
        ranges=data_ranges(header.ranges),
        weight=header.weight,
        stage=header.stage,
    )
    if in_segment:
        _allow(call, _IN_SEGMENT, "a push by way of a segment")
    return call


def _pushed_bucket(message: data_pb2.BucketPush) -> PushedBucket:
    return PushedBucket(
        message.bucket,
        known(_PUSH_KINDS, message.kind, "kind of push"),
        frozenset(message.absent_slices),
        message.finite,
        message.state,
        wire_format(message.wire_format) if message.wire_format else "",
        next_optimizer(message.next_optimizer) if message.HasField("next_optimizer") else None,
    )


def _allow(call: PushCall, kinds: frozenset[PushKind], what: str) -> None:
    for bucket in call.buckets:
        if bucket.kind not in kinds:
            expected = ", ".join(sorted(kind.value for kind in kinds))
            raise InvalidRequest(f"bucket {bucket.bucket}: {what} carries {expected}, got {bucket.kind.value}")


def write_pushed(origin: AnsweringShard, version: int, duplicates: int) -> bytes:
    """Writes a PushResponse.

    version:    the lowest version of the pushed buckets
    duplicates: how many of them had been staged before
    """
    return data_pb2.PushResponse(header=origin.header(version), duplicate_count=duplicates).SerializeToString()


# -- pulls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PullCall:
    """The buckets that a worker pulls at its clock.

    in_segment:   they are written to the worker's segment
    notify_bytes: the worker is notified as soon as buckets of this many bytes are written, and of the last; 0: only
                  once all are
    times_wanted: the worker records a timeline: see PushTimes in ps_server/shard/waiting.py
    whole:        if weights travel in blocks: the buckets of which the worker does not have the version before
    all_staged:   the answer has every update that is staged when the call comes
    """

    worker: Identity
    clock: int
    buckets: tuple[int, ...]
    in_segment: bool = False
    notify_bytes: int = 0
    times_wanted: bool = False
    whole: frozenset[int] = frozenset()
    all_staged: bool = False


def write_pull(call: PullCall) -> bytes:
    """Writes a PullRequest."""
    return data_pb2.PullRequest(
        worker=identity_message(call.worker),
        clock=call.clock,
        buckets=call.buckets,
        in_segment=data_pb2.InSegment() if call.in_segment else None,
        notify_bytes=call.notify_bytes,
        times_wanted=call.times_wanted,
        whole_buckets=sorted(call.whole),
        all_staged=call.all_staged,
    ).SerializeToString()


def read_pull(data: Request) -> PullCall:
    """Reads a PullRequest."""
    request = parse(data_pb2.PullRequest, whole(data))
    return _pull(identity(request.worker), request.clock, request, request.HasField("in_segment"), request.all_staged)


def write_exchange(push: PushCall, pull: PullCall) -> bytes:
    """Writes an ExchangeRequest: a push without a payload, and a pull of the same worker at the same clock."""
    return data_pb2.ExchangeRequest(
        push=_header(push),
        buckets=pull.buckets,
        notify_bytes=pull.notify_bytes,
        in_segment=data_pb2.InSegment() if push.payload is None else None,
        times_wanted=pull.times_wanted,
        whole_buckets=sorted(pull.whole),
    ).SerializeToString()


def read_exchange(data: Request) -> tuple[PushCall, PullCall]:
    """Reads an ExchangeRequest: the push, as `read_push`, and the pull."""
    request, payload = read(data_pb2.ExchangeRequest, data)
    in_segment = request.HasField("in_segment")
    call = _push(request.push, in_segment, payload)
    _allow(call, _IN_EXCHANGE, "an exchange")
    return call, _pull(call.worker, call.clock, request, in_segment)


def _pull(
    worker: Identity,
    clock: int,
    request: data_pb2.PullRequest | data_pb2.ExchangeRequest,
    in_segment: bool,
    all_staged: bool = False,
) -> PullCall:
    return PullCall(
        worker,
        clock,
        tuple(request.buckets),
        in_segment,
        request.notify_bytes,
        request.times_wanted,
        frozenset(request.whole_buckets),
        all_staged,
    )


def write_pull_state(call: PullCall) -> bytes:
    """Writes a PullStateRequest: it asks for the optimizer state of buckets."""
    return data_pb2.PullStateRequest(worker=identity_message(call.worker), buckets=call.buckets).SerializeToString()


def read_pull_state(data: Request) -> PullCall:
    """Reads a PullStateRequest."""
    request = parse(data_pb2.PullStateRequest, whole(data))
    return PullCall(identity(request.worker), 0, tuple(request.buckets))


# -- answers to pulls --------------------------------------------------------------------------------------------------


class BucketTimes(NamedTuple):
    """When a bucket that a worker pulls was staged by its own push, applied, and admitted: in seconds of the shard's
    clock.
    """

    staged: float
    applied: float
    admitted: float


class PulledBucket(NamedTuple):
    """One bucket of a pull.

    bucket:      its index
    waited:      seconds for which the pull waited for other workers
    waiting:     which workers it still waits for; the bucket follows later, and the other fields have no meaning. None:
                 this is the bucket
    save_state:  this version is in a checkpoint: the worker is to save its own state of this clock
    payload:     the weights; empty: they are in the worker's segment
    wire_format: that of the payload; empty: the bucket's own type
    times:       for a worker that records a timeline; otherwise None
    """

    bucket: int
    version: int = 0
    waited: float = 0.0
    waiting: Awaited | None = None
    save_state: bool = False
    payload: memoryview = NO_PAYLOAD
    wire_format: str = ""
    times: BucketTimes | None = None


class Notice(NamedTuple):
    """A notice in the answer to a pull into the segment, or to a pull of no bucket.

    buckets:        the buckets that are in the segment now
    staged_seconds: how long the pushes of the same call have been staged; None: the worker knows, or there were none
    clock:          in a pull of no bucket: the time on the shard's clock, in seconds
    """

    buckets: tuple[PulledBucket, ...] = ()
    staged_seconds: float | None = None
    clock: float | None = None


class PulledState(NamedTuple):
    """One kind of optimizer state of one bucket.

    absent: positions of the slices that have none
    stage:  the stage of the bucket
    """

    bucket: int
    version: int
    state: str
    absent: frozenset[int]
    payload: memoryview
    stage: int = 0


_Response = data_pb2.PullResponse | data_pb2.ExchangeResponse


def write_pulled(origin: AnsweringShard, answer: PulledBucket | Notice) -> Parts:
    """Writes a PullResponse: buckets, or a notice."""
    return _write_pulled(origin, answer, data_pb2.PullResponse)


def write_exchanged(origin: AnsweringShard, answer: PulledBucket | Notice) -> Parts:
    """Writes an ExchangeResponse, as `write_pulled`."""
    return _write_pulled(origin, answer, data_pb2.ExchangeResponse)


def _write_pulled(origin: AnsweringShard, answer: PulledBucket | Notice, kind: Callable[..., _Response]) -> Parts:
    if isinstance(answer, PulledBucket):
        if answer.waiting is None:
            response = kind(header=origin.header(answer.version), buckets=[_pulled_bucket(answer)])
            return message_parts(response, answer.payload or None)
        ranks, reason = answer.waiting
        notice = data_pb2.WaitNotice(bucket=answer.bucket, awaited_ranks=ranks, reason=reason)
        return message_parts(kind(header=origin.header(0), waiting=notice))
    version = min(map(_VERSION, answer.buckets), default=0)
    response = kind(header=origin.header(version), buckets=map(_pulled_bucket, answer.buckets))
    if answer.buckets:
        response.in_segment.SetInParent()
    if answer.staged_seconds is not None:
        assert isinstance(response, data_pb2.ExchangeResponse)
        response.staged_duration.CopyFrom(duration(answer.staged_seconds))
    if answer.clock is not None:
        response.clock_microseconds = _microseconds(answer.clock)
    return message_parts(response)


def _pulled_bucket(bucket: PulledBucket) -> data_pb2.PulledBucket:
    return data_pb2.PulledBucket(
        bucket=bucket.bucket,
        version=bucket.version,
        wait_duration=duration(bucket.waited) if bucket.waited else None,
        state_wanted=bucket.save_state,
        wire_format=wire_format_number(bucket.wire_format) if bucket.wire_format else None,
        times=None
        if bucket.times is None
        else data_pb2.BucketTimes(
            staged_microseconds=_microseconds(bucket.times.staged),
            applied_microseconds=_microseconds(bucket.times.applied),
            admitted_microseconds=_microseconds(bucket.times.admitted),
        ),
    )


def read_pulled(
    fields: bytes, payload: memoryview | None, size: Callable[[int, str], int], exchange: bool = False
) -> list[PulledBucket]:
    """Reads one message of the answer to a pull, or to an exchange. The payloads are views into the message's payload.

    size: returns the bytes of a bucket's weights, given its index and wire format
    """
    response = (data_pb2.ExchangeResponse if exchange else data_pb2.PullResponse).FromString(fields)
    return _buckets(response, payload, size)


def read_notice(fields: bytes, exchange: bool = False) -> Notice:
    """Reads one message of the answer to a pull or exchange into the segment, or to a pull of no bucket."""
    response: _Response = (data_pb2.ExchangeResponse if exchange else data_pb2.PullResponse).FromString(fields)
    staged = clock = None
    if isinstance(response, data_pb2.ExchangeResponse):
        staged = seconds(response.staged_duration) if response.HasField("staged_duration") else None
    elif response.HasField("clock_microseconds"):
        clock = response.clock_microseconds / 1e6
    return Notice(tuple(_buckets(response)), staged, clock)


def _buckets(
    response: _Response, payload: memoryview | None = None, size: Callable[[int, str], int] = lambda *_: 0
) -> list[PulledBucket]:
    if response.HasField("waiting"):
        notice = response.waiting
        return [PulledBucket(notice.bucket, waiting=Awaited(tuple(notice.awaited_ranks), notice.reason))]
    buckets, position, alone = [], 0, len(response.buckets) == 1
    for bucket in response.buckets:
        elements = NO_PAYLOAD
        encoded = wire_format(bucket.wire_format) if bucket.wire_format else ""
        if payload is not None:
            end = len(payload) if alone else position + size(bucket.bucket, encoded)
            elements, position = payload[position:end], end
        waited = seconds(bucket.wait_duration) if bucket.HasField("wait_duration") else 0.0
        times = _times(bucket.times) if bucket.HasField("times") else None
        buckets.append(
            PulledBucket(bucket.bucket, bucket.version, waited, None, bucket.state_wanted, elements, encoded, times)
        )
    return buckets


def _times(times: data_pb2.BucketTimes) -> BucketTimes:
    return BucketTimes(
        times.staged_microseconds / 1e6, times.applied_microseconds / 1e6, times.admitted_microseconds / 1e6
    )


def write_state(origin: AnsweringShard, answer: PulledState) -> Parts:
    """Writes a PullStateResponse."""
    state = data_pb2.PulledState(
        bucket=answer.bucket,
        version=answer.version,
        state=answer.state,
        absent_slices=sorted(answer.absent),
        stage=answer.stage,
    )
    response = data_pb2.PullStateResponse(header=origin.header(answer.version), state=state)
    return message_parts(response, answer.payload)


def read_state(fields: bytes, payload: memoryview | None) -> PulledState:
    """Reads one message of the optimizer state of buckets, from its fields and its payload."""
    state = data_pb2.PullStateResponse.FromString(fields).state
    content = payload if payload is not None else NO_PAYLOAD
    absent = frozenset(state.absent_slices)
    return PulledState(state.bucket, state.version, state.state, absent, content, state.stage)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


# -- segments and data connections -------------------------------------------------------------------------------------


def write_attach(worker: Identity, offer: SegmentOffer) -> bytes:
    """Writes an AttachSegmentRequest."""
    return data_pb2.AttachSegmentRequest(
        worker=identity_message(worker),
        location=offer.location,
        nonce=offer.nonce,
        socket_inode=offer.socket_inode,
        row_bytes=offer.row_bytes,
    ).SerializeToString()


def read_attach(data: bytes) -> tuple[Identity, SegmentOffer]:
    """Returns the worker and the offer of an AttachSegmentRequest."""
    request = parse(data_pb2.AttachSegmentRequest, data)
    offer = SegmentOffer(request.location, request.socket_inode, request.nonce, request.row_bytes)
    return identity(request.worker), offer


def write_attached(origin: AnsweringShard) -> bytes:
    """Writes an AttachSegmentResponse."""
    return data_pb2.AttachSegmentResponse(header=origin.header(0)).SerializeToString()


def write_open(worker: Identity) -> bytes:
    """Writes an OpenDataConnectionRequest."""
    return data_pb2.OpenDataConnectionRequest(worker=identity_message(worker)).SerializeToString()


def read_open(data: bytes) -> Identity:
    """Returns the worker of an OpenDataConnectionRequest."""
    return identity(parse(data_pb2.OpenDataConnectionRequest, data).worker)


def write_opened(origin: AnsweringShard, ticket: bytes, port: int, location: str, inode: int) -> bytes:
    """Writes an OpenDataConnectionResponse of a shard that takes payloads in exchanges of rows."""
    return data_pb2.OpenDataConnectionResponse(
        header=origin.header(0), ticket=ticket, port=port, location=location, socket_inode=inode, row_payloads=True
    ).SerializeToString()
