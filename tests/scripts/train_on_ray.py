"""What a worker on Ray runs: it trains until a file says that it is enough, and says how far it is in another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ps_worker

ENOUGH = "enough"


def train(folder: Path, name: str) -> dict[str, Any]:
    """Trains; writes the number of steps into NAME-PID. Returns what the worker had at the end."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    wanted = torch.randn(8, 1)
    with ps_worker.connect() as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        progress, part = folder / f"{name}-{os.getpid()}", folder / f".{os.getpid()}"
        step, loss = 0, torch.zeros(())
        while not (folder / ENOUGH).exists():
            inputs = torch.randn(16, 8)
            loss = (model(inputs) - inputs @ wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            part.write_text(str(step))
            part.replace(progress)  # so that no reader finds half a number
        return {"rank": session.rank, "loss": loss.item(), "steps": step}


def in_ray_train(config: dict[str, str]) -> None:
    """The training function of Ray Train, with the worker's rank there as its name."""
    import ray.train

    found = train(Path(config["folder"]), str(ray.train.get_context().get_world_rank()))
    (Path(config["folder"]) / f"done-{os.getpid()}").write_text(str(found["loss"]))
