"""A worker that was silent for longer than its lease ends as its script would, or with a code of its own.

Rank 0 stands still in the middle of its script, so that rank 1 trains on alone and is done; then rank 0 goes on.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ps_runtime.launch_id import FINISHED_WITHOUT_CODE
from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import Command, Start

END_SECONDS = 120.0
LEASE_SECONDS = "5"  # of rank 0 it ends while it stands still, and of rank 1 never, however busy the machine is

# Trains three passes. Rank 0 stands still after the second one. Arguments: how, and the folder for its files.
SCRIPT = """
import ctypes, os, signal, sys, threading
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import ps_worker

how, folder = sys.argv[1], Path(sys.argv[2])
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
session = ps_worker.connect()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
while session.world_size < 2:  # in an elastic job: who joins once a rank is gone would take it
    threading.Event().wait(0.01)
for epoch in range(3):
    for x, y in loader:
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 1 and session.is_main:
        print(f"rank {session.rank} stands still as {os.getpid()}", flush=True)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:  # in C code that keeps the GIL, until the test writes into the pipe
            pipe = os.open(folder / "pipe", os.O_RDWR)
            ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    session.mean(1.0)
if session.is_main:
    torch.save(session.unwrap(model).state_dict(), folder / f"model-{session.rank}.pt")
print(f"rank {session.rank} is at its end", flush=True)
"""


def launch(start: Start, folder: Path, how: str, *words: str, **variables: str) -> Command:
    """Starts the script on two workers with servers of their own."""
    (folder / "train.py").write_text(SCRIPT)
    os.mkfifo(folder / "pipe")
    script = (str(folder / "train.py"), how, str(folder))
    flags = ("--shards", "1", "--workers", "2", "--metrics-host", "127.0.0.1", *words)
    settings = {"PS_LEASE": LEASE_SECONDS, "PS_BUSY_SECONDS": "0", "PS_DRAIN_SECONDS": "1", **variables}
    return start("-m", "ps_worker", "run", *flags, *script, **settings)


def stand_still(command: Command) -> int:
    """Waits until rank 0 stands still; its process."""
    [pid] = command.says(r"rank 0 stands still as (\d+)\n")
    return int(pid)


def go_on(folder: Path, pid: int, how: str) -> None:
    """Has rank 0 go on."""
    if how == "stopped":
        os.kill(pid, signal.SIGCONT)
    else:
        (folder / "pipe").write_bytes(b"x")


def heard(command: Command, pattern: str) -> None:
    """Waits for a line of the log."""
    until(lambda: re.search(pattern, command.err), f"{pattern!r} in the log", END_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "how"), cases([("sync", "stopped")], [("local:2", "busy"), ("sync", "busy"), ("async", "stopped")])
)
def test_a_worker_that_was_silent_while_the_others_came_to_their_end_comes_to_its_own_and_saves(
    start: Start, tmp_path: Path, mode: str, how: str
) -> None:
    command = launch(start, tmp_path, how, "--mode", mode)
    pid = stand_still(command)
    heard(command, r"all others have left: it waits up to \d+ s for worker 0, which was silent and may come back")
    command.says("rank 1 is at its end\n")
    go_on(tmp_path, pid, how)
    assert command.process.wait(END_SECONDS) == 0, command.err
    assert "rank 0 is at its end" in command.out
    assert (tmp_path / "model-0.pt").exists(), command.err
    heard(command, r"job 'default' has finished")


@pytest.mark.long
def test_in_an_elastic_job_it_comes_to_its_end_too(start: Start, tmp_path: Path) -> None:
    command = launch(start, tmp_path, "stopped", "--mode", "async", "--elastic")
    [rank, pid] = re.findall(r"\d+", command.says(r"(rank \d stands still as \d+)\n")[0])
    heard(command, rf"it waits up to \d+ s for worker {rank}, which was silent")
    go_on(tmp_path, int(pid), "stopped")
    assert command.process.wait(END_SECONDS) == 0, command.err
    assert f"rank {rank} is at its end" in command.out


@pytest.mark.long
def test_a_worker_whose_job_did_not_wait_for_it_ends_with_a_code_of_its_own(start: Start, tmp_path: Path) -> None:
    """It is not started again: a process that comes late would end with 0, and nothing would be saved."""
    words = ("--mode", "sync", "--max-restarts", "3")
    command = launch(start, tmp_path, "stopped", *words, PS_ABSENCE_SECONDS="0")
    pid = stand_still(command)
    heard(command, r"job 'default' has finished")
    go_on(tmp_path, pid, "stopped")
    assert command.process.wait(END_SECONDS) == FINISHED_WITHOUT_CODE
    assert re.search(r"worker 0: job 'default' finished at 20\S+ \S+ while this worker was away", command.err)
    assert f"worker 0 failed with code {FINISHED_WITHOUT_CODE}" in command.err
    assert "it is not started again" in command.err
    assert not (tmp_path / "model-0.pt").exists()


@pytest.mark.long
def test_a_worker_that_was_killed_holds_up_no_end(start: Start, tmp_path: Path) -> None:
    """Its launcher says so: the job does not wait for it."""
    command = launch(start, tmp_path, "stopped", "--mode", "sync")
    pid = stand_still(command)
    heard(command, r"worker 0 \(pid \d+ on \S+\) is gone")
    os.kill(pid, signal.SIGKILL)
    assert command.process.wait(END_SECONDS) == 128 + signal.SIGKILL
    assert "rank 1 is at its end" in command.out
    heard(command, r"job 'default' has finished")
