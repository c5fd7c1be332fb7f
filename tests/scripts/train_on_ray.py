"""What a worker on Ray runs: it trains until a file says that it is enough, and says how far it is in another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def train_in_group(folder: Path) -> dict[str, Any]:
    """The same by a member of a group, with a model that fully_shard has cut. All of them end at one step."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    fully_shard(model, mesh=mesh)
    with ps_worker.connect() as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02), group=mesh)
        number = session.rank * dist.get_world_size() + dist.get_rank()
        progress, part = folder / f"{number}-{os.getpid()}", folder / f".{os.getpid()}"
        first, step, enough = session.clock, 0, torch.zeros(())
        while not enough:
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            part.write_text(str(step))
            part.replace(progress)
            enough = torch.tensor(float((folder / ENOUGH).exists()))
            dist.all_reduce(enough)
        return {"rank": session.rank, "member": dist.get_rank(), "first": first, "steps": step}


def in_ray_train(config: dict[str, str]) -> None:
    """The training function of Ray Train, with the worker's rank there as its name."""
    import ray.train

    found = train(Path(config["folder"]), str(ray.train.get_context().get_world_rank()))
    (Path(config["folder"]) / f"done-{os.getpid()}").write_text(str(found["loss"]))
