"""A call on a connection that was closed meanwhile fails as any call of this project fails: gRPC raises a bare
ValueError there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ps_protocol.errors import PSError, TryLater, UnknownWorker
from ps_protocol.framing import Parts
from ps_protocol.identity import Identity
from ps_runtime.channel import ChannelClosed, open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import error_from
from ps_runtime.retry import Peer
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.shard_client import ShardClient
from ps_worker import Session
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.cluster.participation import CLOSED
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job

NOWHERE = "127.0.0.1:1"
TOKEN = Access(token=lambda: "a-token-of-some-length")
METHOD = "/ps.data.v1.DataService/Push"


@pytest.mark.parametrize("access", [PLAINTEXT, TOKEN], ids=["plain", "token"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
@pytest.mark.parametrize("made", ["before", "after"])
def test_a_call_on_a_closed_channel_is_a_call_that_failed(access: Access, kind: str, made: str) -> None:
    channel = open_channel(NOWHERE, access)
    method = getattr(channel, kind)(METHOD)
    channel.close()
    if made == "after":
        method = getattr(channel, kind)(METHOD)
    request = iter([b""]) if kind.startswith("stream") else b""
    with pytest.raises(ChannelClosed) as raised:
        method(request, timeout=5)
    error = error_from(raised.value, "shard 0")
    assert isinstance(error, TryLater)
    assert str(error) == "shard 0 does not answer (the connection is closed)"


@pytest.mark.parametrize("waits", [True, False])
def test_a_channel_that_is_closed_as_the_call_begins_is_no_bare_value_error(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    channel = open_channel(NOWHERE)
    method = channel.unary_unary(METHOD)
    signed = channel.metadata

    def closes() -> None:  # between the look whether it is open and the call
        channel.close()
        signed()

    monkeypatch.setattr(channel, "metadata", closes)
    with pytest.raises(ChannelClosed):
        (method if waits else method.future)(b"", timeout=5)


def each_call(calls: ShardCalls) -> list[Callable[[], object]]:
    return [
        lambda: calls.unary("Push", Parts(b"")),
        lambda: calls.try_once("Push", Parts(b"")),
        lambda: calls.first_of("Pull", b"", 1.0),
        lambda: calls.stream("Pull", b"", lambda *_: None),
        lambda: calls.open_data_connection(b"", True, None),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("number", range(5))
def test_a_workers_call_to_a_shard_after_close_is_an_error_of_the_project(number: int) -> None:
    calls = ShardCalls(0, NOWHERE, 5.0)
    calls.close()
    with pytest.raises(PSError):
        each_call(calls)[number]()


def test_a_workers_call_to_the_coordinator_after_close_is_an_error_of_the_project(shared: Cluster, job: str) -> None:
    client = CoordinatorClient(shared.address, 5.0)
    spec = vector_job(job, "async", 16, 0)
    with RawWorker(shared.address, spec, 0) as worker:
        identity = Identity(job, 0, worker.incarnation, worker.lease_key)
        client.close()
        for call in (
            lambda: client.register(spec),
            lambda: client.heartbeat(identity, 0, 1.0),
            lambda: client.save_state(identity, 0, b""),
            lambda: client.tell_script(identity, 1, None),
            lambda: client.exchange(identity, 1, 0, b"", lambda _: True),
        ):
            with pytest.raises(PSError):
                call()
        client.leave(identity)
        assert list(client.watch(job)) == []


def test_calls_of_servers_and_operators_after_close_are_errors_of_the_project() -> None:
    shard, operator = ShardClient(0, NOWHERE), OperatorClient(Peer("coordinator", NOWHERE))
    for each in (shard, operator):
        each.close()
    watched = operator.watch(1.0)
    for call in (shard.statistics, lambda: shard.drop_job("job", "run"), operator.status, lambda: next(watched)):
        with pytest.raises(TryLater):
            call()


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_step_that_waits_while_its_session_is_closed_says_so(shared: Cluster, job: str, transport: str) -> None:
    raised: list[BaseException] = []
    sessions: list[Session] = []

    def train(rank: int) -> None:
        session = shared.connect("sync", rank, 2, job=job, transport=transport)
        sessions.append(session)
        model = nn.Linear(4, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if rank == 1:
            return
        model(torch.ones(4)).backward()
        try:
            optimizer.step()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    until(lambda: 0 in shared.waits(job), "worker 0 waits for worker 1")
    for session in sessions:
        if session.rank == 0:
            session.close()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    assert [type(error) for error in raised] == [UnknownWorker]
    assert str(raised[0]) == CLOSED
