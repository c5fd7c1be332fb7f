"""Data connections: who may open one, what may come by it, and what ends it. Nothing hostile changes anything."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_frames import listener
from ps_frames.frames import TICKET_BYTES, Kind, write_header
from ps_frames.listener import TICKET_SECONDS, Tickets
from ps_frames.server import Opener, ServerConnection
from ps_protocol.convert import group_update_messages
from ps_protocol.errors import (
    Backlogged,
    Fenced,
    Forbidden,
    InvalidRequest,
    NotFound,
    OutOfOrder,
    PSError,
    RunEnded,
    UnknownWorker,
)
from ps_protocol.framing import Parts, message_parts
from ps_protocol.identity import Identity
from ps_protocol.v1 import data_pb2
from ps_runtime import reloading
from ps_runtime.credentials import Access
from ps_server.core.limits import Limits
from ps_server.ops import requests
from ps_server.rpc.call_limits import CallLimits, CallsInFlight
from ps_server.shard.shard import Shard
from tests.tools.cluster import Cluster, until
from tests.tools.frame_client import FrameClient, clocks_read, push_parts, ticket
from tests.tools.raw_worker import RawWorker, joined, vector_job

CELLS = 16
LIMITS = Limits(upload_seconds=30.0, stall_seconds=40.0)
LEASE = 120.0  # of raw workers, which send no heartbeats: on a busy machine a test may take many seconds


@pytest.fixture
def worker(shared: Cluster, job: str) -> Iterator[RawWorker]:
    """The one worker of a job with one bucket, which shard 0 holds."""
    with joined(shared.address, vector_job(job, "async", CELLS, 1)) as [found]:
        yield found


def address_of(cluster: Cluster, worker: RawWorker) -> str:
    """Of the shard that has the worker's bucket."""
    return cluster.servers[worker.shard_of[0]].address


@pytest.fixture
def client(shared: Cluster, worker: RawWorker) -> Iterator[FrameClient]:
    found = ticket(address_of(shared, worker), worker)
    with FrameClient(found.port, found.ticket) as client:
        assert client.is_open()
        yield client


def gradient(of: RawWorker, clock: int, **more: Any) -> data_pb2.PushRequest:
    return of.message(0, clock, torch.ones(CELLS).numpy().tobytes(), **more)


def pull(worker: RawWorker, clock: int, **who: Any) -> Parts:
    request = data_pb2.PullRequest(worker=worker.identity(**who), clock=clock, buckets=[0])
    return Parts(request.SerializeToString())


# -- what it is for --------------------------------------------------------------------------------------------------


def test_pushes_count_once_and_weights_come_back(worker: RawWorker, client: FrameClient) -> None:
    for clock in (1, 2):
        [(staged, _)] = client.ask(Kind.PUSH, push_parts(gradient(worker, clock)))
        assert staged.duplicate_count == 0
        assert client.ask(Kind.PULL, pull(worker, clock))
    [(again, _)] = client.ask(Kind.PUSH, push_parts(gradient(worker, 2)))
    assert again.duplicate_count == 1
    [(response, payload)] = client.ask(Kind.PULL, pull(worker, 2))
    assert [bucket.bucket for bucket in response.buckets] == [0]
    assert torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist() == [-2.0] * CELLS


def test_calls_run_side_by_side(worker: RawWorker, client: FrameClient) -> None:
    """A pull of a clock that has not come waits; meanwhile pushes go on."""
    waiting = client.send(Kind.PULL, pull(worker, 1))
    pushed = client.send(Kind.PUSH, push_parts(gradient(worker, 1)))
    heard = [client.read()[0] for _ in range(3)]
    assert {(header.call, header.kind) for header in heard} == {
        (pushed, Kind.LAST),
        (waiting, Kind.ANSWER),
        (waiting, Kind.END),
    }


def test_a_notice_that_is_the_last_answer_ends_its_call_in_one_frame(worker: RawWorker, client: FrameClient) -> None:
    request = data_pb2.PullRequest(worker=worker.identity(), clock=0, times_wanted=True)
    client.send(Kind.PULL, Parts(request.SerializeToString()))
    assert client.read()[0].kind is Kind.LAST
    assert client.ask(Kind.PULL, pull(worker, 0)), "and the connection goes on"


def test_a_call_that_is_cancelled_waits_no_more(shared: Cluster, worker: RawWorker, client: FrameClient) -> None:
    call = client.send(Kind.PULL, pull(worker, 9))
    held = shared.shards[worker.shard_of[0]].jobs()[worker.spec.name].buckets[0]
    until(lambda: held.waiters, "the pull")
    client.send(Kind.CANCEL, Parts(b""), call)
    until(lambda: not held.waiters, "its end")


def test_errors_are_those_of_grpc(worker: RawWorker, client: FrameClient) -> None:
    bad: list[data_pb2.PushRequest] = [
        gradient(worker, 5),
        worker.message(0, 1, b"short"),
        gradient(worker, 1, kind=data_pb2.PUSH_KIND_COMMIT),
        gradient(worker, 1, absent_slices=[7]),
        worker.message(77, 1),
        gradient(worker, 1, worker=worker.identity(run="7")),
        gradient(worker, 1, worker=worker.identity(lease_key=b"another")),
    ]
    expected = [OutOfOrder, InvalidRequest, InvalidRequest, InvalidRequest, NotFound, (NotFound, RunEnded), Forbidden]
    for message, kind in zip(bad, expected, strict=True):
        with pytest.raises(kind) as by_grpc:  # type: ignore[call-overload]
            worker.send(message, worker.shard_of[0])
        with pytest.raises(kind) as by_frames:  # type: ignore[call-overload]
            client.ask(Kind.PUSH, push_parts(message))
        assert str(by_frames.value) == str(by_grpc.value)
    assert client.ask(Kind.PUSH, push_parts(gradient(worker, 1)))


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_a_ticket_is_good_once(shared: Cluster, worker: RawWorker) -> None:
    found = ticket(address_of(shared, worker), worker)
    with FrameClient(found.port, found.ticket) as first, FrameClient(found.port, found.ticket) as second:
        assert sorted([first.is_open(), second.is_open()]) == [False, True]


def test_only_a_ticket_opens(shared: Cluster, worker: RawWorker) -> None:
    port = ticket(address_of(shared, worker), worker).port
    begun: list[bytes] = [
        write_header(0, Kind.OPEN, TICKET_BYTES) + bytes(TICKET_BYTES),
        write_header(0, Kind.OPEN, 5) + b"short",
        write_header(0, Kind.OPEN, TICKET_BYTES + 1) + bytes(TICKET_BYTES + 1),
        write_header(1, Kind.PUSH, TICKET_BYTES) + bytes(TICKET_BYTES),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
        b"\xff" * 100,
    ]
    for content in begun:
        with FrameClient(port) as stranger:
            stranger.socket.sendall(content)
            assert stranger.is_closed()


def test_tickets_are_for_live_workers_that_prove_who_they_are(shared: Cluster, worker: RawWorker) -> None:
    address = address_of(shared, worker)
    for other, kind in (
        ({"lease_key": b"another"}, Forbidden),
        ({"rank": 3}, UnknownWorker),
        ({"incarnation": worker.incarnation - 1}, (Fenced, UnknownWorker)),
        ({"job": "nobody's"}, NotFound),
    ):
        with pytest.raises(kind):  # type: ignore[call-overload]
            ticket(address, worker, **other)


def test_a_ticket_is_good_for_a_short_time_and_so_are_the_last_few_of_a_worker() -> None:
    now = 0.0
    tickets = Tickets(lambda: now)

    def opener(rank: int) -> Opener:
        return Opener(Identity("job", rank, 1), "ipv4:1.2.3.4:5", (), {})

    first, other = tickets.issue(opener(0)), tickets.issue(opener(1))
    second = tickets.issue(opener(0))
    assert tickets.redeem(second) == opener(0)
    assert tickets.redeem(second) is None
    assert tickets.redeem(first) is None, "one connection is all that a worker needs"
    repeated = [tickets.issue(opener(0)) for _ in range(5)]
    assert tickets.redeem(repeated[0]) is None, "of many only the last are good"
    assert tickets.redeem(repeated[1]) == opener(0), "the answers of a call that was made twice come in any order"
    now = TICKET_SECONDS
    assert tickets.redeem(other) is None
    many = [tickets.issue(opener(rank)) for rank in range(5000)]
    assert tickets.redeem(many[0]) is None, "of too many the oldest are good no longer"
    assert tickets.redeem(many[-1]) == opener(4999)


# -- the end of a place ----------------------------------------------------------------------------------------------


def test_a_connection_ends_when_its_worker_leaves(worker: RawWorker, client: FrameClient) -> None:
    worker.leave()
    assert client.is_closed()


def test_a_connection_ends_when_its_place_is_taken_again(worker: RawWorker, client: FrameClient) -> None:
    worker.join()
    assert client.is_closed()


def test_a_later_connection_of_a_worker_ends_the_one_before(
    shared: Cluster, worker: RawWorker, client: FrameClient
) -> None:
    found = ticket(address_of(shared, worker), worker)
    with FrameClient(found.port, found.ticket) as later:
        assert later.is_open()
        assert client.is_closed()
        assert later.ask(Kind.PUSH, push_parts(gradient(worker, 1)))


def test_a_ticket_of_a_place_that_is_lost_opens_nothing(shared: Cluster, worker: RawWorker) -> None:
    found = ticket(address_of(shared, worker), worker)
    worker.join()
    with FrameClient(found.port, found.ticket) as late:
        assert late.is_closed()


def test_connections_end_with_their_job(shared: Cluster, worker: RawWorker, client: FrameClient) -> None:
    requests.end_job(shared.address, worker.spec.name)
    assert client.is_closed()


# -- exchanges that differ in their clock and their hyper-parameters alone -------------------------------------------


def exchange(worker: RawWorker, clock: int, rate: float = 1.0, **who: Any) -> Parts:
    """Of a step without a gradient, and the weights."""
    left_out = data_pb2.BucketPush(kind=data_pb2.PUSH_KIND_SKIP)
    groups = group_update_messages({0: {"lr": rate}})
    push = data_pb2.PushHeader(worker=worker.identity(**who), clock=clock, buckets=[left_out], groups=groups)
    return Parts(data_pb2.ExchangeRequest(push=push, buckets=[0]).SerializeToString())


def test_exchanges_of_one_step_after_the_other_each_count_once(worker: RawWorker, client: FrameClient) -> None:
    for clock in (1, 2, 3, 3, 4):
        [(answer, _)] = client.ask(Kind.EXCHANGE, exchange(worker, clock))
        assert answer.buckets[0].version == clock
    with pytest.raises(OutOfOrder):
        client.ask(Kind.EXCHANGE, exchange(worker, 6))
    for rate in (1.0, 0.5):
        with pytest.raises(Forbidden, match="this data connection is that of worker 0"):
            client.ask(Kind.EXCHANGE, exchange(worker, 5, rate, rank=1))
        with pytest.raises(Forbidden, match="key"):
            client.ask(Kind.EXCHANGE, exchange(worker, 5, rate, lease_key=b"another"))
    assert client.ask(Kind.EXCHANGE, exchange(worker, 5, 0.5))


def test_an_exchange_with_its_gradient_in_it_is_carried_out_and_answered(
    worker: RawWorker, client: FrameClient
) -> None:
    for clock in (1, 2, 3):
        pushed = gradient(worker, clock)
        request = data_pb2.ExchangeRequest(push=pushed.header, buckets=[0])
        [(answer, payload)] = client.ask(Kind.EXCHANGE, message_parts(request, pushed.payload))
        assert answer.buckets[0].version == clock
        assert torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist() == [-clock] * CELLS


def busy(*_: object) -> None:
    raise Backlogged("the push before is not applied yet")


def test_an_exchange_that_was_refused_is_still_the_next(
    worker: RawWorker, client: FrameClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sends it again, with the same bytes."""
    clocks = clocks_read(monkeypatch)
    assert client.ask(Kind.EXCHANGE, exchange(worker, 1))
    for clock in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Shard, "exchange", busy)
            with pytest.raises(Backlogged):
                client.ask(Kind.EXCHANGE, exchange(worker, clock))
        assert client.ask(Kind.EXCHANGE, exchange(worker, clock))
    assert clocks == [1]


def test_an_exchange_with_other_hyper_parameters_is_made_with_them(
    worker: RawWorker, client: FrameClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, clocks = 0.0, clocks_read(monkeypatch)
    for clock, rate in enumerate((1.0, 1.0, 0.5, 0.5, 0.5, 1.0), 1):
        groups = group_update_messages({0: {"lr": rate}})
        client.ask(Kind.PUSH, push_parts(gradient(worker, clock, kind=data_pb2.PUSH_KIND_DRAFT)))
        commit = data_pb2.BucketPush(kind=data_pb2.PUSH_KIND_COMMIT)
        push = data_pb2.PushHeader(worker=worker.identity(), clock=clock, buckets=[commit], groups=groups)
        request = data_pb2.ExchangeRequest(push=push, buckets=[0])
        [(_, payload)] = client.ask(Kind.EXCHANGE, Parts(request.SerializeToString()))
        expected -= rate
        assert torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist() == [expected] * CELLS
    assert clocks == [1]


def test_nothing_is_kept_of_an_exchange_once_its_connection_has_ended(
    shared: Cluster, worker: RawWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ServerConnection] = []

    def connection(*arguments: Any) -> ServerConnection:
        made.append(ServerConnection(*arguments))
        return made[-1]

    monkeypatch.setattr(listener, "ServerConnection", connection)
    found = ticket(address_of(shared, worker), worker)
    with FrameClient(found.port, found.ticket) as client:
        assert client.is_open()
        assert client.ask(Kind.EXCHANGE, exchange(worker, 1))
        [opened] = made
        until(lambda: opened.kept, "the exchange")
    until(lambda: not opened.kept, "the end of the connection")


@pytest.mark.parametrize("rate", [1.0, 0.5], ids=["the same rate", "another rate"])
@pytest.mark.parametrize("known", [True, False], ids=["for another job", "ended"])
def test_an_exchange_like_the_last_is_refused_once_its_token_does_not_permit_it(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, rate: float
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    token, roles = "a-token-of-some-length", tmp_path / "roles"
    access, own = Access(token=lambda: token), "cluster another-token-of-some-length"

    def write(line: str) -> None:
        roles.write_text(f"{line.format(token=token)}\n{own}\n")
        roles.chmod(0o600)

    write("worker:job {token}")
    cluster = make_cluster(shards=1, tokens=roles, lease=LEASE)
    with joined(cluster.address, vector_job("job", "async", CELLS, 1), access) as [worker]:
        found = ticket(cluster.address, worker, access)
        with FrameClient(found.port, found.ticket) as client:
            assert client.is_open()
            for clock in (1, 2, 3):
                assert client.ask(Kind.EXCHANGE, exchange(worker, clock))
            write("worker:other {token}" if known else "worker:job {token} until=2020-01-01")
            if known:
                with pytest.raises(Forbidden):
                    client.ask(Kind.EXCHANGE, exchange(worker, 4, rate))
            else:
                client.send(Kind.EXCHANGE, exchange(worker, 4, rate))
                assert client.is_closed(), "its worker comes again with a token of now"
            assert cluster.shards[0].jobs()["job"].buckets[0].rule.version == 3, "of the refused one nothing counts"


# -- hostile frames --------------------------------------------------------------------------------------------------

HEADER = struct.Struct("<IQIB3x")


@pytest.mark.parametrize(
    "content",
    [
        HEADER.pack(1, 0, 0, 0),
        HEADER.pack(1, 0, 0, 99),
        HEADER.pack(1, 0, 0, Kind.OPENED),
        HEADER.pack(1, TICKET_BYTES, TICKET_BYTES, Kind.OPEN) + bytes(TICKET_BYTES),
        HEADER.pack(1, 2**63, 10, Kind.PUSH),
        HEADER.pack(1, 2**31, 2**31 - 1, Kind.PUSH),
        HEADER.pack(1, 10, 11, Kind.PUSH),
        HEADER.pack(1, 40 * 2**20, 40 * 2**20, Kind.PUSH),
    ],
    ids=["no kind", "unknown kind", "the shard's kind", "opened twice", "huge", "huge head", "head beyond", "all head"],
)
def test_what_is_no_frame_ends_the_connection_and_changes_nothing(
    shared: Cluster, worker: RawWorker, client: FrameClient, content: bytes
) -> None:
    before = shared.state(worker.spec.name)
    client.socket.sendall(content)
    assert client.is_closed()
    assert shared.state(worker.spec.name) == before
    assert worker.send(gradient(worker, 1)), "the worker is live, by gRPC"


def test_a_call_number_that_is_in_use_ends_the_connection(worker: RawWorker, client: FrameClient) -> None:
    client.send(Kind.PULL, pull(worker, 9), call=5)
    client.send(Kind.PULL, pull(worker, 9), call=5)
    assert client.is_closed()


def test_requests_of_other_workers_are_refused(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "async", CELLS, 2)) as [mine, other], ExitStack() as stack:
        found = ticket(address_of(shared, mine), mine)
        client = stack.enter_context(FrameClient(found.port, found.ticket))
        assert client.is_open()
        before = shared.state(job)
        for kind, request in (
            (Kind.PUSH, push_parts(gradient(other, 1))),
            (Kind.PULL, pull(other, 0)),
            (Kind.PULL, pull(mine, 0, incarnation=0)),
        ):
            with pytest.raises(Forbidden, match="this data connection is that of worker 0"):
                client.ask(kind, request)
        assert shared.state(job) == before


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Kind.PUSH, Parts(b"\x0a\x02\x0a\x05")),
        (Kind.PUSH, Parts(b"no payload is announced here", b"and yet one comes")),
        (Kind.PULL, Parts(b"\x7a\x03", b"abc")),
        (Kind.EXCHANGE, Parts(b"\xff\xff\xff")),
        (Kind.PULL_STATE, Parts(b"\x0a\xff")),
    ],
)
def test_what_is_no_request_gets_an_error_and_the_connection_stays(
    worker: RawWorker, client: FrameClient, kind: Kind, parts: Parts
) -> None:
    with pytest.raises(PSError):
        client.ask(kind, parts)
    assert client.ask(Kind.PUSH, push_parts(gradient(worker, 1)))


# -- slow peers ------------------------------------------------------------------------------------------------------


class Shortened:
    """A time limit of slow peers, which is short for the calls that begin inside a `with`. All others have their time,
    also where this machine is busy.

    begun: how many calls these are
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, uploads: float = 30.0, stalls: float = 30.0) -> None:
        self.begun = 0
        self._monkeypatch, self._uploads, self._stalls = monkeypatch, uploads, stalls

    def __enter__(self) -> Shortened:
        self._patch = self._monkeypatch.context()
        within, short = CallLimits._within, {LIMITS.upload_seconds: self._uploads, LIMITS.stall_seconds: self._stalls}

        def begins(limits: CallLimits, seconds: float, call: Any) -> AbstractContextManager[None]:
            self.begun += 1
            return within(limits, short[seconds], call)

        self._patch.__enter__().setattr(CallLimits, "_within", begins)
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)


def test_a_request_that_is_not_sent_to_its_end_is_cut_off(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=1, limits=LIMITS, lease=LEASE)
    with joined(cluster.address, vector_job("job", "async", CELLS, 1)) as [worker]:
        found = ticket(cluster.address, worker)
        with FrameClient(found.port, found.ticket) as client:
            assert client.is_open()
            with Shortened(monkeypatch, uploads=0.3):
                client.socket.sendall(write_header(1, Kind.PUSH, 100, 4 * CELLS) + bytes(50))
                assert client.is_closed()
        worker.step(torch.ones(CELLS))
        assert worker.pull().tolist() == [-1.0] * CELLS


def test_a_worker_that_does_not_read_is_cut_off_and_holds_up_nobody(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bucket is stepped by others meanwhile: what the kernel does not take is copied, not kept from them."""
    cells = 4 * 2**20
    cluster = make_cluster(shards=1, limits=LIMITS, lease=LEASE)
    job = vector_job("job", "async", cells, 2)
    job = job.__class__(**{**job.__dict__, "bucket_bytes": 4 * cells})
    with joined(cluster.address, job) as [slow, quick]:
        found = ticket(cluster.address, slow)
        with FrameClient(found.port, found.ticket) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            assert client.is_open()
            with Shortened(monkeypatch, stalls=1.0) as shortened:
                client.send(Kind.PULL, pull(slow, 0))
                until(lambda: shortened.begun == 2, "the answer, after the request")
            for _ in range(2):
                quick.step(torch.ones(cells))
            assert quick.pull()[0] == -2.0
            shard = cluster.shards[0]
            until(lambda: not shard.jobs()["job"].of_workers.connected, "the end of the connection")


def test_those_who_say_nothing_take_no_place_from_a_worker(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=1, lease=LEASE)
    with joined(cluster.address, vector_job("job", "async", CELLS, 1)) as [worker], ExitStack() as stack:
        port = ticket(cluster.address, worker).port
        silent = [stack.enter_context(FrameClient(port)) for _ in range(300)]
        found = ticket(cluster.address, worker)
        client = stack.enter_context(FrameClient(found.port, found.ticket))
        assert client.is_open()
        assert client.ask(Kind.PUSH, push_parts(gradient(worker, 1)))
        assert silent[0].is_closed(), "the first made room"


def test_a_server_that_stops_ends_connections_in_the_middle_of_calls(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=1, lease=LEASE)
    with joined(cluster.address, vector_job("job", "async", CELLS, 1)) as [worker]:
        found = ticket(cluster.address, worker)
        with FrameClient(found.port, found.ticket) as client:
            assert client.is_open()
            client.send(Kind.PULL, pull(worker, 9))
            stopping = threading.Thread(target=cluster.stop)
            stopping.start()
            assert client.is_closed()
            stopping.join()


def test_a_refused_request_that_does_not_come_ends_its_connection(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is passed over as it comes: a worker that kept it back would have the connection's thread for good."""
    cluster = make_cluster(shards=1, limits=LIMITS, lease=LEASE)
    with joined(cluster.address, vector_job("job", "async", CELLS, 1)) as [worker]:
        found = ticket(address_of(cluster, worker), worker)
        with FrameClient(found.port, found.ticket) as client:
            assert client.is_open()
            with Shortened(monkeypatch, uploads=0.3), monkeypatch.context() as patch:
                patch.setattr(CallsInFlight, "begin", busy)
                push = push_parts(gradient(worker, 1))
                client.socket.sendall(write_header(99, Kind.PUSH, len(push.head), CELLS * 4))
                with pytest.raises(Backlogged):
                    client.answers(Kind.PUSH)
                assert client.is_closed()
