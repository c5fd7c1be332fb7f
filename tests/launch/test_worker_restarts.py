"""A worker that is killed and started again: it ends where the others end, though they trained on meanwhile, and brings
the rows that its tables had before `prepare`, once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ps_server.storage.checkpoints import MANIFEST
from tests.tools.launching import run, script

BATCHES, PASSES = 16, 3

TRAINS = f"""
import os, pathlib, signal, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ps_worker

is_back, checkpoints = map(pathlib.Path, sys.argv[1:])

def is_saved():  # a checkpoint that is complete has the state of this worker
    # By os.walk: a glob fails where an old checkpoint goes meanwhile.
    return any({{"worker-1.state", {MANIFEST!r}}} <= {{*names}} for _, _, names in os.walk(checkpoints))

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
        if session.rank == 1 and not is_second and session.clock >= 12:
            if is_saved():
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait(0.05)  # steps go on until it is: a checkpoint waits for their clocks
        while session.rank == 0 and session.clock == 40 and not is_back.exists():
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
    marks = str(tmp_path / "is-back"), str(tmp_path / "checkpoints")
    done = run(*servers, *workers, script(tmp_path, TRAINS), *marks)
    assert done.returncode == 0, done.stderr
    ends = {f"[{rank}] rank {rank} ends at clock {BATCHES * PASSES}" for rank in range(2)}
    assert ends <= set(done.stdout.splitlines()), done.stdout + done.stderr
    assert re.search(r"this worker's state is of clock \d+: the data of \d+ steps is left out", done.stderr)


ROWS, STEPS = 40_000, 4

BRINGS_ROWS = f"""
import os, signal, threading
import torch
import ps_worker
from ps_server.ops import requests

ids = torch.arange({ROWS})

def trained(session, state):
    table = ps_worker.Embedding(64, seed=7)
    table.load_state_dict(state)
    own = table
    table, optimizer = session.prepare(table, torch.optim.Adam(table.parameters(), lr=0.1))
    for number in range({STEPS}):
        optimizer.zero_grad()
        table(ids[number :: {STEPS} + 1]).square().sum().backward()
        optimizer.step()
    return own.state_dict()

def dies_in_the_middle():
    while True:
        shards = requests.fetch(os.environ["PS_SERVER"])["shards"]
        rows = [table["row_count"] for shard in shards for job in shard["jobs"] for table in job["tables"]]
        if rows and 0 < sum(rows) < {ROWS}:
            print("has brought some of its rows, and dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
with ps_worker.connect(mode="single", job="before") as session:
    table = ps_worker.Embedding(64, seed=7)
    model, optimizer = session.prepare(table, torch.optim.Adam(table.parameters(), lr=0.1))
    model(ids).sum().backward()
    optimizer.step()
    before = table.state_dict()
with ps_worker.connect(mode="single", job="alone") as session:
    expected = trained(session, before)
if os.environ.get("PS_RESTART_COUNT", "0") == "0":
    threading.Thread(target=dies_in_the_middle, daemon=True).start()
with ps_worker.connect() as session:
    found = trained(session, before)
assert all(torch.equal(value, expected[name]) for name, value in found.items())
print("ends with the rows of one process", flush=True)
"""


@pytest.mark.long
def test_a_worker_that_dies_while_it_brings_its_rows_brings_them_once(tmp_path: Path) -> None:
    """The job begins with them on one shard, and on the other some have come: a new process brings them all."""
    slow = {"PS_FAILPOINTS": "push-checked@1=delay:3"}
    words = ("--shards", "2", "--workers", "1", "--mode", "sync", "--max-restarts", "1")
    done = run(*words, script(tmp_path, BRINGS_ROWS), **slow)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if "rows" in line] == [
        "has brought some of its rows, and dies",
        "ends with the rows of one process",
    ], done.stdout + done.stderr
