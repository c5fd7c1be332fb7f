"""Many workers at once over sockets: each gets its rank once, and all hear of all; shards of any version count them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import Fenced
from ps_protocol.v1 import jobs_pb2, membership_pb2
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_server.core.membership import Arrival, ShardProgress
from ps_server.rpc.shard_client import ShardClient
from ps_server.rpc.shard_service import ShardService
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.raw_worker import vector_job

CELLS = 64
WORKERS = 40  # on one connection, which may have STREAMS_OF_A_CONNECTION calls at a time; on another one they watch
RUN = f"{1:016x}"


class Watching:
    """A thread that reads the rosters of a job. last: the live ranks of the last one, and whether training has begun"""

    def __init__(self, members: MembershipServiceStub) -> None:
        self.last: tuple[list[int], bool] = ([], False)
        self._members = members
        self._over = threading.Event()
        self._stream = self._watched()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _watched(self) -> Any:
        return self._members.Watch(membership_pb2.WatchRequest(job="job"))

    def _read(self) -> None:
        while not self._over.is_set():
            # One whose request took too long, on a busy machine, say, is refused: it watches anew.
            with contextlib.suppress(grpc.RpcError):
                for roster in self._stream:
                    self.last = list(roster.ranks), roster.started
            self._stream = self._watched()
            if self._over.is_set():
                self._stream.cancel()

    def stop(self) -> None:
        self._over.set()
        self._stream.cancel()
        self._thread.join()


def test_workers_that_join_at_once_get_each_rank_once_hear_of_all_and_go_at_once(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(shards=2, lease=600.0)  # nobody sends a heartbeat
    spec = vector_job("job", "async", CELLS, WORKERS)
    with open_channel(cluster.address) as channel, open_channel(cluster.address) as other:
        JobServiceStub(channel).RegisterJob(jobs_pb2.RegisterJobRequest(spec=job_spec_message(spec)))
        members, watched = MembershipServiceStub(channel), MembershipServiceStub(other)
        at_once, watching = threading.Barrier(WORKERS), list[Watching]()

        def ask(number: int) -> membership_pb2.JoinRequest:
            return membership_pb2.JoinRequest(job="job", host="crowd", pid=number, request_id=number)

        def join(number: int) -> membership_pb2.JoinResponse:
            at_once.wait()
            place = members.Join(ask(number + 1))
            watching.append(Watching(watched))
            return place  # type: ignore[no-any-return]

        places = in_parallel(WORKERS, join)
        assert sorted(place.worker.rank for place in places) == list(range(WORKERS))
        assert len({place.worker.incarnation for place in places}) == WORKERS
        until(lambda: all(each.last == (list(range(WORKERS)), True) for each in watching))
        leaving = [place for place in places if place.worker.rank >= WORKERS // 2]

        def leave(number: int) -> None:
            members.Leave(membership_pb2.LeaveRequest(worker=leaving[number].worker))

        in_parallel(len(leaving), leave)
        stay = list(range(WORKERS // 2))
        until(lambda: all(each.last == (stay, True) for each in watching))
        until(lambda: all(sorted(shard.jobs()["job"].partition.roster) == stay for shard in cluster.shards))
        for each in watching:
            each.stop()


def without(*names: str) -> Callable[[ShardService, grpc.Server], None]:
    """Returns how a shard's service is registered in a version that does not know these methods."""
    register = ShardService.register

    def registered(service: ShardService, server: grpc.Server) -> None:
        def add(name: str, handlers: dict[str, Any]) -> None:
            known = {method: handler for method, handler in handlers.items() if method not in names}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, known),))

        generic = SimpleNamespace(add_generic_rpc_handlers=lambda _: None, add_registered_method_handlers=add)
        register(service, generic)  # type: ignore[arg-type]

    return registered


@pytest.mark.parametrize("unknown", [(), ("AddWorkers", "RemoveWorkers")], ids=["of this version", "of an earlier one"])
def test_a_shard_counts_and_removes_workers_whether_or_not_it_takes_several_in_one_call(
    make_cluster: Callable[..., Cluster], unknown: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardService, "register", without(*unknown))
    cluster = make_cluster(shards=1)
    client, [shard] = ShardClient(0, cluster.address), cluster.shards
    client.create_job(vector_job("job", "async", CELLS, 0), [0, 1, 2, 3], RUN, 1)
    client.remove_workers("job", [(1, 5)], RUN)
    arrivals = [Arrival(rank, rank + 1, b"k" * 16) for rank in range(4)]
    for _ in range(2):  # the same twice changes nothing
        added = client.add_workers("job", arrivals, RUN)
        assert [type(each) for each in added] == [ShardProgress, Fenced, ShardProgress, ShardProgress]
        assert "was retired" in str(added[1])
    assert client.add_workers("job", [Arrival(2, 3, b"k" * 16, 7)], RUN) == [added[2]]
    assert sorted(shard.jobs()["job"].partition.roster) == [0, 2, 3]
    client.remove_workers("job", [(0, 1), (2, 3)], RUN)
    assert sorted(shard.jobs()["job"].partition.roster) == [3]
    client.close()
