"""A process that saves and loads by torch.distributed.checkpoint, as a plain FSDP2 script does.

python tests/scripts/train_with_dcp.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves what it began with in DIRECTORY, and what it ended with.
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
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ps_torch
from tests.scripts.train_cut_anew import loss, make_model, state
from tests.scripts.train_in_group import begin_process

STEPS = 3


@dataclass(frozen=True)
class Options:
    """What it is, and does.

    members: of each group; 0: it is a plain script of one process, without servers
    loads:   the folder that it begins with; empty: none
    saves:   the folder that it saves to; empty: none
    groups:  how many there are
    flat:    the folder has the flat layout: names of the model at the top, settings by parameter. The optimizer has a
             schedule before it loads
    """

    members: int
    loads: str = ""
    saves: str = ""
    groups: int = 1
    flat: bool = False


def load(model: Any, optimizer: torch.optim.Optimizer, folder: str, flat: bool) -> None:
    """Loads what each process has of a model and its optimizer."""
    if flat:
        torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    layout = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=layout)
    found: dict[str, Any] = {**(of_model if flat else {"model": of_model}), "optimizer": of_optimizer}
    dcp.load(found, checkpoint_id=folder)
    of_optimizer = found.pop("optimizer")
    of_model = found if flat else found["model"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=layout)


def save(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Saves them. A call of all members of a group."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def main() -> None:
    directory, group, member = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options, name = Options(**json.loads(sys.argv[4])), f"{group}-{member}"
    begin_process()
    model: Any = make_model()
    mesh = None
    if options.members:
        place = {"rank": member, "world_size": options.members}
        dist.init_process_group("gloo", init_method=f"file://{directory}/store-{group}", **place)
        mesh = init_device_mesh("cpu", (options.members,))
        fully_shard(model, mesh=mesh)
    optimizer: Any = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    if options.loads:
        load(model, optimizer, options.loads, options.flat)
    if mesh is None:
        for when in ("begin", "end"):
            save_file(state(model, optimizer), directory / f"{when}-{name}.safetensors")
        return
    with ps_torch.connect(mode="sync", job=os.environ["JOB"], rank=group, world_size=options.groups) as session:
        model, optimizer = session.prepare(model, optimizer, group=mesh, bucket_bytes=64)
        save_file(state(model, optimizer), directory / f"begin-{name}.safetensors")
        for step in range(STEPS):
            loss(model, step, group * options.members + member, options.groups * options.members).backward()
            optimizer.step()
            optimizer.zero_grad()
        if options.saves and session.rank == 0:
            save(model, optimizer, options.saves)
        session.barrier()
        save_file(state(model, optimizer), directory / f"end-{name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
