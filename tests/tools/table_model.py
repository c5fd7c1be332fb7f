"""A model with two tables and a layer, and how it is trained, each rank with its part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import ps_worker

STEPS, BATCH = 12, 40
ITEMS, TAGS = torch.arange(50) * 2**40, torch.arange(-100, 100)


class LookUps:
    """A worker that trains the sum of what a model looks up. Its class has `model` and `optimizer`."""

    model: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer

    def step(self, ids: torch.Tensor) -> None:
        """Makes a step with these ids."""
        self.optimizer.zero_grad()
        self.model(ids).backward()
        self.optimizer.step()


class TableModel(nn.Module):
    """An item and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.item = ps_worker.Embedding(4, scale=0.1)
        self.tags = ps_worker.EmbeddingBag(4, admit_after=2, optimizer=ps_worker.RowWiseAdagrad(lr=0.1))
        self.top = nn.Linear(8, 1)

    def forward(self, item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.item(item), self.tags(tags)], 1)).squeeze(1)  # type: ignore[no-any-return]

    def rows(self) -> dict[str, torch.Tensor]:
        """What was trained."""
        return {"item": self.item.rows(ITEMS), "tags": self.tags.rows(TAGS), "top": self.top.weight.detach().clone()}


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Items, tags, and what the model is to say, of each step."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        items = ITEMS[torch.randint(0, len(ITEMS), (BATCH,), generator=random)]
        yield items, torch.randint(-100, 100, (BATCH, 3), generator=random), torch.rand(BATCH, generator=random)


def train(session: ps_worker.Session, own: TableModel, **options: object) -> None:
    """Trains; options: of prepare."""
    model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1), **options)
    part = slice(session.rank, None, session.world_size)
    for item, tags, wanted in batches():
        optimizer.zero_grad()
        (model(item[part], tags[part]) - wanted[part]).square().mean().backward()
        optimizer.step()
