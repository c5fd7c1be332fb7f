"""A launcher that sees a process die has the coordinator told: with a lease of minutes the others go on all the same.

No test here measures time: each ends within its usual limit only if nothing waits for a lease.
"""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ps_protocol.errors import NotFound
from ps_server.ops import requests
from ps_worker.cluster.launcher_reports import report_shard_end, report_worker_end
from tests.tools.cluster import Cluster, until
from tests.tools.launching import START_SECONDS, Start, python
from tests.tools.raw_worker import RawWorker, vector_job

LEASE = "600"

# Steps until a file says that it is enough: in sync no worker gets two steps ahead of a dead one.
TRAIN = """
import os, sys
from pathlib import Path
import torch
import ps_worker

here = Path(sys.argv[1])
with ps_worker.connect() as session:
    model = torch.nn.Linear(4, 4)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (here / f"pid-{session.rank}").write_text(str(os.getpid()))
    while not (here / "enough").exists():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (here / f"clock-{session.rank}.new").write_text(str(session.clock))
        (here / f"clock-{session.rank}.new").rename(here / f"clock-{session.rank}")
"""


def clock(directory: Path, rank: int) -> int:
    path = directory / f"clock-{rank}"
    return int(path.read_text()) if path.exists() else 0


def process_of(address: str, index: int) -> int | None:
    """The process of a shard; None where the shard did not answer in time."""
    shard = next(each for each in requests.fetch(address)["shards"] if each["index"] == index)
    return int(shard["pid"]) if shard["reachable"] else None


def await_steps(directory: Path, rank: int, count: int = 5) -> None:
    """Waits until a worker has made so many steps more."""
    before = clock(directory, rank)
    until(lambda: clock(directory, rank) >= before + count, f"steps of worker {rank}", START_SECONDS)


@pytest.mark.long
def test_the_others_train_on_when_a_worker_is_killed(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    flags = ("--shards", "1", "--workers", "2", "--server-options", f"--lease {LEASE}", "--mode", "sync")
    command = start("-m", "ps_worker", "run", *flags, str(script), str(tmp_path))
    for rank in range(2):
        await_steps(tmp_path, rank, 1)
    psutil.Process(int((tmp_path / "pid-1").read_text())).kill()
    until(lambda: "worker 1 (pid" in command.err, "the coordinator to hear of it", START_SECONDS)
    await_steps(tmp_path, 0)
    (tmp_path / "enough").touch()
    assert command.process.wait(START_SECONDS) == 128 + signal.SIGKILL
    assert "is gone: its process ended" in command.err


@pytest.mark.long
def test_a_shard_at_another_address_takes_over_when_its_end_is_reported(start: Start, tmp_path: Path) -> None:
    """As a scheduler starts it again: somewhere else. Without the report its index is free after ten seconds of
    silence, which a shard that calls in just before it dies begins anew."""
    common = ("--port=0", "--metrics-port=0", f"--lease={LEASE}", f"--checkpoint-dir={tmp_path / 'kept'}")
    first = start("-m", "ps_server", "shard", "--index=0", "--with-coordinator", "--shards=2", *common)
    [address] = first.says(r"ready at (\S+)")
    words = ["-m", "ps_server", "shard", "--index=1", f"--coordinator={address}", *common]
    second = start(*words)
    [number] = second.says(r"shard 1 ready at \S+ \(process (\d+)\)")
    process = int(number)
    second.process.kill()
    second.process.wait()
    assert not report_shard_end(address, 1, process + 1), "another process than the shard's"
    report = ("-m", "ps_server", "report", "--server", address, "--index", "1", "--process")
    for reported, said in (
        (process + 1, f"process {process + 1} is not shard 1: nothing changed"),
        (process, "shard 1: its end is noted"),
    ):
        done = python(*report, str(reported))
        assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr
    third = start(*words)
    [place] = third.says(r"shard 1 ready at (\S+)")
    assert "already served" not in third.err
    assert {shard["index"]: shard["address"] for shard in requests.fetch(address)["shards"]}[1] == place


@pytest.mark.long
def test_up_reports_the_shard_that_ended(start: Start) -> None:
    command = start("-m", "ps_server", "up", "--shards=2", "--port=0", "--metrics-port=0")
    [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
    for restart in range(1, 5):  # a report that comes when the shard is back already says nothing
        psutil.Process(until(lambda: process_of(address, 1), "an answer of the shard", START_SECONDS)).kill()
        until(lambda: f"shard 1 is back (restart {restart})" in command.err, "the shard", START_SECONDS)  # noqa: B023
        if re.search(r"shard 1 \(pid \d+ at \S+\) is gone: its process ended", command.err):
            break
    else:
        pytest.fail(command.err)
    assert command.end(signal.SIGTERM) == 0


# -- the functions and the commands, for other launchers -------------------------------------------------------------


def live(cluster: Cluster, job: str) -> list[int]:
    return [member.rank for member in cluster.coordinator.job(job).workers.all()]


class Launched(RawWorker):
    """A worker that says of which launch it is, which process, and on which host."""

    launch, pid = "a-launch", 4711

    def join(self) -> object:  # type: ignore[override]
        members = self.members

        class Members:
            @staticmethod
            def Join(request: object, **options: object) -> object:
                request.launch.name, request.pid = Launched.launch, Launched.pid  # type: ignore[attr-defined]
                request.host = socket.gethostname()  # type: ignore[attr-defined]
                return members.Join(request, **options)

        self.members = Members
        try:
            return super().join()
        finally:
            self.members = members


def test_the_function_takes_off_the_process_that_is_named(shared: Cluster, job: str) -> None:
    spec = vector_job(job, "sync", 16, 2)
    with Launched(shared.address, spec, 0) as worker, RawWorker(shared.address, spec, 1):
        where, process = (shared.address, job), (Launched.launch, Launched.pid)
        assert report_worker_end(*where, "another", Launched.pid) == ()
        assert report_worker_end(*where, Launched.launch, 4712) == ()
        assert report_worker_end(*where, *process, host="elsewhere") == ()
        assert report_worker_end(*where, *process, incarnation=worker.incarnation + 1) == ()
        assert live(shared, job) == [0, 1]
        assert report_worker_end(*where, *process, incarnation=worker.incarnation) == (0,)
        assert report_worker_end(*where, *process) == ()
        assert live(shared, job) == [1]
        with pytest.raises(NotFound):
            report_worker_end(shared.address, "no-such-job", *process)


def test_the_command_does_the_same(shared: Cluster, job: str) -> None:
    with Launched(shared.address, vector_job(job, "sync", 16, 1), 0):
        words = ["-m", "ps_worker", "report", "--server", shared.address, "--job", job]
        words += ["--launch", Launched.launch, "--pid", str(Launched.pid)]
        for said in ("taken off: worker 0", "no worker of that process was live"):
            done = python(*words)
            assert (done.returncode, done.stdout) == (0, f"ps-worker: {said}\n"), done.stderr
