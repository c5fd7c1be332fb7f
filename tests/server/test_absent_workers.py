"""A job that all others have left waits for a worker that was silent: it may live, in the middle of its script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import FinishedWithout, Forbidden, JobFinished, RunEnded, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.core.membership import AWAY_SECONDS, DEFAULT_ABSENCE_SECONDS, NamedProcess
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

LEASE = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OneProcess]:
    cluster = OneProcess(tmp_path, lease=LEASE)
    cluster.while_waiting()
    yield cluster
    cluster.stop()


def beat(*workers: DirectWorker) -> None:
    """A heartbeat of each worker."""
    for worker in workers:
        member = worker.place.worker
        worker.cluster.coordinator.job("job").workers.heartbeat(worker.rank, member.incarnation, 0, member.key)


def silent(cluster: OneProcess, *others: DirectWorker) -> None:
    """Passes a lease, in which only these workers give a sign of life."""
    for _ in range(4):
        cluster.clock.seconds += LEASE / 3
        beat(*others)
    cluster.coordinator.expire_workers()


def left_behind(cluster: OneProcess, mode: str = "sync", done: bool = True) -> list[DirectWorker]:
    """Two workers, of which the first was silent, and the second has made a step alone and left."""
    spec = vector_job("job", mode, CELLS, 2)
    away, last = workers = [DirectWorker(cluster, spec, rank, "a") for rank in range(2)]
    away.initialise()
    silent(cluster, last)
    last.push()
    assert not last.leave(done=done), "the job has not ended"
    return workers


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_a_worker_that_was_silent_comes_back_to_the_weights_and_ends_the_job(cluster: OneProcess, mode: str) -> None:
    away, last = left_behind(cluster, mode)
    assert cluster.coordinator.job("job").statistics().absent == (0,)
    cluster.clock.seconds += DEFAULT_ABSENCE_SECONDS / 2
    cluster.coordinator.expire_workers()
    away.rejoin()
    assert away.clock == last.clock, "it comes back at the job's clock"
    assert cluster.coordinator.job("job").statistics().absent == ()
    away.push()
    assert torch.equal(away.pull(), torch.full((CELLS,), 2.0)), "it trains on, alone, from what the others have made"
    assert away.leave(done=True)
    with pytest.raises(JobFinished):
        cluster.coordinator.register_job(away.spec, "a")


@pytest.mark.parametrize("done", [True, False])
def test_a_job_waits_for_it_no_longer_than_it_was_told_to(cluster: OneProcess, done: bool) -> None:
    """A worker that comes later is told that the job is over, and so is one that the last worker did not wait for."""
    away, _ = left_behind(cluster, done=done)
    cluster.clock.seconds += DEFAULT_ABSENCE_SECONDS - LEASE
    cluster.coordinator.expire_workers()
    assert "job" in cluster.coordinator.jobs()
    cluster.clock.seconds += LEASE
    cluster.coordinator.expire_workers()
    assert cluster.coordinator.jobs() == {}
    if done:
        with pytest.raises(FinishedWithout, match=r"'job' finished at 1970-.* while this worker was away"):
            away.rejoin()
    else:
        assert cluster.coordinator.register_job(away.spec, "a")[1], "a job that was cut short has not finished"


def test_a_worker_that_was_gone_long_before_the_end_holds_nothing_up(cluster: OneProcess) -> None:
    spec = vector_job("job", "async", CELLS, 2)
    away, last = (DirectWorker(cluster, spec, rank, "a") for rank in range(2))
    silent(cluster, last)
    for _ in range(int(DEFAULT_ABSENCE_SECONDS / LEASE * 3) + 1):
        cluster.clock.seconds += LEASE / 3
        beat(last)
    cluster.coordinator.expire_workers()
    assert last.leave(done=True)
    with pytest.raises(FinishedWithout):
        away.rejoin()


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_whose_process_is_known_to_be_dead_is_not_waited_for(cluster: OneProcess, before: bool) -> None:
    """Its launcher reports the end, before or after the last worker has left."""
    spec = vector_job("job", "sync", CELLS, 2)
    dead, last = (DirectWorker(cluster, spec, rank, "a") for rank in range(2))
    silent(cluster, last)
    job = cluster.coordinator.job("job")
    process = NamedProcess("a", "here", 0, dead.place.worker.incarnation)
    if before:
        job.expire(process)
    assert last.leave(done=True) is before
    if not before:
        job.expire(process)
        cluster.coordinator.expire_workers()
    assert cluster.coordinator.jobs() == {}


def test_a_silent_worker_that_leaves_without_coming_back_ends_the_wait(cluster: OneProcess) -> None:
    """Its script has come to its end meanwhile."""
    away, _ = left_behind(cluster)
    with pytest.raises(Forbidden):
        cluster.coordinator.leave("job", 0, away.place.worker.incarnation, b"another key", away.run)
    assert away.leave(done=True)
    assert cluster.coordinator.jobs() == {}


def test_while_a_job_waits_its_launch_has_finished_and_another_begins_anew(cluster: OneProcess) -> None:
    away, _ = left_behind(cluster)
    with pytest.raises(JobFinished):
        cluster.coordinator.register_job(away.spec, "a")
    assert cluster.coordinator.job("job").statistics().absent == (0,), "and it waits still"
    with pytest.raises(TryLater):
        cluster.coordinator.register_job(away.spec, "b")
    assert cluster.coordinator.register_job(away.spec, "b")[1]
    with pytest.raises(RunEnded):
        away.rejoin()


def test_a_process_of_the_launch_goes_on_with_a_waiting_job_that_was_cut_short(cluster: OneProcess) -> None:
    away, last = left_behind(cluster, done=False)
    assert not cluster.coordinator.register_job(away.spec, "a")[1]
    again = DirectWorker(cluster, away.spec, 1, "a")
    assert again.clock == last.clock
    assert not again.leave(done=True), "and the silent worker is still waited for"
    away.rejoin()
    assert away.leave(done=True)


def test_a_coordinator_that_comes_back_waits_on(cluster: OneProcess, tmp_path: Path) -> None:
    away, last = left_behind(cluster)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    assert cluster.coordinator.job("job").statistics().absent == (0,)
    away.rejoin()
    assert away.clock == last.clock
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    assert cluster.coordinator.job("job").statistics().absent == (), "it has come back"
    assert away.leave(done=True)


def test_a_coordinator_that_comes_back_ends_the_wait_in_time(cluster: OneProcess, tmp_path: Path) -> None:
    away, _ = left_behind(cluster)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    cluster.clock.seconds += DEFAULT_ABSENCE_SECONDS
    cluster.coordinator.expire_workers()
    with pytest.raises(JobFinished):
        cluster.coordinator.register_job(away.spec, "a")


def test_a_last_worker_that_dies_leaves_its_work_to_be_done(cluster: OneProcess) -> None:
    """The other was done before it, and it was live then: the job is deserted, not finished."""
    spec = vector_job("job", "async", CELLS, 2)
    early, late = (DirectWorker(cluster, spec, rank, "a") for rank in range(2))
    early.leave(done=True)
    beat(late)
    silent(cluster)
    cluster.clock.seconds += DEFAULT_ABSENCE_SECONDS
    cluster.coordinator.expire_workers()
    assert not cluster.coordinator.register_job(spec, "a")[1], "a worker that is started again goes on with it"


def test_an_elastic_newcomer_does_not_take_the_rank_of_a_worker_that_was_taken_off_a_moment_ago(
    cluster: OneProcess,
) -> None:
    """That one lives, and is about to come back: it would be told that another process has replaced it."""
    spec = vector_job("job", "async", CELLS, 0)
    away = DirectWorker(cluster, spec, 0, "a")
    silent(cluster)
    newcomer = cluster.coordinator.join("job", None, JoinRequest(host="there", run=away.run, launch="a"))
    assert newcomer.worker.rank == 1
    assert away.rejoin().worker.rank == 0
    silent(cluster)
    cluster.clock.seconds += AWAY_SECONDS
    later = cluster.coordinator.join("job", None, JoinRequest(host="there", run=away.run, launch="a"))
    assert later.worker.rank == 0, "a rank is not kept for ever"
