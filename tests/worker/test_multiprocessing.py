"""Workers that a script starts itself, with torch.multiprocessing: each leaves its job as under a launcher."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.launching import python

# A lease that no worker of a test outlives: none is taken off the job, so each has left by itself.
LEASE_SECONDS = 600.0
WORK = """
import sys
import torch.multiprocessing as mp


def work(rank, server, how):
    import torch
    import ps_worker

    session = ps_worker.connect(server=server, mode="async", rank=rank, world_size=2, job=how)
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    session.barrier()
    if rank == 1 and sys.argv[3] == "fails":
        raise RuntimeError("no such sample")


if __name__ == "__main__":
    mp.start_processes(work, tuple(sys.argv[1:3]), nprocs=2, start_method=sys.argv[2])
"""


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    cluster = Cluster(1, LEASE_SECONDS)
    yield cluster
    cluster.stop()


@pytest.mark.long
@pytest.mark.parametrize("method", cases(["fork", "spawn"], ["forkserver"]))
def test_workers_that_multiprocessing_starts_leave_when_their_function_is_over(
    patient: Cluster, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "train.py").write_text(WORK)
    done = python(str(tmp_path / "train.py"), patient.address, method, "ends")
    assert done.returncode == 0, done.stderr
    assert all(f"job {method}: worker {rank} leaves, done" in caplog.messages for rank in range(2))


@pytest.mark.long
@pytest.mark.parametrize("method", cases(["spawn"], ["fork"]))
def test_one_that_fails_has_not_come_to_its_end(
    patient: Cluster, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "train.py").write_text(WORK)
    done = python(str(tmp_path / "train.py"), patient.address, method, "fails")
    assert done.returncode == 1
    assert "RuntimeError: no such sample" in done.stderr
    assert f"job {method}: worker 1 leaves" in caplog.messages
