"""Where the messages of the data path become the server's values, and back; see `messages`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from ps_protocol.convert import hyper_parameters, known
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import read_message, write_message
from ps_protocol.job import HyperParameters
from ps_protocol.v1 import data_pb2, types_pb2
from ps_server.core.commands import Staged
from ps_server.core.requests import PullCall, Push, PushKind, SharedBucket, SharedPush, StepCommit
from ps_server.rpc.lease_messages import ranges_of
from ps_server.shard.waiting import Notice, PulledBucket, PulledState

_PUSH_KINDS: dict[int, PushKind] = {
    data_pb2.PUSH_KIND_GRADIENT: PushKind.GRADIENT,
    data_pb2.PUSH_KIND_INITIAL_VALUE: PushKind.INITIAL_VALUE,
    data_pb2.PUSH_KIND_SKIP: PushKind.SKIP,
    data_pb2.PUSH_KIND_ASSIGN: PushKind.ASSIGN,
    data_pb2.PUSH_KIND_ASSIGN_STATE: PushKind.ASSIGN_STATE,
}


def push(data: bytes) -> Push:
    """The push that the bytes of a PushRequest hold; its payload is a view into them."""
    raw, payload = read_message(data)
    header = data_pb2.PushHeader()
    _parse(header, raw)
    return Push(
        job=header.worker.job,
        rank=header.worker.rank,
        incarnation=header.worker.incarnation,
        bucket=header.bucket,
        clock=header.clock,
        kind=known(_PUSH_KINDS, header.kind, "kind of push"),
        payload=payload,
        absent=frozenset(header.absent_segments),
        groups=_group_updates(header.groups),
        key=header.worker.lease_key,
        ranges=ranges_of(header.ranges),
        draft=header.draft,
        state=header.state,
    )


def push_response(staged: Staged) -> bytes:
    """The bytes of the answer to a push."""
    return data_pb2.PushResponse(version=staged.version, duplicate=staged.duplicate).SerializeToString()


def attach_request(data: bytes) -> tuple[str, int, int, str, bytes, bytes]:
    """Job, rank, incarnation, location, nonce and lease key of an AttachSegmentRequest."""
    request = data_pb2.AttachSegmentRequest()
    _parse(request, data)
    worker = request.worker
    return worker.job, worker.rank, worker.incarnation, request.location, request.nonce, worker.lease_key


def shared_push(data: bytes) -> SharedPush:
    """What the bytes of a PushSharedRequest hold. Raises InvalidRequest for a bucket or a group that comes twice."""
    request = data_pb2.PushHeader()
    _parse(request, data)
    return _shared_push(request)


def push_pull(data: bytes) -> tuple[SharedPush, PullCall]:
    """What is pushed and what is pulled by a PushPullSharedRequest. Raises as `shared_push`."""
    request = data_pb2.ExchangeRequest()
    _parse(request, data)
    return _shared_push(request.push), _pull(request.push.worker, request.push.clock, request)


def _shared_push(request: data_pb2.PushHeader) -> SharedPush:
    buckets = _buckets(request.buckets)
    worker, groups, ranges = request.worker, _group_updates(request.groups), ranges_of(request.ranges)
    who = worker.job, worker.rank, worker.incarnation
    return SharedPush(*who, request.clock, buckets, groups, worker.lease_key, ranges=ranges)


def _buckets(messages: Any) -> tuple[SharedBucket, ...]:
    buckets = tuple(SharedBucket(b.bucket, b.skip, frozenset(b.absent_segments), b.finite) for b in messages)
    if len({bucket.index for bucket in buckets}) != len(buckets):
        raise InvalidRequest("a push names each bucket at most once")
    return buckets


def shared_push_response(duplicates: int) -> bytes:
    """The bytes of the answer to a shared push."""
    return data_pb2.PushResponse(duplicate_count=duplicates).SerializeToString()


def _group_updates(updates: Any) -> dict[int, HyperParameters]:
    groups: dict[int, HyperParameters] = {}
    for update in updates:
        if update.group in groups:
            raise InvalidRequest(f"group {update.group} comes twice")
        groups[update.group] = hyper_parameters(update.hyper_parameters)
    return groups


def pull(data: bytes) -> PullCall:
    """What the bytes of a PullRequest ask for."""
    request = data_pb2.PullRequest()
    _parse(request, data)
    call = _pull(request.worker, request.clock, request)
    if not request.HasField("commit"):
        return call
    found = request.commit
    commit = StepCommit(_buckets(found.buckets), _group_updates(found.groups), ranges_of(found.ranges))
    return replace(call, commit=commit)


def pull_state(data: bytes) -> PullCall:
    """What the bytes of a PullStateRequest ask for."""
    request = data_pb2.PullStateRequest()
    _parse(request, data)
    worker = request.worker
    return PullCall(worker.job, worker.rank, worker.incarnation, 0, tuple(request.buckets), worker.lease_key)


def pull_state_response(state: PulledState) -> bytes:
    """The bytes of a PullStateResponse."""
    header = data_pb2.PulledState(
        bucket=state.bucket, version=state.version, state=state.name, absent_segments=sorted(state.absent)
    )
    return write_message(header, state.payload)


def _pull(
    worker: types_pb2.WorkerIdentity, clock: int, request: data_pb2.PullRequest | data_pb2.ExchangeRequest
) -> PullCall:
    who = worker.job, worker.rank, worker.incarnation
    return PullCall(*who, clock, tuple(request.buckets), worker.lease_key, request.word_bytes)


def pull_response(bucket: PulledBucket) -> bytes:
    """The bytes of one message of a pull's stream: a bucket, or why it is not admitted yet."""
    return write_message(_pull_header(bucket), bucket.payload)


def pull_shared_response(notice: Notice) -> bytes:
    """The bytes of a PullSharedResponse."""
    return data_pb2.PullResponse(
        headers=[_pull_header(bucket) for bucket in notice.buckets], staged_seconds=notice.staged_seconds
    ).SerializeToString()


def _pull_header(bucket: PulledBucket) -> data_pb2.PulledBucket:
    header = data_pb2.PulledBucket(
        bucket=bucket.bucket, version=bucket.version, waited_seconds=bucket.waited, checkpoint=bucket.save_state
    )
    if bucket.waiting is not None:
        header.waiting.CopyFrom(data_pb2.WaitNotice(ranks=bucket.waiting.waiting_for, reason=bucket.waiting.reason))
    return header


def _parse(message: Any, raw: bytes | memoryview) -> None:
    try:
        message.ParseFromString(bytes(raw))
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {message.DESCRIPTOR.name}") from error
