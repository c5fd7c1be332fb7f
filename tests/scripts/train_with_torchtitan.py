"""A process that saves and loads by torchtitan's own classes: its CheckpointManager, its optimizers and schedules.

python tests/scripts/train_with_torchtitan.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. It trains without servers. Leaves what it began with in DIRECTORY, and what it ended
with.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from tests.scripts.train_cut_anew import loss, make_model, state
from tests.scripts.train_in_group import begin_process

STEPS, RATE = 3, 0.02


@dataclass(frozen=True)
class Options:
    """What it is, and does.

    members: processes over which `fully_shard` cuts the model
    loads:   the folder that it begins with; empty: none
    saves:   it trains, and saves to DIRECTORY/checkpoint/step-3
    groups:  there is one
    """

    members: int
    loads: str = ""
    saves: bool = False
    groups: int = 1


def main() -> None:
    directory, member = Path(sys.argv[1]), int(sys.argv[3])
    options = Options(**json.loads(sys.argv[4]))
    begin_process()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=member, world_size=options.members)
    model: Any = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (options.members,)))
    # As its Trainer makes them: the schedule is there before anything is loaded.
    config = default_adamw(RATE, betas=(0.9, 0.999), weight_decay=0.01)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=1000)
    excluded = ["dataloader", "lr_scheduler", "train_state"]
    manager = CheckpointManager.Config(
        enable=True,
        interval=STEPS,
        initial_load_path=options.loads or None,
        initial_load_model_only=False,
        exclude_from_loading=excluded if options.loads else [],
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": {"step": STEPS}},
        sd_adapter=None,
        base_folder=str(directory),
    )
    assert manager.load() == bool(options.loads)
    save_file(state(model, optimizers.optimizers[0]), directory / f"begin-0-{member}.safetensors")
    for step in range(STEPS if options.saves else 0):
        loss(model, step, member, options.members).backward()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
    if options.saves:
        assert manager.save(STEPS)
    manager.close()
    save_file(state(model, optimizers.optimizers[0]), directory / f"end-0-{member}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
