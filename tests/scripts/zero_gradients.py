"""Zeroes gradients between two backwards of a table in each way, and writes what the step that follows has done.

FILE    gets, for each way, the first element of two rows: that of the first backward, and that of the second
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import ps_worker


def main() -> None:
    """Trains."""
    found = {}
    with ps_worker.connect() as session:
        table = ps_worker.Embedding(2, initial="constant", scale=0.0)
        own = nn.Sequential(table, nn.Linear(2, 1))
        model, optimizer = session.prepare(own, torch.optim.SGD(table.parameters(), lr=1.0))
        own[1].weight.data.fill_(1.0)
        for number, (name, zero, to_none) in enumerate(
            (f"{name}, {to_none}", zero, to_none)
            for to_none in (True, False)
            for name, zero in (
                ("optimizer", optimizer.zero_grad),
                ("model", model.zero_grad),
                ("module", table.zero_grad),
            )
        ):
            ids = torch.tensor([2 * number, 2 * number + 1])
            for each in ids:
                zero(set_to_none=to_none)
                model(each[None]).sum().backward()
            optimizer.step()
            found[name] = table.rows(ids)[:, 0].tolist()
    if session.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
