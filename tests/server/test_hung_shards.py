"""A coordinator whose shards hang, die in the middle of what it does, or whose disk is full: what it has decided is
booked as far as it was done, and no other job, and no other shard's workers, wait for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import NotFound, TryLater, UnknownWorker
from ps_protocol.job import JobSpec
from ps_protocol.messages.workers import JoinRequest
from ps_runtime import background
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.expiry import Expiry
from ps_server.coordinator.timing import Timing
from ps_server.core.membership import RETURN_LEASES, JoinedWorker
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.storage.disk import Disk
from tests.tools.cluster import until
from tests.tools.one_process import DirectShard, DirectWorker, FullDisk, OneProcess
from tests.tools.raw_worker import vector_job

CELLS = 64
HANGS = 600.0  # seconds: what waits for a call that hangs waits longer than any test
LEASE = 60.0  # ends where a test says so


class HangingShard(DirectShard):
    """A shard that answers nothing while `hangs`; calls of that time are carried out when it goes on."""

    def __init__(self, shard: Shard, process: int) -> None:
        super().__init__(shard, process)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.waiting = 0

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)

        def call(*arguments: Any) -> Any:
            if not self.goes_on.is_set():
                self.waiting += 1
                if not self.goes_on.wait(HANGS):
                    raise TryLater("the shard does not answer")
            return method(*arguments)

        return call


class Threaded:
    """A coordinator with its threads, and two shards that may hang."""

    def __init__(self, lease: float) -> None:
        self.shards = [Shard(ShardMetrics(CollectorRegistry()), NoThreads(), index=index) for index in range(2)]
        self.apis = [HangingShard(shard, index + 1) for index, shard in enumerate(self.shards)]
        self.coordinator = Coordinator(
            2,
            lambda index, _: self.apis[index],
            lease,
            timing=Timing(held_jobs_look=0.1),
            make_executor=ThreadPoolExecutor,
        )
        for index in range(2):
            self.coordinator.shard_directory.register(index, f"127.0.0.1:{index + 1}", "", 1, index + 1)
        self.coordinator.start()

    def join(self, spec: JobSpec, rank: int) -> JoinedWorker:
        job, _ = self.coordinator.register_job(spec)
        return self.coordinator.join(spec.name, rank, JoinRequest(host="here", run=job.placed.run))

    def counted(self, shard: int, job: str) -> list[int]:
        return sorted(self.shards[shard].jobs()[job].partition.roster)

    def die(self, *names: str) -> None:
        """Has the leases of all live workers of these jobs be over: the thread that looks finds it."""
        for name in names:
            members = self.coordinator.job(name).workers
            with members._lock:
                live = members._membership.workers
                live.update({rank: replace(member, expires=-math.inf) for rank, member in live.items()})

    def stop(self) -> None:
        for api in self.apis:
            api.goes_on.set()
        self.coordinator.stop()


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    cluster = Threaded(lease=LEASE)
    yield cluster
    cluster.stop()


def test_a_hung_shard_keeps_no_dead_worker_on_another_one(threaded: Threaded) -> None:
    """Workers of two jobs die while shard 1 hangs: shard 0 stops counting them when their leases are over."""
    for name in ("first", "second"):
        for rank in range(2):
            threaded.join(vector_job(name, "async", CELLS, 0), rank)
    threaded.apis[1].goes_on.clear()
    threaded.die("first", "second")
    until(lambda: not threaded.counted(0, "first") and not threaded.counted(0, "second"))
    assert threaded.counted(1, "first") == [0, 1], "it has not heard yet"
    threaded.apis[1].goes_on.set()
    until(lambda: not threaded.counted(1, "first") and not threaded.counted(1, "second"))


def test_a_join_that_waits_for_a_hung_shard_holds_up_nothing_else_of_its_job(threaded: Threaded) -> None:
    spec = vector_job("job", "async", CELLS, 0)
    threaded.join(spec, 0)
    threaded.apis[1].goes_on.clear()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(threaded.join, spec, 1)
        until(lambda: threaded.apis[1].waiting > 0 and threaded.counted(0, "job") == [0, 1])
        threaded.die("job")
        until(lambda: threaded.counted(0, "job") == [1])  # worker 0 died, and the join still waits
        job = threaded.coordinator.job("job")
        assert (job.statistics().workers, job.workers.empty()) == ((), False)
        threaded.apis[1].goes_on.set()
        assert joining.result().worker.rank == 1
    assert [member.rank for member in job.workers.all()] == [1]


def test_another_job_is_registered_and_ended_while_one_waits_for_a_hung_shard(threaded: Threaded) -> None:
    threaded.join(vector_job("old", "async", CELLS, 0), 0)
    threaded.apis[1].goes_on.clear()
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(threaded.coordinator.job("old").end)
        until(lambda: "old" not in threaded.coordinator.jobs())
        registering = pool.submit(threaded.coordinator.register_job, vector_job("new", "async", CELLS, 0))
        until(lambda: "new" in threaded.shards[0].jobs())
        with pytest.raises(TryLater, match="'new' is being registered at this moment"):
            threaded.coordinator.register_job(vector_job("new", "async", CELLS, 0))
        until(lambda: threaded.apis[1].waiting >= 2)
        threaded.apis[1].goes_on.set()
        ending.result()
        assert registering.result()[1]
    until(lambda: all(list(shard.jobs()) == ["new"] for shard in threaded.shards))


# -- without threads -------------------------------------------------------------------------------------------------


def roster(cluster: OneProcess, shard: int) -> dict[int, int]:
    return {rank: live.incarnation for rank, live in cluster.shards[shard].jobs()["job"].partition.roster.items()}


def steps(worker: DirectWorker, count: int) -> torch.Tensor:
    for _ in range(count):
        worker.push()
    return worker.pull()


def test_a_shard_that_has_not_called_in_hears_of_a_worker_that_died_meanwhile(
    cluster: OneProcess, tmp_path: Path
) -> None:
    """The coordinator comes back, shard 1 is silent, and the lease of a worker runs out."""
    spec = vector_job("job", "async", CELLS, 0)
    workers = [DirectWorker(cluster, spec, rank) for rank in range(2)]
    address = cluster.address_of(1)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True), calling=[0])
    members = cluster.coordinator.job("job").workers
    cluster.clock.seconds += 15
    member = workers[0].place.worker
    members.heartbeat(0, member.incarnation, 0, member.key)
    cluster.clock.seconds += 8
    cluster.coordinator.expire_workers()
    assert list(roster(cluster, 0)) == [0]
    assert list(roster(cluster, 1)) == [0, 1]
    cluster.coordinator.shard_directory.register(1, address, "", 1, cluster.process_of(1))
    cluster.coordinator.expire_workers()
    assert list(roster(cluster, 1)) == [0]


def test_no_shard_counts_a_worker_that_joins_while_another_shard_does_not_answer(cluster: OneProcess) -> None:
    """Otherwise those who train on it would wait for the worker, each time that it tries."""
    spec = vector_job("job", "ssp:0", CELLS, 0)
    DirectWorker(cluster, spec, 0)
    hung = cluster.coordinator.shards()[1].api

    def process() -> int:
        raise TryLater("shard 1 does not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hung, "process", process)
        with pytest.raises(TryLater, match="shard 1 does not answer"):
            DirectWorker(cluster, spec, 1)
        assert [list(roster(cluster, shard)) for shard in range(2)] == [[0], [0]]
    DirectWorker(cluster, spec, 1)
    assert [list(roster(cluster, shard)) for shard in range(2)] == [[0, 1], [0, 1]]


def test_a_coordinator_that_was_killed_over_a_join_takes_the_worker_back(cluster: OneProcess, tmp_path: Path) -> None:
    spec = vector_job("job", "async", CELLS, 0)
    DirectWorker(cluster, spec, 0)
    job = cluster.coordinator.job("job")
    reservation = job.workers.reserve(1, JoinRequest(host="here"))
    cluster.coordinator.save_ahead()
    job.workers.count([reservation])
    address = cluster.address_of(1)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True), calling=[0])
    cluster.coordinator.expire_workers()  # shard 1 has not called in yet
    assert list(roster(cluster, 0)) == [0]
    cluster.coordinator.shard_directory.register(1, address, "", 1, cluster.process_of(1))
    cluster.coordinator.expire_workers()
    assert list(roster(cluster, 1)) == [0]


@pytest.mark.usefixtures("caplog")
def test_what_the_disk_does_not_take_is_not_done(tmp_path: Path) -> None:
    disk = FullDisk()
    cluster = OneProcess(tmp_path, disk=disk)
    spec = vector_job("job", "async", CELLS, 0)
    worker = DirectWorker(cluster, spec, 0)
    disk.full = True
    with pytest.raises(TryLater, match=r"coordinator\.json cannot be written: No space left on device"):
        DirectWorker(cluster, spec, 1)
    with pytest.raises(TryLater, match="No space left on device"):
        cluster.coordinator.register_job(vector_job("other", "async", CELLS, 0))
    assert [list(roster(cluster, shard)) for shard in range(2)] == [[0], [0]]
    assert list(cluster.coordinator.jobs()) == list(cluster.shards[0].jobs()) == ["job"]
    disk.full = False
    DirectWorker(cluster, spec, 1)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    members = cluster.coordinator.job("job").workers
    assert [member.rank for member in members.all()] == [0, 1]
    assert members.last_incarnation() > worker.place.worker.incarnation
    cluster.stop()


class AskingDisk(FullDisk):
    """A full disk that calls back before it refuses something."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self.ask = ask

    def write(self, *arguments: Any, **named: Any) -> Any:
        if self.full:
            self.ask()
        return super().write(*arguments, **named)


@pytest.mark.usefixtures("caplog")
def test_a_job_that_is_not_on_disk_yet_is_not_given_to_a_second_caller(tmp_path: Path) -> None:
    """It may not come to be: a worker that was told that it is there would end with NotFound."""
    asked: list[str] = []

    def ask() -> None:
        if not asked:
            with pytest.raises(TryLater) as refused:
                cluster.coordinator.register_job(spec)
            asked.append(str(refused.value))

    spec, disk = vector_job("job", "async", CELLS, 0), AskingDisk(ask)
    cluster = OneProcess(tmp_path, disk=disk)
    disk.full = True
    with pytest.raises(TryLater, match="No space left on device"):
        cluster.coordinator.register_job(spec)
    assert asked == ["job 'job' is being registered at this moment"]
    disk.full = False
    assert cluster.coordinator.register_job(spec)[1]
    cluster.stop()


def test_a_worker_whose_join_is_not_on_disk_yet_is_told_to_nobody_whatever_else_is_told_meanwhile(
    tmp_path: Path,
) -> None:
    """A coordinator that dies now and comes back does not know the worker: others must not train without it."""
    told: list[tuple[list[int], bool]] = []

    class SlowDisk(Disk):
        def write(self, *arguments: Any, **named: Any) -> Any:
            if cluster.coordinator.jobs():
                job = cluster.coordinator.job("job")
                job.watchers.tell()  # as the join of another worker would at this moment
                job.watchers.add(lambda roster: roster and told.append((roster[0], roster[2])))()
            return super().write(*arguments, **named)

    cluster = OneProcess(tmp_path, disk=SlowDisk())
    spec = vector_job("job", "sync", CELLS, 2)
    for rank in range(2):
        DirectWorker(cluster, spec, rank)
    assert told
    assert {rank for ranks, _ in told for rank in ranks} == {0}
    assert not any(started for _, started in told)
    assert cluster.coordinator.job("job").workers.announced() == ([0, 1], 2, True)
    cluster.stop()


@pytest.mark.usefixtures("caplog")
def test_what_the_disk_did_not_take_is_written_when_it_can(tmp_path: Path) -> None:
    disk = FullDisk()
    cluster = OneProcess(tmp_path, disk=disk)
    spec = vector_job("job", "async", CELLS, 0)
    workers = [DirectWorker(cluster, spec, rank) for rank in range(2)]
    disk.full = True
    assert not workers[1].leave()
    disk.full = False
    cluster.coordinator.save_again()
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    assert [member.rank for member in cluster.coordinator.job("job").workers.all()] == [0]
    cluster.stop()


def test_a_job_that_has_started_stays_so_whatever_dies_and_in_whatever_order(
    cluster: OneProcess, tmp_path: Path
) -> None:
    """All its workers, the coordinator, a shard: who comes back waits for the others, and goes on without those that do
    not come."""
    spec = vector_job("job", "async", CELLS, 2)
    workers = [DirectWorker(cluster, spec, rank) for rank in range(2)]
    workers[0].initialise()
    workers[0].checkpoint()
    cluster.while_waiting()
    cluster.clock.seconds += 11
    cluster.coordinator.expire_workers()
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    back = DirectWorker(cluster, spec, 0)
    assert cluster.coordinator.job("job").workers.roster() == ([0], 2, False)
    assert cluster.coordinator.job("job").workers.rejoining() == (1,)
    for _ in range(RETURN_LEASES):
        cluster.clock.seconds += 10
        member = back.place.worker
        cluster.coordinator.job("job").workers.heartbeat(0, member.incarnation, back.clock, member.key)
        cluster.coordinator.expire_workers()
    assert cluster.coordinator.job("job").workers.roster() == ([0], 2, True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_second_shard_that_dies_during_a_rollback_is_rolled_back_too(cluster: OneProcess, mode: str) -> None:
    worker = DirectWorker(cluster, vector_job("job", mode, CELLS, 1), 0)
    worker.initialise()
    worker.checkpoint()
    cluster.while_waiting()
    before = worker.clock
    cluster.start_shard(1)
    restore = cluster.shards[1].restore_job

    def dies_meanwhile(*arguments: Any) -> Any:
        cluster.start_shard(0)
        return restore(*arguments)

    cluster.shards[1].restore_job = dies_meanwhile  # type: ignore[method-assign]
    cluster.coordinator.recover_jobs()
    with pytest.raises(TryLater, match="shard 0 was started anew"):
        worker.rejoin()
    cluster.shards[1].restore_job = restore  # type: ignore[method-assign]
    cluster.coordinator.recover_jobs()
    worker.clock = before
    worker.rejoin()
    assert torch.equal(steps(worker, 2), torch.full((CELLS,), float(worker.clock)))


def test_a_shard_that_dies_while_the_last_worker_leaves_brings_no_job_back(cluster: OneProcess) -> None:
    worker = DirectWorker(cluster, vector_job("job", "sync", CELLS, 1), 0)
    worker.initialise()
    worker.checkpoint()
    cluster.while_waiting()
    steps(worker, 1)

    def dies() -> None:
        if cluster.process_of(1) == 2:
            cluster.start_shard(1)
        cluster.coordinator.recover_jobs()
        cluster.coordinator.make_checkpoints()

    cluster.clock.meanwhile = dies
    assert worker.leave()
    cluster.coordinator.recover_jobs()
    assert cluster.process_of(1) == 3
    assert cluster.coordinator.jobs() == cluster.shards[0].jobs() == cluster.shards[1].jobs() == {}
    new = DirectWorker(cluster, vector_job("job", "sync", CELLS, 1), 0)
    new.initialise()
    assert torch.equal(steps(new, 1), torch.ones(CELLS))


def test_a_last_worker_that_leaves_during_a_rollback_ends_the_job_after_it(cluster: OneProcess) -> None:
    worker = DirectWorker(cluster, vector_job("job", "sync", CELLS, 1), 0)
    worker.initialise()
    worker.checkpoint()
    cluster.while_waiting()
    cluster.start_shard(1)
    restore = cluster.shards[1].restore_job

    def leaves_meanwhile(*arguments: Any) -> Any:
        assert not worker.leave()
        return restore(*arguments)

    cluster.shards[1].restore_job = leaves_meanwhile  # type: ignore[method-assign]
    cluster.coordinator.recover_jobs()
    assert cluster.coordinator.jobs() == {}


def test_a_join_that_a_rollback_overtakes_is_made_again(cluster: OneProcess) -> None:
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, 0), 0)
    worker.initialise()
    worker.checkpoint()
    cluster.while_waiting()
    add = cluster.shards[0].add_worker

    def loses_a_shard(*arguments: Any) -> Any:
        cluster.shards[0].add_worker = add  # type: ignore[method-assign]
        frontier = add(*arguments)
        cluster.start_shard(1)
        cluster.coordinator.recover_jobs()
        return frontier

    cluster.shards[0].add_worker = loses_a_shard  # type: ignore[method-assign]
    with pytest.raises((TryLater, UnknownWorker)):
        DirectWorker(cluster, worker.spec, 1)
    cluster.coordinator.expire_workers()
    assert roster(cluster, 0).keys() == roster(cluster, 1).keys() == set()
    worker.rejoin()
    DirectWorker(cluster, worker.spec, 1)
    assert roster(cluster, 0).keys() == roster(cluster, 1).keys() == {0, 1}


def test_a_process_that_was_replaced_does_not_come_back_as_its_shard(cluster: OneProcess) -> None:
    """Its call was on its way when it died, and is carried out after that of its successor."""
    address, before = cluster.address_of(1), cluster.process_of(1)
    cluster.start_shard(1)
    with pytest.raises(TryLater, match="was replaced by another one"):
        cluster.coordinator.shard_directory.register(1, address, "", 1, before)
    assert cluster.coordinator.shards()[1].process == cluster.process_of(1)


def test_a_coordinator_asks_the_process_at_an_address_which_one_it_is(cluster: OneProcess, tmp_path: Path) -> None:
    """A shard's process calls in, dies, and another one has its address; only then the call arrives, at a coordinator
    that was started meanwhile and knows neither."""
    cluster.start_coordinator(CheckpointPolicy(tmp_path), calling=[0])
    address, process = cluster.address_of(1), cluster.process_of(1)
    with pytest.raises(TryLater, match="process 7 is gone, and another one serves at"):
        cluster.coordinator.shard_directory.register(1, address, "", 7, process - 1)
    assert list(cluster.coordinator.shards()) == [0]
    cluster.coordinator.shard_directory.register(1, address, "", 8, process)
    assert cluster.coordinator.shards()[1].process == process


# -- background threads, and jobs that workers have deserted ---------------------------------------------------------


@pytest.mark.usefixtures("caplog")  # the errors are meant
def test_an_error_in_one_job_is_counted_and_keeps_no_other_from_its_turn(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        DirectWorker(cluster, vector_job(name, "async", CELLS, 0), 0)
    expire: Callable[[CoordinatedJob], None] = CoordinatedJob.expire

    def fails(job: CoordinatedJob) -> None:
        if job.spec.name == "a":
            raise KeyError(1)
        expire(job)

    monkeypatch.setattr(CoordinatedJob, "expire", fails)
    before = background.errors().get("leases", 0)
    cluster.clock.seconds += 11
    cluster.coordinator.expire_workers()
    assert background.errors()["leases"] == before + 1
    assert not cluster.coordinator.job("b").workers.all()


def test_a_coordinator_that_stood_still_ends_no_lease_because_of_it(cluster: OneProcess) -> None:
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, 0), 0)
    members = cluster.coordinator.job("job").workers
    expiry = Expiry(cluster.coordinator.jobs, cluster.coordinator._cluster, background.Background())
    expiry.look_regularly()
    cluster.clock.seconds += 30  # of a lease of 10
    expiry.look_regularly()
    assert [member.rank for member in members.all()] == [0]
    members.heartbeat(0, worker.place.worker.incarnation, 0, worker.place.worker.key)
    for _ in range(10):
        assert members.all()
        cluster.clock.seconds += 1
        expiry.look_regularly()
    assert not members.all()


def test_a_coordinator_that_stood_still_waits_for_the_dead_no_longer_than_a_lease(cluster: OneProcess) -> None:
    """Heartbeats of before lie in its sockets, and are heard before it looks."""
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, 0), 0)
    members = cluster.coordinator.job("job").workers
    expiry = Expiry(cluster.coordinator.jobs, cluster.coordinator._cluster, background.Background())
    expiry.look_regularly()
    cluster.clock.seconds += 30  # of a lease of 10
    members.heartbeat(0, worker.place.worker.incarnation, 0, worker.place.worker.key)
    for _ in range(11):
        expiry.look_regularly()
        cluster.clock.seconds += 1
    expiry.look_regularly()
    assert not members.all()


@pytest.mark.usefixtures("caplog")  # the errors are meant
def test_a_thread_goes_on_after_an_error() -> None:
    rounds: list[int] = []

    def work() -> None:
        rounds.append(len(rounds))
        raise ZeroDivisionError

    threads = background.Background()
    threads.start()
    before = background.errors().get("division", 0)
    threads.repeat("division", 0.001, work)
    until(lambda: len(rounds) > 3)
    threads.stop()
    assert background.errors()["division"] - before == len(rounds)


@pytest.mark.parametrize(("joins", "seconds"), [(False, 300), (True, 3600)])
def test_a_job_without_workers_ends(cluster: OneProcess, joins: bool, seconds: int) -> None:
    spec = vector_job("job", "async", CELLS, 0)
    if joins:
        DirectWorker(cluster, spec, 0).initialise()
        cluster.coordinator.expire_workers()
        cluster.clock.seconds += 10  # its lease is over
    else:
        cluster.coordinator.register_job(spec)
    cluster.coordinator.expire_workers()
    cluster.while_waiting()
    cluster.clock.seconds += seconds - 11
    cluster.coordinator.expire_workers()
    assert "job" in cluster.coordinator.jobs()
    cluster.clock.seconds += 12
    cluster.coordinator.expire_workers()
    assert cluster.coordinator.jobs() == cluster.shards[0].jobs() == {}
    with pytest.raises(NotFound, match="job 'job' ended: it had no worker for 3"):
        cluster.coordinator.join("job", 0, JoinRequest())
