"""Begins a table with pretrained rows, and has each rank set some of them later. Ends with code 0 if rows are right."""

from __future__ import annotations

import torch
from torch import nn

import ps_worker

DIM, RATE = 2, 0.5
IDS = torch.arange(4)


def main() -> None:
    """Trains."""
    with ps_worker.connect() as session:
        rank, start = session.rank, torch.ones(4, DIM)
        # Those of rank 0 count.
        table = ps_worker.Embedding.from_pretrained(IDS, start * (rank + 1), freeze=False)
        model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=RATE))
        assert torch.equal(table.rows(IDS), start)
        table.assign(IDS[rank : rank + 2], start[:2] * 10 * (rank + 1))
        expected = [10.0, 10.0, 1.0, 1.0] if rank == 0 else [1.0, 20.0, 20.0, 1.0]
        assert table.rows(IDS)[:, 0].tolist() == expected, "its own lookups see them at once"
        model(IDS[:1] + rank).sum().backward()
        optimizer.step()
        expected = [10.0 - RATE / 2, 10.0 - RATE / 2, 20.0, 1.0]
        assert table.rows(IDS)[:, 0].tolist() == expected, "all have both, and of one id the lowest rank's"
        assert len(table) == 4


if __name__ == "__main__":
    main()
