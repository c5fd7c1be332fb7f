"""Trains two tables and a layer, each rank with its part of every batch, and leaves rows and weights in a file.

DIRECTORY [earlier] [frozen]    with `earlier`, rank 0 begins with the rows of a model that was trained a little; with
                                `frozen`, only rows are trained
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import ps_worker
from tests.tools.table_model import TableModel, train


def earlier() -> dict[str, torch.Tensor]:
    """The state of a model that was trained a little."""
    with ps_worker.connect(mode="single", job="earlier") as session:
        own = TableModel()
        model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
        model(torch.arange(5) * 2**40, torch.ones(5, 3, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return dict(own.state_dict())


def main() -> None:
    """Trains."""
    torch.manual_seed(0)
    state = earlier() if "earlier" in sys.argv else None
    with ps_worker.connect() as session:
        own = TableModel()
        own.top.requires_grad_("frozen" not in sys.argv)
        if session.rank == 0 and state is not None:
            own.load_state_dict(state)
        train(session, own)
        rows = own.rows()
        if state is not None:
            rows["counts"] = torch.tensor([len(own.item), len(own.tags)])
        save_file(rows, Path(sys.argv[1]) / f"{session.mode.replace(':', '')}-{session.rank}.safetensors")


if __name__ == "__main__":
    main()
