"""A second launch on a job that is being trained is refused, or takes over; a launch that is started again goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from ps_protocol.errors import Fenced, InvalidRequest, JobInUse
from ps_protocol.messages.workers import JoinRequest
from ps_runtime import launch_id
from ps_server.coordinator import refusals, state_file
from ps_server.coordinator.state_file import SavedJob, StateFile
from ps_server.coordinator.timing import Timing
from ps_server.core.membership import LiveWorker
from ps_server.ops import requests
from ps_server.storage.manifest import seal
from ps_worker import Session
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.heartbeats import be_sure_soon, beat_often
from tests.tools.launching import ROOT, START_SECONDS, Command, Commands

END_SECONDS = 120.0
LEASE = 10.0
LONG_LEASE = 300.0  # longer than any test: what ends before was not waited for
BEATS = 60  # heartbeats in a lease

# Connects once there is no file NAME.hold, and trains until there is a file NAME.stop; files say that it is here, and
# its clock. Argument: the name.
SCRIPT = """
import os, sys, time
import torch
import ps_worker

name = sys.argv[1]
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
open(f"{name}.{os.environ['PS_RANK']}.here", "w").close()
while os.path.exists(f"{name}.hold"):
    time.sleep(0.01)
with ps_worker.connect() as session:
    model, optimizer = session.prepare(model, optimizer)
    sys.stdout.write(f"{name}: rank {session.rank} begins at clock {session.clock} with {model.weight.item()}\\n")
    open(f"{name}.{session.rank}.{os.getpid()}.pid", "w").close()
    while not os.path.exists(f"{name}.stop"):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)  # so that it leaves the processor to the other launch; it steps until it is stopped
        with open(f"{name}.{session.rank}.new", "w") as file:
            file.write(str(session.clock))
        os.rename(f"{name}.{session.rank}.new", f"{name}.{session.rank}.clock")  # whoever reads it finds a clock
"""


class Launches:
    """A cluster of real processes, and launches of `ps-worker run` that train on it in a directory."""

    def __init__(self, directory: Path, commands: Commands, *flags: str) -> None:
        self._directory, self._start = directory, commands.start
        (directory / "train.py").write_text(SCRIPT)
        ports = ("--shards", "1", "--port", "0", "--metrics-port", "0")
        self.servers = self._start("-m", "ps_server", "up", *ports, *flags)
        [self.address] = self.servers.says(r"ps-server: ready at (\S+) \(1 shard\)\n")

    def run(self, name: str, *flags: str) -> Command:
        """Starts two workers, in a launch of this name."""
        run = ("-m", "ps_worker", "run", "--server", self.address, "--workers", "2", "--metrics-host", "127.0.0.1")
        return self._start(*run, *flags, str(self._directory / "train.py"), name)

    def _clock(self, name: str, rank: int) -> int:
        try:
            return int((self._directory / f"{name}.{rank}.clock").read_text())
        except FileNotFoundError:
            return 0

    def trains(self, name: str) -> None:
        """Waits until both workers of a launch make steps, from now on."""
        before = [self._clock(name, rank) for rank in range(2)]
        until(lambda: all(self._clock(name, rank) > before[rank] for rank in range(2)), f"steps of {name}")

    def pid(self, name: str, rank: int) -> int:
        """The process of a launch's worker that was started last."""
        files = sorted(self._directory.glob(f"{name}.{rank}.*.pid"), key=lambda file: file.stat().st_mtime)
        return int(files[-1].name.split(".")[2])

    def ends(self, name: str, command: Command) -> None:
        """Has a launch's scripts end, and waits for it."""
        (self._directory / f"{name}.stop").touch()
        assert command.process.wait(END_SECONDS) == 0, command.err


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launches]]:
    """Clusters to order: launches("--lease", "4")."""
    monkeypatch.chdir(tmp_path)
    with closing(Commands(tmp_path)) as commands:
        yield lambda *flags: Launches(tmp_path, commands, *flags)


def kill_all(launch: Command) -> None:
    """Ends a launch's workers as a crash of their host would."""
    workers = launch.family()
    launch.process.send_signal(signal.SIGSTOP)  # it would report its workers' death, and they end after its own
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process beside a worker ends with it
            process.kill()
    launch.process.kill()
    launch.process.wait(END_SECONDS)


# -- as a user does, with real processes -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_second_launch_on_a_running_job_is_refused_and_takes_over_where_it_is_told_to(
    launches: Callable[..., Launches],
) -> None:
    at = launches("--lease", str(LEASE))
    first = at.run("first", "--max-restarts", "1")
    at.trains("first")
    refused = at.run("refused")
    assert refused.process.wait(END_SECONDS) == 1
    assert "begins" not in refused.out, "neither of its workers trains"
    [said] = set(re.findall(r"worker \d: (job 'default' is in use: .*--take-over.*)", refused.err))
    pids = f"{at.pid('first', 0)}, {at.pid('first', 1)}"
    assert f"workers 0 and 1 on host {os.uname().nodename} (pids {pids}) train it since 20" in said
    assert "--job NAME" in said
    assert "Traceback" not in refused.err
    at.trains("first")
    second = at.run("second", "--take-over")
    assert first.process.wait(END_SECONDS) == 1, "nor does it take its places back when its workers are started again"
    for rank in range(2):
        assert f"worker {rank} was replaced: " in first.err
    assert re.search(r"another launch took over: pid \d+ on host \S+", first.err)
    assert "job 'default' is in use: " in first.err
    at.trains("second")
    at.ends("second", second)
    assert re.findall(r"rank 0 begins at clock (\d+)", second.out) != ["0"], "it goes on with the job as it is"


@pytest.mark.long
def test_a_user_who_starts_again_after_a_crash_waits_for_the_lease_and_is_not_refused(
    launches: Callable[..., Launches], tmp_path: Path
) -> None:
    at, hold = launches("--lease", "20"), tmp_path / "second.hold"
    first = at.run("first")
    at.trains("first")
    hold.touch()  # or the lease might be over before interpreters have started
    second = at.run("second", "--connect-timeout", "5")  # shorter than the lease: the wait is the coordinator's wish
    until(lambda: len([*tmp_path.glob("second.*.here")]) == 2, "both workers of the second", START_SECONDS)
    kill_all(first)
    hold.unlink()
    at.trains("second")
    assert "is in use: workers 0 and 1 on host" in second.err
    assert "Waiting for a sign of life" in second.err
    at.ends("second", second)


@pytest.mark.long
def test_a_worker_that_its_launch_starts_again_takes_its_place_at_once(launches: Callable[..., Launches]) -> None:
    at = launches("--lease", "40")
    first = at.run("first", "--max-restarts", "1")
    at.trains("first")
    os.kill(at.pid("first", 1), signal.SIGKILL)
    first.says(r"first: rank 1 begins at clock [1-9]\d* with", count=1)
    at.trains("first")
    assert "is in use" not in first.err
    at.ends("first", first)


@pytest.mark.long
def test_all_workers_started_again_on_restored_servers_go_on(launches: Callable[..., Launches], tmp_path: Path) -> None:
    at = launches("--lease", str(LONG_LEASE), "--checkpoint-dir", "kept", "--checkpoint-every", "5steps")
    first = at.run("first")
    at.trains("first")
    until(lambda: list((tmp_path / "kept").glob("*/*/manifest.json")), "a checkpoint")
    kill_all(first)
    assert at.servers.end(signal.SIGTERM) == 0
    again = launches("--checkpoint-dir", "kept", "--restore")
    second = again.run("second")
    begun = second.says(r"second: rank \d begins at clock (\d+) with", count=2)
    assert all(int(clock) > 0 for clock in begun), "of the checkpoint"
    again.trains("second")
    again.ends("second", second)


# -- one process -----------------------------------------------------------------------------------------------------


def prepared(session: Session, weight: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with one weight, of which each step takes 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    found: tuple[nn.Module, torch.optim.Optimizer] = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(model.weight.item())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_notebooks_cell_that_is_run_again_begins_anew(
    shared: Cluster, job: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def cell(weight: float) -> float:
        session = shared.connect(mode, job=job)  # nobody closes it
        model, optimizer = prepared(session, weight)
        step(model, optimizer)
        assert session.clock == 1
        return step(model, optimizer)

    assert cell(10.0) == 8.0
    assert "an earlier session" not in caplog.text
    assert cell(100.0) == 98.0, "the fresh model's weights, not those of the first run"
    [said] = [record for record in caplog.records if "an earlier session of this process" in record.message]
    assert job in said.message
    shared.connect(mode, job=job).close()  # one that was never prepared closes it as well
    assert job not in shared.coordinator.jobs()


def test_sessions_of_one_process_in_other_places_stay_as_they_are(shared: Cluster, job: str) -> None:
    """One whose rank comes again, with others live, goes on with the job."""
    sessions = [shared.connect("async", rank, 2, job=job) for rank in range(2)]
    trained = in_parallel(2, lambda rank: prepared(sessions[rank], 10.0))
    others = [shared.connect("async", job=f"{job}.other")]
    others += [shared.connect("async", elastic=True, job=f"{job}.elastic") for _ in range(2)]
    trained += [prepared(session) for session in others]
    for model, optimizer in trained:
        step(model, optimizer)
    assert {session.rank for session in others[1:]} == {0, 1}
    again = shared.connect("async", 0, 2, job=job)
    model, _ = prepared(again, 100.0)
    assert model.weight.item() == 8.0, "what both have made of it"
    for session in (sessions[1], again, *others):
        session.close()


# -- launches in one process: PS_LAUNCH_ID tells them apart ----------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """A session of the launch that is named.

    A launch is refused after two heartbeats of the first one: a lease has so many that this takes a second, and not
    half of a lease.
    """
    beat_often(monkeypatch, BEATS)
    be_sure_soon(monkeypatch, BEATS)
    monkeypatch.setattr(refusals, "LONGEST_ASK_AGAIN_SECONDS", 0.1)

    def connect(cluster: Cluster, launch: str, mode: str = "async", *place: int, **more: object) -> Session:
        monkeypatch.setenv("PS_LAUNCH_ID", launch)
        return cluster.connect(mode, *place, **more)

    return connect


def test_a_refused_launch_changes_nothing(shared: Cluster, job: str, launched: Callable[..., Session]) -> None:
    with launched(shared, "a", job=job) as session:
        model, optimizer = prepared(session, 5.0)
        step(model, optimizer)
        before = shared.state(job)
        with launched(shared, "b", job=job) as stranger, pytest.raises(JobInUse, match="is in use: worker 0 "):
            prepared(stranger, 50.0)
        assert shared.state(job) == before
        assert step(model, optimizer) == 3.0


def test_a_launch_of_several_ranks_is_refused_as_a_whole(
    shared: Cluster, job: str, launched: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 of the first launch has left; the second launch's worker 1 must not train on with its worker 0."""
    sessions = [launched(shared, "a", "async", rank, 2, job=job) for rank in range(2)]
    in_parallel(2, lambda rank: prepared(sessions[rank]))
    sessions[1].close()
    monkeypatch.setenv("PS_LAUNCH_RANKS", "0-1")
    with launched(shared, "b", "async", 1, 2, job=job) as stranger, pytest.raises(JobInUse, match="worker 0 on host"):
        prepared(stranger)
    monkeypatch.setenv("PS_LAUNCH_RANKS", "1-1")
    with launched(shared, "c", "async", 1, 2, job=job) as replacement:
        model, optimizer = prepared(replacement)
        step(model, optimizer)
    sessions[0].close()


def test_elastic_workers_of_any_launch_may_join(shared: Cluster, job: str, launched: Callable[..., Session]) -> None:
    sessions = [launched(shared, launch, job=job, elastic=True) for launch in ("a", "b")]
    for session in sessions:
        prepared(session)
    assert [session.rank for session in sessions] == [0, 1]
    for session in sessions:
        session.close()


def test_who_is_replaced_by_another_launch_is_told_of_it_and_cannot_take_over_in_turn(
    shared: Cluster, job: str, launched: Callable[..., Session]
) -> None:
    with launched(shared, "a", job=job, take_over=True) as first:
        model, optimizer = prepared(first)
        with launched(shared, "b", job=job, take_over=True) as second:
            prepared(second)
            with pytest.raises(Fenced, match=r"worker 0 was replaced: .*; another launch took over: pid \d+ on host"):
                step(model, optimizer)
            again = launched(shared, "a", job=job, take_over=True)
            with again, pytest.raises(JobInUse, match="That launch took over from this one"):
                prepared(again)
            with launched(shared, "c", job=job, take_over=True) as third:
                prepared(third)


def test_a_launch_is_known_after_the_coordinators_restart(
    make_cluster: Callable[..., Cluster], tmp_path: Path, launched: Callable[..., Session]
) -> None:
    timing = Timing(asked_checkpoint=0.1)  # no worker steps meanwhile
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=timing)
    with launched(cluster, "a") as session:
        model, optimizer = prepared(session)
        step(model, optimizer)
        requests.checkpoint_job(cluster.address, "default")
        cluster.start_again(0)  # with a shard, so that the job is rolled back as well: nobody holds a rank for a moment
        with launched(cluster, "b") as stranger, pytest.raises(JobInUse):
            prepared(stranger)
        step(model, optimizer)
        [member] = cluster.coordinator.jobs()["default"].workers.all()
        assert member.launch == "a"


def test_a_launch_that_waits_while_the_first_one_ends_begins_the_job_anew(
    make_cluster: Callable[..., Cluster], launched: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(lease=LONG_LEASE)
    first = launched(cluster, "a")
    model, optimizer = prepared(first, 5.0)
    step(model, optimizer)
    second = launched(cluster, "b")

    def work(which: int) -> float:
        if which == 0:
            until(lambda: "Waiting for a sign of life" in caplog.text)
            first.close()
            return 0.0
        return step(*prepared(second, 50.0))

    assert in_parallel(2, work) == [0.0, 49.0]
    second.close()


def test_status_says_which_launch_a_worker_is_of_and_since_when(
    shared: Cluster, job: str, launched: Callable[..., Session]
) -> None:
    with launched(shared, "a", job=job) as session:
        prepared(session)
        [worker] = next(known["workers"] for known in requests.fetch(shared.address)["jobs"] if known["name"] == job)
        assert worker["launch"] == "a"
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+Z", worker["join_time"])


def test_a_launchs_name_that_is_none_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session:
        prepared(session)
        for launch in ("x" * 256, "line\nline"):
            with pytest.raises(InvalidRequest, match="a launch's name has up to 255 printable ASCII characters"):
                shared.coordinator.join(job, 0, JoinRequest(launch=launch))


def test_files_of_coordinators_that_knew_no_launches_are_read(tmp_path: Path) -> None:
    worker = LiveWorker(0, 1, 0.0, 5, 12, "host", "", b"key", 7, "a", 3.0, replaced=(("b", 1),))
    job = SavedJob({}, "run", (0,), {0: 1}, 1, 0, True, (worker,), rejoining=(2,), pending_removals=((0, 3, 1),))
    StateFile(tmp_path).save(lambda: {"job": job})
    assert StateFile(tmp_path).load()[0]["job"].workers == (worker,)
    kept = {**json.loads((tmp_path / state_file.FILE).read_text()), "format": 1}
    known = kept["jobs"]["job"]
    for name, former in (("shard_processes", "held_by"), ("rejoining", "awaited"), ("pending_removals", "ghosts")):
        known[former] = known.pop(name)
    for name in ("launch", "since", "replaced"):
        del known["workers"][0][name]
    del kept["seal"]
    (tmp_path / state_file.FILE).write_text(json.dumps({**kept, "seal": seal(kept)}))
    found = StateFile(tmp_path).load()[0]["job"]
    assert found == replace(job, workers=(replace(worker, launch="", since=0.0, replaced=()),))


# -- what a launch is called -----------------------------------------------------------------------------------------

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., launch_id.LaunchId]:
    """The launch of a process with these variables, in a job of four workers."""
    for name in [*TORCHRUN, *SLURM, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"]:
        monkeypatch.delenv(name, raising=False)

    def find(variables: dict[str, str], **more: str) -> launch_id.LaunchId:
        with monkeypatch.context() as patch:
            for name, value in (variables | more).items():
                patch.setenv(name, value)
            return launch_id.launch_id(4, take_over=False)

    return find


def test_a_torchrun_and_a_slurm_step_are_launches(named: Callable[..., launch_id.LaunchId]) -> None:
    for variables, again in ((TORCHRUN, "TORCHELASTIC_RESTART_COUNT"), (SLURM, "SLURM_RESTART_COUNT")):
        found = named(variables)
        assert found.ranks == range(4)
        restarted = named(variables, **{again: "1"})
        assert restarted.name == found.name
        assert restarted.ranks == range(0), "the others may be there already"
        assert found.is_unique == (variables is SLURM), "each torchrun of a host has one name by default"
        assert named(variables, PS_LAUNCH_ID="mine") == launch_id.LaunchId("mine", is_unique=True)
    others = [{"MASTER_PORT": "29501"}, {"MASTER_ADDR": "node8"}, {"TORCHELASTIC_RUN_ID": "x"}]
    assert len({named(TORCHRUN, **other).name for other in [{}, *others]}) == 4
    assert os.uname().nodename in named(TORCHRUN, MASTER_ADDR="127.0.0.1").name, "every host has that address"
    assert named(SLURM, SLURM_STEP_ID="1").name != named(SLURM).name
    assert named(SLURM, SLURM_STEP_NUM_TASKS="2").ranks == range(0), "the step is not the whole job"


def test_the_tasks_of_a_job_array_are_one_launch_of_elastic_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("12", "13"):
        for name, value in {**SLURM, "SLURM_JOB_ID": task, "SLURM_ARRAY_JOB_ID": "12"}.items():
            monkeypatch.setenv(name, value)
        assert launch_id.launch_id(0, take_over=False).name == "slurm-12.0"
        assert launch_id.launch_id(4, take_over=False).name == f"slurm-{task}.0", "each has a worker 0"


def test_a_process_that_nothing_has_launched_is_a_launch_of_its_own(named: Callable[..., launch_id.LaunchId]) -> None:
    assert named({}).name == named({}).name
    asks = "from ps_runtime.launch_id import launch_id; print(launch_id(1, False).name)"
    other = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, cwd=ROOT, check=True)
    assert other.stdout.strip() not in ("", named({}).name)


def test_ranks_of_a_launch_that_are_none_are_refused(named: Callable[..., launch_id.LaunchId]) -> None:
    assert named({}, PS_LAUNCH_ID="a", PS_LAUNCH_RANKS="2-3").ranks == range(2, 4)
    for wrong in ("2", "a-b", "-1-3"):
        with pytest.raises(InvalidRequest, match="PS_LAUNCH_RANKS is FIRST-LAST, two ranks, got"):
            named({}, PS_LAUNCH_ID="a", PS_LAUNCH_RANKS=wrong)
