"""One member of a group that trains a model which `fully_shard` has cut, on a device that all members share.

python tests/scripts/train_on_device.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves the whole weights that it began and ended with in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ps_torch
from tests.scripts import train_in_group
from tests.scripts.train_in_group import BUCKET_BYTES, ROWS, batch, begin_process, cut, loss, make_model, make_optimizer

STEPS = 8


@dataclass(frozen=True)
class Options:
    """How it trains.

    device:    "cuda": the first GPU, which all members share; "cpu"
    transport: as of connect
    overlap:   as of prepare
    micro:     backwards in a step
    """

    device: str
    transport: str = "auto"
    overlap: bool = False
    optimizer: str = "AdamW"
    groups: int = 2
    members: int = 2
    micro: int = 2


def one_process(options: Options) -> dict[str, torch.Tensor]:
    """What one process ends with on the combined batches, on the same device, without servers."""
    model = make_model().to(options.device)
    optimizer = make_optimizer(options.optimizer, model)
    for step in range(STEPS):
        loss(model, *(each.to(options.device) for each in batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model that `fully_shard` has cut. A collective of all members."""
    return {name: tensor.full_tensor().detach().cpu() for name, tensor in model.state_dict().items()}


def main() -> None:
    directory, group, member = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = Options(**json.loads(sys.argv[4]))
    begin_process()
    if options.device == "cuda":
        torch.cuda.set_device(0)
    # Not NCCL, which refuses two ranks on one GPU.
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/group-{group}", rank=member, world_size=options.members
    )
    mesh = init_device_mesh(options.device, (options.members,))
    model: Any = make_model().to(options.device)
    if group:
        nn.init.zeros_(model[0].weight)  # it is given group 0's
    cut(model, mesh, train_in_group.Options())
    optimizer: Any = make_optimizer(options.optimizer, model)
    place = {"job": os.environ["JOB"], "rank": group, "world_size": options.groups}
    with ps_torch.connect(mode="sync", **place, transport=options.transport) as session:
        session.device = torch.device(options.device)
        more = {"bucket_bytes": BUCKET_BYTES, "overlap": options.overlap}
        model, optimizer = session.prepare(model, optimizer, group=mesh, **more)
        assert all(each.device.type == options.device for each in model.parameters())
        save_file(whole(model), directory / f"begin-{group}-{member}.safetensors")
        size = ROWS // (options.groups * options.members * options.micro)
        for step in range(STEPS):
            rows, wanted = (each.to(options.device) for each in batch(step))
            for part in range(options.micro):
                first = ((group * options.members + member) * options.micro + part) * size
                with nullcontext() if part == options.micro - 1 else session.no_sync():
                    (loss(model, rows[first:][:size], wanted[first:][:size]) / options.micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_file(whole(model), directory / f"end-{group}-{member}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
