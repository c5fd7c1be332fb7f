"""Checkpoints that are asked for, and the last ones: of a job whose workers leave, and of servers that are to stop.

Steps may be slow, workers may leave one after the other, and coordinators may come back."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import CheckpointFailed, TryLater
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.messages.workers import JoinRequest
from ps_protocol.tensors import bytes_of
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.job_workers import Joined
from ps_server.coordinator.timing import DEFAULT_TIMING
from ps_server.core.snapshot import SnapshotRequest
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads, Task
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.disk import Disk
from ps_server.storage.manifest import Manifest
from tests.tools.cluster import until
from tests.tools.one_process import CELLS, DirectWorker, OneProcess, join_all, train
from tests.tools.raw_worker import vector_job

SLOW_STEP_SECONDS = 8.0


def slowly(cluster: OneProcess, each: list[DirectWorker]) -> Callable[[], None]:
    """Trains with steps that take long."""
    next_step = cluster.clock.now() + SLOW_STEP_SECONDS

    def work() -> None:
        nonlocal next_step
        if cluster.clock.now() >= next_step:
            next_step = cluster.clock.now() + SLOW_STEP_SECONDS
            train(each)

    return work


def asked(cluster: OneProcess, seconds: float) -> Manifest:
    checkpoints = cluster.coordinator.job("job").checkpoints
    assert checkpoints is not None
    return checkpoints.request(seconds)


def whole(cluster: OneProcess, each: list[DirectWorker]) -> Manifest:
    """A checkpoint with all states."""
    cluster.while_waiting(slowly(cluster, each))
    manifest = asked(cluster, 30.0)
    cluster.while_waiting()
    assert manifest.without == ()
    return manifest


# -- slow steps --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_asked_for_waits_for_slow_steps(cluster: OneProcess) -> None:
    each = join_all(cluster, "sync")
    train(each)
    cluster.while_waiting(slowly(cluster, each))
    manifest = asked(cluster, 60.0)
    assert sorted(manifest.workers) == [0, 1]
    assert manifest.without == ()
    assert {part.clock for part in manifest.workers.values()} == {manifest.clock} == {2}


def test_servers_that_are_told_to_stop_wait_for_slow_steps(cluster: OneProcess, tmp_path: Path) -> None:
    each = join_all(cluster, "sync")
    train(each)
    cluster.while_waiting(slowly(cluster, each))
    cluster.coordinator.drain(2 * SLOW_STEP_SECONDS)
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("job", store.names("job")[-1])
    assert (sorted(manifest.workers), manifest.clock) == ([0, 1], 2)


def test_a_checkpoint_says_which_workers_have_not_come_in_time(
    cluster: OneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    each = join_all(cluster, "sync")
    train(each)
    cluster.while_waiting()
    with caplog.at_level(logging.WARNING):
        manifest = asked(cluster, 2.0)
    assert (manifest.clock, manifest.workers, manifest.without) == (1, {}, (0, 1))
    assert "workers [0, 1] did not come to clock 2 in time" in caplog.text
    assert "without the state of workers [0, 1]" in caplog.text
    made = cluster.coordinator.job("job").statistics().checkpoints
    assert made is not None
    assert (made.without, made.incomplete, made.complete) == ((0, 1), 1, 1)
    train(each)  # and training goes on
    assert whole(cluster, each).clock == 3


@pytest.mark.parametrize("mode", ["ssp:4", "async"])
def test_states_of_workers_that_have_made_no_step_are_missed_without_a_warning(
    cluster: OneProcess, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    each = join_all(cluster, mode)
    cluster.while_waiting()
    with caplog.at_level(logging.INFO):
        assert asked(cluster, 60.0).without == (0, 1)
    assert "has no state of workers [0, 1] yet: no step of theirs is in it" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    each[1].push()
    with caplog.at_level(logging.WARNING):
        assert asked(cluster, 60.0).without == (0, 1)
    assert "is without the state of workers [0, 1]: after a return to it" in caplog.text


def test_nothing_is_waited_for_before_training_begins(cluster: OneProcess) -> None:
    [worker] = [DirectWorker(cluster, vector_job("job", "sync", CELLS, 2), 0)]
    worker.initialise()
    before = cluster.clock.now()
    cluster.while_waiting()
    assert asked(cluster, 60.0).clock == 0
    assert cluster.clock.now() < before + 1


def test_what_was_asked_for_in_vain_is_not_made_again_at_the_same_clock(cluster: OneProcess, tmp_path: Path) -> None:
    each = join_all(cluster, "sync")
    made = whole(cluster, each)
    assert made.clock == each[0].clock
    assert asked(cluster, 2.0).name == made.name, "it has the same weights, and all states"
    assert CheckpointStore(tmp_path).names("job") == [made.name]


def test_the_last_checkpoint_with_all_states_is_kept(cluster: OneProcess, tmp_path: Path) -> None:
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1))
    each = join_all(cluster, "sync")
    good = whole(cluster, each)
    without = []
    for _ in range(2):
        train(each)
        without.append(asked(cluster, 1.0))
    assert all(manifest.without == (0, 1) for manifest in without)
    store = CheckpointStore(tmp_path)
    assert store.names("job") == [good.name, without[-1].name]
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1, resume=True))  # the next one knows it too
    train(each)
    last = asked(cluster, 1.0)
    assert store.names("job") == [good.name, last.name]
    better = whole(cluster, each)
    assert store.names("job") == [better.name]


class StaleOnce(Disk):
    """A disk that cannot read the manifest of one checkpoint. name: that checkpoint; empty: it reads all"""

    name = ""

    def open(self, path: Path) -> BinaryIO:
        if path.name.startswith("manifest") and path.parent.name == self.name:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().open(path)


def test_a_rollback_is_told_although_the_disk_does_not_say_now_which_checkpoint_has_all_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that was known to have them is kept."""
    disk = StaleOnce()
    cluster = OneProcess(tmp_path, disk=disk)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1))
    each = join_all(cluster, "sync")
    good = whole(cluster, each)
    train(each)
    without = asked(cluster, 1.0)
    assert without.without == (0, 1)
    cluster.start_shard(1)
    disk.name = good.name
    cluster.coordinator.recover_jobs()
    assert f"rolled back to checkpoint {without.name}" in caplog.text
    disk.name = ""
    for worker in each:
        worker.rejoin()
    train(each)
    last = asked(cluster, 1.0)
    assert CheckpointStore(tmp_path).names("job") == [good.name, last.name]
    cluster.stop()


def test_a_run_that_begins_anew_keeps_the_last_checkpoint_of_the_run_before(
    cluster: OneProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user may have forgotten --restore."""
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1))
    store = CheckpointStore(tmp_path)
    results: list[str] = []
    for run in range(3):
        each = join_all(cluster, "sync")
        if run:
            assert (
                f"beside the checkpoints of an earlier run, of which the last one, {results[-1]} at clock"
                in caplog.text
            )
        for _ in range(3):
            train(each)
            made = whole(cluster, each)
            assert store.names("job") == [*results[-1:], made.name]
        if run == 2:  # the next coordinator knows it too
            cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1, resume=True))
            train(each)
            made = whole(cluster, each)
            assert store.names("job") == [*results[-1:], made.name]
        cluster.coordinator.job("job").end()
        results.append(made.name)
        caplog.clear()


def test_a_run_that_continues_counts_the_checkpoints_before_it_as_its_own(cluster: OneProcess, tmp_path: Path) -> None:
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1))
    whole(cluster, join_all(cluster, "sync"))
    cluster.coordinator.job("job").end()
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1, restore=True))
    each = join_all(cluster, "sync")
    train(each)
    made = whole(cluster, each)
    assert CheckpointStore(tmp_path).names("job") == [made.name]


def test_what_was_begun_when_a_job_ends_is_removed(cluster: OneProcess, tmp_path: Path) -> None:
    each = join_all(cluster, "sync")
    made = whole(cluster, each)
    store = CheckpointStore(tmp_path)
    assert store.begin("job", "000777")
    cluster.shards[0].begin_snapshot(SnapshotRequest("job", "000777", None, each[0].run))
    until(lambda: store.unfinished("job", made.name) == ["000777"], "a part of it")
    cluster.coordinator.job("job").end()
    assert store.unfinished("job", made.name) == []
    assert store.names("job") == [made.name]


# -- workers leave -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_workers_that_are_told_to_stop_leave_their_states(
    cluster: OneProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    """One has pushed its step and waits for the other, which is in the middle of that step, when both are told."""
    each = join_all(cluster, "sync")
    train(each)
    ahead, behind = each
    ahead.push()
    cluster.while_waiting()
    states = {ahead.rank: (2, b"after 2"), behind.rank: (1, b"after 1")}
    with caplog.at_level(logging.WARNING):
        for worker in (each[first], each[1 - first]):
            worker.leave(states[worker.rank])
    assert cluster.coordinator.jobs() == {}
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("job", store.names("job")[-1])
    assert (manifest.clock, manifest.versions, manifest.without) == (2, (2, 2), ())
    assert f"workers had left before, by rank at clock {{{behind.rank}: 1}}" in caplog.text
    cluster.start_coordinator(CheckpointPolicy(tmp_path, restore=True))
    for rank in range(2):
        worker = DirectWorker(cluster, vector_job("job", "sync", CELLS, 2), rank)
        assert worker.place.state == (2, states[rank][1]), "no data is left out: it has made no step since"
        assert worker.clock == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_left_without_a_state_is_named(cluster: OneProcess, tmp_path: Path, mode: str) -> None:
    each = join_all(cluster, mode)
    train(each)
    cluster.while_waiting()
    each[0].leave()
    each[1].leave((1, b"state"))
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("job", store.names("job")[-1])
    assert (sorted(manifest.workers), manifest.without) == ([1], (0,))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_new_process_of_a_worker_that_died_goes_on_from_its_newest_state(
    cluster: OneProcess, tmp_path: Path, mode: str
) -> None:
    """However many checkpoints the others have made since, and though the one that has the state is removed."""
    cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=1))
    each = join_all(cluster, mode)
    first = whole(cluster, each)
    state = first.workers[1].clock, b"state at %d" % first.workers[1].clock
    train(each)
    cluster.clock.seconds += 60.0  # both leases are over; worker 0 takes its place again
    cluster.coordinator.expire_workers()
    each[0].rejoin()
    for _ in range(2):  # it waits a lease for the other, and then trains alone
        cluster.clock.seconds += 6.0
        member = each[0].place.worker
        cluster.coordinator.job("job").workers.heartbeat(0, member.incarnation, each[0].clock, member.key)
        cluster.coordinator.expire_workers()
    for _ in range(3):
        train([each[0]])
        made = whole(cluster, [each[0]])
        assert (made.workers[1].clock, made.without) == (state[0], ())
        assert made.workers[0].clock > state[0]
    assert CheckpointStore(tmp_path).names("job") == [made.name]
    if mode == "sync":
        each[1].rejoin()
        assert each[1].place.state is None, "its process was only cut off, and knows more"
        cluster.clock.seconds += 60.0
        cluster.coordinator.expire_workers()
    again = DirectWorker(cluster, each[1].spec, 1)
    assert again.place.state == state
    assert again.clock >= made.clock, "it leaves out the data of the steps that the other made"


def test_a_state_that_is_too_large_does_not_keep_a_worker_in_its_job(cluster: OneProcess) -> None:
    each = join_all(cluster, "sync")
    train(each)
    each[0].leave((1, bytes(17 * 2**20)))
    assert [member.rank for member in cluster.coordinator.job("job").workers.all()] == [1]


def test_a_process_goes_on_from_what_its_rank_has_left_behind(cluster: OneProcess) -> None:
    each = join_all(cluster, "sync")
    whole(cluster, each)
    train(each)
    clock = each[0].clock
    each[0].leave((clock, b"newer than the checkpoint"))
    assert each[0].join(JoinRequest(host="here", run=each[0].run)).state == (clock, b"newer than the checkpoint")


# -- the coordinator comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_coordinator_that_comes_back_knows_the_last_checkpoint(
    cluster: OneProcess, tmp_path: Path, mode: str
) -> None:
    each = join_all(cluster, mode)
    made = whole(cluster, each)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, seconds=1000.0, resume=True))
    job = cluster.coordinator.job("job")
    told = job.statistics().checkpoints
    assert told is not None
    assert (told.name, told.clock, told.without) == (made.name, made.clock, ())
    cluster.while_waiting()
    cluster.coordinator.make_checkpoints()
    assert job.checkpoints is not None
    cluster.clock.wait(job.checkpoints._changed, lambda: False, 5.0)
    assert CheckpointStore(tmp_path).names("job") == [made.name], "the next one is due later"
    cluster.clock.seconds += 60.0  # worker 1 is dead, and another process takes its rank
    cluster.coordinator.expire_workers()
    place = each[1].join(JoinRequest(host="here", run=each[1].run))
    assert place.state is not None
    clock, state = place.state
    assert (clock, state) == (made.workers[1].clock, b"state at %d" % clock)


def test_a_damaged_state_is_not_given_to_a_worker(
    cluster: OneProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    each = join_all(cluster, "sync")
    made = whole(cluster, each)
    (tmp_path / "job" / made.name / "worker-1.state").write_bytes(b"stale at 1")
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    cluster.clock.seconds += 60.0
    cluster.coordinator.expire_workers()
    assert each[1].join(JoinRequest(host="here", run=each[1].run)).state is None
    assert "worker 1 goes on without its state" in caplog.text


# -- what is acknowledged is in the last checkpoint --------------------------------------------------------------------


def test_a_join_that_was_under_way_when_the_servers_stop_ends_no_refusal(cluster: OneProcess) -> None:
    """The shards hear of its worker after the last checkpoint was begun: the pushes of all are refused nevertheless."""
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, 0), 0)
    worker.initialise()
    train([worker])
    members = cluster.coordinator.job("job").workers
    late = JoinRequest(host="here", run=worker.run)
    reservation = members.reserve(1, late)
    cluster.while_waiting(lambda: None)
    cluster.coordinator.drain(0.0)
    [counted] = members.count([reservation])
    assert isinstance(counted, Joined)
    members.admit(reservation, late, counted)
    with pytest.raises(TryLater, match="the servers are stopping"):
        worker.push()
    with pytest.raises(TryLater, match="the cluster is stopping"):
        members.reserve(2, late)


@pytest.mark.parametrize("seconds", [2.0, 15.0])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_last_checkpoints_that_hang_keep_the_servers_no_longer_than_a_shard_waits(
    cluster: OneProcess, mode: str, seconds: float
) -> None:
    """In async there are two of them, one after the other."""
    train(join_all(cluster, mode))
    before = cluster.clock.now()
    cluster.coordinator.drain(seconds)
    assert cluster.clock.now() - before <= seconds + DEFAULT_TIMING.fallback + 0.1


def test_a_checkpoint_of_before_is_not_taken_for_the_last_one(cluster: OneProcess) -> None:
    each = join_all(cluster, "async")
    before = whole(cluster, each)
    checkpoints = cluster.coordinator.job("job").checkpoints
    assert checkpoints is not None
    with pytest.raises(CheckpointFailed, match="has no last checkpoint"):
        checkpoints.final()
    cluster.while_waiting()
    cluster.coordinator.drain(0.0)
    assert checkpoints.final().name > before.name


@pytest.mark.parametrize("mode", ["async", "ssp:3"])
def test_no_push_is_acknowledged_after_the_last_checkpoint(cluster: OneProcess, tmp_path: Path, mode: str) -> None:
    each = join_all(cluster, mode)
    train(each)
    acknowledged = [1, 1]

    def push() -> None:
        for worker in each:
            before = worker.clock
            try:
                worker.push()
                worker.pull()
                acknowledged[worker.rank] = worker.clock
            except TryLater:
                worker.clock = before
            if worker.in_checkpoint:
                worker.save_state()

    cluster.while_waiting(push)
    cluster.coordinator.drain(15.0)
    for _ in range(3):
        push()
    store = CheckpointStore(tmp_path)
    manifest = store.manifest("job", store.names("job")[-1])
    assert acknowledged == [manifest.clocks[0], manifest.clocks[1]]
    assert manifest.versions == (sum(acknowledged), sum(acknowledged))
    assert manifest.without == ()
    with pytest.raises(TryLater, match="the servers are stopping"):
        each[0].push()
    each[0].clock -= 1
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))  # the shards did not end after all
    each[0].rejoin()
    each[0].push()


class HeldThreads(NoThreads):
    """Runs what applies updates when it is told to."""

    def __init__(self) -> None:
        self.held: list[Task] = []

    def submit(self, task: Task) -> None:
        self.held.append(task)

    def run_here(self, tasks: Iterable[Task]) -> None:
        self.held += tasks

    def run(self) -> None:
        held, self.held = self.held, []
        for task in held:
            task()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    store = CheckpointStore(tmp_path)
    assert all(store.begin("job", name) for name in ("000001", "000002"))
    shard = Shard(ShardMetrics(CollectorRegistry()), HeldThreads(), Seconds(), checkpoints=store, index=0)
    yield shard
    shard.stop()


class Seconds:
    """A clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def push(shard: Shard, clock: int, kind: PushKind = PushKind.GRADIENT) -> bool:
    """Pushes a bucket; whether it was new."""
    call = PushCall(Identity("job", 0, 1, run="1"), clock, (PushedBucket(0, kind),), bytes(bytes_of(torch.ones(16))))
    [staged] = shard.push(call)
    return not staged.duplicate


def test_the_last_snapshot_has_what_was_staged_before_it(shard: Shard) -> None:
    threads, clock = shard._threads, shard._clock
    assert isinstance(threads, HeldThreads)
    assert isinstance(clock, Seconds)
    shard.create_job(vector_job("job", "async", 16, 1), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    push(shard, 0, PushKind.INITIAL_VALUE)
    threads.run()
    assert push(shard, 1), "acknowledged, and not in the weights yet"
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1", 10.0))
    with pytest.raises(TryLater):
        push(shard, 2)
    assert not push(shard, 1), "a repeat is acknowledged"
    with pytest.raises(TryLater):
        shard.await_snapshot("job", "000001", 0.0, "1")
    threads.run()
    assert shard.await_snapshot("job", "000001", 0.0, "1").extent.clocks == {0: 1}
    clock.now = 9.0
    with pytest.raises(TryLater):
        push(shard, 2)
    clock.now = 10.0
    assert push(shard, 2), "the servers have not ended"


def test_who_waits_for_a_snapshot_of_a_later_clock_is_told_that_the_shard_stops(shard: Shard) -> None:
    threads = shard._threads
    assert isinstance(threads, HeldThreads)
    shard.create_job(vector_job("job", "sync", 16, 1), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    push(shard, 0, PushKind.INITIAL_VALUE)
    threads.run()
    shard.begin_snapshot(SnapshotRequest("job", "000001", 5, "1"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shard.await_snapshot, "job", "000001", 60.0, "1")
        shard.stop()
        with pytest.raises(TryLater, match="the shard stops"):
            waiting.result()


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_checkpoint_that_was_given_up_meanwhile_is_no_trouble_of_the_shard(
    shard: Shard, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_given_up: bool
) -> None:
    """As at the end of a job: its directory is gone. One that is there, and cannot be written to, is a trouble."""
    caplog.set_level(logging.DEBUG)
    threads, folder = shard._threads, tmp_path / "job" / "000001"
    assert isinstance(threads, HeldThreads)
    shard.create_job(vector_job("job", "async", 16, 1), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    push(shard, 0, PushKind.INITIAL_VALUE)
    threads.run()
    if is_given_up:
        folder.rmdir()
    else:
        (folder / "shard-0.safetensors").mkdir()
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1"))
    threads.run()
    with pytest.raises(CheckpointFailed):
        shard.await_snapshot("job", "000001", 0.0, "1")
    [told] = [record for record in caplog.records if "cannot be written" in record.getMessage()]
    assert told.levelno == (logging.DEBUG if is_given_up else logging.WARNING)


def test_in_sync_the_last_snapshot_lets_its_own_clock_complete(shard: Shard) -> None:
    threads = shard._threads
    assert isinstance(threads, HeldThreads)
    shard.create_job(vector_job("job", "sync", 16, 1), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    push(shard, 0, PushKind.INITIAL_VALUE)
    shard.begin_snapshot(SnapshotRequest("job", "000001", 1, "1", 10.0))
    assert push(shard, 1)
    threads.run()
    with pytest.raises(TryLater):
        push(shard, 2)
    assert shard.await_snapshot("job", "000001", 0.0, "1").extent.clocks == {0: 1}
    shard.begin_snapshot(SnapshotRequest("job", "000002", 2, "1"))
    assert push(shard, 2), "another snapshot, so the servers go on"


@pytest.mark.parametrize("ends", ["the servers", "this shard"])
def test_only_a_worker_that_joined_later_ends_the_refusal_of_pushes(shard: Shard, ends: str) -> None:
    shard.create_job(vector_job("job", "async", 16, 2), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    push(shard, 0, PushKind.INITIAL_VALUE)
    if ends == "this shard":
        shard.jobs()["job"].refusals.seconds = 10.0
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1", 10.0 if ends == "the servers" else 0.0, 3))
    shard.add_worker("job", 1, 3, None, run="1")
    with pytest.raises(TryLater):
        push(shard, 1)
    shard.add_worker("job", 1, 4, None, run="1")
    if ends == "the servers":
        assert push(shard, 1)
    else:
        with pytest.raises(TryLater):
            push(shard, 1)
