"""A training script with everything in it that decides how a run ends: dropout, BatchNorm, shuffle, schedulers, noise.

python tests/scripts/train_with_state.py DIRECTORY [CLOCK ...]

Waits at each of these clocks for the file DIRECTORY/go-CLOCK, once. Leaves what it ended with in DIRECTORY.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ps_worker

SAMPLES, BATCH, PASSES = 32, 2, 6
OUTER = {"warm_up": 4}  # in mode local:4, 4 rounds of one step, and 11 more to the end


class Noisy(Dataset[torch.Tensor]):
    """Numbers with noise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / SAMPLES, random.random(), torch.rand(()).item(), 1.0])

    def __len__(self) -> int:
        return SAMPLES


def hold(directory: Path, rank: int, clock: int) -> None:
    """Says that it is here, and waits to be let go."""
    (directory / f"held-{clock}-{rank}").touch()
    while not (directory / f"go-{clock}").exists():
        threading.Event().wait(0.01)


def main() -> None:
    directory, holds = Path(sys.argv[1]), {int(clock) for clock in sys.argv[2:]}
    torch.set_num_threads(1)
    random.seed(int(os.environ["PS_RANK"]))
    torch.manual_seed(int(os.environ["PS_RANK"]))
    with ps_worker.connect() as session:
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        steps = PASSES * SAMPLES // (BATCH * session.world_size)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps + 1)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        model, optimizer, loader, cycle, decay = session.prepare(
            model, optimizer, DataLoader(Noisy(), BATCH, shuffle=True), cycle, decay, bucket_bytes=128, outer=OUTER
        )
        if 0 in holds:
            hold(directory, session.rank, 0)
        for _ in range(PASSES):
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                cycle.step()
                optimizer.zero_grad()
                if session.clock in holds:
                    holds.discard(session.clock)
                    hold(directory, session.rank, session.clock)
            decay.step()
        rest = torch.tensor([random.random(), torch.rand(()).item(), optimizer.param_groups[0]["lr"], session.clock])
        found = {name: tensor.detach().clone() for name, tensor in session.unwrap(model).state_dict().items()}
        save_file(found | {"rest": rest}, directory / f"rank-{session.rank}.safetensors")


if __name__ == "__main__":
    main()
