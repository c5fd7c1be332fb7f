"""One process of `python -m bench groups`: a member of a group, of torch's HSDP, or one that trains alone.

It reads an Order from the first line of its input. The benchmark sends each later line to all processes of a system at
the same time, and each of them answers:

    {"steps": N}    takes N steps: when they began and ended, the last loss, the seconds of a core that this process has
                    used, and the bytes that went through this host's interfaces meanwhile
    {"seconds": S}  the same for so long, with as many steps as its neighbours; then it leaves the job
    {"save": PATH}  writes the whole model, in the first process
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ps_worker
from bench.machine import traffic
from bench.talk import own_output
from bench.training import adamw
from examples.char_gpt import CharGPT, Shape, Windows, library_text

HSDP, ALONE, APART = "HSDP", "one process", "groups apart"
BLOCK = 64


@dataclass(frozen=True)
class Order:
    """What a process trains, and with which others.

    system: HSDP, ALONE, "ours", or APART: each group trains by itself, and exchanges nothing with the other
    meets:  HOST:PORT at which the processes of its torch world meet, of which it is number `rank` of `size`
    group:  the number of its group, of `groups`
    server, job, mode, quorum, transport, wire: as ps_worker.connect and prepare take them; quorum 0: there is none
    sgd:    the optimizer is SGD with momentum, and otherwise AdamW
    tensor: the members of a group cut the MLPs by tensor parallel, and have one batch; otherwise fully_shard cuts all
    micro:  backwards in a step
    batch:  blocks in the batch of one of `groups` times `members` processes; ALONE has all of them
    warmup: steps before the first order
    """

    system: str
    meets: str = ""
    rank: int = 0
    size: int = 1
    group: int = 0
    groups: int = 2
    members: int = 2
    server: str = ""
    job: str = "default"
    mode: str = "sync"
    quorum: int = 0
    transport: str = "auto"
    wire: str = "float32"
    sgd: bool = False
    tensor: bool = False
    micro: int = 1
    layers: int = 8
    width: int = 512
    batch: int = 8
    warmup: int = 3


class Training:
    """The model, and the steps that a process takes with it."""

    def __init__(self, order: Order, session: ps_worker.Session | None) -> None:
        torch.manual_seed(0)
        self._order, self._session = order, session
        self.model: nn.Module = CharGPT(Shape(order.layers, max(1, order.width // 64), order.width, BLOCK))
        mesh = self._cut()
        own = self.model.parameters()
        # torch 2.13 has no fused SGD for DTensors.
        self._optimizer: Any = torch.optim.SGD(own, lr=0.01, momentum=0.9) if order.sgd else adamw(own)
        if session is not None:
            wires = {"gradient_wire": order.wire, "weight_wire": order.wire}
            self.model, self._optimizer = session.prepare(
                self.model, self._optimizer, group=mesh, outer={"warm_up": 0}, **wires
            )
        self._windows = Windows(library_text(), BLOCK)
        self._made = 0

    def _cut(self) -> Any:
        """Cuts the model over the processes of this one's torch world; returns their mesh."""
        order = self._order
        if order.system == ALONE:
            return None
        shape, names = (
            ((order.groups, order.members), ("groups", "members")) if order.system == HSDP else ((order.size,), None)
        )
        mesh = whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
        blocks: Any = self.model.blocks
        if order.tensor:
            of_group = mesh["members"] if order.system == HSDP else mesh
            for block in blocks:
                parallelize_module(block, of_group, {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()})
            if order.system != HSDP:
                return whole
            mesh = mesh["groups"]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        return whole

    def step(self) -> float:
        """Takes one step, with the same samples as every other system; returns the loss of this process' own."""
        order, count = self._order, self._order.groups * self._order.members
        own = order.group * order.members + order.rank if order.system != HSDP else order.rank
        size = order.batch * (count if order.system == ALONE else 1)
        if order.tensor and order.system != ALONE:
            own, size = own // order.members, order.batch * order.members
        first = self._made * order.batch * count + own * size
        batch = [self._windows[(first + index) % len(self._windows)] for index in range(size)]
        parts = [torch.stack(each).chunk(order.micro) for each in zip(*batch, strict=True)]
        total = 0.0
        for number, (x, y) in enumerate(zip(*parts, strict=True), 1):
            is_last = number == order.micro or self._session is None
            with contextlib.nullcontext() if is_last else self._session.no_sync():
                loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()) / order.micro
                loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._made += 1
        return total

    def save(self, path: Path) -> None:
        """Writes the whole model, in the first process: all of its torch world call it."""
        found = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in self.model.state_dict().items()
        }
        if self._order.rank == self._order.group == 0:
            save_file({name: value.detach().clone() for name, value in found.items()}, path)


def take(training: Training, order: Order, told: dict[str, Any]) -> dict[str, Any]:
    """As many steps as told, or as begin in that time."""
    before, cpu, began = traffic(), time.process_time(), time.perf_counter()
    ends: list[float] = []
    loss = float("nan")
    while len(ends) < told.get("steps", sys.maxsize) and not _is_over(order, began, told.get("seconds")):
        loss = training.step()
        ends.append(time.perf_counter() - began)
    moved = [now - then for now, then in zip(traffic(), before, strict=True)]
    return {"began": began, "ends": ends, "loss": loss, "cpu": time.process_time() - cpu, "traffic": moved}


def _is_over(order: Order, began: float, seconds: float | None) -> bool:
    """Whether the time is over, for one of the processes that meet: each takes as many steps as the others."""
    if seconds is None:
        return False
    over = torch.tensor(float(time.perf_counter() - began >= seconds))
    if order.size > 1:
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over)


def answers(training: Training, order: Order, session: ps_worker.Session | None) -> Iterator[dict[str, Any]]:
    """Does what each line says."""
    for line in sys.stdin:
        told = json.loads(line)
        if "save" in told:
            training.save(Path(told["save"]))
            yield {"saved": True}
            continue
        found = take(training, order, told)
        if session is not None and "seconds" in told:
            session.close()
        yield found


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    order = Order(**json.loads(sys.stdin.readline()))
    if order.size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://{order.meets}", rank=order.rank, world_size=order.size)
    with contextlib.ExitStack() as stack:
        session = None
        if order.server:
            place = order.server, order.mode, order.job, order.group, order.groups
            more = {"quorum": order.quorum} if order.quorum else {}
            session = stack.enter_context(ps_worker.connect(*place, transport=order.transport, **more))
        training = Training(order, session)
        for _ in range(order.warmup):
            training.step()
        say({"ready": True, "pid": os.getpid()})
        for found in answers(training, order, session):
            say(found)
    if order.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
