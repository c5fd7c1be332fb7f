"""Turns the worker's values into protobuf messages, and back, where that is more than naming the fields."""

from __future__ import annotations

import os
import socket

from ps_protocol.convert import (
    data_range_messages,
    duration,
    identity,
    identity_message,
    seconds,
    since_1970,
)
from ps_protocol.data import LeaseRequest
from ps_protocol.identity import Identity
from ps_protocol.v1 import leases_pb2, membership_pb2, rounds_pb2, types_pb2
from ps_runtime.launch_id import UNKNOWN
from ps_worker.cluster.options import JobOptions
from ps_worker.values import (
    Continued,
    HeartbeatAnswer,
    JoinResult,
    RoundNews,
    SavedState,
    ShardMap,
    ShardPushed,
)


def heartbeat(worker: Identity, clock: int, script_wanted: bool = False) -> membership_pb2.HeartbeatRequest:
    """Says that a worker lives, and how many steps it has finished. script_wanted: as in CoordinatorClient.heartbeat"""
    return membership_pb2.HeartbeatRequest(worker=identity_message(worker), clock=clock, script_wanted=script_wanted)


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
    state = response.worker_state
    return JoinResult(
        identity(response.worker),
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
        worker=identity_message(worker),
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
