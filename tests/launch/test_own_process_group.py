"""A script with collectives of its own: it makes its process group after `prepare`, as docs/training.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.launching import run, script

COLLECTIVES = """
import torch
import torch.distributed as dist
import ps_worker

session = ps_worker.connect()
model = torch.nn.Linear(1, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
dist.init_process_group("gloo", init_method=sys.argv[1], rank=session.rank, world_size=session.world_size)
for _ in range(2):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.tensor([session.rank + 1.0])
    dist.all_reduce(total)
say(type(optimizer).__name__, total.item())
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_a_script_has_collectives_of_its_own_beside_the_servers(
    shared: Cluster, job: str, mode: str, tmp_path: Path
) -> None:
    meeting = f"file://{tmp_path}/meeting"  # no other process can take that, as it could a port
    where = ("--server", shared.address, "--job", job, "--mode", mode, "--metrics-host", "127.0.0.1")
    done = run(*where, "--workers", "2", script(tmp_path, COLLECTIVES), meeting)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] SGD 3.0" for rank in range(2)]
