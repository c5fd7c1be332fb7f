"""However a script ends, its worker leaves the job at once: nobody waits for its lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until

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


def start(cluster: Cluster, world_size: int, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PS_SERVER": cluster.address, "PS_RANK": "0", "PS_WORLD_SIZE": str(world_size)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(("how", "code"), cases([("raise", 1)], [("end", 0)]))
def test_a_script_that_ends_or_fails_leaves_the_job(make_cluster: Callable[..., Cluster], how: str, code: int) -> None:
    cluster = make_cluster(lease=LEASE)
    assert start(cluster, 1, "3", how).wait(60) == code
    assert cluster.coordinator.jobs() == {}


def test_a_worker_that_is_terminated_while_it_waits_for_another_leaves_the_job(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(lease=LEASE)
    running: list[subprocess.Popen[bytes]] = []

    def work(which: int) -> None:
        if which == 0:
            running.append(start(cluster, 2, "9", "end"))
            return
        with cluster.connect("sync", 1, 2) as session:  # joins, and never makes a step
            session.prepare(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))
            job = cluster.coordinator.jobs()["default"]
            until(lambda: any(b.waiters for e in cluster.shards for b in e.jobs()["default"].buckets.values()))
            running[0].send_signal(signal.SIGTERM)
            assert running[0].wait(60) == 128 + signal.SIGTERM
            assert [member.rank for member in job.members.all()] == [1]

    in_parallel(2, work)
