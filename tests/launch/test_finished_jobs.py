"""A worker that comes after the last one has left does not train the job a second time: real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.launching import Command, Commands, python

END_SECONDS = 120.0

# Trains one step. Argument: how it goes on.
SCRIPT = """
import signal, sys
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
if sys.argv[1] == "waits":
    signal.pause()
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
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(launch: str, how: str, *flags: str) -> Command:
        words = ("run", "--server", address, "--elastic", "--mode", "async", "--metrics-host", "127.0.0.1", *flags)
        return commands.start("-m", "ps_worker", *words, str(tmp_path / "train.py"), how, PS_LAUNCH_ID=launch)

    return start


def ended(command: Command) -> tuple[int, int]:
    """The exit code of a command, and how many of its workers trained."""
    return command.process.wait(END_SECONDS), command.out.count("trained to clock ")


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
