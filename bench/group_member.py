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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ps_worker
from bench.machine import traffic
from bench.talk import own_output
from bench.training import adamw
from examples.char_gpt import Block, CharGPT, Shape, Windows, library_text, rotation

HSDP, REPLICAS, ALONE, APART = "HSDP", "replicas", "one process", "groups apart"
SHARDED, TENSOR, PIPELINE = "sharded", "tensor parallel", "pipeline"
BLOCK = 64


@dataclass(frozen=True)
class Order:
    """What a process trains, and with which others.

    system: HSDP, ALONE, "ours", or APART: each group trains by itself, and exchanges nothing with the other. REPLICAS:
            torch's own, which are cut as groups are, and average their gradients by all_reduce once they are clipped
    meets:  HOST:PORT at which the processes of its torch world meet, of which it is number `rank` of `size`
    group:  the number of its group, of `groups`
    server, job, mode, quorum, transport, wire: as ps_worker.connect and prepare take them; quorum 0: there is none
    sgd:    the optimizer is SGD with momentum, and otherwise AdamW
    cut:    SHARDED, by fully_shard. Otherwise the members of a group have one batch. TENSOR: they cut the MLPs by
            tensor parallel. PIPELINE: they are stages, by 1F1B, and the embedding is the head, too
    micro:  backwards in a step
    clip:   the norm that each group clips its gradient to; 0: none does
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
    cut: str = SHARDED
    micro: int = 1
    clip: float = 0.0
    layers: int = 8
    width: int = 512
    batch: int = 8
    warmup: int = 3


class Stage(CharGPT):
    """One of two stages. Both have the embedding, which is the head of the last one."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__(shape, tied=True)
        self._is_first = index == 0
        for number in range(shape.layers):
            if (2 * number >= shape.layers) == self._is_first:
                self.blocks[number] = nn.Identity()
        if self._is_first:
            self.norm = self.head = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activations after the first blocks for bytes of text, or the logits for such activations."""
        cos, sin = rotation(x.shape[1], self.shape.width // self.shape.heads, x.device)
        x = self.embedding(x) if self._is_first else x
        for block in self.blocks:
            x = block(x, cos, sin) if isinstance(block, Block) else x
        return x if self._is_first else self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    """The model, and the steps that a process takes with it."""

    def __init__(self, order: Order, session: ps_worker.Session | None) -> None:
        torch.manual_seed(0)
        self._order, self._session = order, session
        self._member = order.rank % order.members
        self._is_stage = order.cut == PIPELINE and order.system != ALONE
        shape = Shape(order.layers, max(1, order.width // 64), order.width, BLOCK)
        self.model: Any = Stage(shape, self._member) if self._is_stage else CharGPT(shape, order.cut == PIPELINE)
        self._mesh = None if order.system == ALONE else self._cut()
        own = [*self.model.parameters()]
        # torch's fused AdamW takes DTensors and other tensors apart from each other.
        kinds = [[each for each in own if isinstance(each, DTensor) == is_cut] for is_cut in (True, False)]
        groups = [{"params": each} for each in kinds if each]
        # torch 2.13 has no fused SGD for DTensors.
        self._optimizer: Any = torch.optim.SGD(groups, lr=0.01, momentum=0.9) if order.sgd else adamw(groups)
        if session is not None:
            wires = {"gradient_wire": order.wire, "weight_wire": order.wire}
            self.model, self._optimizer = session.prepare(
                self.model, self._optimizer, group=self._mesh, outer={"warm_up": 0}, **wires
            )
        if self._is_stage:
            stage = PipelineStage(self.model, self._member, 2, torch.device("cpu"), group=self._members)
            self._schedule = Schedule1F1B(stage, order.micro, loss_fn=cross_entropy)
        self._windows = Windows(library_text(), BLOCK)
        self._made = 0
        self._turns = self._samples()

    def _cut(self) -> Any:
        """Cuts the model over the processes of this one's torch world; returns their mesh."""
        order = self._order
        copies = order.size // order.members
        mesh = init_device_mesh("cpu", (copies, order.members), mesh_dim_names=("groups", "members"))
        self._copies, self._members = mesh["groups"].get_group(), mesh["members"].get_group()
        over = mesh if order.system == HSDP else mesh["members"]
        for block in self.model.blocks:
            if order.cut == TENSOR:
                parallelize_module(block, over, {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()})
            elif order.cut == SHARDED:
                fully_shard(block, mesh=over)
        if order.cut == SHARDED:
            fully_shard(self.model, mesh=over)
        return mesh

    def _samples(self) -> list[tuple[int, int]]:
        """The samples of a step that this process has: the first one's number, and how many. One process that clips has
        those of one group after the other."""
        order, of_group = self._order, self._order.batch * self._order.members
        if order.system == ALONE:
            turns = order.groups if order.clip else 1
            size = of_group * order.groups // turns
            return [(turn * size, size) for turn in range(turns)]
        number = order.group * order.members + order.rank
        if order.cut == SHARDED:
            return [(number * order.batch, order.batch)]
        return [(number // order.members * of_group, of_group)]

    def step(self) -> float:
        """Takes one step, with the same samples as every other system; returns the loss of this process' own."""
        order, total = self._order, 0.0
        begun = self._made * order.batch * order.members * order.groups
        own, gradients = [*self.model.parameters()], []
        for first, size in self._turns:
            self._optimizer.zero_grad()
            total += self._backward(begun + first, size) / len(self._turns)
            if order.clip:
                self._clip()
            gradients.append([each.grad for each in own])
        if len(self._turns) > 1:
            for parameter, each in zip(own, zip(*gradients, strict=True), strict=True):
                parameter.grad = sum(each) / len(each)
        if order.system == REPLICAS:
            for gradient in gradients[0]:
                dist.all_reduce(local(gradient), group=self._copies)
                local(gradient).div_(order.groups)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._made += 1
        return total

    def _backward(self, first: int, size: int) -> float:
        """Makes the gradient of some samples, in parts; returns their loss, which only the last stage knows."""
        micro = self._order.micro
        batch = [self._windows[(first + index) % len(self._windows)] for index in range(size)]
        x, y = (torch.stack(each) for each in zip(*batch, strict=True))
        losses: list[torch.Tensor] = []
        if self._is_stage:
            self._schedule.step(*([x] if self._member == 0 else []), target=y, losses=losses)
            dist.all_reduce(self.model.embedding.weight.grad, group=self._members)
            return sum(loss.item() for loss in losses) / micro
        for number, part in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True), 1):
            is_last = number == micro or self._session is None
            with contextlib.nullcontext() if is_last else self._session.no_sync():
                losses.append(cross_entropy(self.model(part[0]), part[1]) / micro)
                losses[-1].backward()
        return sum(loss.item() for loss in losses)

    def _clip(self) -> None:
        """Clips the gradient of a group. What its members hold alike counts once, in the first of them."""
        found = {name: each.grad for name, each in self.model.named_parameters()}
        squares = [
            local(each).square().sum()
            for name, each in found.items()
            if self._member == 0 or isinstance(each, DTensor) or (self._is_stage and name != "embedding.weight")
        ]
        squared = torch.stack(squares).sum()
        if self._order.system != ALONE:
            dist.all_reduce(squared, group=self._members)
        scale = min(1.0, self._order.clip / float(squared.sqrt()))
        for each in found.values():
            local(each).mul_(scale)

    def save(self, path: Path) -> None:
        """Writes the whole model, in the first process: all of its torch world call it."""
        found = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in self.model.state_dict().items()
        }
        if self._is_stage:
            parts: list[Any] = [None] * self._order.size
            dist.all_gather_object(parts, found)
            found = {name: value for part in parts for name, value in part.items()}
        if self._order.rank == self._order.group == 0:
            save_file({name: value.detach().clone() for name, value in found.items()}, path)


def local(tensor: Any) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
