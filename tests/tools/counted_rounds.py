"""The counting oracle for local steps: each sample adds 1 to a cell of its own, and each worker's round leaves a mark.

A round's mean divides by how many took part in it. The worker's mark of the round is divided by the same number, so the
weights tell how much each sample of a round must have added, and whether the round counted at all.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

import ps_worker
from ps_worker import Session
from tests.tools.counting import Indices

SAMPLES, BATCH, PASSES = 42, 2, 2
MODE = "local:3"
OUTER = {"lr": 1.0, "momentum": 0.0, "warm_up": 0}
RANKS, ROUNDS = 8, 100


@dataclass(frozen=True)
class Use:
    """A sample that a worker made a step with, in a round. attempt: when it began the round, maybe for a second time"""

    sample: int
    rank: int
    round_number: int
    attempt: float = 0.0


class CountedRounds(nn.Module):
    """A cell for each sample of each pass, and one for each round of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(SAMPLES * PASSES))
        self.marks = nn.Parameter(torch.zeros(RANKS, ROUNDS))

    def forward(self, samples: torch.Tensor, rank: int, round_number: int) -> torch.Tensor:
        # samples: [batch] -> a loss whose gradient is -1 at each cell, and at the round's mark in its first step
        first = float(self.marks[rank, round_number].detach() == 0)
        return -self.cells[samples].sum() - first * self.marks[rank, round_number]


def train(session: Session, each: Callable[[int, Use], bool] = lambda taken, use: True) -> list[Use]:
    """Trains for all passes; returns what was made.

    each: called with how many batches were taken, and the step's first use, after each step; False ends the loop there
    """
    model = CountedRounds()
    loader = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, batches = session.prepare(model, optimizer, loader, bucket_bytes=512, outer=OUTER)
    uses: list[Use] = []
    taken, attempt = 0, 0.0
    for number in range(PASSES):
        for batch in batches:
            taken += 1
            samples = batch + number * SAMPLES
            rank, round_number = session.rank, session.round + 1
            if model.marks[rank, round_number] == 0:
                attempt = time.monotonic()
            uses += [Use(sample, rank, round_number, attempt) for sample in samples.tolist()]
            model(samples, rank, round_number).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not each(taken, uses[-1]):
                return uses
    return uses


def wrong(weights: dict[str, torch.Tensor], uses: list[Use]) -> list[str]:
    """What is wrong with the weights that a job ended with: each sample must have been used in one round that counts,
    and have added what the round's mark says.
    """
    cells, marks = weights["cells"], weights["marks"]
    last: dict[tuple[int, int], float] = {}  # a round that was broken off may be made again
    for use in uses:
        place = use.rank, use.round_number
        last[place] = max(last.get(place, 0.0), use.attempt)
    pushed = [use for use in uses if use.attempt == last[use.rank, use.round_number]]
    found = []
    for sample in range(SAMPLES * PASSES):
        counted = [use for use in pushed if use.sample == sample and marks[use.rank, use.round_number] > 0]
        expected = sum(float(marks[use.rank, use.round_number]) for use in counted)
        if len(counted) != 1 or abs(float(cells[sample]) - expected) > 1e-6:
            found.append(f"sample {sample} has {float(cells[sample])}, used in {counted}, expected {expected}")
    return found


def main() -> None:
    """A worker in a process of its own, which stops for ever after some batches."""
    server, job, transport, last = sys.argv[1:]

    def each(taken: int, use: Use) -> bool:
        print(taken, use.rank, use.round_number, flush=True)
        if taken == int(last):
            threading.Event().wait()
        return True

    with ps_worker.connect(server, MODE, job=job, elastic=True, transport=transport) as session:
        train(session, each)


if __name__ == "__main__":
    main()
