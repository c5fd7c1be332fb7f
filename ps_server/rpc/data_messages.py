"""Where the messages of the data path become the server's values, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_protocol.convert import (
    data_ranges,
    duration,
    group_updates,
    known,
    next_optimizer,
    wire_format,
    wire_format_number,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts, split_head, split_message
from ps_protocol.identity import Identity
from ps_protocol.segment_layout import SegmentOffer
from ps_protocol.v1 import data_pb2, types_pb2
from ps_server.core.commands import Staged
from ps_server.core.requests import PullCall, PushCall, PushedBucket, PushKind
from ps_server.core.validation import check_once
from ps_server.shard.waiting import Answer, BucketTimes, Notice, PulledBucket, PulledState

M = TypeVar("M", bound=Message)

_PUSH_KINDS: dict[int, PushKind] = {
    number: PushKind[name.removeprefix("PUSH_KIND_")] for name, number in data_pb2.PushKind.items() if number
}
_IN_EXCHANGE = frozenset({PushKind.GRADIENT, PushKind.SKIP, PushKind.COMMIT})
_IN_SEGMENT = frozenset({PushKind.GRADIENT, PushKind.SKIP})

Request = bytes | Parts  # as gRPC brings it, and as a data connection does

# -- requests --------------------------------------------------------------------------------------------------------


def push(data: Request) -> PushCall:
    """Reads a PushRequest; its payload is a view into the bytes, or the part that came."""
    request, payload = read(data_pb2.PushRequest, data)
    call = _push(request.header, request.HasField("in_segment"), payload)
    _allow(call, frozenset(PushKind) - {PushKind.COMMIT}, "a push")
    return call


def exchange(data: Request) -> tuple[PushCall, PullCall]:
    """Reads an ExchangeRequest: what is pushed, as `push`, and what is pulled."""
    request, payload = read(data_pb2.ExchangeRequest, data)
    in_segment = request.HasField("in_segment")
    call = _push(request.push, in_segment, payload)
    _allow(call, _IN_EXCHANGE, "an exchange")
    return call, _pull(request.push.worker, request.push.clock, request, in_segment)


def pull(data: Request) -> PullCall:
    """Reads a PullRequest."""
    request = parse(data_pb2.PullRequest, whole(data))
    return _pull(request.worker, request.clock, request, request.HasField("in_segment"))


def pull_state(data: Request) -> PullCall:
    """Reads a PullStateRequest."""
    request = parse(data_pb2.PullStateRequest, whole(data))
    worker = request.worker
    identity = worker.job, worker.rank, worker.incarnation
    return PullCall(*identity, 0, tuple(request.buckets), worker.lease_key, run=worker.run)


def attach_request(data: bytes) -> tuple[Identity, SegmentOffer]:
    """Returns the worker and the offer of an AttachSegmentRequest."""
    request = parse(data_pb2.AttachSegmentRequest, data)
    offer = SegmentOffer(request.location, request.socket_inode, request.nonce, request.row_bytes)
    return _identity(request.worker), offer


def _push(header: data_pb2.PushHeader, in_segment: bool, payload: Buffer | None) -> PushCall:
    """Returns what is pushed. Raises InvalidRequest for a bucket or a group that comes twice, and for two locations."""
    if in_segment and payload is not None:
        raise InvalidRequest("elements are in the segment or in the message, got both")
    worker = header.worker
    call = PushCall(
        job=worker.job,
        rank=worker.rank,
        incarnation=worker.incarnation,
        clock=header.clock,
        buckets=tuple(_pushed_bucket(bucket) for bucket in header.buckets),
        payload=None if in_segment else payload or b"",
        groups=group_updates(header.groups),
        ranges=data_ranges(header.ranges),
        key=worker.lease_key,
        run=worker.run,
        weight=header.weight,
        stage=header.stage,
    )
    check_once([bucket.bucket for bucket in call.buckets], "a push names each bucket")
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


def _pull(
    worker: types_pb2.WorkerIdentity,
    clock: int,
    request: data_pb2.PullRequest | data_pb2.ExchangeRequest,
    in_segment: bool,
) -> PullCall:
    identity = worker.job, worker.rank, worker.incarnation
    all_staged = isinstance(request, data_pb2.PullRequest) and request.all_staged
    buckets, notify, whole = tuple(request.buckets), request.notify_bytes, frozenset(request.whole_buckets)
    return PullCall(
        *(*identity, clock, buckets, worker.lease_key, in_segment, notify, worker.run, request.times_wanted, whole),
        all_staged=all_staged,
    )


def open_request(data: bytes) -> Identity:
    """Returns the worker of an OpenDataConnectionRequest."""
    return _identity(parse(data_pb2.OpenDataConnectionRequest, data).worker)


def _identity(worker: types_pb2.WorkerIdentity) -> Identity:
    return Identity(worker.job, worker.rank, worker.incarnation, worker.lease_key, worker.run)


def read(kind: type[M], data: Request) -> tuple[M, Buffer | None]:
    """Returns a message without its payload, and the payload; None where it has none."""
    if not isinstance(data, Parts):
        fields, payload = split_message(data)
        return parse(kind, fields), payload
    if data.payload is None:
        return read(kind, data.head)
    return parse(kind, split_head(data.head, len(data.payload))), data.payload


def whole(data: Request) -> bytes:
    """Returns the bytes of a request that has no payload. Raises InvalidRequest for one that has."""
    if not isinstance(data, Parts):
        return data
    if data.payload is not None:
        raise InvalidRequest(f"this request has no payload, and {len(data.payload)} bytes of one came")
    return data.head


def parse(kind: type[M], data: bytes) -> M:
    """Returns a message. Raises InvalidRequest for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from error


# -- answers ---------------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """Writes the answers of one shard, each with the header that says where it comes from.

    process: the number that the process chose when it started
    run:     of the job that the answers belong to
    """

    shard_index: int
    process: int
    run: str = ""

    def of(self, run: str) -> Answers:
        """Returns the answers that belong to a run of a job."""
        return self._replace(run=run)

    def pushed(self, staged: Iterable[Staged]) -> bytes:
        """Returns the bytes of a PushResponse."""
        answers = list(staged)
        header = self.header(min((answer.version for answer in answers), default=0))
        duplicates = sum(answer.duplicate for answer in answers)
        return data_pb2.PushResponse(header=header, duplicate_count=duplicates).SerializeToString()

    def attached(self) -> bytes:
        """Returns the bytes of an AttachSegmentResponse."""
        return data_pb2.AttachSegmentResponse(header=self.header(0)).SerializeToString()

    def opened(self, ticket: bytes, port: int, location: str, inode: int) -> bytes:
        """Returns the bytes of an OpenDataConnectionResponse."""
        return data_pb2.OpenDataConnectionResponse(
            header=self.header(0), ticket=ticket, port=port, location=location, socket_inode=inode
        ).SerializeToString()

    def pulled(self, answer: Answer) -> Parts:
        """Returns a PullResponse: buckets that are here, or why one is not admitted yet."""
        return self._pulled(data_pb2.PullResponse, answer)

    def exchanged(self, answer: Answer) -> Parts:
        """Returns an ExchangeResponse, as `pulled`."""
        return self._pulled(data_pb2.ExchangeResponse, answer)

    def state(self, answer: Answer) -> Parts:
        """Returns a PullStateResponse."""
        assert isinstance(answer, PulledState)
        state = data_pb2.PulledState(
            bucket=answer.bucket,
            version=answer.version,
            state=answer.name,
            absent_slices=sorted(answer.absent),
            stage=answer.stage,
        )
        response = data_pb2.PullStateResponse(header=self.header(answer.version), state=state)
        return message_parts(response, answer.payload)

    def _pulled(self, kind: Callable[..., data_pb2.PullResponse | data_pb2.ExchangeResponse], answer: Answer) -> Parts:
        if isinstance(answer, PulledBucket):
            if answer.waiting is None:
                response = kind(header=self.header(answer.version), buckets=[_pulled_bucket(answer)])
                return message_parts(response, answer.payload)
            notice = data_pb2.WaitNotice(
                bucket=answer.bucket, awaited_ranks=answer.waiting.waiting_for, reason=answer.waiting.reason
            )
            return message_parts(kind(header=self.header(0), waiting=notice))
        assert isinstance(answer, Notice)
        version = min((bucket.version for bucket in answer.buckets), default=0)
        response = kind(header=self.header(version), buckets=[_pulled_bucket(bucket) for bucket in answer.buckets])
        if answer.buckets:
            response.in_segment.SetInParent()
        if answer.staged_seconds is not None:
            assert isinstance(response, data_pb2.ExchangeResponse)
            response.staged_duration.CopyFrom(duration(answer.staged_seconds))
        if answer.clock is not None:
            response.clock_microseconds = _microseconds(answer.clock)
        return message_parts(response)

    def header(self, version: int) -> types_pb2.ResponseHeader:
        """Returns the header of an answer that has this version."""
        return types_pb2.ResponseHeader(
            shard_index=self.shard_index, process=self.process, run=self.run, version=version
        )


def _pulled_bucket(bucket: PulledBucket) -> data_pb2.PulledBucket:
    return data_pb2.PulledBucket(
        bucket=bucket.bucket,
        version=bucket.version,
        wait_duration=duration(bucket.waited) if bucket.waited else None,
        state_wanted=bucket.save_state,
        wire_format=wire_format_number(bucket.wire_format),
        times=_bucket_times(bucket.times) if bucket.times is not None else None,
    )


def _bucket_times(times: BucketTimes) -> data_pb2.BucketTimes:
    return data_pb2.BucketTimes(
        staged_microseconds=_microseconds(times.staged),
        applied_microseconds=_microseconds(times.applied),
        admitted_microseconds=_microseconds(times.admitted),
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
