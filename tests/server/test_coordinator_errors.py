"""What a coordinator does where something fails that should not: no job is stuck, and no worker is left out."""

from __future__ import annotations

import errno
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ps_protocol.errors import Fenced, LimitExceeded, NotFound, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.shards import Shards
from ps_server.core.snapshot import RestoreProgress
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.disk import Disk
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job


def worker_of(cluster: OneProcess, mode: str) -> DirectWorker:
    worker = DirectWorker(cluster, vector_job("job", mode, CELLS, 0), 0)
    worker.initialise()
    return worker


def test_a_job_whose_workers_died_before_the_coordinator_came_back_is_kept_as_long_and_saved(
    cluster: OneProcess, tmp_path: Path
) -> None:
    worker = worker_of(cluster, "async")
    for _ in range(5):
        worker.push()
    cluster.clock.seconds += 11
    cluster.coordinator.expire_workers()
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    cluster.while_waiting()
    cluster.clock.seconds += 301
    cluster.coordinator.expire_workers()
    assert "job" in cluster.coordinator.jobs(), "that a new worker may join, as long as any job without one"
    cluster.clock.seconds += 3600
    cluster.coordinator.expire_workers()
    assert not cluster.coordinator.jobs()
    store = CheckpointStore(tmp_path)
    assert store.manifest("job", store.names("job")[-1]).clocks == {0: 5}


def test_a_job_ends_also_where_its_last_checkpoint_meets_a_bug(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(cluster, "async")
    checkpoints = cluster.coordinator.job("job").checkpoints
    assert checkpoints is not None

    def fails(*arguments: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(checkpoints, "request_last", fails)
    with pytest.raises(AssertionError, match="a bug"):
        worker.leave()
    assert not cluster.coordinator.jobs()
    worker_of(cluster, "async")


def test_a_join_that_met_a_bug_holds_no_place(cluster: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(cluster, "async")
    with monkeypatch.context() as patch:
        patch.setattr(cluster.coordinator, "save_ahead", lambda: [][0])
        with pytest.raises(IndexError):
            cluster.coordinator.join("job", 1, JoinRequest(host="here", run=worker.run))
    worker.leave()
    assert not cluster.coordinator.jobs(), "the last worker has left"


def test_a_coordinator_that_is_told_to_stop_waits_for_no_restore(cluster: OneProcess) -> None:
    """A shard that reads a checkpoint gets on for as long as it takes; here it never ends."""
    worker = worker_of(cluster, "async")
    worker.checkpoint()
    cluster.start_shard(1)
    asked, read = threading.Event(), iter(range(10**9))

    def endless(*arguments: Any) -> RestoreProgress:
        asked.set()
        return RestoreProgress(next(read), 10**9, None)

    cluster.shards[1].restore_job = endless  # type: ignore[method-assign]
    shards = cluster.coordinator._cluster.shards
    assert isinstance(shards, Shards)
    with ThreadPoolExecutor(1) as pool:
        recovering = pool.submit(cluster.coordinator.recover_jobs)
        assert asked.wait(60)
        shards.close()
        recovering.result(60)
    with pytest.raises(TryLater, match="the last try failed: the coordinator is stopping"):
        cluster.coordinator.join("job", 1, JoinRequest(host="here", run=worker.run))


def test_a_worker_that_a_rollback_overtakes_while_it_joins_is_asked_to_try_again(cluster: OneProcess) -> None:
    """The shards refuse its incarnation, as that of any earlier worker. No other process has its place."""
    worker = worker_of(cluster, "async")
    worker.checkpoint()
    add_worker = cluster.shards[0].add_worker

    def rolled_back_first(*arguments: Any) -> int:
        cluster.shards[0].add_worker = add_worker  # type: ignore[method-assign]
        cluster.start_shard(1)
        cluster.coordinator.recover_jobs()
        return add_worker(*arguments)

    cluster.shards[0].add_worker = rolled_back_first  # type: ignore[method-assign]
    with pytest.raises(TryLater, match="was rolled back while worker 1 joined"):
        cluster.coordinator.join("job", 1, JoinRequest(host="here", run=worker.run))
    assert cluster.coordinator.join("job", 1, JoinRequest(host="here", run=worker.run)).worker.rank == 1


def test_a_new_worker_that_its_dead_predecessor_overtakes_while_it_joins_is_asked_to_try_again(
    cluster: OneProcess,
) -> None:
    """The call by which the predecessor wanted to come back arrives after its death: the network was cut before."""
    dead = worker_of(cluster, "async")
    cluster.clock.seconds += 20
    cluster.coordinator.expire_workers()
    add_worker = cluster.shards[0].add_worker

    def overtaken(*arguments: Any) -> int:
        cluster.shards[0].add_worker = add_worker  # type: ignore[method-assign]
        previous = dead.place.worker.incarnation
        cluster.coordinator.job("job").workers.reserve(0, JoinRequest(host="here", previous=previous, run=dead.run))
        return add_worker(*arguments)

    cluster.shards[0].add_worker = overtaken  # type: ignore[method-assign]
    new = JoinRequest(host="here", pid=7, run=dead.run)
    with pytest.raises(TryLater, match="another process joins job 'job' as worker 0 at this moment"):
        cluster.coordinator.join("job", 0, new)
    assert cluster.coordinator.join("job", 0, new).worker.incarnation > dead.place.worker.incarnation
    with pytest.raises(Fenced):
        dead.rejoin()


def test_the_first_call_of_a_dead_worker_that_arrives_late_does_not_push_out_its_successor(cluster: OneProcess) -> None:
    spec = vector_job("job", "async", CELLS, 0)
    live = DirectWorker(cluster, spec, 0, "launch")
    live.initialise()
    request = JoinRequest(host="here", pid=7, run=live.run, launch="launch", attempt=5)
    with pytest.raises(TryLater, match="worker 0 of job 'job' is live: a successor has to ask again"):
        cluster.coordinator.join("job", 0, request)
    live.push()
    again = cluster.coordinator.join("job", 0, replace(request, waited=0.05))
    assert again.worker.incarnation > live.place.worker.incarnation, "who lives asks again"
    with pytest.raises(Fenced):
        live.push()


def test_workers_hear_why_their_job_is_not_rolled_back_and_it_is_not_tried_all_the_time(cluster: OneProcess) -> None:
    worker = worker_of(cluster, "async")
    worker.checkpoint()
    cluster.start_shard(1)
    restore, tries = cluster.shards[1].restore_job, []

    def no_room(*arguments: Any) -> RestoreProgress:
        tries.append(1)
        raise LimitExceeded("job 'job' does not fit into this shard's memory")

    cluster.shards[1].restore_job = no_room  # type: ignore[method-assign]
    for _ in range(4):
        cluster.coordinator.recover_jobs()
    assert len(tries) == 1
    with pytest.raises(TryLater, match=r"shard 1 was started anew; the last try failed: .*does not fit"):
        worker.rejoin()
    cluster.shards[1].restore_job = restore  # type: ignore[method-assign]
    cluster.clock.seconds += 5
    cluster.coordinator.recover_jobs()
    worker.rejoin()


def test_a_shard_that_holds_a_later_run_is_no_obstacle_to_a_restore(cluster: OneProcess, tmp_path: Path) -> None:
    """The clock of the coordinator before was ahead of this one's."""
    worker = worker_of(cluster, "async")
    worker.push()
    cluster.while_waiting()
    worker.leave()
    with pytest.raises(NotFound):
        cluster.coordinator.job("job")
    later = f"{int(worker.run, 16) + 10**15:016x}"
    cluster.shards[0].create_job(worker.spec, [0, 1], later)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, restore=True))
    cluster.while_waiting()
    again = DirectWorker(cluster, worker.spec, 0)
    assert again.run > later
    assert again.pull().tolist() == [1.0] * CELLS


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_whose_join_failed_half_way_before_a_rollback_is_expected_and_its_steps_are_counted(
    cluster: OneProcess, mode: str
) -> None:
    """It asks for its place again before the shard that was started anew has called in; then the job is rolled back."""
    worker = worker_of(cluster, mode)
    saved = worker.checkpoint().clock
    for _ in range(4):
        worker.push()
        worker.pull()

    def knows_no_job(*arguments: Any) -> int:
        raise NotFound("this shard knows no job 'job'")

    cluster.shards[1].add_worker = knows_no_job  # type: ignore[method-assign]
    with pytest.raises(TryLater, match="knows no job"):
        worker.rejoin()
    members, before = cluster.coordinator.job("job").workers, worker.clock
    assert members.all() == []
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    assert members.rejoining() == (0,)
    worker.rejoin()
    assert members.rejoining() == ()
    statistics = cluster.coordinator.job("job").statistics()
    steps = statistics.redone_steps if mode == "sync" else statistics.lost_steps
    assert steps == before - saved


def test_of_two_launches_that_begin_at_once_the_first_gets_all_ranks(cluster: OneProcess) -> None:
    """Their workers come in turns, and none of them is live yet."""
    run = cluster.coordinator.register_job(vector_job("job", "async", CELLS, 2))[0].placed.run
    members = cluster.coordinator.job("job").workers

    def request(launch: str, rank: int, **more: Any) -> JoinRequest:
        return JoinRequest(host=launch, run=run, launch=launch, launch_ranks=range(2), attempt=1 + rank, **more)

    first = members.reserve(0, request("a", 0))
    for rank in (0, 1):
        with pytest.raises(TryLater, match="another launch joins job 'job' at this moment"):
            members.reserve(rank, request("b", rank))
    members.reserve(1, request("a", 1))
    assert members.reserve(0, request("a", 0)).incarnation > first.incarnation, "a rank that is started again"
    assert members.reserve(0, request("b", 0, take_over=True)).rank == 0


class Stale(Disk):
    """A disk that cannot read the manifests of checkpoints while it fails."""

    fails = False

    def open(self, path: Path) -> BinaryIO:
        if self.fails and path.name.startswith("manifest"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().open(path)


def test_a_coordinator_that_cannot_read_the_checkpoints_now_does_not_start_without_the_job(tmp_path: Path) -> None:
    """Without it, it would have the shards drop the job. Whatever has started it starts it again."""
    disk = Stale()
    cluster = OneProcess(tmp_path, disk=disk)
    worker_of(cluster, "async").checkpoint()
    disk.fails = True
    with pytest.raises(TryLater, match="Stale file handle"):
        cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    disk.fails = False
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    assert "job" in cluster.coordinator.jobs()
    cluster.stop()


class Unlisted(Disk):
    """A disk that lists no folder of a checkpoint."""

    def is_empty(self, path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")


def test_a_restore_counts_although_the_disk_does_not_tell_which_checkpoints_were_begun_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a warning depends on that."""
    cluster = OneProcess(tmp_path, disk=Unlisted())
    worker = worker_of(cluster, "async")
    made = worker.checkpoint()
    assert CheckpointStore(tmp_path).begin("job", "000777")
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    worker.rejoin()
    assert f"rolled back to checkpoint {made.name}" in caplog.text
    said = rf"whether checkpoints after {made.name} were begun is not known: .*Stale file handle"
    assert re.search(said, caplog.text)
    cluster.stop()
