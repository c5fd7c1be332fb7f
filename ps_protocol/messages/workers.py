"""The messages between workers and the coordinator: joins, heartbeats, rounds of values, and leases of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from ps_protocol.batches import LeaseReport, LeaseRequest, LoaderSpec
from ps_protocol.convert import (
    data_range_messages,
    data_ranges,
    duration,
    identity,
    identity_message,
    seconds,
    since_1970,
    timestamp,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.identity import Identity
from ps_protocol.v1 import leases_pb2, membership_pb2, rounds_pb2, types_pb2

# -- joins -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardMap:
    """Addresses of the shards by index, and the shard of each bucket."""

    addresses: dict[int, str]
    bucket_shards: tuple[int, ...]


def shard_map_message(shards: ShardMap) -> types_pb2.ShardMap:
    """Returns the message of a job's shard map."""
    return types_pb2.ShardMap(
        shards=[
            types_pb2.ShardInfo(index=index, address=shards.addresses[index]) for index in sorted(shards.addresses)
        ],
        bucket_shards=shards.bucket_shards,
    )


def shard_map(message: types_pb2.ShardMap) -> ShardMap:
    """Reads the shard map from a message."""
    return ShardMap({shard.index: shard.address for shard in message.shards}, tuple(message.bucket_shards))


@dataclass(frozen=True)
class JoinRequest:
    """A process's request to join.

    previous:     the last incarnation of a worker that comes back; None: a new worker
    clock:        how many steps that worker had finished
    attempt:      identifies the request in all its repetitions; 0: repetitions are not recognised
    launch:       the launch that started the process; empty: unknown
    take_over:    fence live workers of other launches
    waited:       seconds since the process first heard that it must wait for a launch that may be dead; 0: it has not
    launch_ranks: the ranks of all workers that the launch is about to start
    run:          the run of the job that the process registered; empty: any run
    """

    pid: int = 0
    host: str = ""
    metrics_address: str = ""
    previous: int | None = None
    clock: int = 0
    attempt: int = field(default=0, repr=False)
    launch: str = ""
    take_over: bool = False
    waited: float = 0.0
    launch_ranks: range = range(0)
    run: str = ""


def write_join(job: str, rank: int | None, request: JoinRequest) -> membership_pb2.JoinRequest:
    """Returns the message of a join request. rank: the rank that the process wants; None: any"""
    ranks, launch = request.launch_ranks, None
    if request.launch or request.take_over or len(ranks):
        launch = membership_pb2.Launch(
            name=request.launch, first_rank=ranks.start, rank_count=len(ranks), takeover=request.take_over
        )
    return membership_pb2.JoinRequest(
        job=job,
        rank=rank,
        pid=request.pid,
        host=request.host,
        metrics_address=request.metrics_address,
        previous_incarnation=request.previous or 0,
        clock=request.clock,
        request_id=request.attempt,
        wait_duration=duration(request.waited),
        launch=launch,
        run=request.run,
    )


def read_join(message: membership_pb2.JoinRequest) -> JoinRequest:
    """Reads the join request from a message."""
    launch = message.launch
    return JoinRequest(
        message.pid,
        message.host,
        message.metrics_address,
        message.previous_incarnation or None,
        message.clock,
        message.request_id,
        launch.name,
        launch.takeover,
        max(0.0, seconds(message.wait_duration)),
        range(launch.first_rank, launch.first_rank + launch.rank_count),
        message.run,
    )


@dataclass(frozen=True)
class SavedState:
    """A worker's own state. clock: of the checkpoint with this state, or the worker's own when it left"""

    clock: int
    content: bytes = field(repr=False)


def state_message(state: SavedState | None) -> membership_pb2.WorkerState | None:
    """Returns the message of a worker's own state, or of the state that its script has set; None if there is none."""
    return None if state is None else membership_pb2.WorkerState(clock=state.clock, content=state.content)


def write_script(script: SavedState | None) -> bytes:
    """Returns the state that a script has set as bytes, for other members of a group. Empty if there is none."""
    message = state_message(script)
    return b"" if message is None else b"+" + message.SerializeToString()


def read_script(encoded: bytes) -> SavedState | None:
    """Returns the state that a script has set, from the bytes of `write_script`; None if there is none."""
    if not encoded:
        return None
    message = membership_pb2.WorkerState.FromString(encoded[1:])
    return SavedState(message.clock, message.content)


def group_state(states: Sequence[bytes]) -> bytes:
    """Returns the states of a group's members as one state."""
    return membership_pb2.GroupState(members=states).SerializeToString()


def member_states(content: bytes) -> Sequence[bytes]:
    """Returns the states of the members in a group's state. Raises InvalidRequest if it is not a group's state."""
    try:
        return tuple(membership_pb2.GroupState.FromString(content).members)
    except DecodeError as error:
        raise InvalidRequest(f"no state of a group: {error}") from None


@dataclass(frozen=True)
class Continued:
    """The earlier training of a job that a new launch continues.

    began:   when the job began, or the earlier run whose checkpoint it was restored from, in seconds since 1970
    trained: when it was last trained, in seconds since 1970; None: unknown
    live:    how many other workers train it now
    """

    began: float
    trained: float | None
    live: int


@dataclass(frozen=True)
class ShardPushed:
    """How far workers of one rank have pushed on one shard.

    clock:   the last clock that they have pushed to all trained buckets and all tables there
    further: by bucket or table, the last clock that they have pushed to it, if it is later. Tables follow the buckets
    """

    clock: int
    further: Mapping[int, int]


def pushed_message(shard: int, pushed: ShardPushed) -> types_pb2.ShardPushes:
    """Writes how far workers of one rank have pushed on one shard."""
    of_clock: dict[int, list[int]] = {}
    for part, clock in pushed.further.items():
        of_clock.setdefault(clock, []).append(part)
    further = [types_pb2.FurtherPush(clock=clock, parts=parts) for clock, parts in of_clock.items()]
    return types_pb2.ShardPushes(shard=shard, pushed_clock=pushed.clock, further=further)


def shard_pushed(message: types_pb2.ShardPushes) -> ShardPushed:
    """Reads the message that `pushed_message` writes."""
    return ShardPushed(message.pushed_clock, {part: each.clock for each in message.further for part in each.parts})


@dataclass(frozen=True)
class JoinResult:
    """A worker's place in its job: the result of its join.

    clock:         the clock at which it starts
    lease:         seconds for which it counts as live without a heartbeat
    shard_map:     the present shard of each bucket; None: as at the registration
    restore_count: how often the whole job was rolled back to a checkpoint
    state:         the state that an earlier worker of this rank has saved; None if there is none
    pushed:        the last clock that workers of this rank had pushed to all trained buckets; None: unknown
    on_shards:     the same for each shard; empty: unknown
    continued:     for the first worker of a launch, if others have trained the job; otherwise None
    """

    identity: Identity
    clock: int
    lease: float
    shard_map: ShardMap | None = None
    restore_count: int = 0
    state: SavedState | None = None
    pushed: int | None = None
    on_shards: Mapping[int, ShardPushed] = field(default_factory=dict)
    continued: Continued | None = None

    def has_had(self, shard: int, unit: int, clock: int) -> bool:
        """Whether a bucket or table of a shard already had this rank's push of `clock` when the worker joined.

        unit: the index of the bucket or table; tables follow the buckets
        """
        pushed = self.on_shards.get(shard)
        return pushed is not None and max(pushed.clock, pushed.further.get(unit, 0)) >= clock

    def has_some(self, clock: int) -> bool:
        """Whether any bucket or table already had this rank's push of `clock` when the worker joined."""
        every = [(pushed.clock, *pushed.further.values()) for pushed in self.on_shards.values()]
        return any(clock <= most for each in every for most in each)


def write_joined(result: JoinResult) -> membership_pb2.JoinResponse:
    """Returns the message of a worker's place in a job."""
    continued = None
    if result.continued is not None:
        began, live = timestamp(result.continued.began), result.continued.live
        continued = membership_pb2.ContinuedJob(begin_time=began, live_count=live)
        if result.continued.trained is not None:
            continued.train_time.CopyFrom(timestamp(result.continued.trained))
    return membership_pb2.JoinResponse(
        worker=identity_message(result.identity),
        clock=result.clock,
        lease_duration=duration(result.lease),
        shard_map=None if result.shard_map is None else shard_map_message(result.shard_map),
        restore_count=result.restore_count,
        worker_state=state_message(result.state),
        pushed_clock=result.pushed,
        shard_pushes=[pushed_message(shard, pushed) for shard, pushed in result.on_shards.items()],
        continued=continued,
    )


def read_joined(message: membership_pb2.JoinResponse) -> JoinResult:
    """Returns the place that a worker got."""
    state, job = message.worker_state, message.continued
    continued = None
    if message.HasField("continued"):
        trained = since_1970(job.train_time) if job.HasField("train_time") else None
        continued = Continued(since_1970(job.begin_time), trained, job.live_count)
    return JoinResult(
        identity(message.worker),
        message.clock,
        seconds(message.lease_duration),
        shard_map(message.shard_map) if message.HasField("shard_map") else None,
        message.restore_count,
        SavedState(state.clock, state.content) if message.HasField("worker_state") else None,
        message.pushed_clock if message.HasField("pushed_clock") else None,
        {each.shard: shard_pushed(each) for each in message.shard_pushes},
        continued,
    )


# -- signs of life -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeartbeatAnswer:
    """The coordinator's answer to a heartbeat.

    script_request: the number of the request for the state that this worker's script has set; 0: there is none
    script:         the state that the job's script has set, for a worker that asked; None: unknown
    script_coming:  another worker is about to send it: ask again
    """

    script_request: int
    script: SavedState | None
    script_coming: bool


def write_heartbeat(worker: Identity, clock: int, script_wanted: bool = False) -> membership_pb2.HeartbeatRequest:
    """Returns the message of a heartbeat.

    clock:         the steps that the worker has finished
    script_wanted: ask for the state that the job's script has set
    """
    return membership_pb2.HeartbeatRequest(worker=identity_message(worker), clock=clock, script_wanted=script_wanted)


def read_heartbeat_answer(message: membership_pb2.HeartbeatResponse) -> HeartbeatAnswer:
    """Reads the answer to a heartbeat from a message."""
    script = SavedState(message.script.clock, message.script.content) if message.HasField("script") else None
    return HeartbeatAnswer(message.script_request, script, message.script_coming)


# -- rounds of values --------------------------------------------------------------------------------------------------

VALUES_BYTES = 8 * 2**20  # of values in one message: those of several workers may exceed the limit of a message


@dataclass(frozen=True)
class GatherRequest:
    """One worker's value for a round. number: that of the round; 0: there is no value, and the worker asks which round
    is next
    """

    worker: Identity
    number: int
    clock: int
    value: bytes = field(repr=False)


def write_gather(request: GatherRequest) -> rounds_pb2.GatherValuesRequest:
    """Returns the message of a worker's value for a round."""
    return rounds_pb2.GatherValuesRequest(
        worker=identity_message(request.worker), round=request.number, clock=request.clock, value=request.value
    )


def read_gather(message: rounds_pb2.GatherValuesRequest) -> GatherRequest:
    """Reads the value for a round from a message."""
    return GatherRequest(identity(message.worker), message.round, message.clock, message.value)


@dataclass(frozen=True)
class ValueNews:
    """One message from the coordinator about a round, in which each worker gives a value and gets those of all workers.

    complete:    this is the last message of the round; unless it is `refused`, all values have come
    values:      by rank; a message may have only some of them
    refused:     the reason why there are no values; empty: there are values
    waiting_for: ranks that have not given their value yet
    step_wanted: whether one of these ranks waits, in a step, for a step of this worker; only then it gives its value
    """

    number: int
    complete: bool
    values: dict[int, bytes] = field(repr=False)
    refused: str
    waiting_for: tuple[int, ...]
    step_wanted: bool


def write_round_news(news: ValueNews) -> Iterator[rounds_pb2.GatherValuesResponse]:
    """Yields the messages about a round. Its values are split over as many as needed; only the last one is marked
    complete.
    """
    response = rounds_pb2.GatherValuesResponse(
        round=news.number, awaited_ranks=news.waiting_for, step_wanted=news.step_wanted
    )
    size = 0
    for rank, value in news.values.items():
        if response.values and size + len(value) > VALUES_BYTES:
            yield response
            response, size = rounds_pb2.GatherValuesResponse(round=news.number), 0
        response.values.add(rank=rank, value=value)
        size += len(value)
    response.complete, response.refusal = news.complete, news.refused
    yield response


def read_round_news(message: rounds_pb2.GatherValuesResponse) -> ValueNews:
    """Reads the news of a round from a message."""
    return ValueNews(
        message.round,
        message.complete,
        {given.rank: given.value for given in message.values},
        message.refusal,
        tuple(message.awaited_ranks),
        message.step_wanted,
    )


# -- leases of data ----------------------------------------------------------------------------------------------------


def write_lease_request(worker: Identity, request: LeaseRequest) -> leases_pb2.LeaseDataRequest:
    """Returns the message that asks for batches of a loader's data."""
    loader, report = request.loader, request.report
    return leases_pb2.LeaseDataRequest(
        worker=identity_message(worker),
        loader=leases_pb2.LoaderSpec(
            loader=loader.loader,
            sample_count=loader.size,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            seed=loader.seed,
        ),
        pass_number=request.pass_number,
        batch_count=request.count,
        leased=data_range_messages(report.leased),
        committed=data_range_messages(report.committed),
        returned=data_range_messages(report.returned),
    )


def read_lease_request(message: leases_pb2.LeaseDataRequest) -> LeaseRequest:
    """Reads the request for batches from a message."""
    loader = message.loader
    seed = loader.seed if loader.HasField("seed") else None
    return LeaseRequest(
        loader=LoaderSpec(loader.loader, loader.sample_count, loader.batch_size, loader.drop_last, seed),
        pass_number=message.pass_number,
        count=message.batch_count,
        report=LeaseReport(data_ranges(message.leased), data_ranges(message.committed), data_ranges(message.returned)),
    )
