"""What the members of groups do in the tests of Accelerate. Each function is one process' script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import DistributedType, PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

import ps_worker.accelerate
from ps_worker.huggingface import PsTrainer
from tests.scripts.models import refusal

BATCH = 8  # of all processes together


def accelerate(**options: Any) -> Accelerator:
    """An accelerator that cuts. Accelerate leaves its plugin out on CPUs; here its state says what it does on GPUs."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=True, fsdp_plugin=plugin(), **options)


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    policy = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **policy | options)


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    shares = int(os.environ.get("PS_WORLD_SIZE", "1")) * int(os.environ.get("PS_GROUP_SIZE", "1"))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), DataLoader(data, BATCH // shares)


def whole(model: nn.Module) -> list[list[float]]:
    tensors = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    return [tensor.flatten().tolist() for tensor in tensors]


def train(steps: int, accumulate: int = 1, sized: bool = False, **more: Any) -> dict[str, Any]:
    """Trains on servers. sized: a ParallelismConfig says how many processes cut. more: saves, loads: a folder"""
    session = ps_worker.accelerate.connect()
    options = {"parallelism_config": ParallelismConfig(dp_shard_size=2)} if sized else {}
    accelerator = accelerate(gradient_accumulation_steps=accumulate, **options)
    model, optimizer, schedule, loader = make()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if "loads" in more:
        accelerator.load_state(str(more["loads"]))
    given = model, optimizer, schedule, loader
    model, optimizer, schedule, loader = ps_worker.accelerate.join(session, accelerator, *given)
    kinds = [type(each).__name__ for each in (optimizer, schedule)]
    batches = [batch for _ in range(9) for batch in loader][: steps * accumulate]
    for x, y in batches[more.get("skip", 0) :]:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if "saves" in more:
        if session.rank == 0:
            accelerator.save_state(str(more["saves"]))
        session.barrier()
    found = {"weights": whole(model), "clock": session.clock, "kinds": kinds, "rate": optimizer.param_groups[0]["lr"]}
    session.close()
    return found


def alone(steps: int, accumulate: int = 1) -> list[list[float]]:
    """What plain torch ends with on the combined batches. The schedule steps once for each process, as Accelerate's."""
    model, optimizer, schedule, loader = make()
    batches = [batch for _ in range(9) for batch in loader][: steps * accumulate]
    for number, (x, y) in enumerate(batches, 1):
        (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(2):
                schedule.step()
    return whole(model)


def refusals(root: Path) -> list[str]:
    """What is said of other ways to cut, before anything joins."""
    session = ps_worker.accelerate.connect()
    found = []
    accelerator = accelerate()
    model, optimizer, _, _ = make()
    model, optimizer = accelerator.prepare(model, optimizer)

    def said() -> str:
        return refusal(lambda: ps_worker.accelerate.join(session, accelerator, model, optimizer))

    for name in ("dp_replicate_size", "tp_size", "cp_size"):
        accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=2, **{name: 2})
        found.append(said())
    accelerator.state.parallelism_config = None
    accelerator.scaler = torch.amp.GradScaler("cpu")
    found.append(said())
    accelerator.scaler = None
    accelerator.state.fsdp_plugin = plugin(cpu_offload=True)
    found.append(said())
    accelerator.state.distributed_type = DistributedType.MULTI_CPU  # what it is where nothing else is said
    found.append(said())
    arguments = TrainingArguments(str(root), use_cpu=True, report_to=[])
    found.append(refusal(lambda: PsTrainer(make()[0], arguments, session=session)))
    return found


def without_a_group_size() -> str:
    """What `join` says where a torchrun for each group started the processes, and no variable calls them a group."""
    del os.environ["PS_GROUP_SIZE"]
    session = ps_worker.accelerate.connect()
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = make()
    return refusal(lambda: ps_worker.accelerate.join(session, accelerator, model, optimizer))
