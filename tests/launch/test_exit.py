"""However a script ends, its worker leaves the job at once: nobody waits for its lease."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.forkserver import Forked, Nursery
from tests.tools.launching import START_SECONDS

LEASE = 300.0  # longer than any test: a worker that is gone before has said so

SCRIPT = """
import sys, torch, ps_worker

def train():  # the session is a local variable, as in most scripts
    session = ps_worker.connect()
    model = torch.nn.Linear(4, 4)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(int(sys.argv[1])):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    if sys.argv[2] == "raise":
        raise ValueError("the script has a mistake")

train()
"""


Start = Callable[..., Forked]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Start:
    """Starts the script as rank 0: start(cluster, world_size, steps, how it ends)."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def begin(cluster: Cluster, world_size: int, *arguments: str) -> Forked:
        told = {"PS_SERVER": cluster.address, "PS_RANK": "0", "PS_WORLD_SIZE": str(world_size)}
        return nursery.run(script, arguments, tmp_path / "log", finalizes=True, **told)

    return begin


@pytest.mark.parametrize(("how", "code"), cases([("raise", 1)], [("end", 0)]))
def test_a_script_that_ends_or_fails_leaves_the_job(
    make_cluster: Callable[..., Cluster], start: Start, how: str, code: int
) -> None:
    cluster = make_cluster(lease=LEASE)
    assert start(cluster, 1, "3", how).wait(START_SECONDS) == code
    assert cluster.coordinator.jobs() == {}


def test_a_worker_that_is_terminated_while_it_waits_for_another_leaves_the_job(
    make_cluster: Callable[..., Cluster], start: Start
) -> None:
    cluster = make_cluster(lease=LEASE)
    running: list[Forked] = []

    def work(which: int) -> None:
        if which == 0:
            running.append(start(cluster, 2, "9", "end"))
            return
        with cluster.connect("sync", 1, 2) as session:  # joins, and never makes a step
            session.prepare(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))
            job = cluster.coordinator.jobs()["default"]
            until(lambda: any(b.waiters for e in cluster.shards for b in e.jobs()["default"].buckets.values()))
            running[0].send_signal(signal.SIGTERM)
            assert running[0].wait(START_SECONDS) == 128 + signal.SIGTERM
            assert [member.rank for member in job.workers.all()] == [1]

    in_parallel(2, work)
