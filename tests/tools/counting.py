"""The counting oracle for data: each sample adds 1 to a cell of its own in every parameter, once per pass."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ps_worker
from ps_worker import Session

SAMPLES, BATCH, PASSES = 90, 4, 3
BUCKET_BYTES = 512


class Indices(Dataset[int]):
    """0 .. size - 1."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


class Cells(nn.Module):
    """Three vectors, in several buckets each, with a cell for every sample of every pass."""

    def __init__(self, cells: int = SAMPLES * PASSES) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(cells) for _ in range(3))

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        # cells: [samples] -> a loss whose gradient is -1 at each of them, in every vector
        return -sum(vector[cells].sum() for vector in self.vectors)  # type: ignore[return-value]


def optimizer_for(mode: str, model: nn.Module) -> torch.optim.Optimizer:
    """One whose first step on a cell adds 1 to it, and a second one more.

    In sync, where a gradient is divided by how many took part, that is Adagrad: it divides by the gradients so far.
    """
    if mode == "sync":
        return torch.optim.Adagrad(model.parameters(), lr=1.0)
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train(
    session: Session,
    mode: str,
    each: Callable[[int], object],
    ended: Callable[[int], object] = lambda count: None,
    **loading: Any,
) -> list[int]:
    """Trains for all passes; returns how many batches each had.

    each:  called with the number of every batch taken
    ended: called after every pass with the number of its batches
    """
    model = Cells()
    loader = DataLoader(Indices(), batch_size=BATCH, shuffle=True, **loading)
    model, optimizer, batches = session.prepare(model, optimizer_for(mode, model), loader, bucket_bytes=BUCKET_BYTES)
    taken, counts = 0, []
    for number in range(PASSES):
        before = taken
        for batch in batches:
            taken += 1
            each(taken)
            model(batch + number * SAMPLES).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(taken - before)
        ended(counts[-1])
    return counts


def main() -> None:
    """A worker in a process of its own, which stops for ever when it has taken some batches."""
    server, mode, job, transport, last = sys.argv[1:]

    def each(taken: int) -> None:
        print(taken, flush=True)
        if taken == int(last):
            threading.Event().wait()

    with ps_worker.connect(server, mode, job=job, elastic=True, transport=transport) as session:
        train(session, mode, each)


if __name__ == "__main__":
    main()
