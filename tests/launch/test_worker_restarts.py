"""A worker that is killed and started again ends where the others end, though they trained on meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.launching import run, script

BATCHES, PASSES = 16, 3

TRAINS = f"""
import os, pathlib, signal, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ps_worker

is_back = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.randn({2 * 4 * BATCHES}, 4)), batch_size=4, shuffle=True)
session = ps_worker.connect()
model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
is_second = os.environ.get("PS_RESTART_COUNT", "0") != "0"
for epoch in range({PASSES}):
    for (x,) in loader:
        if is_second:
            is_back.touch()
        if session.rank == 1 and not is_second and session.clock == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        while session.rank == 0 and session.clock == 27 and not is_back.exists():
            threading.Event().wait(0.01)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
print(f"rank {{session.rank}} ends at clock {{session.clock}}", flush=True)
"""


@pytest.mark.long
def test_a_worker_that_is_started_again_trains_no_pass_a_second_time(tmp_path: Path) -> None:
    """The others make checkpoints while it is not there."""
    servers = ("--shards", "2", "--checkpoint-every", "5steps", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    workers = ("--workers", "2", "--mode", "sync", "--max-restarts", "1")
    done = run(*servers, *workers, script(tmp_path, TRAINS), str(tmp_path / "is-back"))
    assert done.returncode == 0, done.stderr
    ends = {f"[{rank}] rank {rank} ends at clock {BATCHES * PASSES}" for rank in range(2)}
    assert ends <= set(done.stdout.splitlines()), done.stdout + done.stderr
    assert re.search(r"this worker's state is of clock \d+: the data of \d+ steps is left out", done.stderr)
