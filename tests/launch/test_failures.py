"""A worker that fails: what the launcher says at once, at the end, and of workers that the terminal does not show."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps_launch.failures import LONGEST_CAUSE, Cause, Failure
from ps_launch.output import rank_prefix
from ps_runtime.logs import JSON, Speaker, line_of
from tests.tools.cluster import Cluster, until
from tests.tools.launching import END_SECONDS, Refusal, Start, environment, run, script

LAUNCH = ("-m", "ps_worker", "run", "--server", "h:1", "--elastic", "--workers", "2")
# Worker 1 fails; worker 0 waits for a signal, or for the file that the test makes.
FAILS = """
if os.environ["PS_LOCAL_RANK"] == "1":
    {fail}
say("0 is here")
await_file(os.path.join(os.path.dirname(__file__), "enough"))
"""
RAISES = "raise RuntimeError('no such sample')"
FAILED = "worker 1 failed with code 1 (RuntimeError: no such sample)"


def said_by_launcher(text: str) -> list[str]:
    return re.findall(r"^ps-worker: (.*)$", text, re.MULTILINE)


# -- at once, and at the end -----------------------------------------------------------------------------------------


def test_a_failure_is_said_while_the_others_go_on_and_again_at_the_end(start: Start, tmp_path: Path) -> None:
    command = start(*LAUNCH, "--log-dir", str(tmp_path), script(tmp_path, FAILS.format(fail=RAISES)))
    until(lambda: f"{FAILED}; the launch goes on with 1 of 2 workers" in command.err, "the failure", END_SECONDS)
    assert command.process.poll() is None
    (tmp_path / "enough").touch()
    assert command.process.wait(END_SECONDS) == 1
    assert said_by_launcher(command.err)[-1] == f"1 of 2 workers failed: {FAILED}; see {tmp_path}/worker-1.log"


def test_of_several_failures_the_first_is_named_at_the_end(tmp_path: Path) -> None:
    fails = """
if os.environ["PS_LOCAL_RANK"] == "1":
    os.kill(os.getpid(), 9)
while os.getppid() and "SIGKILL" not in open(sys.argv[1]).read():  # what the launcher says is the condition
    time.sleep(0.05)
sys.exit(3)
"""
    errors = tmp_path / "errors"
    words = [sys.executable, *LAUNCH, script(tmp_path, fails), str(errors)]
    with errors.open("wb") as stderr:
        done = subprocess.run(words, env=environment(), stderr=stderr, timeout=END_SECONDS, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert said_by_launcher(errors.read_text())[1:] == [
        "worker 1 was ended by SIGKILL; the launch goes on with 1 of 2 workers",
        "worker 0 failed with code 3",
        "2 of 2 workers failed; the first: worker 1 was ended by SIGKILL",
    ]


def test_with_stop_on_failure_the_others_end_with_the_first(tmp_path: Path) -> None:
    fails = FAILS.format(fail="sys.exit(7)").replace("say(", "import signal; signal.signal(15, told); say(")
    told = "def told(*_): say('told to end'); sys.exit(0)\n"
    # Worker 1 fails once worker 0 can be told.
    waits = "await_file(sys.argv[1])"
    fails = fails.replace("sys.exit(7)", f"{waits}\n    sys.exit(7)").replace(
        'say("0 is here")', 'open(sys.argv[1], "w").close()'
    )
    for flags, variables in ((["--stop-on-failure"], {}), ([], {"PS_STOP_ON_FAILURE": "1"})):
        ready = tmp_path / f"ready{len(flags)}"
        done = run(*LAUNCH[3:], *flags, script(tmp_path, told + fails), str(ready), **variables)
        assert done.returncode == 7
        assert "[0] told to end\n" in done.stdout
        assert "worker 1 failed with code 7; the others are stopped, as --stop-on-failure says" in done.stderr


def test_with_stop_on_failure_a_worker_is_started_again_first(tmp_path: Path) -> None:
    fails = FAILS.format(fail="sys.exit(7)")
    done = run(*LAUNCH[3:], "--stop-on-failure", "--max-restarts", "1", script(tmp_path, fails))
    assert done.returncode == 7
    assert said_by_launcher(done.stderr)[1:] == [
        "worker 1 failed with code 7; it is started again in 0.5 s (restart 1 of 1)",
        "worker 1 failed with code 7; the others are stopped, as --stop-on-failure says",
        "1 of 2 workers failed: worker 1 failed with code 7",
    ]


@pytest.mark.long
def test_the_launcher_says_when_all_workers_have_joined(shared: Cluster, job: str, tmp_path: Path) -> None:
    trains = """
import torch, ps_worker
session = ps_worker.connect()
model = torch.nn.Linear(1, 1)
session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
while "joined" not in open(sys.argv[1]).read():  # what the launcher says is the condition
    time.sleep(0.05)
"""
    errors = tmp_path / "errors"
    where = ("--server", shared.address, "--job", job, "--workers", "2", "--metrics-host", "127.0.0.1")
    words = [sys.executable, "-m", "ps_worker", "run", *where, script(tmp_path, trains), str(errors)]
    with errors.open("wb") as stderr:
        done = subprocess.run(words, env=environment(), stderr=stderr, timeout=140, check=False)
    assert done.returncode == 0, errors.read_text()
    assert said_by_launcher(errors.read_text()) == ["starting 2 workers", "2 workers have joined, training begins"]


# -- what the terminal shows -----------------------------------------------------------------------------------------


def test_only_some_ranks_are_shown_and_errors_of_all(tmp_path: Path) -> None:
    text = """
rank = os.environ["PS_LOCAL_RANK"]
say("out of", rank)
sys.stderr.write(f"progress of {rank}\\n")
if rank == "2":
    raise RuntimeError("no such sample")
"""
    words = ("--server", "h:1", "--workers", "3", "--elastic", "--log-dir", str(tmp_path / "logs"))
    done = run(*words, "--show-ranks", "0", script(tmp_path, text))
    assert done.stdout == "[0] out of 0\n"
    assert "[0] progress of 0\n" in done.stderr
    assert "[1] " not in done.stderr
    shown = re.findall(r"^\[2\] (.*)$", done.stderr, re.MULTILINE)
    assert shown[:2] == ["progress of 2", "Traceback (most recent call last):"]
    assert shown[-1] == "RuntimeError: no such sample"
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "out of 1\nprogress of 1\n"


def test_a_single_worker_that_is_not_shown_is_not_shown(tmp_path: Path) -> None:
    done = run("--server", "h:1", "--first-rank", "4", script(tmp_path, "say('here')"), PS_SHOW_RANKS="0")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("text", ["", "all", "0;1", "0,", "-1", "0-3"])
def test_ranks_that_are_none_are_refused(text: str, refusal: Refusal) -> None:
    code, said = refusal("--server", "h:1", f"--show-ranks={text}", __file__)
    assert code == 2
    assert f"expected ranks with commas between, as 0 or 0,3, got {text!r}" in said


def test_ranks_have_colours_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    try:
        coloured = {rank_prefix(rank, theirs) for rank in range(8)}
        assert len(coloured) == 8
        assert all(re.fullmatch(rb"\x1b\[\d\dm\[\d\]\x1b\[0m ", prefix) for prefix in coloured)
        with (tmp_path / "file").open("wb") as file:
            assert rank_prefix(3, file.fileno()) == b"[3] "
        monkeypatch.setenv("NO_COLOR", "1")
        assert rank_prefix(3, theirs) == b"[3] "
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("TERM", "dumb")
        assert rank_prefix(3, theirs) == b"[3] "
    finally:
        os.close(ours)
        os.close(theirs)


# -- the cause -------------------------------------------------------------------------------------------------------


def cause_of(text: str) -> str:
    cause = Cause()
    for line in text.encode().splitlines():
        cause.read(line)
    return cause.text


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    f()\n    ^^^\n'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TRACEBACK + "RuntimeError: no", "RuntimeError: no"),
        (TRACEBACK + "my.Own: first line\nsecond line\n", "my.Own: first line"),
        # One error while another was handled: the last is what ended the script.
        (TRACEBACK + "KeyError: 1\n\nDuring handling of it, another occurred:\n\n" + TRACEBACK + "E: 2\n", "E: 2"),
        (TRACEBACK + "\x1b[1;35mValueError\x1b[0m: \x1b[35mno\x1b[0m", "ValueError: no"),
        (TRACEBACK + "E: " + "x" * 1000, "E: " + "x" * (LONGEST_CAUSE - 6) + "..."),
        # As this package ends a script under the launcher.
        ('  File "train.py", line 1, in <module>\n    f()\nworker 1: 4 is not 3\n', "4 is not 3"),
        (line_of(Speaker("worker", rank=1), "hello", JSON), ""),
        ('{"time": "x", "level": "critical", "message": "4 is not 3"}', "4 is not 3"),
        ('{"time": "cut', ""),
        ("worker 1: a line of the script's own\nWARNING: no traceback\n", ""),
        (TRACEBACK, ""),
    ],
)
def test_the_cause_is_the_last_line_of_the_last_traceback(text: str, cause: str) -> None:
    assert cause_of(text) == cause


def test_a_signal_has_its_name() -> None:
    assert str(Failure(1, -11)) == "worker 1 was ended by SIGSEGV"
    assert str(Failure(1, -99)) == "worker 1 was ended by signal 99"
    assert (Failure(1, -9).exit_code, Failure(1, 3).exit_code) == (137, 3)
