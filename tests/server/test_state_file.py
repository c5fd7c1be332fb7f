"""The coordinator's own file: what it says of workers, and what a coordinator does that cannot read it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from ps_protocol.errors import JobFinished, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.state_file import FILE, StateFile
from ps_server.storage.disk import MAX_READ_BYTES, Disk
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

LEASE = 10.0


def test_when_a_worker_was_heard_by_another_machines_clock_says_nothing(tmp_path: Path) -> None:
    """Otherwise a launch is refused for good because of one that is dead."""
    cluster = OneProcess(tmp_path, lease=LEASE)
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, 1), 0, "a")
    member = worker.place.worker
    for _ in range(2):
        cluster.clock.seconds += LEASE / 2
        cluster.coordinator.job("job").workers.heartbeat(0, member.incarnation, 1, member.key)
    DirectWorker(cluster, vector_job("other", "async", CELLS, 1), 0)  # so that the file is written
    cluster.clock.seconds = 1.0
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    with pytest.raises(TryLater):
        cluster.coordinator.join("job", 0, JoinRequest(launch="b", waited=LEASE / 2))
    cluster.stop()


def test_the_file_is_json_also_of_a_worker_that_was_not_heard_yet(tmp_path: Path) -> None:
    cluster = OneProcess(tmp_path)
    DirectWorker(cluster, vector_job("job", "async", CELLS, 1), 0)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)["jobs"]["job"]["workers"]
    cluster.stop()


# What each job has in the files of the first release of this format: it takes no other name.
OF_FIRST_RELEASE = {
    *("spec", "run", "placement", "shard_processes", "last_incarnation", "restore_count", "started", "workers"),
    *("lost_steps", "redone_steps", "unaccounted", "began", "departed", "settled", "rejoining", "away"),
    *("pending_removals", "continues", "rounds_completed", "rounds", "launches"),
}


def test_an_earlier_release_goes_on_with_the_file_of_a_job_that_trains(tmp_path: Path) -> None:
    cluster = OneProcess(tmp_path)
    DirectWorker(cluster, vector_job("job", "async", CELLS, 1), 0)
    assert json.loads((tmp_path / FILE).read_text())["jobs"]["job"].keys() <= OF_FIRST_RELEASE
    cluster.stop()


class UnsteadyStore(Disk):
    """Gives the coordinator's file only at every other try. away: whether the next try is in vain"""

    away = False

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        if path.name == FILE:
            self.away = not self.away
            if not self.away:
                raise ConnectionError(errno.EIO, "no answer")
        return super().read(path, most)


def test_a_file_that_cannot_be_read_now_is_not_taken_for_none(tmp_path: Path) -> None:
    file = StateFile(tmp_path, UnsteadyStore())
    with pytest.raises(TryLater, match="cannot be read: no answer"):
        file.load()
    assert file.load() == ({}, {})


@pytest.mark.parametrize("answers_first", [True, False])
def test_a_store_that_does_not_answer_makes_no_coordinator_forget_what_has_finished(
    tmp_path: Path, answers_first: bool
) -> None:
    cluster = OneProcess(tmp_path)
    spec = vector_job("job", "async", CELLS, 0)
    cluster.while_waiting()
    worker = DirectWorker(cluster, spec, 0, "a")
    worker.initialise()
    assert worker.leave(done=True)
    cluster.stop()
    disk = UnsteadyStore()
    disk.away = not answers_first
    with pytest.raises(TryLater, match="cannot be read: no answer"):
        OneProcess(tmp_path, disk=disk).start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    cluster = OneProcess(tmp_path)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    with pytest.raises(JobFinished):
        cluster.coordinator.register_job(spec, "a")
    cluster.stop()
