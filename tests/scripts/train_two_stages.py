"""Trains two stages on parameter servers: the head by SGD, then all layers by AdamW. Writes its weights and its state.

    train_two_stages.py DIRECTORY [CLOCK ...]

Waits at each of these clocks for the file DIRECTORY/go-CLOCK, once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from tests.tools.cluster import until
from tests.tools.small_models import drawn, filled, step

FIRST_PASSES, SECOND_PASSES = 2, 3
SAMPLES, BATCH = 24, 4
SWITCH = FIRST_PASSES * SAMPLES // BATCH  # the clock at which the second stage begins
STEPS = SWITCH + SECOND_PASSES * SAMPLES // BATCH


def main(directory: Path, holds: set[int]) -> None:
    """Trains."""

    def train(optimizer: torch.optim.Optimizer, schedule: Any, passes: int) -> None:
        for _ in range(passes):
            for [batch] in loader:
                step(net, optimizer, batch)
                schedule.step()
                hold()

    def hold() -> None:
        clock = session.clock
        if clock in holds:
            holds.discard(clock)
            (directory / f"held-{clock}-{session.rank}").touch()
            until((directory / f"go-{clock}").exists, "being let go")

    session = ps_worker.connect()
    net: Any = filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)))
    torch.manual_seed(session.rank)
    data = DataLoader(TensorDataset(drawn(0, SAMPLES * session.world_size, 6)), BATCH, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first = ExponentialLR(optimizer, 0.9)
    net, optimizer, loader, first = session.prepare(net, optimizer, data, first, bucket_bytes=256)
    hold()
    train(optimizer, first, FIRST_PASSES)
    second_optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    second = ExponentialLR(second_optimizer, 0.95)
    second_optimizer, second = session.prepare(second_optimizer, second)
    train(second_optimizer, second, SECOND_PASSES)
    state = second_optimizer.state_dict()
    found = {f"{index}.{key}": value for index, each in state["state"].items() for key, value in each.items()}
    found |= {name: value.detach().clone() for name, value in net.state_dict().items()}
    found["rest"] = torch.tensor([state["param_groups"][0]["lr"], session.clock, torch.rand(()).item()])
    save_file(found, directory / f"rank-{session.rank}.safetensors")
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {int(clock) for clock in sys.argv[2:]})
