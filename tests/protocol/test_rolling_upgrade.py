"""Servers are upgraded first: they understand workers of the release before, whose messages are kept as files.

The files are what a worker of version 1 of the protocol sent and got in its whole life, recorded with that release
(tests/tools/record_worker.py), and the contract as it was then. Here they are sent to servers of today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import VersionMismatch
from ps_protocol.versions import VERSION
from ps_runtime.grpc_status import error_from
from tests.tools.cluster import Cluster, until
from tests.tools.recordings import Player, Recorded, recording

FOLDER = Path(__file__).with_name("release_1")
JOB = "released"


@pytest.fixture(scope="module")
def calls() -> list[Recorded]:
    return recording(FOLDER)


def only(calls: list[Recorded], name: str) -> Recorded:
    return next(call for call in calls if call.name == name)


def first_life(calls: list[Recorded]) -> list[Recorded]:
    """The calls of the worker from its registration until it leaves, and what an operator asks meanwhile."""
    names = [call.name for call in calls]
    return calls[names.index("RegisterJob") : names.index("Leave")]


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Cluster:
    return make_cluster(shards=1, checkpoint_dir=tmp_path, lease=120.0)  # one heartbeat is recorded


@pytest.fixture
def player(cluster: Cluster) -> Iterator[Player]:
    made = Player(cluster.address)
    yield made
    made.close()


def test_the_recording_has_a_whole_life_and_names_no_run(calls: list[Recorded]) -> None:
    assert {call.name for call in calls} == {
        *("RegisterShard", "RegisterJob", "Join", "Watch", "Push", "Pull", "Exchange", "LeaseData", "GatherValues"),
        *("Heartbeat", "SaveWorkerState", "Leave", "GetStatus", "CheckpointJob", "EndJob"),
    }
    assert "run" not in only(calls, "Join").method.input_type.fields_by_name
    assert "protocol_version" not in only(calls, "RegisterJob").method.input_type.fields_by_name


def weights(answers: list[Any]) -> dict[int, tuple[int, bytes]]:
    """By bucket, the version and the bytes that a pull has brought."""
    return {a.buckets[0].bucket: (a.buckets[0].version, a.payload) for a in answers if not a.HasField("waiting")}


def same_answers(call: Recorded, answers: list[Any]) -> None:
    """Compares answers of today with those of that release, but for what is new in each cluster."""
    was = call.recorded()
    if call.name in ("Pull", "Exchange"):
        assert weights(answers) == weights(was) != {}
        return
    [then], [now] = was[-1:], answers[-1:]
    same = {
        "RegisterJob": lambda answer: (answer.created, answer.bucket_bytes, list(answer.shard_map.bucket_shards)),
        "Join": lambda answer: (answer.worker.rank, answer.clock, answer.restore_count, len(answer.worker.lease_key)),
        "Push": lambda answer: answer.duplicate_count,
        "LeaseData": lambda answer: (list(answer.ranges), answer.complete),
        "GatherValues": lambda answer: (answer.round, answer.complete, list(answer.values), answer.refusal),
        "GetStatus": lambda answer: [(job.name, job.bucket_count, len(job.workers)) for job in answer.jobs],
        "Heartbeat": lambda answer: answer.live_count,
        "SaveWorkerState": lambda answer: answer,
    }[call.name]
    assert same(now) == same(then)


def clock_of(call: Recorded) -> int:
    """The clock of a call that pushes or pulls; -1: of another."""
    request = call.new_request()
    if call.name == "Push":
        return int(request.header.clock)
    if call.name == "Exchange":
        return int(request.push.clock)
    return int(request.clock) if call.name == "Pull" else -1


def live(player: Player, calls: list[Recorded]) -> list[tuple[Recorded, Future[list[Any]]]]:
    """Sends a worker's calls in their order; returns those that may wait for later ones, with their answers to come."""
    streams = []
    for call in first_life(calls):
        if call.name == "CheckpointJob":
            continue  # it waits for steps that the recording may not have: see `checkpoint`
        for earlier, answers_to_come in streams:
            # A worker begins a step when it has the weights of the last, and tells what it has used once that counts.
            tells = call.name == "LeaseData" and earlier.name == "Exchange"
            if tells or 0 <= clock_of(earlier) < clock_of(call):
                answers_to_come.result()
        if call.method.server_streaming:
            streams.append((call, player.begin(call)))
            continue
        answers = player.send(call)
        same_answers(call, answers)
        if call.name == "Join":
            player.identity = answers[0].worker
    return streams


def test_servers_of_today_serve_a_worker_of_version_1_as_its_own_did(
    player: Player, cluster: Cluster, calls: list[Recorded]
) -> None:
    streams = live(player, calls)
    watch = next(future for call, future in streams if call.name == "Watch")
    for call, future in streams:
        if future is not watch:
            same_answers(call, future.result())
    last = [call for call in calls if call.name == "Exchange"][-1]
    assert cluster.coordinator.job(JOB).workers.all()[0].clock == last.new_request().push.clock
    for call in (call for call in first_life(calls) if call.name == "Push" and call.new_request().header.clock == 0):
        assert player.send(call)[0].duplicate_count == 1
    checkpoint(player, calls)
    assert [answer.ended for answer in player.send(only(calls, "Leave"))] == [True]
    assert watch.result()[-1].started
    assert cluster.coordinator.jobs() == {}

    again, end = calls[-2:]
    assert player.send(again)[0].created
    player.send(end)
    assert cluster.coordinator.jobs() == {}


def checkpoint(player: Player, calls: list[Recorded]) -> None:
    """Asks for a checkpoint as an operator did, and makes steps like the last one until it is there."""
    asked = player.begin(only(calls, "CheckpointJob"))
    pushes = {
        request.header.buckets[0].bucket: call
        for call, request in ((call, call.new_request()) for call in calls if call.name == "Push")
        if request.header.clock == 1
    }
    clock = max(call.new_request().clock for call in calls if call.name == "Heartbeat")
    saved = []

    def step() -> bool:
        nonlocal clock
        clock += 1

        def gradient(request: Any) -> None:
            request.header.clock = clock
            del request.header.ranges[:]

        def state(request: Any) -> None:
            request.state.clock = clock

        for call in pushes.values():
            player.send(call, gradient)
        pull = next(c for c in calls if c.name == "Pull" and len(c.new_request().buckets) == len(pushes))
        pulled = player.send(pull, lambda request: setattr(request, "clock", clock))
        if any(bucket.state_wanted for answer in pulled for bucket in answer.buckets):
            player.send(only(calls, "SaveWorkerState"), state)
            saved.append(clock)
        return asked.done()

    until(step, "the checkpoint")
    [answer] = asked.result()
    assert answer.checkpoint.clock in saved


def test_a_worker_of_version_1_loses_its_place_in_a_run_that_has_ended(
    player: Player, cluster: Cluster, calls: list[Recorded]
) -> None:
    """It names no run; its key is that of a worker of the run before."""
    live(player, calls)
    cluster.coordinator.job(JOB).end()
    player.send(only(calls, "RegisterJob"))
    for name in ("Heartbeat", "Exchange", "SaveWorkerState"):
        with pytest.raises(grpc.RpcError) as refused:
            player.send(only(calls, name))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert type(error_from(refused.value, "")).__name__ == "UnknownWorker"


# -- what does not go together is refused in words -------------------------------------------------------------------


def test_a_shard_of_version_1_is_refused(player: Player, calls: list[Recorded]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        player.send(only(calls, "RegisterShard"))
    error = error_from(refused.value, "the coordinator")
    assert isinstance(error, VersionMismatch)
    assert str(error) == (
        f"the coordinator speaks version {VERSION} of the protocol, and the shard speaks version 1: "
        "all servers of a cluster need one version"
    )


def test_a_shard_of_today_holds_no_job_of_a_coordinator_of_version_1(player: Player, calls: list[Recorded]) -> None:
    spec = only(calls, "RegisterJob").new_request().spec
    spec.bucket_bytes = 64
    for name, more in (("CreateJob", {}), ("RestoreJob", {"checkpoint": "000001"})):
        with pytest.raises(grpc.RpcError) as refused:
            player.call("ShardService", name, calls[0].message(f"{name}Request", spec=spec, buckets=[0], **more))
        error = error_from(refused.value, "the shard")
        assert isinstance(error, VersionMismatch)
        assert "without a run, as in version 1: all servers of a cluster need one version" in str(error)


@pytest.fixture
def recorded_server(calls: list[Recorded]) -> Iterator[str]:
    """A server that answers each registration of a job as that release did."""
    register = only(calls, "RegisterJob")
    service = register.method.containing_service.full_name
    answers = {"RegisterJob": grpc.unary_unary_rpc_method_handler(lambda request, context: register.answers[0])}
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, answers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_worker_of_today_refuses_servers_of_version_1(recorded_server: str) -> None:
    model = nn.Linear(2, 2)
    with (
        ps_worker.connect(recorded_server, "sync", job=JOB) as session,
        pytest.raises(VersionMismatch, match=r"the server speaks version 1 .* upgrade the servers before the workers"),
    ):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
