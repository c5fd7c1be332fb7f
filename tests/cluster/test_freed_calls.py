"""A call that is over is freed at once, also after an error: none waits for the collector of cycles.

gRPC counts calls that are over and not freed, and refuses new ones on a connection that has many of them. A call keeps
its request, too, which may be megabytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import PSError, TryLater
from ps_protocol.v1 import jobs_pb2, membership_pb2
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_server.coordinator.coalesced import Together
from ps_server.coordinator.recovery import Rollback
from ps_server.coordinator.timing import Timing
from ps_server.rpc.call_limits import STREAMS_OF_A_CONNECTION
from ps_server.rpc.streams import GrpcCall
from ps_server.shard.pulls import Pull
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.unfinished import Unfinished

CELLS = 64
CALLS = 8


def in_memory(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


@contextmanager
def all_freed(kind: type) -> Iterator[None]:
    """Requires that no more objects of a type are in memory after the block than before it, without the collector."""
    gc.collect()
    before = in_memory(kind)
    gc.disable()
    try:
        yield
        until(lambda: in_memory(kind) <= before, f"the end of every {kind.__name__}")
    finally:
        gc.enable()


def test_a_worker_that_asks_again_during_a_rollback_is_told_so_every_time(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(shards=1, checkpoint_dir=tmp_path)
    recovery = cluster.coordinator._recovery
    assert recovery is not None
    recovery._under_way["job"] = Rollback("job", f"{1:016x}", "000001", 1)
    with open_channel(cluster.address) as channel, all_freed(GrpcCall):
        spec = job_spec_message(vector_job("job", "async", CELLS, 1))
        JobServiceStub(channel).RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec))
        members = MembershipServiceStub(channel)
        for number in range(2 * STREAMS_OF_A_CONNECTION):
            with pytest.raises(grpc.RpcError, match="is being rolled back to checkpoint 000001"):
                members.Join(membership_pb2.JoinRequest(job="job", host="crowd", pid=number, request_id=number))


def test_calls_for_which_a_shard_was_asked_in_vain_are_freed(make_cluster: Callable[..., Cluster]) -> None:
    """The errors of these calls do not come from the method alone: one comes from a thread, one is for several
    callers, and one is swallowed."""
    cluster = make_cluster(shards=2, lease=600.0, timing=Timing(shard_lost=600.0))
    spec = vector_job("job", "async", CELLS, 0)
    with RawWorker(cluster.address, spec, 0) as worker:
        worker.initialise()
        leased: list[Any] = []
        while found := worker.lease_batches(leased=leased).ranges:
            leased.extend(found)
        cluster.servers[1].stop()
        ask = membership_pb2.JoinRequest(job="job", rank=1, host="crowd", pid=1, request_id=1)
        with all_freed(GrpcCall):
            for _ in range(CALLS):
                worker.lease_batches(leased=leased)  # no other is free, so shards are asked for what is committed
                with pytest.raises(grpc.RpcError, match=r"shard 1 at .* does not answer"):
                    worker.members.Join(ask, timeout=30)


def test_requests_that_are_broken_off_are_freed(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=1)
    path = "/ps_protocol.v1.MembershipService/Heartbeat"
    with all_freed(GrpcCall), Unfinished(cluster.address, (path,), 100, calls=4, cancels=True) as unfinished:
        until(lambda: unfinished.begun >= CALLS * 4, "calls that are cancelled")


def test_a_pull_of_a_worker_that_lost_its_place_is_freed(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=1, lease=600.0)
    spec = vector_job("job", "sync", CELLS, 2)
    with RawWorker(cluster.address, spec, 0) as first, RawWorker(cluster.address, spec, 1) as second:
        first.initialise()
        with ThreadPoolExecutor() as pool, all_freed(Pull):
            first.send(first.message(0, 1))
            waits = pool.submit(lambda: list(first.answers(first.ask(1, [0]))))
            until(lambda: cluster.shards[0].jobs()["job"].units[0].waiters, "the pull")
            cluster.lose_place(0, "job")
            assert isinstance(waits.exception(30), PSError)
            del waits
        assert second.incarnation


def test_an_error_of_a_turn_refers_to_none_of_its_callers() -> None:
    def work(wanted: object) -> list[int]:
        error = TryLater("no shard answers")
        raise error

    together = Together[object, int](work, 1)  # type: ignore[arg-type]
    with all_freed(Request):
        for _ in range(CALLS):
            with pytest.raises(TryLater, match="no shard answers"):
                together.do(Request())


class Request:
    """What a caller wants."""
