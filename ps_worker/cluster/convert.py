"""Where the worker's values become protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ps_protocol.convert import hyper_messages, job_spec_message
from ps_protocol.data import BatchLease, DataRange, LeaseRequest
from ps_protocol.framing import read_message, write_message
from ps_protocol.job import HyperParameters, JobSpec
from ps_protocol.v1 import control_pb2, data_pb2, job_pb2
from ps_runtime.launch_id import UNKNOWN, LaunchId
from ps_worker.values import (
    BucketPush,
    Identity,
    JoinResult,
    Offer,
    PulledBucket,
    Roster,
    RoundNews,
    ShardMap,
    StateChunk,
)

# -- data ------------------------------------------------------------------------------------------------------------


def gradient_push(who: Identity, push: BucketPush, payload: memoryview | None, draft: bool = False) -> bytes:
    """One bucket's gradient; without payload, the word that this step has none. `draft`: it does not count yet."""
    header = data_pb2.PushHeader(
        worker=_identity(who),
        bucket=push.bucket.index,
        clock=push.clock,
        kind=data_pb2.PUSH_KIND_SKIP if payload is None else data_pb2.PUSH_KIND_GRADIENT,
        absent_segments=push.absent,
        groups=_group_updates(push.groups),
        ranges=_ranges(push.ranges),
        draft=draft,
    )
    return write_message(header, payload)


def assignment(
    who: Identity, bucket: int, clock: int, absent: Sequence[int], state: str | None, payload: memoryview | None
) -> bytes:
    """Weights (`state` None) or optimizer state that the script has set in a bucket before its step of that clock.

    state: a kind of state; "": the segments that are not absent lose theirs
    """
    header = data_pb2.PushHeader(
        worker=_identity(who),
        bucket=bucket,
        clock=clock,
        kind=data_pb2.PUSH_KIND_ASSIGN if state is None else data_pb2.PUSH_KIND_ASSIGN_STATE,
        absent_segments=absent,
        state=state,
    )
    return write_message(header, payload)


def attach_request(who: Identity, location: str, nonce: bytes) -> bytes:
    """Asks a shard to map a segment."""
    return data_pb2.AttachSegmentRequest(worker=_identity(who), location=location, nonce=nonce).SerializeToString()


def shared_push(who: Identity, clock: int, pushes: Sequence[BucketPush], finite: Set[int] = frozenset()) -> bytes:
    """Several buckets whose gradients lie in the segment; `finite`: those whose bytes there were looked at."""
    return _shared_push(who, clock, pushes, finite).SerializeToString()


def push_pull(
    who: Identity,
    clock: int,
    pushes: Sequence[BucketPush],
    finite: Set[int],
    buckets: Sequence[int],
    word_bytes: int,
) -> bytes:
    """As `shared_push`, and asks for buckets at that clock, as `pull_request`."""
    push = _shared_push(who, clock, pushes, finite)
    return data_pb2.PushPullSharedRequest(push=push, buckets=buckets, word_bytes=word_bytes).SerializeToString()


def _shared_push(
    who: Identity, clock: int, pushes: Sequence[BucketPush], finite: Set[int]
) -> data_pb2.PushSharedRequest:
    groups = {group: values for push in pushes for group, values in push.groups.items()}
    return data_pb2.PushSharedRequest(
        worker=_identity(who),
        clock=clock,
        buckets=_shared_buckets(pushes, finite),
        groups=_group_updates(groups),
        ranges=_ranges(pushes[0].ranges),  # of one clock, so of one step
    )


def _shared_buckets(pushes: Sequence[BucketPush], finite: Set[int]) -> list[data_pb2.SharedBucket]:
    return [
        data_pb2.SharedBucket(
            bucket=push.bucket.index,
            skip=push.empty,
            absent_segments=push.absent,
            finite=push.bucket.index in finite,
        )
        for push in pushes
    ]


def _ranges(ranges: Sequence[DataRange]) -> list[job_pb2.DataRange]:
    return [
        job_pb2.DataRange(loader=one.loader, pass_number=one.pass_number, start=one.start, stop=one.stop)
        for one in ranges
    ]


def _group_updates(groups: Mapping[int, HyperParameters]) -> list[data_pb2.GroupUpdate]:
    return [
        data_pb2.GroupUpdate(group=group, hyper_parameters=hyper_messages(values)) for group, values in groups.items()
    ]


def initial_push(who: Identity, bucket: int, payload: memoryview) -> bytes:
    """One bucket's initial value."""
    kind = data_pb2.PUSH_KIND_INITIAL_VALUE
    return write_message(data_pb2.PushHeader(worker=_identity(who), bucket=bucket, kind=kind), payload)


def pull_request(
    who: Identity, clock: int, buckets: Sequence[int], word_bytes: int = 0, commit: Sequence[BucketPush] = ()
) -> bytes:
    """Asks a shard for buckets at a clock.

    word_bytes: into the segment, and to be told of them whenever they make so many bytes; 0: when all are there
    commit:     of that clock: pushes that left as drafts, and empty ones; they count before anything is pulled
    """
    request = data_pb2.PullRequest(worker=_identity(who), clock=clock, buckets=buckets, word_bytes=word_bytes)
    if commit:
        groups = {group: values for push in commit for group, values in push.groups.items()}
        request.commit.buckets.extend(_shared_buckets(commit, frozenset()))
        request.commit.groups.extend(_group_updates(groups))
        request.commit.ranges.extend(_ranges(commit[0].ranges))
    return request.SerializeToString()


def state_request(who: Identity, buckets: Sequence[int]) -> bytes:
    """Asks a shard for the optimizer state of buckets."""
    return data_pb2.PullStateRequest(worker=_identity(who), buckets=buckets).SerializeToString()


def state_chunk(data: bytes) -> StateChunk:
    """What one message of the answer to that holds; its payload is a view into it."""
    raw, payload = read_message(data)
    header = data_pb2.StateHeader.FromString(bytes(raw))
    return StateChunk(header.bucket, header.version, header.state, frozenset(header.absent_segments), payload)


def pulled(data: bytes) -> PulledBucket:
    """What one message of a pull's stream holds; its payload is a view into it."""
    raw, payload = read_message(data)
    return _pulled(data_pb2.PullHeader.FromString(bytes(raw)), payload)


def shared_pulled(data: bytes) -> tuple[list[PulledBucket], float | None]:
    """What one message of a shared pull's stream holds: buckets that are in the segment now, and for how many seconds
    the pushes that went with the pull have been staged, if it says so."""
    message = data_pb2.PullSharedResponse.FromString(data)
    found = [_pulled(header, memoryview(b"")) for header in message.headers]
    return found, message.staged_seconds if message.HasField("staged_seconds") else None


def _pulled(header: data_pb2.PullHeader, payload: memoryview) -> PulledBucket:
    waiting = (tuple(header.waiting.ranks), header.waiting.reason) if header.HasField("waiting") else None
    return PulledBucket(header.bucket, header.version, header.waited_seconds, payload, waiting, header.checkpoint)


def _identity(who: Identity) -> data_pb2.WorkerIdentity:
    return data_pb2.WorkerIdentity(job=who.job, rank=who.rank, incarnation=who.incarnation, lease_key=who.key)


# -- control ---------------------------------------------------------------------------------------------------------


def register_request(spec: JobSpec) -> control_pb2.RegisterJobRequest:
    """Registers a job."""
    return control_pb2.RegisterJobRequest(spec=job_spec_message(spec))


def registered(response: control_pb2.RegisterJobResponse) -> tuple[ShardMap, int]:
    """Where a registered job's buckets are, and the bytes of a full one."""
    return _shard_map(response.shard_map), response.bucket_bytes


def _shard_map(found: job_pb2.ShardMap) -> ShardMap:
    return ShardMap({shard.index: shard.address for shard in found.shards}, tuple(found.bucket_shards))


@dataclass(frozen=True)
class Applicant:
    """A process that asks for a place.

    previous, clock: of a worker that comes back, its last incarnation and the steps it had finished; 0 for a new one
    """

    pid: int
    host: str
    metrics_address: str = ""
    previous: int = 0
    clock: int = 0
    launch: LaunchId = UNKNOWN


def join_request(job: str, rank: int | None, who: Applicant, attempt: int, waited: float) -> control_pb2.JoinJobRequest:
    """Asks to take part, or to come back. waited: seconds since it was told first to wait for others."""
    request = control_pb2.JoinJobRequest(
        job=job,
        rank=rank,
        pid=who.pid,
        host=who.host,
        metrics_address=who.metrics_address,
        previous_incarnation=who.previous,
        clock=who.clock,
        attempt=attempt,
        launch=who.launch.name,
        take_over=who.launch.take_over,
        launch_first_rank=who.launch.ranks.start,
        launch_rank_count=len(who.launch.ranks),
    )
    request.waited.FromNanoseconds(int(waited * 1e9))
    return request


def place(job: str, response: control_pb2.JoinJobResponse) -> JoinResult:
    """What a worker got when it joined."""
    lease = response.lease.ToNanoseconds() / 1e9
    who = Identity(job, response.rank, response.incarnation, response.lease_key)
    return JoinResult(
        who,
        response.clock,
        lease,
        _shard_map(response.shard_map) if response.HasField("shard_map") else None,
        response.restore_count,
        response.worker_state if response.HasField("worker_state") else None,
    )


def watch_request(job: str) -> control_pb2.WatchJobRequest:
    """Asks who takes part."""
    return control_pb2.WatchJobRequest(job=job)


def roster(response: control_pb2.WatchJobResponse) -> Roster:
    """Who takes part."""
    return Roster(tuple(response.ranks), response.world_size, response.started)


def heartbeat_request(who: Identity, clock: int) -> control_pb2.HeartbeatRequest:
    """A sign of life."""
    return control_pb2.HeartbeatRequest(
        job=who.job, rank=who.rank, incarnation=who.incarnation, clock=clock, lease_key=who.key
    )


def save_request(who: Identity, clock: int, state: bytes) -> control_pb2.SaveWorkerStateRequest:
    """A worker's own part of a checkpoint."""
    return control_pb2.SaveWorkerStateRequest(
        job=who.job, rank=who.rank, incarnation=who.incarnation, lease_key=who.key, clock=clock, state=state
    )


def leave_request(who: Identity) -> control_pb2.LeaveJobRequest:
    """Says goodbye."""
    return control_pb2.LeaveJobRequest(job=who.job, rank=who.rank, incarnation=who.incarnation, lease_key=who.key)


def lease_request(who: Identity, ask: LeaseRequest) -> control_pb2.LeaseDataRequest:
    """Asks for batches."""
    return control_pb2.LeaseDataRequest(
        job=who.job,
        rank=who.rank,
        incarnation=who.incarnation,
        lease_key=who.key,
        loader=ask.loader.loader,
        sample_count=ask.loader.size,
        batch_size=ask.loader.batch_size,
        drop_last=ask.loader.drop_last,
        seed=ask.loader.seed,
        pass_number=ask.pass_number,
        batch_count=ask.count,
        held=_ranges(ask.report.held),
        committed=_ranges(ask.report.committed),
        returned=_ranges(ask.report.returned),
    )


def leased(response: control_pb2.LeaseDataResponse) -> BatchLease:
    """The batches given, and whether the pass is complete."""
    ranges = (DataRange(each.loader, each.pass_number, each.start, each.stop) for each in response.ranges)
    return BatchLease(tuple(ranges), response.complete)


def exchange_request(who: Identity, offer: Offer) -> control_pb2.ExchangeValuesRequest:
    """Gives a value to a round."""
    return control_pb2.ExchangeValuesRequest(
        job=who.job,
        rank=who.rank,
        incarnation=who.incarnation,
        lease_key=who.key,
        number=offer.number,
        clock=offer.clock,
        value=offer.value,
    )


def round_news(response: control_pb2.ExchangeValuesResponse) -> RoundNews:
    """How a round stands."""
    values = {one.rank: one.value for one in response.values}
    waiting = tuple(response.waiting_for)
    return RoundNews(response.number, response.complete, values, response.refused, waiting, response.step_wanted)
