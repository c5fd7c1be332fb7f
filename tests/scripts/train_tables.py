"""Trains two tables and a layer, each rank with its part of every batch, and leaves rows and weights in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import ps_worker

STEPS, BATCH = 12, 40


class Model(nn.Module):
    """An item and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.item = ps_worker.Embedding(4, scale=0.1)
        self.tags = ps_worker.EmbeddingBag(4, admit_after=2, optimizer=ps_worker.RowWiseAdagrad(lr=0.1))
        self.top = nn.Linear(8, 1)

    def forward(self, item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.item(item), self.tags(tags)], 1)).squeeze(1)  # type: ignore[no-any-return]


def earlier() -> dict[str, torch.Tensor]:
    """The state of a model that was trained a little."""
    with ps_worker.connect(mode="single", job="earlier") as session:
        own = Model()
        model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
        model(torch.arange(5) * 2**40, torch.ones(5, 3, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return dict(own.state_dict())


def main() -> None:
    """Trains."""
    torch.manual_seed(0)
    state = earlier()
    session = ps_worker.connect()
    own = Model()
    if session.rank == 0:
        own.load_state_dict(state)
    model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        item = torch.randint(0, 50, (BATCH,), generator=random) * 2**40
        tags = torch.randint(-100, 100, (BATCH, 3), generator=random)
        wanted = torch.rand(BATCH, generator=random)
        part = slice(session.rank, None, session.world_size)
        optimizer.zero_grad()
        (model(item[part], tags[part]) - wanted[part]).square().mean().backward()
        optimizer.step()
    rows = {
        "item": own.item.rows(torch.arange(50) * 2**40),
        "tags": own.tags.rows(torch.arange(-100, 100)),
        "counts": torch.tensor([len(own.item), len(own.tags)]),
        "top": own.top.weight.detach(),
    }
    save_file(rows, Path(sys.argv[1]) / f"{session.mode}-{session.rank}.safetensors")
    session.close()


if __name__ == "__main__":
    main()
