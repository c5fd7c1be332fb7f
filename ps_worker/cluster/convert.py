"""Turns the worker's values into protobuf messages, and back, where that is more than naming the fields.

The functions for the data path write and read bytes, so that gRPC hands payloads on as they are.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence, Set

from ps_protocol.convert import (
    data_range_messages,
    duration,
    group_update_messages,
    next_optimizer_message,
    seconds,
    since_1970,
    wire_format,
    wire_format_number,
)
from ps_protocol.data import LeaseRequest
from ps_protocol.framing import Parts, message_parts
from ps_protocol.identity import Identity
from ps_protocol.v1 import data_pb2, leases_pb2, membership_pb2, rounds_pb2, types_pb2
from ps_runtime.launch_id import UNKNOWN
from ps_worker.cluster.options import JobOptions
from ps_worker.values import (
    Assignment,
    BucketPush,
    Continued,
    HeartbeatAnswer,
    JoinResult,
    PulledBucket,
    RoundNews,
    SavedState,
    ShardMap,
    ShardPushed,
    ShardTimes,
    StateChunk,
)

_NOTHING = memoryview(b"")


def identity(worker: Identity) -> types_pb2.WorkerIdentity:
    """Returns the caller, as every message of a worker names it."""
    return types_pb2.WorkerIdentity(
        job=worker.job, rank=worker.rank, incarnation=worker.incarnation, lease_key=worker.key, run=worker.run
    )


def heartbeat(worker: Identity, clock: int, script_wanted: bool = False) -> membership_pb2.HeartbeatRequest:
    """Says that a worker lives, and how many steps it has finished. script_wanted: as in CoordinatorClient.heartbeat"""
    return membership_pb2.HeartbeatRequest(worker=identity(worker), clock=clock, script_wanted=script_wanted)


def open_request(worker: Identity) -> bytes:
    """Asks a shard for a data connection."""
    return data_pb2.OpenDataConnectionRequest(worker=identity(worker)).SerializeToString()


# -- pushes ----------------------------------------------------------------------------------------------------------


def gradient_push(
    worker: Identity, push: BucketPush, payload: memoryview | None, wire_format: str = "", draft: bool = False
) -> Parts:
    """Writes one bucket's gradient; without payload, that this step has none.

    wire_format: of the payload; empty: the bucket's own type
    draft:       it does not count yet
    """
    kind = data_pb2.PUSH_KIND_DRAFT if draft else data_pb2.PUSH_KIND_GRADIENT
    header = _push_header(worker, push.clock, [push], kind, wire_format)
    return message_parts(data_pb2.PushRequest(header=header), payload)


def initial_push(worker: Identity, bucket: int, payload: memoryview) -> Parts:
    """Writes one bucket's initial value."""
    return _setting(worker, 0, data_pb2.BucketPush(bucket=bucket, kind=data_pb2.PUSH_KIND_INITIAL_VALUE), payload)


def assignment(worker: Identity, clock: int, assignment: Assignment) -> Parts:
    """Writes what takes effect with the step of this clock; 0: with the initial values."""
    state, following = assignment.state, assignment.next
    kind = data_pb2.PUSH_KIND_ASSIGN if state is None else data_pb2.PUSH_KIND_ASSIGN_STATE
    push = data_pb2.BucketPush(
        bucket=assignment.bucket.index,
        kind=kind if following is None else data_pb2.PUSH_KIND_NEXT_OPTIMIZER,
        absent_slices=assignment.absent,
        state=state or "",
        next_optimizer=None if following is None else next_optimizer_message(following),
    )
    return _setting(worker, clock, push, assignment.payload, assignment.stage)


def _setting(
    worker: Identity, clock: int, push: data_pb2.BucketPush, payload: memoryview | None, stage: int = 0
) -> Parts:
    header = data_pb2.PushHeader(worker=identity(worker), clock=clock, buckets=[push], stage=stage)
    return message_parts(data_pb2.PushRequest(header=header), payload)


def shared_push(worker: Identity, clock: int, pushes: Sequence[BucketPush], finite: Set[int]) -> Parts:
    """Announces buckets whose gradients lie in the segment. finite: those whose bytes there were checked"""
    header = _push_header(worker, clock, pushes, data_pb2.PUSH_KIND_GRADIENT, finite=finite)
    return message_parts(data_pb2.PushRequest(header=header, in_segment=data_pb2.InSegment()))


def shared_exchange(
    worker: Identity,
    clock: int,
    pushes: Sequence[BucketPush],
    finite: Set[int],
    buckets: Sequence[int],
    notify_bytes: int,
    times: bool = False,
) -> bytes:
    """Announces buckets as `shared_push`, and asks for buckets at that clock, as `pull_request` with notify_bytes."""
    return data_pb2.ExchangeRequest(
        push=_push_header(worker, clock, pushes, data_pb2.PUSH_KIND_GRADIENT, finite=finite),
        buckets=buckets,
        notify_bytes=notify_bytes,
        in_segment=data_pb2.InSegment(),
        times_wanted=times,
    ).SerializeToString()


def commit_exchange(
    worker: Identity,
    clock: int,
    commit: Sequence[BucketPush],
    buckets: Sequence[int],
    times: bool = False,
    whole: Sequence[int] = (),
) -> bytes:
    """Commits a step (pushes that left as drafts, and empty ones), and asks for buckets at that clock."""
    header = _push_header(worker, clock, commit, data_pb2.PUSH_KIND_COMMIT)
    return data_pb2.ExchangeRequest(
        push=header, buckets=buckets, times_wanted=times, whole_buckets=whole
    ).SerializeToString()


def _push_header(
    worker: Identity,
    clock: int,
    pushes: Sequence[BucketPush],
    kind: data_pb2.PushKind,
    wire_format: str = "",
    finite: Set[int] = frozenset(),
) -> data_pb2.PushHeader:
    """Returns the header of pushes of one clock, so of one step. kind, wire_format: of those that are not empty"""
    groups = {group: values for push in pushes for group, values in push.groups.items()}
    return data_pb2.PushHeader(
        worker=identity(worker),
        clock=clock,
        buckets=[
            data_pb2.BucketPush(
                bucket=push.bucket.index,
                kind=data_pb2.PUSH_KIND_SKIP if push.empty else kind,
                absent_slices=push.absent,
                finite=push.bucket.index in finite,
                wire_format=wire_format_number("" if push.empty else wire_format),
            )
            for push in pushes
        ],
        groups=group_update_messages(groups),
        ranges=data_range_messages(pushes[0].ranges if pushes else ()),
        weight=pushes[0].weight if pushes else 0.0,
        stage=pushes[0].stage if pushes else 0,
    )


# -- pulls -----------------------------------------------------------------------------------------------------------


def pull_request(
    worker: Identity,
    clock: int,
    buckets: Sequence[int],
    notify_bytes: int | None = None,
    times: bool = False,
    whole: Sequence[int] = (),
    all_staged: bool = False,
) -> bytes:
    """Asks a shard for buckets at a clock: as payloads, or, with `notify_bytes`, into the segment.

    notify_bytes: to be told of them whenever they make so many bytes; 0: when all are there
    times:        each is to bring its times; with no bucket, the answer is the shard's clock
    whole:        those of which this worker has not the version before
    all_staged:   with every update that is staged when it comes
    """
    return data_pb2.PullRequest(
        worker=identity(worker),
        clock=clock,
        buckets=buckets,
        in_segment=None if notify_bytes is None else data_pb2.InSegment(),
        notify_bytes=notify_bytes,
        times_wanted=times,
        whole_buckets=whole,
        all_staged=all_staged,
    ).SerializeToString()


def shard_clock(fields: bytes) -> float | None:
    """Reads the answer to a pull of no bucket: the shard's clock, in seconds; None: it does not tell it."""
    response = data_pb2.PullResponse.FromString(fields)
    return response.clock_microseconds / 1e6 if response.HasField("clock_microseconds") else None


def state_chunk(fields: bytes, payload: memoryview | None) -> StateChunk:
    """Reads one message of the optimizer state of buckets, from its fields and its payload."""
    state = data_pb2.PullStateResponse.FromString(fields).state
    content = payload if payload is not None else _NOTHING
    return StateChunk(state.bucket, state.state, frozenset(state.absent_slices), content, state.stage)


def pulled(
    fields: bytes, payload: memoryview | None, size: Callable[[int, str], int], exchange: bool = False
) -> list[PulledBucket]:
    """Reads one message of the answer to a pull, or to an exchange; payloads are views into its payload.

    size: bytes of a bucket's weights, by index and wire format
    """
    response = (data_pb2.ExchangeResponse if exchange else data_pb2.PullResponse).FromString(fields)
    return _buckets(response, payload, size)


def shared_pulled(fields: bytes) -> list[PulledBucket]:
    """Reads one message of the answer to a pull into the segment: buckets that are there now."""
    return _buckets(data_pb2.PullResponse.FromString(fields))


def shared_exchanged(fields: bytes) -> tuple[list[PulledBucket], float | None]:
    """Reads one message of the answer to an exchange in the segment: buckets that are there now, and the seconds for
    which the pushes have been staged, where the message tells them.
    """
    response = data_pb2.ExchangeResponse.FromString(fields)
    staged = seconds(response.staged_duration) if response.HasField("staged_duration") else None
    return _buckets(response), staged


def _buckets(
    response: data_pb2.PullResponse | data_pb2.ExchangeResponse,
    payload: memoryview | None = None,
    size: Callable[[int, str], int] = lambda *_: 0,
) -> list[PulledBucket]:
    if response.HasField("waiting"):
        notice = response.waiting
        reason = tuple(notice.awaited_ranks), notice.reason
        return [PulledBucket(notice.bucket, 0.0, _NOTHING, reason)]
    buckets, position, alone = [], 0, len(response.buckets) == 1
    for bucket in response.buckets:
        elements = _NOTHING
        encoded = wire_format(bucket.wire_format) if bucket.wire_format else ""
        if payload is not None:
            end = len(payload) if alone else position + size(bucket.bucket, encoded)
            elements, position = payload[position:end], end
        waited = seconds(bucket.wait_duration) if bucket.HasField("wait_duration") else 0.0
        times = _times(bucket.times) if bucket.HasField("times") else None
        told = bucket.state_wanted, encoded, times, bucket.version
        buckets.append(PulledBucket(bucket.bucket, waited, elements, None, *told))
    return buckets


def _times(times: data_pb2.BucketTimes) -> ShardTimes:
    return ShardTimes(
        times.staged_microseconds / 1e6, times.applied_microseconds / 1e6, times.admitted_microseconds / 1e6
    )


# -- the coordinator -------------------------------------------------------------------------------------------------


def shard_map(message: types_pb2.ShardMap) -> ShardMap:
    """Reads where a job's buckets are."""
    return ShardMap({shard.index: shard.address for shard in message.shards}, tuple(message.bucket_shards))


def join_request(
    options: JobOptions,
    run: str,
    metrics_address: str,
    before: JoinResult | None,
    clock: int,
    request_id: int,
    waited: float,
) -> membership_pb2.JoinRequest:
    """Asks for a place for this process in a run of the job.

    before, clock: of a worker that comes back, its last place and the steps it had finished there
    request_id:    the same in every repeat of one request
    waited:        seconds since the coordinator first told the worker to wait for others
    """
    launch, ranks = None, options.launch.ranks
    if options.launch != UNKNOWN:
        launch = membership_pb2.Launch(
            name=options.launch.name, first_rank=ranks.start, rank_count=len(ranks), takeover=options.launch.take_over
        )
    return membership_pb2.JoinRequest(
        job=options.job,
        rank=options.rank if before is None else before.identity.rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        metrics_address=metrics_address,
        previous_incarnation=0 if before is None else before.identity.incarnation,
        clock=clock,
        request_id=request_id,
        wait_duration=duration(waited),
        launch=launch,
        run=run,
    )


def join_result(response: membership_pb2.JoinResponse) -> JoinResult:
    """Reads the place that a worker got."""
    worker, state = response.worker, response.worker_state
    return JoinResult(
        Identity(worker.job, worker.rank, worker.incarnation, worker.lease_key, worker.run),
        response.clock,
        seconds(response.lease_duration),
        shard_map(response.shard_map) if response.HasField("shard_map") else None,
        response.restore_count,
        SavedState(state.clock, state.content) if response.HasField("worker_state") else None,
        response.pushed_clock if response.HasField("pushed_clock") else None,
        {each.shard: _pushed(each) for each in response.shard_pushes},
        _continued(response.continued) if response.HasField("continued") else None,
    )


def _continued(job: membership_pb2.ContinuedJob) -> Continued:
    trained = since_1970(job.train_time) if job.HasField("train_time") else None
    return Continued(since_1970(job.begin_time), trained, job.live_count)


def worker_state(state: SavedState | None) -> membership_pb2.WorkerState | None:
    """Returns a worker's own state, or what its script has set."""
    return None if state is None else membership_pb2.WorkerState(clock=state.clock, content=state.content)


def heartbeat_answer(response: membership_pb2.HeartbeatResponse) -> HeartbeatAnswer:
    """Reads what the coordinator answers to a sign of life."""
    script = SavedState(response.script.clock, response.script.content) if response.HasField("script") else None
    return HeartbeatAnswer(response.script_request, script, response.script_coming)


def _pushed(pushes: types_pb2.ShardPushes) -> ShardPushed:
    return ShardPushed(pushes.pushed_clock, {part: each.clock for each in pushes.further for part in each.parts})


def lease_request(worker: Identity, ask: LeaseRequest) -> leases_pb2.LeaseDataRequest:
    """Asks for batches of a loader's data."""
    return leases_pb2.LeaseDataRequest(
        worker=identity(worker),
        loader=leases_pb2.LoaderSpec(
            loader=ask.loader.loader,
            sample_count=ask.loader.size,
            batch_size=ask.loader.batch_size,
            drop_last=ask.loader.drop_last,
            seed=ask.loader.seed,
        ),
        pass_number=ask.pass_number,
        batch_count=ask.count,
        leased=data_range_messages(ask.report.leased),
        committed=data_range_messages(ask.report.committed),
        returned=data_range_messages(ask.report.returned),
    )


def round_news(response: rounds_pb2.GatherValuesResponse) -> RoundNews:
    """Reads how a round stands."""
    return RoundNews(
        response.round,
        response.complete,
        {given.rank: given.value for given in response.values},
        response.refusal,
        tuple(response.awaited_ranks),
        response.step_wanted,
    )
