"""When a worker's interpreter ends, no thread of the package is there any more, however the script came to its end.

A daemon thread that is in C++ code then, be it to free a tensor, aborts the process after the script's last line:
"terminate called without an active exception", code -6.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Forked, Nursery

END_SECONDS = 60.0

# Trains 14 steps of 4 MiB and a table, then ends. Arguments: address, job, rank, workers, transport, how it
# ends, and whether each thread takes a moment to end.
# What was registered first is called last: `tell` names the threads that are there when the interpreter ends.
SCRIPT = """
import atexit, signal, sys, threading

@atexit.register
def tell():
    print("threads:", *sorted(thread.name for thread in threading.enumerate()), flush=True)
    told.set()

told, run = threading.Event(), threading.Thread.run

def run_and_end_slowly(thread):
    run(thread)
    if slow == "slow" and not thread.name.startswith(("Thread-", "metrics")):  # those are gRPC's, and waited for anyway
        told.wait(0.1)  # it frees tensors, say

threading.Thread.run = run_and_end_slowly

import torch
import ps_runtime.pools
import ps_worker
import ps_worker.row_feed
from ps_worker.cluster import connection, own_membership

address, job, rank, workers, transport, how, slow = sys.argv[1:]
if slow == "slow":  # threads that get no processor for seconds, on a busy machine, are waited for as well
    ps_runtime.pools.JOIN_SECONDS = connection.JOIN_SECONDS = own_membership.JOIN_SECONDS = 30.0
    ps_worker.row_feed.EXIT_SECONDS = 30.0
session = ps_worker.connect(address, "sync", job, int(rank), int(workers), transport=transport)
table = ps_worker.Embedding(16, optimizer=ps_worker.RowWiseAdagrad(lr=0.1))
model = torch.nn.ModuleDict({"table": table, "net": torch.nn.Linear(1024, 1024)})
model, optimizer = session.prepare(model, torch.optim.SGD(model["net"].parameters(), lr=0.01))
for step in range(14):
    looked_up = model["table"](torch.arange(8)).sum()
    (model["net"](torch.ones(2, 1024)).sum() + looked_up).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
if how == "close":
    session.close()
    tell()
elif how == "feed":
    feed = ps_worker.RowFeed("table", address, job)
    feed.wait_for(0)
elif how == "raise":
    raise ValueError("the script has a mistake")
elif how == "exit":
    sys.exit(3)
elif how == "wait":
    signal.pause()
"""


def start(
    nursery: Nursery, folder: Path, shared: Cluster, transport: str, how: str, rank: int = 0, of: int = 1
) -> Forked:
    """Starts the script as one worker of a job that is named after the folder."""
    script = folder / "train.py"
    if not script.exists():
        script.write_text(SCRIPT)
    words = [shared.address, folder.name, rank, of, transport, how, "slow" if of == 1 else "quick"]
    return nursery.run(script, words, folder / f"out-{rank}", finalizes=True, OMP_NUM_THREADS="1")


def out(folder: Path, rank: int = 0) -> str:
    path = folder / f"out-{rank}"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_a_closed_session_has_no_thread(nursery: Nursery, shared: Cluster, tmp_path: Path, transport: str) -> None:
    assert start(nursery, tmp_path, shared, transport, "close").wait(END_SECONDS) == 0
    assert out(tmp_path).splitlines() == ["trained", *["threads: MainThread"] * 2]


@pytest.mark.parametrize(
    ("how", "code"), cases([("raise", 1), ("wait", 128 + 15), ("feed", 0)], [("end", 0), ("exit", 3)])
)
def test_no_thread_is_there_when_the_interpreter_ends(
    nursery: Nursery, shared: Cluster, tmp_path: Path, how: str, code: int
) -> None:
    worker = start(nursery, tmp_path, shared, "tcp", how)
    if how == "wait":
        until(lambda: "trained" in out(tmp_path) or worker.poll() is not None, "a worker that has trained")
        worker.send_signal(signal.SIGTERM)
    assert worker.wait(END_SECONDS) == code, out(tmp_path)
    assert out(tmp_path).splitlines()[-1] == "threads: MainThread"


@pytest.mark.long
@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_a_process_that_has_trained_ends_with_its_own_code(
    nursery: Nursery, shared: Cluster, tmp_path: Path, transport: str
) -> None:
    """It was one in some hundreds that did not: `python -m bench launches` starts a thousand. Threads are waited for no
    longer than in any other process.
    """
    for number in range(4):
        folder = tmp_path / f"{transport}-{number}"
        folder.mkdir()
        how = ("close", "end")[number % 2]
        workers = [start(nursery, folder, shared, transport, how, rank, 2) for rank in range(2)]
        codes = [worker.wait(END_SECONDS) for worker in workers]
        assert codes == [0, 0], (number, out(folder, 0), out(folder, 1))
