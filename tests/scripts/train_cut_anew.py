"""A process of a job whose checkpoint is restored with another cut: a member of a group, or a worker of one process.

python tests/scripts/train_cut_anew.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves what it began with in DIRECTORY, and what it ended with: whole weights, buffers
and optimizer state.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import ps_torch
from tests.scripts.train_in_group import begin_process
from tests.scripts.train_with_state import hold

ROWS = 24


@dataclass(frozen=True)
class Options:
    """How it trains.

    members:   of each group; 0: workers have one process, without a group
    groups:    how many groups, or workers of one process, there are
    stops:     the clock at which it ends
    optimizer: a class of torch.optim
    values:    its arguments
    columns:   the weights of layers are cut along their second dimension
    mode:      as of connect
    prepared:  more that goes to prepare
    holds:     the clock at which it waits
    """

    members: int
    stops: int
    optimizer: str
    values: dict[str, Any]
    columns: bool
    mode: str
    prepared: dict[str, Any]
    groups: int = 1
    holds: int = -1


class Counted(nn.Module):
    """Has a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.batches += torch.tensor([1.0, 2.0, 0.5])
        return rows


def make_model() -> nn.Sequential:
    """A model of uneven and empty shards, with a layer that is not trained. Columns are even, as FSDP2 wants them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), Counted(), nn.Linear(6, 2), nn.Linear(2, 1))
    model[2].requires_grad_(False)
    return model


def make_optimizer(model: nn.Module, name: str, values: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """Returns an optimizer, and its schedule."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, name)(trained, **values)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def loss(model: nn.Module, step: int, member: int = 0, members: int = 1) -> torch.Tensor:
    """The loss of a member on its share of the samples of a step."""
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1000 + step))
    own = slice(member * ROWS // members, (member + 1) * ROWS // members)
    return nn.functional.mse_loss(model(rows[own]), rows[own].sum(1, keepdim=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor."""
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The model's tensors by name, and the optimizer's by parameter and name."""
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for index, of_parameter in optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{index}/{name}": whole(tensor) for name, tensor in of_parameter.items()}
    return found


def main() -> None:
    directory, group, member = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = Options(**json.loads(sys.argv[4]))
    name, size = f"{group}-{member}", max(1, options.members)
    begin_process()
    model: Any = make_model()
    if group:
        nn.init.zeros_(model[0].weight)  # it is given what the job has
    given: dict[str, Any] = {"bucket_bytes": 64, **options.prepared}
    if options.members:
        place = {"rank": member, "world_size": options.members}
        dist.init_process_group("gloo", init_method=f"file://{directory}/store-{group}", **place)
        given["group"] = mesh = init_device_mesh("cpu", (options.members,))
        placed = (lambda tensor: Shard(1) if tensor.dim() > 1 else None) if options.columns else None
        fully_shard(model, mesh=mesh, shard_placement_fn=placed)
    optimizer, schedule = make_optimizer(model, options.optimizer, options.values)
    with ps_torch.connect(mode=options.mode, job=os.environ["JOB"], rank=group, world_size=options.groups) as session:
        model, optimizer, schedule = session.prepare(model, optimizer, schedule, **given)
        save_file(state(model, optimizer), directory / f"begin-{name}.safetensors")
        while session.clock < options.stops:
            if session.clock == options.holds:
                hold(directory, 10 * group + member, options.holds)
            loss(model, session.clock, group * size + member, size * options.groups).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        numbers = {"rate": torch.tensor(optimizer.param_groups[0]["lr"]), "clock": torch.tensor(session.clock)}
        save_file(state(model, optimizer) | numbers, directory / f"end-{name}.safetensors")
    if options.members:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
