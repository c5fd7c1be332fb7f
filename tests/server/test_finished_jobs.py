"""A job that has finished stays finished for the launches that took part in it, and for no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import FinishedWithout, Forbidden, JobFinished, NotFound
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.ended_jobs import JOBS_KEPT, EndedJobs, FinishedJob
from ps_server.coordinator.state_file import StateFile
from ps_server.coordinator.timing import Clock
from ps_server.core.membership import DEFAULT_ABSENCE_SECONDS
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.view.watch import Watch
from tests.tools.one_process import CELLS, DirectWorker, OneProcess, train
from tests.tools.raw_worker import vector_job

SPEC = vector_job("job", "async", CELLS, 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OneProcess]:
    cluster = OneProcess(tmp_path)
    cluster.while_waiting()
    yield cluster
    cluster.stop()


def trained(cluster: OneProcess, *launches: str) -> list[DirectWorker]:
    """A worker of each launch, of which the first has made a step."""
    workers = [DirectWorker(cluster, SPEC, rank, launch) for rank, launch in enumerate(launches)]
    workers[0].initialise()
    workers[0].push()
    return workers


def begins(cluster: OneProcess, launch: str) -> bool:
    """Whether a worker of a launch that registers the job now makes it."""
    return cluster.coordinator.register_job(SPEC, launch)[1]


def test_a_late_worker_of_a_launch_that_took_part_is_told_so_and_another_launch_begins_anew(
    cluster: OneProcess,
) -> None:
    preempted, last = trained(cluster, "a", "b")
    preempted.leave()
    assert last.leave(done=True)
    for launch in ("a", "b"):
        with pytest.raises(JobFinished, match=r"'job' has finished: .* at 1970-.*`ps-server end --job job`"):
            cluster.coordinator.register_job(SPEC, launch)
    assert cluster.coordinator.jobs() == {}, "nothing was made"
    assert begins(cluster, "c")


@pytest.mark.parametrize("done", [(True, False), (False, False)])
def test_a_job_whose_last_worker_was_cut_short_has_not_finished(cluster: OneProcess, done: tuple[bool, bool]) -> None:
    """Also a worker that was done before it: what the last one has not done is still to be done."""
    for worker, is_done in zip(trained(cluster, "a", "a"), done, strict=True):
        worker.leave(done=is_done)
    assert begins(cluster, "a")


def test_a_job_that_its_workers_deserted_has_not_finished(cluster: OneProcess) -> None:
    trained(cluster, "a")
    cluster.clock.seconds += 20
    cluster.coordinator.expire_workers()
    cluster.coordinator.job("job").desert()
    assert begins(cluster, "a")


class LeavingClock(Clock):
    """The clock of a watch. In the view after `leaving` is set, the job has ended once its figures are read."""

    def __init__(self, worker: DirectWorker) -> None:
        self.leaving, self._worker = False, worker

    def since_1970(self) -> float:
        if self.leaving:
            self.leaving = False
            assert self._worker.leave(done=True)
        return super().since_1970()


def test_a_job_that_ends_while_a_view_is_made_is_kept_with_its_last_checkpoint(cluster: OneProcess) -> None:
    [worker] = trained(cluster, "a")
    clock = LeavingClock(worker)
    watch = Watch(cluster.coordinator, 1, clock)
    clock.leaving = True
    watch.look()
    assert list(watch.view.jobs) == ["job"]
    assert cluster.coordinator.jobs() == {}
    watch.look()
    [finished] = watch.finished
    assert finished.end.checkpoints is not None
    assert finished.end.checkpoints.name is not None, "the one that was made at its end"


def test_a_process_that_has_taken_part_begins_its_job_anew_and_its_launch_with_it(cluster: OneProcess) -> None:
    """A notebook's cell that is run again, or the next round of a search: it says no launch."""
    [worker] = trained(cluster, "a")
    worker.leave(done=True)
    assert begins(cluster, "")
    assert not begins(cluster, "a"), "a worker of it that is started again joins that run"


def test_a_late_worker_of_a_finished_launch_does_not_join_the_next_launchs_run(cluster: OneProcess) -> None:
    [worker] = trained(cluster, "a")
    worker.leave(done=True)
    [_] = trained(cluster, "b")
    with pytest.raises(JobFinished):
        cluster.coordinator.register_job(SPEC, "a")
    assert not begins(cluster, "b")


def test_a_launch_that_joins_the_next_run_has_not_finished_that(cluster: OneProcess) -> None:
    [worker] = trained(cluster, "a")
    worker.leave(done=True)
    trained(cluster, "b")
    run = cluster.coordinator.job("job").placed.run
    cluster.coordinator.join("job", 1, JoinRequest(host="here", run=run, launch="a"))
    assert not begins(cluster, "a")


def test_a_worker_that_was_away_at_the_end_is_told_so(cluster: OneProcess) -> None:
    away, last = trained(cluster, "a", "a")
    cluster.clock.seconds += 9
    last.cluster.coordinator.job("job").workers.heartbeat(1, last.place.worker.incarnation, 0, last.place.worker.key)
    cluster.clock.seconds += 9
    cluster.coordinator.expire_workers()
    last.leave(done=True)
    cluster.clock.seconds += DEFAULT_ABSENCE_SECONDS  # for which the job waits for it: see test_absent_workers.py
    cluster.coordinator.expire_workers()
    with pytest.raises(FinishedWithout):
        away.rejoin()
    trained(cluster, "b")
    with pytest.raises(NotFound) as refused:
        away.rejoin()
    assert not isinstance(refused.value, FinishedWithout), "another run has the name now"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("restart", [False, True])
def test_workers_that_come_to_their_end_after_a_rollback_took_them_off_do_not_join_again(
    cluster: OneProcess, tmp_path: Path, mode: str, done: bool, restart: bool
) -> None:
    """Each had made its last step: it leaves the place that the rollback has taken from it."""
    spec = vector_job("job", mode, CELLS, 2)
    workers = [DirectWorker(cluster, spec, rank, "a") for rank in range(2)]
    workers[0].initialise()
    job = cluster.coordinator.job("job")
    cluster.while_waiting(lambda: train(workers))
    saved = job.checkpoint()
    cluster.while_waiting()
    train(workers)
    for worker in workers:
        member = worker.place.worker
        job.workers.heartbeat(worker.rank, member.incarnation, worker.clock, member.key)
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    if restart:
        cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
        cluster.while_waiting()
        job = cluster.coordinator.job("job")
    assert job.workers.rejoining() == (0, 1)
    with pytest.raises(Forbidden):
        cluster.coordinator.leave("job", 1, workers[1].place.worker.incarnation, b"another key", workers[1].run)
    assert not workers[1].leave(done=done)
    assert job.workers.rejoining() == (0,), "nothing waits for it"
    assert not workers[1].leave(done=done), "a second time changes nothing"
    assert workers[0].leave((workers[0].clock, b"the state of a later step"), done=done)
    steps = job.statistics()
    lost = sum(worker.clock - saved.clock for worker in workers)
    assert (steps.redone_steps if mode == "sync" else steps.lost_steps) == lost > 0
    store = CheckpointStore(tmp_path)
    last = store.manifest("job", store.names("job")[-1])
    assert last.workers.keys() <= saved.workers.keys()
    for rank in last.workers:
        state = store.read_worker("job", last.name, last.workers[rank].part)
        assert state == b"state at %d" % saved.workers[rank].clock, "not that of steps that were rolled back"
    if done:
        with pytest.raises(JobFinished):
            cluster.coordinator.register_job(spec, "a")
    else:
        assert cluster.coordinator.register_job(spec, "a")[1]


def test_a_job_whose_workers_all_died_after_a_rollback_is_deserted(cluster: OneProcess) -> None:
    """One of them leaves, and another one's process is known to be gone: no live worker waits for either."""
    spec = vector_job("job", "sync", CELLS, 2)
    workers = [DirectWorker(cluster, spec, rank, "a") for rank in range(2)]
    workers[0].initialise()
    job = cluster.coordinator.job("job")
    cluster.while_waiting(lambda: train(workers))
    job.checkpoint()
    cluster.while_waiting()
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    assert job.life.deserted_for(empty=False) == 0.0  # the last look before
    cluster.clock.seconds += 500.0
    assert job.life.deserted_for(job.workers.empty(without_awaited=True)) == 500.0
    workers[0].leave(done=True)
    job.desert()
    assert cluster.coordinator.jobs() == {}


@pytest.mark.parametrize("restore", [False, True])
def test_a_coordinator_that_comes_back_knows_it_and_one_that_begins_anew_does_not(
    cluster: OneProcess, tmp_path: Path, restore: bool
) -> None:
    for worker in trained(cluster, "a", "b"):
        cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))  # it knows of the launches of a live job
        worker.leave(done=True)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=not restore, restore=restore))
    for launch in ("a", "b"):
        with pytest.raises(JobFinished):
            cluster.coordinator.register_job(SPEC, launch)
    cluster.start_coordinator(CheckpointPolicy(tmp_path))
    assert begins(cluster, "a")


def test_a_file_of_an_earlier_release_names_no_finished_job(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load() == ({}, {})
    file.save(dict, lambda: {"job": FinishedJob("1", ("a",), 5.0)})
    assert StateFile(tmp_path).load() == ({}, {"job": FinishedJob("1", ("a",), 5.0)})
    file.path.write_text("{}")
    assert StateFile(tmp_path).load() == ({}, {})


def test_what_is_kept_of_jobs_that_are_over_is_bounded() -> None:
    ended = EndedJobs()
    for number in range(JOBS_KEPT + 10):
        ended.ended(f"job {number}", "", FinishedJob("1", ("a",), 5.0))
        ended.ended(f"other {number}", "why", None)
    assert len(ended.finished()) == JOBS_KEPT
    ended.check("job 9", "a")
    with pytest.raises(JobFinished):
        ended.check("job 10", "a")
    assert ended.error("other 9", "") is None
    assert "why" in str(ended.error("other 10", ""))


def test_what_was_added_to_a_job_is_forgotten_with_it() -> None:
    """The next run of the job adds its groups anew."""

    def kept(begin: str, launch: str) -> set[str]:
        jobs = EndedJobs()
        for name in ("job", "job.added1", "job.added2", "job.added", "other.added1"):
            jobs.ended(name, "", FinishedJob("run", ("a",), 0.0))
        jobs.begun(begin, launch)
        return set(jobs.finished())

    assert kept("job", "b") == {"job", "job.added", "other.added1"}
    assert kept("job", "") == {"job.added", "other.added1"}
    assert kept("other", "b") == {"job", "job.added1", "job.added2", "job.added"}
    jobs = EndedJobs()
    jobs.ended("job.added1", "", FinishedJob("run", ("a",), 0.0))
    assert not jobs.forget("job")
    assert jobs.finished() == {}
