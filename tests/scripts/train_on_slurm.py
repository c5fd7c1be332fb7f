"""What jobs under Slurm run: train_on_slurm.py PASSES SECONDS FOLDER, with a pause in each step.

Ends before that many passes where FOLDER/enough is there; every worker by itself, so in an elastic job alone. Writes
the samples of each step, as `clock: samples`, into FOLDER/RANK, and says on which node a worker begins and ends. In a
group each member does so, into FOLDER/RANK-MEMBER, with a model that fully_shard has cut.
"""

import hashlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import ps_worker

SAMPLES, BATCH = 64, 8


def main() -> None:
    passes, pause, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.arange(SAMPLES, dtype=torch.float32).reshape(-1, 1)
    loader = DataLoader(TensorDataset(inputs), batch_size=BATCH, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    in_group: dict[str, Any] = {}
    name = ""
    if "PS_GROUP_SIZE" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        in_group, name = {"group": dist.group.WORLD}, f"-{dist.get_rank()}"
    session = ps_worker.connect()
    model, optimizer, loader = session.prepare(model, optimizer, loader, **in_group)
    rank, where = session.rank, f"{os.environ['SLURMD_NODENAME']} in process {os.getpid()}"
    print(f"worker {rank} begins at clock {session.clock} on {where}", flush=True)
    with (folder / f"{rank}{name}").open("a", buffering=1) as steps:
        for _ in range(passes):
            if (folder / "enough").exists():
                break
            for (x,) in loader:
                model(x / SAMPLES).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.write(f"{session.clock}: {' '.join(str(int(sample)) for sample in x)}\n")
                threading.Event().wait(pause)
    parameters = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    print(f"worker {rank} ends at clock {session.clock} with {hashlib.sha256(weights).hexdigest()}", flush=True)
    session.close()


if __name__ == "__main__":
    main()
