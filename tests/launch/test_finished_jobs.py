"""A worker that comes after the last one has left does not train the job a second time: real processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ps_protocol.errors import FinishedWithout, JobFinished, PSError
from ps_runtime.launch_id import FINISHED_WITHOUT_CODE, LAUNCHED
from ps_worker.launched import report_errors_in_one_line
from tests.tools.launching import Command, Commands, python

END_SECONDS = 120.0

# Trains one step. Argument: how it goes on.
SCRIPT = """
import sys, time
import torch
import ps_worker

model = torch.nn.Linear(1, 1, bias=False)
session = ps_worker.connect()
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
model(torch.ones(1)).sum().backward()
optimizer.step()
print(f"trained to clock {session.clock}", flush=True)
if sys.argv[1] == "fails":
    raise RuntimeError("an error of the script's own")
while sys.argv[1] == "waits":
    time.sleep(1)  # until SIGTERM: one that comes just before `signal.pause` would not end it
"""

# Trains a job and then another one: the next of its script, or a layer that it adds. Arguments: which of them, and a
# file for which it waits between the two.
TWO_JOBS = """
import sys, threading
from pathlib import Path
import torch
import ps_worker

how, go = sys.argv[1], Path(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
model[0].requires_grad_(False)


def step(model, optimizer):
    model(torch.ones(1)).sum().backward()
    optimizer.step()


def train(job):
    session = ps_worker.connect(job=job)
    prepared = session.prepare(model, torch.optim.SGD(model[1].parameters(), lr=1.0))
    step(*prepared)
    return session, *prepared


session, prepared, optimizer = train("first")
print("trained the first", flush=True)
while not go.exists():
    threading.Event().wait(0.01)
if how == "next":
    session.close()
    train("second")
else:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    step(prepared, optimizer)
print("trained both", flush=True)
"""

Run = Callable[..., Command]


@pytest.fixture
def address(commands: Commands) -> str:
    """A cluster of one shard."""
    up = ("up", "--shards", "1", "--port", "0", "--metrics-port", "0")
    [address] = commands.start("-m", "ps_server", *up).says(r"ps-server: ready at (\S+) \(1 shard\)\n")
    return address


@pytest.fixture
def run(commands: Commands, address: str, tmp_path: Path) -> Run:
    """Starts elastic workers of a launch with a name: run("a", "ends")."""

    def start(launch: str, how: str, *flags: str, script: str = SCRIPT, after: str = "") -> Command:
        (tmp_path / "train.py").write_text(script)
        words = ("run", "--server", address, "--elastic", "--mode", "async", "--metrics-host", "127.0.0.1", *flags)
        arguments = (str(tmp_path / "train.py"), how, str(tmp_path / after))
        return commands.start("-m", "ps_worker", *words, *arguments, PS_LAUNCH_ID=launch)

    return start


def ended(command: Command) -> tuple[int, int]:
    """The exit code of a command, and how many of its workers trained."""
    return command.process.wait(END_SECONDS), command.out.count("trained to clock ")


@pytest.mark.parametrize(
    ("error", "code"), [(JobFinished("it has finished"), 0), (FinishedWithout("it has"), FINISHED_WITHOUT_CODE)]
)
def test_the_exit_code_says_whether_there_was_nothing_to_do_or_something_was_not_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: PSError, code: int
) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_errors_in_one_line()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, None)
    assert ended.value.code == code
    assert capsys.readouterr().err.endswith(f": {error}\n")


@pytest.mark.long
def test_a_late_worker_of_the_same_launch_ends_with_0_and_says_why(run: Run, address: str) -> None:
    assert ended(run("a", "ends")) == (0, 1)
    late = run("a", "ends", "--workers", "2")
    assert ended(late) == (0, 0)
    assert late.err.count(": job 'default' has finished: its last worker was done at 20") == 2
    assert "Traceback" not in late.err
    assert "failed with code" not in late.err
    assert ended(run("b", "ends")) == (0, 1), "another launch begins the job anew"
    assert ended(run("a", "ends")) == (0, 0), "and the first has finished all the same"
    assert python("-m", "ps_server", "end", "--server", address, "--job", "default").returncode == 0
    assert ended(run("a", "ends")) == (0, 1)


@pytest.mark.long
def test_a_script_that_was_cut_short_has_not_finished_its_job(run: Run) -> None:
    assert ended(run("a", "fails")) == (1, 1)
    stopped = run("a", "waits")
    stopped.says("trained to clock 1\n")
    assert stopped.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert ended(run("a", "ends")) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("next", FINISHED_WITHOUT_CODE), ("added", 0)])
def test_a_worker_that_comes_late_to_its_next_job_trains_nothing_anew(
    run: Run, tmp_path: Path, how: str, code: int
) -> None:
    """A job that has finished: its script ends with a code of its own, not with 0, as a process that has nothing to do.
    Layers that are added to a job that still trains are there as others have left them.
    """
    slow, fast = (run("a", how, script=TWO_JOBS, after=name) for name in ("slow", "fast"))
    for worker in (slow, fast):
        worker.says("trained the first\n")
    (tmp_path / "fast").touch()
    assert fast.process.wait(END_SECONDS) == 0, fast.err
    (tmp_path / "slow").touch()
    assert slow.process.wait(END_SECONDS) == code, slow.out
    said = "has trained, and finds its next job without it: job 'second' has finished: " in slow.err
    assert (said, "trained both" in slow.out) == (how == "next", how == "added")
