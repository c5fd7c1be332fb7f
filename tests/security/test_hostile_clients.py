"""Clients that dawdle, hoard or overreach take nothing from the others, and are told which limit they passed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import Backlogged, InvalidRequest, LimitExceeded
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import Consistency
from ps_protocol.v1 import data_pb2, jobs_pb2, membership_pb2, types_pb2
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT
from ps_runtime.grpc_status import error_from
from ps_server.core.limits import Limits
from ps_server.rpc.call_limits import STREAMS_OF_A_CONNECTION, WAITING_FOR_EACH
from ps_server.rpc.health_client import is_serving
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.crowded import silent
from tests.tools.http2 import PREFACE
from tests.tools.raw_worker import RawWorker
from tests.tools.slow_client import CallDrops, Dripping, Drops

MakeCluster = Callable[..., Cluster]

SECONDS = 20.0
STEPS = 10
# A step of this model takes milliseconds, on a busy machine many seconds. What a hostile client could take is minutes,
# or for ever.
SLOWEST_STEP_SECONDS = 30.0


def worst_step(cluster: Cluster, job: str) -> float:
    """The slowest of a worker's steps, in seconds."""
    model = nn.Linear(64, 64)
    with cluster.connect("sync", job=job, transport="grpc") as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=1024)
        slowest = 0.0
        for _ in range(STEPS):
            begun = time.perf_counter()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            slowest = max(slowest, time.perf_counter() - begun)
    return slowest


def uploads(cluster: Cluster) -> float:
    return sum(calls(cluster, "started", method) for method in ("Push", "Pull", "Heartbeat"))


@contextlib.contextmanager
def slow_uploads(cluster: Cluster, count: int) -> Iterator[None]:
    """Calls whose request never comes: a stream of one message, of which not even the first byte is sent."""
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait()
        yield b""

    with contextlib.ExitStack() as stack:
        calls = []
        for server in cluster.servers:
            for path in ("DataService/Push", "DataService/Pull", "MembershipService/Heartbeat"):
                call = stack.enter_context(open_channel(server.address)).stream_stream(f"/ps_protocol.v1.{path}")
                calls += [call(nothing(), timeout=600) for _ in range(count)]
        until(lambda: uploads(cluster) >= 3 * count, "the start of every call")
        try:
            yield
        finally:
            release.set()


@pytest.mark.long
def test_hundreds_of_requests_that_never_arrive_delay_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    alone = worst_step(cluster, "alone")
    with slow_uploads(cluster, STREAMS_OF_A_CONNECTION):
        beside = worst_step(cluster, "beside")
    print(f"slowest step alone {alone * 1e3:.1f} ms, beside unfinished requests {beside * 1e3:.1f} ms")
    assert beside < SLOWEST_STEP_SECONDS


def test_a_request_that_does_not_arrive_in_time_is_cut_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(upload_seconds=0.2))
    with slow_uploads(cluster, 4):
        until(lambda: not cluster.servers[0].calls_in_flight(), "the end of every call")


DRIPPING = 100


@pytest.mark.long
@pytest.mark.parametrize("method", cases(["DataService/Push"], ["MembershipService/Heartbeat"]))
def test_clients_that_send_a_request_byte_by_byte_delay_nobody_and_are_cut_off(
    make_cluster: MakeCluster, method: str
) -> None:
    """They come from another host, with more of them than there are places for requests."""
    cluster = make_cluster(shards=1, limits=Limits(upload_seconds=5.0))  # the worker is not to be cut off
    server = cluster.servers[0]
    drops = [CallDrops(f"/ps_protocol.v1.{method}", 10**6) for _ in range(12)]
    with Dripping(server.address, drops, 0.1, source="127.0.0.2") as clients:
        until(lambda: calls(cluster, "started", method.rpartition("/")[2]) >= len(drops), "the start of every call")
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        until(lambda: server.calls_in_flight() == 0, "the end of every call")
        turns = clients.turns
        until(lambda: clients.turns > turns + 1, "another byte on each connection")
        assert not clients.refused, "the calls are over; the connections may make others"
        assert worst_step(cluster, "after") < SLOWEST_STEP_SECONDS
        until(lambda: server.calls_in_flight() == 0, "the end of the worker's own calls, and no other")


def test_clients_that_shake_hands_byte_by_byte_delay_nobody_and_are_cut_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(handshake_seconds=2.0))
    with Dripping(
        cluster.address, [Drops(PREFACE) for _ in range(DRIPPING)], pause=0.2
    ) as clients:  # a preface takes 4.8 s
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        until(lambda: clients.refused == DRIPPING, "the end of every connection")


@pytest.mark.parametrize("prefix", cases([b"GET /metrics HTTP/1.1\r\n"], [b""]))
def test_scrapers_that_ask_byte_by_byte_keep_nobody_else_out_and_are_cut_off(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, prefix: bytes
) -> None:
    """Their timeout alone would begin anew with every byte."""
    monkeypatch.setattr("ps_runtime.web.CONNECTION_SECONDS", 1.0)
    cluster = make_cluster(shards=1)
    address = cluster.servers[0].metrics_address
    with Dripping(address, [Drops(b"x", prefix) for _ in range(DRIPPING)], source="127.0.0.2") as clients:
        assert scrape(address), "who scrapes from another host is answered"
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        until(lambda: clients.refused == DRIPPING, "the end of every connection")
    assert scrape(address)


UNREAD, SPARE = 80, 8  # a server that is busy may have one of so many calls try later
# A client that wants less than one answer at a time. Without these, gRPC's client guesses how much to take in before it
# is asked for, and on a fast link now and then takes everything: nothing would lie unread at the server.
_SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
]


@contextlib.contextmanager
def unread_pulls(cluster: Cluster) -> Iterator[None]:
    """Pulls of a few megabytes each, all begun, whose answers are never asked for."""
    big = nn.Linear(1024, 2048)
    with cluster.connect("async", job="big", transport="grpc") as session:
        session.prepare(big, torch.optim.SGD(big.parameters(), lr=0.1))
        pull = data_pb2.PullRequest(worker=types_pb2.WorkerIdentity(job="big"), buckets=[0, 1, 2]).SerializeToString()
        begun = calls(cluster, "started")
        with contextlib.ExitStack() as stack:
            unread = []
            for _ in range(2):  # a connection may have no more than STREAMS_OF_A_CONNECTION
                channel = stack.enter_context(grpc.insecure_channel(cluster.address, options=_SMALL_WINDOW))
                call = channel.unary_stream("/ps_protocol.v1.DataService/Pull")
                unread += [call(pull, timeout=600) for _ in range((UNREAD + SPARE) // 2)]
            until(lambda: calls(cluster, "started") >= begun + UNREAD + SPARE, "the start of every pull")
            yield
            for answer in unread:
                answer.cancel()


def calls(cluster: Cluster, what: str, method: str = "Pull", code: str = "") -> float:
    """How many calls of a method the first server has "started" or "handled" since its start: it only grows."""
    return counted(scrape(cluster.servers[0].metrics_address), what, method, code)


def counted(samples: dict[str, float], what: str, method: str, code: str = "") -> float:
    return sum(
        value
        for sample, value in samples.items()
        if sample.startswith(f"grpc_server_{what}_total{{") and f'grpc_method="{method}"' in sample and code in sample
    )


def test_readers_that_never_read_delay_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(stall_seconds=600.0))
    with unread_pulls(cluster):
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        # A pull of the job beside may begin and end while a page is written, between its two counters.
        until(lambda: pulls_under_way(cluster) >= UNREAD, "a page that has every unread pull")


def pulls_under_way(cluster: Cluster) -> float:
    samples = scrape(cluster.servers[0].metrics_address)
    return counted(samples, "started", "Pull") - counted(samples, "handled", "Pull")


def test_readers_that_never_read_are_cut_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(stall_seconds=2.0))
    with unread_pulls(cluster):
        until(lambda: calls(cluster, "handled") >= calls(cluster, "started"), "the end of every pull")
        assert calls(cluster, "handled", code='grpc_code="CANCELLED"') >= UNREAD


def test_a_thousand_connections_that_say_nothing_delay_nobody_and_are_closed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(handshake_seconds=2.0))
    with silent(int(cluster.address.rpartition(":")[2]), 1000) as opened:
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        for connection in opened:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # the server's settings come first; then it hangs up
                    pass


def test_a_thousand_connections_to_the_metrics_leave_the_cluster_alone(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_runtime.web.ConnectionServer.request_queue_size", 1024)  # or the kernel has clients wait
    cluster = make_cluster(shards=1)
    with silent(int(cluster.servers[0].metrics_address.rpartition(":")[2]), 1000):
        assert worst_step(cluster, "beside") < SLOWEST_STEP_SECONDS
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 100


def watch(channel: grpc.Channel, seconds: float) -> Any:
    """A call that lasts until it is cancelled, once the job is there."""
    return MembershipServiceStub(channel).Watch(membership_pb2.WatchRequest(job="job"), timeout=seconds)


def test_calls_in_flight_are_limited_by_caller(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(calls=3))
    register(cluster, job())
    with open_channel(cluster.address) as channel, open_channel(cluster.address) as another:
        watching = [watch(channel, 600) for _ in range(3 * WAITING_FOR_EACH)]
        for stream in watching[:8]:
            next(stream)
        errors = set()
        for _ in range(20):  # a connection more is no caller more
            watching.append(watch(another, 5))  # those that are let in stay: one of the first may have been refused
            try:
                next(watching[-1])
            except grpc.RpcError as error:
                errors.add(type(error_from(error, "it")))
        assert Backlogged in errors


def test_calls_in_flight_are_limited_in_all_but_for_probes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(all_calls=12))
    server = cluster.servers[0]
    register(cluster, job())
    until(lambda: server.calls_in_flight() == 0, "the end of that call: its answer is here a moment before")
    with open_channel(cluster.address) as channel:
        watching = [watch(channel, 600) for _ in range(6)]
        for stream in watching:
            next(stream)  # the roster: this call is among those in flight, and not one that is over in a moment
        with pytest.raises(Backlogged, match="6 calls in flight, half of what all may have: max-all-calls is 12"):
            register(cluster, job())
        assert is_serving(cluster.address, PLAINTEXT)
        for stream in watching:
            stream.cancel()
        until(lambda: server.calls_in_flight() == 0, "the end of every call")
        register(cluster, job())


# -- limits by name --------------------------------------------------------------------------------------------------


def job(name: str = "job", count: int = 1, size: int = 16, label: str = "p") -> JobSpec:
    parameters = tuple(ParameterSpec(f"{label}{index}", (size,), "float32", 0) for index in range(count))
    return JobSpec(name, parameters, "SGD", ({"lr": 1.0},), Consistency(None), 64, 1)


def register(cluster: Cluster, spec: JobSpec) -> None:
    RawWorker.register(cluster.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(spec)))


@pytest.mark.parametrize(
    ("limits", "specs", "says"),
    [
        (Limits(parameters=3), [job(count=4)], "max-parameters is 3"),
        (Limits(buckets=3), [job(size=1024)], "max-buckets is 3"),
        (Limits(name_length=8), [job(label="weights.")], "max-name-length is 8"),
        (Limits(jobs=1), [job("one"), job("two")], "max-jobs"),
    ],
)
def test_a_job_past_a_limit_is_told_which(
    make_cluster: MakeCluster, limits: Limits, specs: list[JobSpec], says: str
) -> None:
    cluster = make_cluster(shards=1, limits=limits)
    for spec in specs[:-1]:
        register(cluster, spec)
    with pytest.raises(LimitExceeded, match=says):
        register(cluster, specs[-1])
    assert set(cluster.coordinator.jobs()) == {spec.name for spec in specs[:-1]}


@pytest.mark.parametrize("sends", ["message", "metadata"])
def test_what_is_too_long_is_refused_before_it_is_read(make_cluster: MakeCluster, sends: str) -> None:
    cluster = make_cluster(shards=1, limits=Limits(message_bytes=2**16, metadata_bytes=4096))
    body = bytes(2**17) if sends == "message" else b""
    metadata = (("x-long", "x" * 65536),) if sends == "metadata" else None
    with open_channel(cluster.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/ps_protocol.v1.DataService/Push")(body, timeout=SECONDS, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_call_without_a_request_is_told_so(shared: Cluster) -> None:
    with open_channel(shared.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/ps_protocol.v1.DataService/Push")(iter(()), timeout=SECONDS)
    assert isinstance(error_from(caught.value, "it"), InvalidRequest)
