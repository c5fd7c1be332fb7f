"""Where the worker's values become protobuf messages, and back, as far as that is more than naming the fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ps_protocol.convert import hyper_messages
from ps_protocol.data import BatchLease, DataRange, LeaseRequest
from ps_protocol.framing import read_message, write_message
from ps_protocol.job import HyperParameters
from ps_protocol.v1 import data_pb2, job_pb2, jobs_pb2, leases_pb2, membership_pb2, rounds_pb2, types_pb2
from ps_runtime.launch_id import UNKNOWN, LaunchId
from ps_worker.values import (
    BucketPush,
    Identity,
    JoinResult,
    PulledBucket,
    RoundNews,
    ShardMap,
    StateChunk,
)

# -- data ------------------------------------------------------------------------------------------------------------


def identity(who: Identity) -> types_pb2.WorkerIdentity:
    """Returns who calls a shard, as every message to one says it."""
    return types_pb2.WorkerIdentity(job=who.job, rank=who.rank, incarnation=who.incarnation, lease_key=who.key)


def gradient_push(who: Identity, push: BucketPush, payload: memoryview | None, draft: bool = False) -> bytes:
    """Writes one bucket's gradient; without payload, that this step has none. `draft`: it does not count yet."""
    header = data_pb2.PushHeader(
        worker=identity(who),
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
    """Writes weights (`state` None) or optimizer state that a script has set in a bucket before its step of a clock.

    state: a kind of state; "": the segments that are not absent lose theirs
    """
    header = data_pb2.PushHeader(
        worker=identity(who),
        bucket=bucket,
        clock=clock,
        kind=data_pb2.PUSH_KIND_ASSIGN if state is None else data_pb2.PUSH_KIND_ASSIGN_STATE,
        absent_segments=absent,
        state=state,
    )
    return write_message(header, payload)


def shared_push(who: Identity, clock: int, pushes: Sequence[BucketPush], finite: Set[int] = frozenset()) -> bytes:
    """Announces buckets whose gradients lie in the segment; `finite`: those whose bytes there were looked at."""
    return _shared_push(who, clock, pushes, finite).SerializeToString()


def push_pull(
    who: Identity,
    clock: int,
    pushes: Sequence[BucketPush],
    finite: Set[int],
    buckets: Sequence[int],
    notice_bytes: int,
) -> bytes:
    """Does as `shared_push`, and asks for buckets at that clock, as `pull_request`."""
    push = _shared_push(who, clock, pushes, finite)
    return data_pb2.ExchangeRequest(push=push, buckets=buckets, word_bytes=notice_bytes).SerializeToString()


def _shared_push(who: Identity, clock: int, pushes: Sequence[BucketPush], finite: Set[int]) -> data_pb2.PushHeader:
    groups = {group: values for push in pushes for group, values in push.groups.items()}
    return data_pb2.PushHeader(
        worker=identity(who),
        clock=clock,
        buckets=_shared_buckets(pushes, finite),
        groups=_group_updates(groups),
        ranges=_ranges(pushes[0].ranges),  # of one clock, so of one step
    )


def _shared_buckets(pushes: Sequence[BucketPush], finite: Set[int]) -> list[data_pb2.BucketPush]:
    return [
        data_pb2.BucketPush(
            bucket=push.bucket.index,
            skip=push.empty,
            absent_segments=push.absent,
            finite=push.bucket.index in finite,
        )
        for push in pushes
    ]


def _ranges(ranges: Sequence[DataRange]) -> list[types_pb2.DataRange]:
    return [
        types_pb2.DataRange(loader=each.loader, pass_number=each.pass_number, start=each.start, stop=each.stop)
        for each in ranges
    ]


def _group_updates(groups: Mapping[int, HyperParameters]) -> list[job_pb2.GroupUpdate]:
    return [
        job_pb2.GroupUpdate(group=group, hyper_parameters=hyper_messages(values)) for group, values in groups.items()
    ]


def initial_push(who: Identity, bucket: int, payload: memoryview) -> bytes:
    """Writes one bucket's initial value."""
    kind = data_pb2.PUSH_KIND_INITIAL_VALUE
    return write_message(data_pb2.PushHeader(worker=identity(who), bucket=bucket, kind=kind), payload)


def pull_request(
    who: Identity, clock: int, buckets: Sequence[int], notice_bytes: int = 0, commit: Sequence[BucketPush] = ()
) -> bytes:
    """Asks a shard for buckets at a clock.

    notice_bytes: into the segment, and to be told of them whenever they make so many bytes; 0: when all are there
    commit:     of that clock: pushes that left as drafts, and empty ones; they count before anything is pulled
    """
    request = data_pb2.PullRequest(worker=identity(who), clock=clock, buckets=buckets, word_bytes=notice_bytes)
    if commit:
        groups = {group: values for push in commit for group, values in push.groups.items()}
        request.commit.buckets.extend(_shared_buckets(commit, frozenset()))
        request.commit.groups.extend(_group_updates(groups))
        request.commit.ranges.extend(_ranges(commit[0].ranges))
    return request.SerializeToString()


def state_chunk(data: bytes) -> StateChunk:
    """Reads one message of the optimizer state of buckets; the payload is a view into it."""
    raw, payload = read_message(data)
    header = data_pb2.PulledState.FromString(bytes(raw))
    return StateChunk(header.bucket, header.version, header.state, frozenset(header.absent_segments), payload)


def pulled(data: bytes) -> PulledBucket:
    """Reads one message of a pull's stream; the payload is a view into it."""
    raw, payload = read_message(data)
    return _pulled(data_pb2.PulledBucket.FromString(bytes(raw)), payload)


def shared_pulled(data: bytes) -> tuple[list[PulledBucket], float | None]:
    """Reads one message of a shared pull's stream: buckets that are in the segment now, and for how many seconds the
    pushes that went with the pull have been staged, if it says so.
    """
    message = data_pb2.PullResponse.FromString(data)
    buckets = [_pulled(header, memoryview(b"")) for header in message.headers]
    return buckets, message.staged_seconds if message.HasField("staged_seconds") else None


def _pulled(header: data_pb2.PulledBucket, payload: memoryview) -> PulledBucket:
    waiting = (tuple(header.waiting.ranks), header.waiting.reason) if header.HasField("waiting") else None
    return PulledBucket(header.bucket, header.version, header.waited_seconds, payload, waiting, header.checkpoint)


# -- control ---------------------------------------------------------------------------------------------------------


def registered(response: jobs_pb2.RegisterJobResponse) -> tuple[ShardMap, int]:
    """Reads where a registered job's buckets are, and the bytes of a full one."""
    return _shard_map(response.shard_map), response.bucket_bytes


def _shard_map(message: types_pb2.ShardMap) -> ShardMap:
    return ShardMap({shard.index: shard.address for shard in message.shards}, tuple(message.bucket_shards))


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


def join_request(job: str, rank: int | None, who: Applicant, attempt: int, waited: float) -> membership_pb2.JoinRequest:
    """Asks to take part, or to come back.

    waited: seconds since it was told first to wait for others
    """
    request = membership_pb2.JoinRequest(
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


def join_result(job: str, response: membership_pb2.JoinResponse) -> JoinResult:
    """Reads what a worker got when it joined."""
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


def lease_request(who: Identity, ask: LeaseRequest) -> leases_pb2.LeaseDataRequest:
    """Asks for batches of a loader's data."""
    return leases_pb2.LeaseDataRequest(
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


def leased(response: leases_pb2.LeaseDataResponse) -> BatchLease:
    """Reads which batches were given, and whether the pass is complete."""
    ranges = (DataRange(each.loader, each.pass_number, each.start, each.stop) for each in response.ranges)
    return BatchLease(tuple(ranges), response.complete)


def round_news(response: rounds_pb2.GatherValuesResponse) -> RoundNews:
    """Reads how a round stands."""
    return RoundNews(
        response.number,
        response.complete,
        {each.rank: each.value for each in response.values},
        response.refused,
        tuple(response.waiting_for),
        response.step_wanted,
    )
