"""A launch as its user sees it: what it prints, what ends it, and what an error says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_launch.output import LONGEST_LINE_BYTES, PROGRESS_SECONDS, OutputLines
from ps_protocol.errors import LimitExceeded
from ps_protocol.messages.workers import JoinResult
from ps_worker.cluster import own_membership
from ps_worker.cluster.own_membership import OwnMembership
from tests.tools.cluster import Cluster, until
from tests.tools.launching import END_SECONDS, ROOT, START_SECONDS, Refusal, environment, run, script
from tests.tools.raw_worker import RawWorker, vector_job

TRAIN = """
import os, sys, time
from pathlib import Path

import torch
import ps_worker

session = ps_worker.connect()
begin(session.rank)
model = torch.nn.Linear(width(session.rank), 4)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    model(torch.full((1, width(session.rank)), value(session.rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped(session.rank)
print("rank", session.rank, "has finished", flush=True)
session.close()
"""
ORDINARY = """
import os, sys
from pathlib import Path
begin = stepped = lambda rank: None
width = lambda rank: 4
value = lambda rank: 1.0
here = Path(__file__).parent
"""


CAPTURED: Any = {"capture_output": True, "text": True, "timeout": START_SECONDS}


def training(directory: Path, change: str) -> str:
    """A training script that needs a server; `change` replaces a part of what is ORDINARY."""
    path = directory / "train.py"
    path.write_text("\n".join([ORDINARY, change, TRAIN]))
    return str(path)


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(shared: Cluster, job: str, tmp_path: Path) -> Launch:
    """Runs the training script with a change to its end: launch("begin = ...", "--elastic")."""

    def run_changed(change: str, *flags: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
        where = ("--server", shared.address, "--job", job, "--workers", str(workers), "--metrics-host", "127.0.0.1")
        return run(*where, *flags, training(tmp_path, change))

    return run_changed


# -- the beginning ---------------------------------------------------------------------------------------------------

RANK_1_FAILS = "begin = lambda rank: sys.exit(7) if rank == 1 else None"


@pytest.mark.long
def test_a_worker_that_fails_before_all_have_joined_ends_the_launch(shared: Cluster, job: str, launch: Launch) -> None:
    """Worker 0 would wait for half an hour. A worker is started again first, where it may be."""
    done = launch(RANK_1_FAILS, "--max-restarts", "1")
    assert done.returncode == 7
    assert "has finished" not in done.stdout
    assert re.findall("^ps-worker: (.*)$", done.stderr, re.MULTILINE) == [
        "starting 2 workers",
        "worker 1 failed with code 7; it is started again in 0.5 s (restart 1 of 1)",
        "worker 1 failed with code 7; not all workers of the job had joined, so the others are stopped",
        "1 of 2 workers failed: worker 1 failed with code 7",
    ]
    until(lambda: job not in shared.coordinator.jobs(), "the job's end: rank 0 was asked to leave")


@pytest.mark.long
def test_two_different_models_end_the_launch_with_the_difference(job: str, launch: Launch) -> None:
    done = launch("width = lambda rank: 4 + rank")
    assert done.returncode == 1
    assert "so the others are stopped" in done.stderr
    assert re.search(rf"worker [01]: job '{re.escape(job)}'", done.stderr)


@pytest.mark.long
def test_once_all_have_joined_a_worker_that_fails_does_not_take_the_others_with_it(launch: Launch) -> None:
    done = launch("stepped = lambda rank: sys.exit(7) if rank == 1 else None")
    assert done.returncode == 7
    assert done.stdout == "[0] rank 0 has finished\n"
    # The other one may have ended by the time that the launcher looks.
    goes_on = "(; the launch goes on with 1 of 2 workers)?"
    assert re.search(f"^ps-worker: worker 1 failed with code 7{goes_on}$", done.stderr, re.MULTILINE)
    assert "so the others are stopped" not in done.stderr


@pytest.mark.long
def test_in_an_elastic_job_no_worker_is_waited_for(launch: Launch) -> None:
    done = launch("begin = lambda rank: sys.exit(7) if os.environ['PS_LOCAL_RANK'] == '1' else None", "--elastic")
    assert done.returncode == 7
    assert "[0] rank 0 has finished\n" in done.stdout


@pytest.fixture
def informed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the start timeout of a worker begin when it has heard of so many live workers: informed(3)."""
    await_started = OwnMembership.await_started

    def begin_with(count: int) -> None:
        def awaited(membership: OwnMembership, place: JoinResult, *waits: Callable[[list[int]], None]) -> None:
            until(lambda: len(membership.roster.ranks) == count, "the roster")
            await_started(membership, place, *waits)

        monkeypatch.setattr(OwnMembership, "await_started", awaited)

    return begin_with


def test_ranks_that_never_join_are_named_when_the_start_timeout_is_over(
    shared: Cluster,
    job: str,
    informed: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    informed(1)
    monkeypatch.setattr(own_membership, "START_NOTICE_SECONDS", 0.0)
    monkeypatch.setenv("PS_START_TIMEOUT", "0.5")
    with shared.connect("sync", 2, 6, job=job) as session, pytest.raises(LimitExceeded) as caught:
        session.prepare(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))
    missing = (
        rf"waiting for ranks 0-1, 3-5 to join job '{re.escape(job)}': 1 of 6 workers are there \(ranks 2\), waiting for"
    )
    assert re.fullmatch(rf"gave up after --start-timeout 0.5 s: {missing} \d+ s", str(caught.value))
    assert any(re.match(missing, record.getMessage()) for record in caplog.records), "it was said before"


def test_ranks_that_may_have_died_are_named_when_the_start_timeout_is_over(
    shared: Cluster, job: str, informed: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have joined, and since one was started again none has given a sign of life."""
    informed(3)
    monkeypatch.setenv("PS_START_TIMEOUT", "0.5")
    spec = vector_job(job, "sync", 16, world_size=3)
    model = nn.ParameterDict({"cells": nn.Parameter(torch.zeros(16))})
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            stack.enter_context(RawWorker(shared.address, spec, rank))
        with shared.connect("sync", 0, 3, job=job) as session, pytest.raises(LimitExceeded) as caught:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_bytes=64)
    assert "waiting for a sign of life of ranks 1-2 in job" in str(caught.value)
    assert "3 of 3 workers are there (ranks 0-2)" in str(caught.value)


# -- what an error says ----------------------------------------------------------------------------------------------

NOT_FINITE = "value = lambda rank: float('inf')"


def test_an_error_under_the_launcher_shows_the_users_own_line_before_one_message(
    launch: Launch, tmp_path: Path
) -> None:
    done = launch(NOT_FINITE, workers=1)
    assert done.returncode == 1
    failing = tmp_path / "train.py"
    line = 1 + failing.read_text().splitlines().index("    optimizer.step()")
    begin = done.stderr.index(f'  File "{failing}", line {line}, in <module>\n    optimizer.step()\n')
    assert "worker 0: " in done.stderr[begin:]
    assert "non_finite='skip'" in done.stderr[begin:]
    assert "Traceback" not in done.stderr
    assert "ps_worker/" not in done.stderr.replace(str(tmp_path), ""), "no frame of the package's own"


@pytest.mark.long
def test_without_the_launcher_an_error_has_its_usual_traceback(shared: Cluster, job: str, tmp_path: Path) -> None:
    command = [sys.executable, training(tmp_path, NOT_FINITE)]
    said = subprocess.run(command, env=environment(PS_SERVER=shared.address, PS_JOB=job), **CAPTURED).stderr
    assert "Traceback (most recent call last)" in said
    assert "NonFiniteGradient" in said


@pytest.mark.long
def test_log_lines_have_time_level_and_rank_until_the_script_sets_up_its_own() -> None:
    """What is logged is that a variable has no effect: a script that no launcher started says it itself, once."""
    code = "import sys, ps_worker, logging; exec(sys.argv[1]); ps_worker.connect().close(); ps_worker.connect().close()"

    def lines(before: str) -> list[str]:
        command = [sys.executable, "-c", code, before]
        return subprocess.run(command, env=environment(PS_SHARDZ="1"), **CAPTURED).stderr.splitlines()

    [line] = lines("")
    assert line[4] == line[7] == "-"
    said = "the variable PS_SHARDZ is not known and has no effect, did you mean PS_SHARDS?"
    assert line[23:] == f" WARNING worker 0: {said}"
    assert lines("logging.basicConfig(format='mine: %(message)s')") == [f"mine: {said}"]


# -- output ----------------------------------------------------------------------------------------------------------


def test_lines_of_several_workers_stay_whole_and_have_the_rank_in_front(tmp_path: Path) -> None:
    writes = script(
        tmp_path,
        """
rank = os.environ["PS_RANK"]
for step in range(200):
    for part in ("step ", str(step), " of ", rank, "\\n"):
        sys.stdout.write(part); sys.stdout.flush()
        sys.stderr.write(part.upper()); sys.stderr.flush()
sys.stdout.write("the end")
""",
    )
    done = run("--server", "h:1", "--workers", "3", "--first-rank", "4", writes)
    assert done.returncode == 0
    for rank in (4, 5, 6):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] step {step} of {rank}" for step in range(200)] + [f"[{rank}] the end"]
        own = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] STEP {step} OF {rank}" for step in range(200)]
    assert len(done.stdout.splitlines()) == 3 * 201


def test_what_each_worker_writes_is_kept_in_a_file(tmp_path: Path) -> None:
    writes = script(tmp_path, "say('out of', os.environ['PS_RANK'])\nsys.stdout.flush()\nsys.exit('the error')")
    logs = tmp_path / "deep" / "logs"
    for _ in range(2):  # an earlier run's lines stay
        done = run("--server", "h:1", "--workers", "2", "--elastic", "--log-dir", str(logs), writes)
        assert done.returncode == 1
        assert sorted(done.stdout.splitlines()) == []  # PS_RANK is not there in an elastic job
    assert sorted(path.name for path in logs.iterdir()) == ["worker-0.log", "worker-1.log"]
    assert (logs / "worker-0.log").read_text().count("KeyError: 'PS_RANK'") == 2
    done = run("--server", "h:1", "--workers", "1", "--first-rank", "8", "--log-dir", str(logs), writes)
    assert (done.stdout, "the error\n" in done.stderr) == ("out of 8\n", True), "a single worker's lines have no rank"
    assert (logs / "worker-8.log").read_text() == "out of 8\nthe error\n"


def test_a_log_directory_that_cannot_be_is_one_line(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_text("")
    said = f"ps-worker: --log-dir {tmp_path / 'file'} cannot be written (File exists)\n"
    assert refusal("--log-dir", str(tmp_path / "file"), __file__) == (1, said)


def test_a_single_worker_keeps_the_terminal(tmp_path: Path) -> None:
    asks = script(tmp_path, "say(sys.stdout.isatty(), sys.stderr.isatty())")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ps_worker", "run", asks]
    try:
        subprocess.run(command, env=environment(), stdout=theirs, stderr=theirs, timeout=START_SECONDS, check=True)
        assert os.read(ours, 100).decode().split() == ["True", "True"]
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_worker_that_is_killed_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    """Nor does a process that it leaves behind, with its output, keep the launcher."""
    killed = script(
        tmp_path,
        """
import signal, subprocess
if os.environ["PS_RANK"] == "1":
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    sys.stdout.write(f"left {left.pid}\\nhalf a line")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    done = run("--server", "h:1", "--workers", "2", killed)
    assert done.returncode == 128 + signal.SIGKILL
    left, half = done.stdout.splitlines()
    os.kill(int(left.split()[2]), signal.SIGKILL)
    assert half == "[1] half a line"


def test_workers_go_on_when_nobody_reads_what_they_write(tmp_path: Path) -> None:
    """As in `ps-worker run … | head`."""
    done = tmp_path / "done"
    writes = script(
        tmp_path, f"for _ in range(20000): say('x' * 100)\nopen('{done}' + os.environ['PS_RANK'], 'w').close()"
    )
    command = [sys.executable, "-m", "ps_worker", "run", "--server", "h:1", "--workers", "2", writes]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(START_SECONDS) == 0
    assert all(Path(f"{done}{rank}").exists() for rank in range(2))


def test_a_launcher_whose_reader_stands_still_can_be_ended(tmp_path: Path) -> None:
    writes = script(tmp_path, f"open('{tmp_path}/begun', 'w').close()\nwhile True: say('x' * 100)")
    hurried = "import ps_launch.worker_launch as l; l.STOP_SECONDS = 2; import ps_worker.cli as c; c.main()"
    command = [sys.executable, "-c", hurried, "run", "--server", "h:1", "--workers", "2", writes]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        until((tmp_path / "begun").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 128 + signal.SIGTERM
        assert process.stdout is not None
        process.stdout.close()


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = run("-m", "package.train", "--lr", "3", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.stdout == "__main__ package ['--lr', '3']\n"
    done = run("--server", "h:1", "--workers", "2", "-m", "no_such_module")
    assert done.returncode == 1
    assert "No module named no_such_module" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_does_not_take_a_worker_for_a_process_of_torchrun(tmp_path: Path) -> None:
    uses = script(tmp_path, "from accelerate import Accelerator\nsay(Accelerator(cpu=True).num_processes)")
    done = run("--server", "h:1", "--workers", "2", uses)
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"], done.stderr


# -- lines, as bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "lines", "end"),
    [
        # A bar that is wiped out leaves nothing, and one that stays its last state.
        ([b"\r10%\r20%\r30%\r", b"     \rdone\n", b"\r40%\r50%\r"], [b"10%", b"done"], [b"50%"]),
        # The cursor moves nowhere, and colours stay.
        ([b"\x1b[2K\x1b[31mred\x1b[0m\x1b[A\n"], [b"\x1b[31mred\x1b[0m"], []),
        # A line without an end is written in parts.
        ([b"x" * (LONGEST_LINE_BYTES + 1), b"yz\n"], [b"x" * (LONGEST_LINE_BYTES + 1), b"yz"], []),
    ],
    ids=["bars", "colours", "without an end"],
)
def test_lines_are_what_a_terminal_would_show(parts: list[bytes], lines: list[bytes], end: list[bytes]) -> None:
    reader = OutputLines(lambda: 0.0)
    assert [line for part in parts for line in reader.feed(part)] == lines
    assert reader.end() == end


def test_lines_are_the_same_however_the_bytes_arrive() -> None:
    text = "first\nzweite Zeile, größer\r\n\nlast without an end".encode()
    expected = [b"first", "zweite Zeile, größer".encode(), b"", b"last without an end"]
    for size in range(1, len(text)):
        lines = OutputLines()
        found = [line for i in range(0, len(text), size) for line in lines.feed(text[i : i + size])]
        assert found + lines.end() == expected


def test_a_progress_bar_is_a_line_a_second_and_its_last_state() -> None:
    now = 0.0
    lines = OutputLines(lambda: now)
    found = []
    for percent in range(0, 101, 5):
        found += lines.feed(f"\r{percent:3}%".encode())
        now += PROGRESS_SECONDS / 4
    found += lines.feed(b"\n")
    assert found == [b"  0%", b" 20%", b" 40%", b" 60%", b" 80%", b"100%"]
    assert lines.end() == []
