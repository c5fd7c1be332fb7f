"""Servers that are stopped and started again while a job runs: `ps-server up`, SIGTERM, and `up --resume`."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.cluster import free_ports
from tests.tools.cluster import until
from tests.tools.launching import Start

SHARDS = 2
RESTARTS = 2
MORE_STEPS = 20

# Each step takes 1 from all weights and rows. There is no loader: nothing brings the data of a step again.
SCRIPT = f"""
import json, os, sys, time
import torch
import ps_worker
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 1, bias=False) for _ in range(4))
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0)
        for layer in self.layers:
            nn.init.zeros_(layer.weight)
    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers) + self.table(torch.arange(4)).sum()

net = Net()
session = ps_worker.connect()
model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
steps = left = 0
while left < {MORE_STEPS}:
    left += os.path.exists(sys.argv[1] + "/enough")
    optimizer.zero_grad()
    model(torch.ones(1, 16)).backward()
    optimizer.step()
    steps += 1
    print("step", steps, flush=True)
values = [value for layer in net.layers for value in layer.weight.flatten().tolist()]
values += net.table.rows(torch.arange(4))[:, 0].tolist()
print("end", json.dumps([steps, sorted(set(values))]), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_step_counts_once_and_everywhere(start: Start, tmp_path: Path, mode: str, transport: str) -> None:
    port = free_ports(SHARDS)
    own = tmp_path / "own.py"
    own.write_text(SCRIPT)
    flags = ["--shards", str(SHARDS), f"--port={port}", "--metrics-port=0", f"--checkpoint-dir={tmp_path / 'kept'}"]
    up = start("-m", "ps_server", "up", *flags)
    up.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    where = "--server", f"127.0.0.1:{port}", "--mode", mode, f"--transport={transport}"
    worker = start("-m", "ps_worker", "run", "--workers", "1", *where, str(own), str(tmp_path))
    for _ in range(RESTARTS):
        made = len(re.findall("step", worker.out))
        until(lambda: len(re.findall("step", worker.out)) > made + MORE_STEPS, "more steps")  # noqa: B023
        up.end(signal.SIGTERM)
        up = start("-m", "ps_server", "up", *flags, "--resume")
        up.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    made = len(re.findall("step", worker.out))
    until(lambda: len(re.findall("step", worker.out)) > made + MORE_STEPS, "steps after the last restart")
    (tmp_path / "enough").touch()
    [end] = worker.says(r"end (.*)\n")
    steps, values = json.loads(end)
    assert values == [-float(steps)], worker.err
    assert worker.process.wait(60) == 0
    up.end(signal.SIGTERM)
