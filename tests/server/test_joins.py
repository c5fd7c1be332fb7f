"""Workers that join at the same time: they go together, and each gets its own place or its own refusal."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import InvalidRequest, PSError, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_server.coordinator.coalesced import Together
from ps_server.coordinator.job_workers import Roster
from ps_server.coordinator.timing import Clock
from ps_server.coordinator.watchers import PAUSE_A_WATCHER, Watchers
from ps_server.core.membership import WORKERS_A_CALL, JoinedWorker
from ps_server.rpc.shard_service import ShardService
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from tests.tools.cluster import until
from tests.tools.one_process import OneProcess
from tests.tools.raw_worker import vector_job

CELLS = 64
SECONDS = 20.0


# -- turns -------------------------------------------------------------------------------------------------------------


class Turns:
    """Work that doubles a number and refuses 7; each turn waits until it may go on."""

    def __init__(self, most: int = 100) -> None:
        self.taken: list[list[int]] = []
        self.goes_on = threading.Event()
        self.fails: Exception | None = None
        self.together: Together[int, int] = Together(self._work, most)

    def _work(self, wanted: Sequence[int]) -> list[int | BaseException]:
        self.taken.append(list(wanted))
        assert self.goes_on.wait(SECONDS)
        if self.fails is not None:
            raise self.fails
        return [TryLater("not 7") if each == 7 else 2 * each for each in wanted]

    def waiting(self) -> int:
        return len(self.together._waiting)


def all_during_the_first(turns: Turns, pool: ThreadPoolExecutor, wanted: Sequence[int]) -> list[Future[int]]:
    """Has the first begin a turn, and all others come while it lasts."""
    futures = [pool.submit(turns.together.do, wanted[0])]
    until(lambda: len(turns.taken) == 1)
    futures += [pool.submit(turns.together.do, each) for each in wanted[1:]]
    until(lambda: turns.waiting() == len(wanted) - 1)
    turns.goes_on.set()
    return futures


def test_those_that_come_during_a_turn_share_the_next_and_each_gets_its_own_result_or_error() -> None:
    turns = Turns()
    with ThreadPoolExecutor(10) as pool:
        futures = all_during_the_first(turns, pool, range(10))
        for each, future in enumerate(futures):
            if each == 7:
                assert str(future.exception(SECONDS)) == "not 7"
            else:
                assert future.result(SECONDS) == 2 * each
    assert turns.taken[0] == [0]
    assert sorted(turns.taken[1]) == list(range(1, 10))


def test_a_turn_that_fails_fails_for_all_that_are_in_it_and_for_no_other() -> None:
    turns = Turns()
    turns.fails = TryLater("shard 1 does not answer")
    with ThreadPoolExecutor(4) as pool:
        errors = [future.exception(SECONDS) for future in all_during_the_first(turns, pool, range(4))]
        assert [str(error) for error in errors] == ["shard 1 does not answer"] * 4
        assert len({id(error) for error in errors}) == 4, "each raises its own: threads share no traceback"
        turns.fails = None
        assert turns.together.do(21) == 42


def test_the_traceback_of_a_bug_goes_to_one_caller_and_the_others_are_told_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = Turns()
    turns.fails = AssertionError("a bug")
    with ThreadPoolExecutor(4) as pool:
        alone, *errors = [future.exception(SECONDS) for future in all_during_the_first(turns, pool, range(4))]
        assert alone is turns.fails
    own = [error for error in errors if error is turns.fails]
    told = [error for error in errors if error is not turns.fails]
    assert (len(own), [type(error) for error in told]) == (1, [PSError, PSError])
    assert {str(error) for error in told} == {"internal error; the server's log says more"}
    assert "3 calls that were answered together failed" in caplog.text
    assert "AssertionError: a bug" in caplog.text
    assert "_work" in {frame.name for frame in traceback.extract_tb(own[0].__traceback__)}


def test_a_turn_takes_no_more_than_it_may() -> None:
    turns = Turns(most=4)
    with ThreadPoolExecutor(10) as pool:
        assert [future.result(SECONDS) for future in all_during_the_first(turns, pool, [1] * 10)] == [2] * 10
    assert list(map(len, turns.taken)) == [1, 4, 4, 1]


# -- joins -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OneProcess]:
    cluster = OneProcess(tmp_path, shards=2)
    cluster.coordinator.register_job(vector_job("job", "async", CELLS, 0))
    yield cluster
    cluster.stop()


class Crowd:
    """Workers that join a cluster while shard 0 counts the first of them."""

    def __init__(self, cluster: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.calls = cluster, Counter[str]()
        self.goes_on, self.begun = threading.Event(), threading.Event()
        for index, shard in cluster.shards.items():
            monkeypatch.setattr(shard, "add_workers", self._counted(index, shard.add_workers))

    def _counted(self, index: int, add: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[f"shard {index}"] += 1
            self.begun.set()
            assert self.goes_on.wait(SECONDS)
            return add(*arguments)

        return call

    def join(self, ranks: Sequence[int], meanwhile: Callable[[], object] = lambda: None) -> list[Future[JoinedWorker]]:
        """Joins: the first alone, and all others together after it. meanwhile: what is done before the first goes on"""

        def join(rank: int) -> JoinedWorker:
            return self.cluster.coordinator.join("job", rank, JoinRequest(host="here", attempt=rank + 1))

        joins = self.cluster.coordinator.job("job")._joins._together
        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = [pool.submit(join, ranks[0])]
            assert self.begun.wait(SECONDS)
            futures += [pool.submit(join, rank) for rank in ranks[1:]]
            until(lambda: len(joins._waiting) == len(ranks) - 1)
            meanwhile()
            self.goes_on.set()
        return futures


def rosters(cluster: OneProcess) -> list[list[int]]:
    """The ranks that each shard counts."""
    return [sorted(shard.jobs()["job"].partition.roster) for shard in cluster.shards.values()]


def test_joins_that_wait_while_one_is_counted_take_one_call_a_shard_and_round(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(cluster, monkeypatch)
    places = [future.result() for future in crowd.join(range(30))]
    assert [place.worker.rank for place in places] == list(range(30))
    assert len({place.worker.incarnation for place in places}) == len({place.worker.key for place in places}) == 30
    assert crowd.calls == {"shard 0": 4, "shard 1": 4}, "two rounds for the first, and two for all others"
    assert rosters(cluster) == [list(range(30))] * 2
    assert cluster.coordinator.job("job").workers.announced()[0] == list(range(30))


def test_a_worker_that_a_shard_fences_is_refused_alone(cluster: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def retire() -> None:  # the incarnation of worker 3, as a shard that knows better than the coordinator
        reserved = {each.rank: each.incarnation for each in cluster.coordinator.job("job").workers._joining}
        cluster.shards[1].remove_worker("job", 3, reserved[3])

    futures = Crowd(cluster, monkeypatch).join(range(6), retire)
    assert [future.exception() is None for future in futures] == [True, True, True, False, True, True]
    assert "incarnation" in str(futures[3].exception())
    assert isinstance(futures[3].exception(), TryLater)
    assert rosters(cluster) == [[0, 1, 2, 4, 5]] * 2, "shard 0, which had counted it, has heard that it is gone"
    assert cluster.coordinator.join("job", 3, JoinRequest(host="here", attempt=99)).worker.rank == 3


def test_a_worker_that_another_process_overtakes_while_it_joins_with_others_is_refused_alone(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = cluster.coordinator.job("job").workers
    futures = Crowd(cluster, monkeypatch).join(range(4), lambda: members.reserve(2, JoinRequest(host="there")))
    assert [future.exception() is None for future in futures] == [True, True, False, True]
    assert "another process joins job 'job' as worker 2" in str(futures[2].exception())
    assert rosters(cluster) == [[0, 1, 3]] * 2


def test_a_shard_that_does_not_answer_fails_the_joins_of_that_turn_and_none_counts_on_any_shard(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise TryLater("shard 1 does not answer")

    crowd, shard = Crowd(cluster, monkeypatch), cluster.shards[1]
    with monkeypatch.context() as patch:
        futures = crowd.join(range(5), lambda: patch.setattr(shard, "add_workers", silent))
    assert {str(future.exception()) for future in futures[1:]} == {"shard 1 does not answer"}
    assert set(rosters(cluster)[0]) <= {0}
    assert [crowd.cluster.coordinator.join("job", rank, JoinRequest()).worker.rank for rank in range(5)] == [*range(5)]


def test_a_repeated_join_of_a_crowd_gets_the_place_of_the_first(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost: the worker asks again with the number of the same attempt."""
    places = [future.result() for future in Crowd(cluster, monkeypatch).join(range(5))]
    for rank, place in enumerate(places):
        again = cluster.coordinator.join("job", rank, JoinRequest(host="here", attempt=rank + 1))
        assert (again.worker.rank, again.worker.incarnation) == (rank, place.worker.incarnation)


def test_workers_that_fall_silent_together_are_removed_by_one_call_a_shard(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(32):
        cluster.coordinator.join("job", rank, JoinRequest(host="here"))
    calls, told = Counter[int](), list[Roster | None]()
    for index, shard in cluster.shards.items():
        remove = shard.remove_workers

        def counted(*arguments: Any, index: int = index, remove: Callable[..., Any] = remove) -> Any:
            calls[index] += 1
            return remove(*arguments)

        monkeypatch.setattr(shard, "remove_workers", counted)
    cluster.coordinator.job("job").watchers.add(told.append)
    cluster.clock.seconds += 60
    cluster.coordinator.expire_workers()
    assert calls == {0: 1, 1: 1}
    assert rosters(cluster) == [[], []]
    assert [roster and roster[0] for roster in told] == [list(range(32)), []], "one message for all of them"


# -- rosters -----------------------------------------------------------------------------------------------------------


class Later(Clock):
    """A clock that stands, and what is to be done when it goes on."""

    def __init__(self) -> None:
        self.time, self.due = 0.0, list[tuple[float, Callable[[], None]]]()

    def now(self) -> float:
        return self.time

    def later(self, seconds: float, work: Callable[[], None]) -> bool:
        self.due.append((self.time + seconds, work))
        return True

    def go_on(self) -> None:
        self.time, work = self.due.pop(0)
        work()


def test_rosters_of_a_crowd_that_follow_each_other_closely_are_told_as_the_newest() -> None:
    clock, roster, told = Later(), [([0], 4, False)], list[Roster | None]()
    watchers = Watchers(lambda: roster[0], clock, clock.later)
    for _ in range(100):
        watchers.add(told.append)
    told.clear()
    for ranks in ([0, 1], [0, 1, 2], [0, 2]):
        roster[0] = (ranks, 4, False)
        watchers.tell()
    assert told == [([0, 1], 4, False)] * 100, "the first change at once"
    clock.go_on()
    assert clock.time == pytest.approx(100 * PAUSE_A_WATCHER)
    assert told[100:] == [([0, 2], 4, False)] * 100, "the others together, as the newest"
    assert clock.due == []


def test_that_training_begins_is_told_a_crowd_at_once_and_the_end_is_the_last_word() -> None:
    clock, roster, told = Later(), [([0], 2, False)], list[Roster | None]()
    watchers = Watchers(lambda: roster[0], clock, clock.later)
    watchers.add(told.append)
    for each in (([0], 2, False), ([], 2, False), ([0, 1], 2, True), ([1], 2, True)):
        roster[0] = each
        watchers.tell()
    assert told[1:] == [([0], 2, False), ([0, 1], 2, True)], "two wait for the pauses"
    watchers.end()
    while clock.due:
        clock.go_on()
    assert told[3:] == [None]


# -- the call to a shard -----------------------------------------------------------------------------------------------


def test_a_shard_answers_the_coordinator_while_all_threads_of_their_server_wait() -> None:
    """In a process that is both, joins hold these threads until the shard has answered."""
    goes_on = threading.Event()
    with ThreadPoolExecutor(1) as of_server, ThreadPoolExecutor(1) as of_shard:
        server = grpc.server(of_server)
        ShardService(Shard(ShardMetrics(CollectorRegistry()), NoThreads()), pool=of_shard).register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        of_server.submit(goes_on.wait, SECONDS)
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                status = shard_pb2_grpc.ShardServiceStub(channel).GetShardStatus
                assert status(shard_pb2.GetShardStatusRequest(), timeout=SECONDS) is not None
        finally:
            goes_on.set()
            server.stop(None).wait()


def test_a_shard_refuses_a_call_for_workers_of_several_jobs_or_for_too_many() -> None:
    service = ShardService(Shard(ShardMetrics(CollectorRegistry()), NoThreads()))
    two = shard_pb2.RemoveWorkersRequest(workers=[{"job": "a"}, {"job": "b"}])
    many = shard_pb2.RemoveWorkersRequest(workers=[{"job": "a"}] * (WORKERS_A_CALL + 1))
    for request in (two, many, shard_pb2.RemoveWorkersRequest()):
        with pytest.raises(InvalidRequest, match=r"expected 1 to 64 workers of one run of a job, got \d+ of \d+ runs"):
            service.RemoveWorkers(request, None)
