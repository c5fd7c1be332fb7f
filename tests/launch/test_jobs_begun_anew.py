"""A job that has ended when a worker is started again begins anew, and waits for all its ranks: the launch does not go
on where one of these has ended for good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.launching import run, script

# Rank 1 comes to its end, or fails for the second time; then rank 0 fails as the last worker of the job, which so ends.
TRAINS = """
import os, sys, threading
from pathlib import Path

how, here = sys.argv[1], Path(__file__).parent
is_second = os.environ["PS_RESTART_COUNT"] != "0"
if os.environ["PS_RANK"] == "1":
    (here / "process").write_text(str(os.getpid()))
    if how == "fails" and not is_second:
        sys.exit(7)

import torch
import ps_worker

session = ps_worker.connect()
model = torch.nn.Linear(1, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
session.barrier()
print("trains", flush=True)
if session.rank == 1:
    sys.exit(8 if how == "fails" else 0)
while os.path.exists("/proc/" + (here / "process").read_text()):
    threading.Event().wait(0.01)
raise RuntimeError("the disk is full")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("fails", 8, "2 of 2 workers failed; the first: worker 1 failed with code 8"),
        ("ends", 1, "1 of 2 workers failed: worker 0 failed with code 1 (RuntimeError: the disk is full)"),
    ],
)
def test_a_launch_ends_when_a_worker_that_is_started_again_waits_for_one_that_has_ended(
    tmp_path: Path, how: str, code: int, last: str
) -> None:
    """It would wait for half an hour."""
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    words = ("--shards", "1", "--workers", "2", "--mode", "sync", "--max-restarts", "1", str(path), how)
    done = run(*words, PS_LEASE="120")
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.split()) == ["[0]", "[1]", "trains", "trains"]
    assert re.search(r"waiting for ranks 1 to join job 'default'", done.stderr)
    lines = re.findall("^ps-worker: (.*)$", done.stderr, re.MULTILINE)
    assert lines[-2:] == ["the job begins anew, and worker 1 will not join it again, so the others are stopped", last]


AWAITS = """
import signal
path, rank, count = os.environ["PS_STARTED_FILE"], os.environ["PS_RANK"], os.environ["PS_RESTART_COUNT"]
open(path, "w").close()  # all have joined
if rank == "1":
    sys.exit(0)
if count == "0":
    sys.exit(5)
open(path + "-awaits", "w").write({awaits!r})
if {awaits!r} != "1":
    sys.exit(0)
signal.pause()  # until the launcher stops it
"""


@pytest.mark.parametrize(("awaits", "code"), [("1", 5), ("2", 0)])
def test_it_ends_for_ranks_of_its_own_alone(tmp_path: Path, awaits: str, code: int) -> None:
    """Those of other launches may come."""
    words = ("--server", "127.0.0.1:1", "--mode", "sync", "--workers", "2", "--world-size", "3", "--max-restarts", "1")
    done = run(*words, script(tmp_path, AWAITS.format(awaits=awaits)))
    assert done.returncode == code, done.stderr
    assert ("the job begins anew, and worker 1 will not join it again" in done.stderr) == bool(code)


def test_the_other_workers_of_a_group_that_ends_are_not_taken_for_ended_ones(tmp_path: Path) -> None:
    """A group that ends, and will be started again, joins again."""
    text = """
path, rank, count = os.environ["PS_STARTED_FILE"], os.environ["PS_RANK"], os.environ["PS_RESTART_COUNT"]
open(path, "w").close()
if rank == "1" and count == "0":
    sys.exit(5)
if rank == "0":
    open(path + "-awaits", "w").write("1")
    await_file(path + "-is-back")
else:
    await_file(path + "-awaits")
    os.remove(path + "-awaits")
    open(path + "-is-back", "w").close()
"""
    words = ("--server", "127.0.0.1:1", "--mode", "sync", "--workers", "2", "--group", "1", "--max-restarts", "1")
    done = run(*words, script(tmp_path, text))
    assert done.returncode == 0, done.stderr
