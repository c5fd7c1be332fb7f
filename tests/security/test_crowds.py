"""Many workers behind one address: they share max-calls, and wait for each other there; none is ended by it."""

from __future__ import annotations

import grpc
import pytest
import torch

from ps_protocol.errors import Backlogged
from ps_protocol.v1 import data_pb2, membership_pb2
from ps_protocol.v1.data_pb2_grpc import DataServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.grpc_status import error_from
from ps_server.core.limits import Limits
from ps_server.rpc import call_limits
from ps_server.rpc.call_limits import BUSY_SECONDS, WAITING_FOR_EACH
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.raw_worker import joined, vector_job

WORKERS, STEPS = 6, 4


@pytest.mark.parametrize("transport", ["grpc", "auto"])
def test_workers_of_one_address_join_and_train_beyond_the_limit_of_its_calls(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "BUSY_SECONDS", 0.05)
    cluster = Cluster(shards=2, limits=Limits(calls=WORKERS // 2))

    def train(rank: int) -> list[float]:
        with cluster.connect("sync", rank, WORKERS, transport=transport) as session:
            model = torch.nn.Linear(1, 1, bias=False)
            with torch.no_grad():
                model.weight.zero_()
            module, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for _ in range(STEPS):
                module.weight.grad = torch.ones_like(module.weight)
                optimizer.step()
            return [float(value) for value in module.weight.detach().flatten()]

    try:
        assert in_parallel(WORKERS, train) == [[-float(STEPS)]] * WORKERS
    finally:
        cluster.stop()


def test_a_call_past_the_limit_is_told_when_to_come_back_and_heartbeats_and_watches_count_apart() -> None:
    cluster = Cluster(shards=1, limits=Limits(calls=4), lease=120.0)  # the worker sends one heartbeat
    try:
        with (
            joined(cluster.address, vector_job("job", "async", 16, 1)) as [worker],
            open_channel(cluster.address) as channel,
        ):
            most = 4 + 4 * WAITING_FOR_EACH
            pulls = []
            for count in range(1, most + 1):  # one after the other: of a burst, some would be told to come back
                pulls.append(worker.ask(10 + count, [0]))
                until(lambda count=count: cluster.servers[0].calls_in_flight() >= count, "a pull")  # type: ignore[misc]
            request = data_pb2.PullRequest(worker=worker.identity(), clock=0, buckets=[0])
            with pytest.raises(grpc.RpcError) as refused:
                next(DataServiceStub(channel).Pull(request, timeout=20))
            error = error_from(refused.value, "shard")
            assert (type(error), error.retry_after) == (Backlogged, BUSY_SECONDS)
            assert "that is the limit max-calls" in str(error)
            worker.heartbeat()
            watching = [
                MembershipServiceStub(channel).Watch(membership_pb2.WatchRequest(job="job"), timeout=60)
                for _ in range(10)
            ]
            assert all(list(next(stream).ranks) == [0] for stream in watching)
            for call in (*pulls, *watching):
                call.cancel()
    finally:
        cluster.stop()
