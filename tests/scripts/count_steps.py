"""Trains until it is told to stop: each step adds 1 to every weight, in two buckets and, where it has one, in a table.

    python count_steps.py DIRECTORY [table]

It has no loader: all that decides how it goes on is the step at hand. DIRECTORY/stop says after how many steps it ends.
Rank 0 makes one more when all others have ended. Each leaves the weights as it had them last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ps_worker
from tests.tools.cluster import until

LOOK_STEPS = 20


class Counts(nn.Module):
    """Two weights, each in a bucket of its own, and perhaps rows on all shards."""

    def __init__(self, with_table: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0) if with_table else None

    def forward(self) -> torch.Tensor:
        rows = 0.0 if self.table is None else self.table(torch.arange(8)).sum()
        return -(self.first.sum() + self.second.sum() + rows)


def main() -> None:
    """Trains."""
    directory, own = Path(sys.argv[1]), Counts("table" in sys.argv[2:])
    session = ps_worker.connect()
    model: Any
    # An outer step that takes the change of a round as it is, from the first round on.
    outer = {"lr": 1.0, "momentum": 0.0, "warm_up": 0} if session.mode.startswith("local") else None
    model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0), bucket_bytes=64, outer=outer)
    stop, steps, others = directory / "stop", 0, range(1, session.world_size)

    def step() -> None:
        nonlocal steps
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        steps += 1

    while steps % LOOK_STEPS or not stop.exists() or steps < int(stop.read_text()):
        step()
        if steps % LOOK_STEPS == 0:
            (directory / f"steps-{session.rank}.new").write_text(str(steps))
            (directory / f"steps-{session.rank}.new").rename(directory / f"steps-{session.rank}")
    if session.rank == 0:
        until(lambda: all((directory / f"found-{rank}").exists() for rank in others), "the others' end", 120)
        step()
    rows = [] if own.table is None else own.table.rows(torch.arange(8))[:, 0].tolist()
    found = [*own.first.tolist(), *own.second.tolist(), *rows]
    (directory / f"found-{session.rank}").write_text(json.dumps([steps, found]))


if __name__ == "__main__":
    main()
