"""A new launch that goes on with weights that others have trained says so, on both sides."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ps_protocol.messages.workers import Continued, JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.core.membership import JoinedWorker
from tests.tools import launching
from tests.tools.cluster import Cluster
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

LEASE = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OneProcess]:
    made = OneProcess(tmp_path, lease=LEASE)
    yield made
    made.stop()


def trained(cluster: OneProcess, world_size: int = 0, clock: int = 3) -> DirectWorker:
    """A worker of launch "first" that has come to a clock."""
    worker = DirectWorker(cluster, vector_job("job", "async", CELLS, world_size), 0, "first")
    worker.initialise()
    for _ in range(clock):
        worker.push()
    return worker


def join(cluster: OneProcess, launch: str, rank: int, **more: object) -> JoinedWorker:
    return cluster.coordinator.join("job", rank, JoinRequest(launch=launch, **more))  # type: ignore[arg-type]


def gone(cluster: OneProcess, seconds: float = 0.0) -> float:
    """Has all leases be over; returns how long ago that was seen, some time later."""
    cluster.clock.seconds += LEASE + 1
    for _ in range(2):
        cluster.coordinator.expire_workers()
    cluster.clock.seconds += seconds
    return seconds


def test_a_job_that_is_still_held_says_how_old_it_is(cluster: OneProcess, caplog: pytest.LogCaptureFixture) -> None:
    begun = cluster.clock.seconds
    trained(cluster)
    ended = cluster.clock.seconds + LEASE + 1
    gone(cluster, seconds=600.0)
    found = join(cluster, "second", 0).continued
    assert found is not None
    assert (round(found.began), found.live) == (round(begun), 0)
    assert found.trained == pytest.approx(ended, abs=LEASE + 2), "to the lease"
    assert "job job: a new launch continues the job at clock 3: begun 1970-01-01 00:1" in caplog.text
    assert any("a new launch continues the job" in event.text for event in cluster.coordinator.events.after(0))


def test_a_worker_of_a_launch_that_has_taken_part_continues_nothing(cluster: OneProcess) -> None:
    trained(cluster)
    gone(cluster)
    assert join(cluster, "first", 0).continued is None, "it is started again"
    assert join(cluster, "second", 1).continued is not None
    assert join(cluster, "second", 2).continued is None, "its launch has been told"


def test_who_joins_a_job_that_is_trained_hears_by_how_many(cluster: OneProcess) -> None:
    trained(cluster)
    found = join(cluster, "second", 1).continued
    assert found is not None
    assert (found.live, found.trained) == (1, pytest.approx(cluster.clock.seconds))


def test_a_job_at_its_beginning_is_not_continued(cluster: OneProcess) -> None:
    worker = DirectWorker(cluster, vector_job("job", "sync", CELLS, 2), 0, "first")
    assert worker.place.continued is None
    assert join(cluster, "second", 1).continued is None


@pytest.mark.parametrize("how", ["restore", "resume"])
def test_a_job_that_comes_from_a_checkpoint_says_when_that_was_made(
    cluster: OneProcess, tmp_path: Path, how: str
) -> None:
    begun = cluster.clock.seconds
    worker = trained(cluster, world_size=1)
    worker.checkpoint()
    made = worker.cluster.coordinator.job("job").checkpoints
    assert made is not None
    when = made.last_made_at()
    gone(cluster)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, **{how: True}))
    cluster.coordinator.register_job(worker.spec)
    found = join(cluster, "second", 0).continued
    assert found == Continued(pytest.approx(begun, abs=1.0), when, 0)


SCRIPT = """
import torch
import ps_worker

model = torch.nn.Linear(1, 1)
with ps_worker.connect() as session:
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
"""


@pytest.mark.long
def test_it_is_the_first_line_of_a_launch_on_both_sides(
    make_cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the launcher's own lines, and before the coordinator says that a worker joins."""
    first = make_cluster(shards=1, checkpoint_dir=tmp_path)
    with first.connect("sync", job="kept") as session:
        model = torch.nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.ones(1)).sum().backward()
        optimizer.step()
    first.servers[0].stop()
    address = make_cluster(shards=1, checkpoint_dir=tmp_path, restore=True).address
    where = ("--server", address, "--job", "kept", "--workers", "1", "--metrics-host", "127.0.0.1")
    with caplog.at_level(logging.INFO, "ps_server"):
        caplog.clear()
        done = launching.run(*where, launching.script(tmp_path, SCRIPT))
    assert done.returncode == 0, done.stderr
    begins = next(line for line in done.stderr.splitlines() if not line.startswith("ps-worker: "))
    age = r"begun .*, last trained .*"
    assert re.search(rf"continues job 'kept' at clock 1: {age}\. To begin anew: ", begins), done.stderr
    told = [record.getMessage() for record in caplog.records]
    [line] = [line for line in told if "a new launch continues the job at clock 1: begun " in line]
    [joins] = [line for line in told if "worker 0 joins" in line]
    assert told.index(line) < told.index(joins)


def test_the_workers_log_says_so_where_its_user_looks(
    make_cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for restore in (False, True):
        cluster = make_cluster(shards=1, checkpoint_dir=tmp_path, restore=restore)
        caplog.clear()
        with cluster.connect("sync", job="kept") as session:
            model = torch.nn.Linear(1, 1)
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            said = [record for record in caplog.records if "continues job 'kept'" in record.getMessage()]
            for _ in range(3):
                model(torch.ones(1)).sum().backward()
                optimizer.step()
        cluster.servers[0].stop()
        assert len(said) == restore
    [line] = said
    assert line.levelname == "WARNING"
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.match(
        rf"continues job 'kept' at clock 3: begun {date}, last trained {date}\. To begin", line.getMessage()
    )
