"""A small Llama that several processes train together: FSDP2 and tensor parallel, over a mesh of two dimensions.

    torchrun --nproc-per-node 4 examples/llama.py                                         # alone: 2 x 2 processes
    ps-worker run --shards 2 --workers 2 --group 4 examples/llama.py --out runs/llama-4   # two groups of 2 x 2
    ps-worker run --shards 2 --workers 2 --group 2 examples/llama.py --out runs/llama-2   # two groups of two

It has what such scripts have: tensor parallel with sequence parallel norms, activation checkpointing, `torch.compile`
where --compile asks for it, clipping, warm-up and cosine, and checkpoints by torch.distributed.checkpoint, from which
any number of processes goes on: all of them read --out, also those of other machines. A group of processes is one
worker of a parameter server (docs/groups.md). What it asks of the training is marked (ps): two lines to join, its share
of the data, and results over all groups.

From top to bottom: the model, how it is cut, the schedule, checkpoints, the training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from char_gpt import VOCABULARY, Windows, library_text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import ps_torch as ps

ROPE_BASE = 10_000.0

# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaShape:
    """How large the model is.

    kv_heads: how many heads keys and values have; each serves heads / kv_heads heads of queries
    hidden:   the width within a feed-forward layer
    recompute: whether a block forgets what it has computed, and computes it again in backward: less memory
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    hidden: int = 176
    block: int = 64
    recompute: bool = False


def turns(block: int, width: int) -> Tensor:
    """Returns cosine and sine by which RoPE turns the pairs of a head, at each place: (2, block, width / 2)."""
    speed = ROPE_BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(block).float(), speed)
    return torch.stack((angles.cos(), angles.sin()))


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Returns queries or keys with each pair turned by its place, so that their products depend on distances alone."""
    cosine, sine = rotation  # (length, head width / 2)
    even, odd = x[..., 0::2], x[..., 1::2]  # (batch, heads, length, head width / 2)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal attention of grouped queries."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.queries_each = shape.heads // shape.kv_heads
        self.query = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1: a tensor-parallel process has a part of the heads.
        q, k, v = (
            layer(x).view(batch, length, -1, self.head).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = turned(q, rotation), turned(k, rotation)
        k, v = (each.repeat_interleave(self.queries_each, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, length, head width)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """A feed-forward layer whose gate is a SiLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Attention and a feed-forward layer, each behind an RMSNorm and beside what comes in."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.forward_norm, self.feed_forward = nn.RMSNorm(shape.width), SwiGLU(shape)
        self.recompute = shape.recompute

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._layers, x, rotation, use_reentrant=False)  # type: ignore[no-any-return]
        return self._layers(x, rotation)

    def _layers(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.forward_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Bytes in, logits of the byte after each out."""

    rotation: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.register_buffer("rotation", turns(shape.block, shape.width // shape.heads), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        rotation = self.rotation[:, : x.shape[1]]
        x = self.embedding(x)  # (batch, length, width); with tensor parallel a part of the length
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# --- how it is cut ---------------------------------------------------------------------------------------------------


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Cuts layers by heads and by hidden width. Between them, where the norms are, each process has a part of the
    places (sequence parallel). All layers are in the plan: so clip_grad_norm_ finds gradients of one mesh."""
    whole: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def cut(model: Llama, mesh: DeviceMesh, compiler: str | None) -> None:
    """Cuts a model over a mesh with the dimensions data and tensor: tensor parallel first, then FSDP2."""
    if mesh["tensor"].size() > 1:
        tensor_parallel(model, mesh["tensor"])
    for block in model.blocks:
        if compiler is not None:
            block.compile(backend=compiler)
        if mesh["data"].size() > 1:
            fully_shard(block, mesh=mesh["data"])
    if mesh["data"].size() > 1:
        fully_shard(model, mesh=mesh["data"])


# --- the schedule, and checkpoints -----------------------------------------------------------------------------------


def warm_up_and_cosine(step: int, warm_up: int, steps: int) -> float:
    """Returns the part of the learning rate that a step has: up in a line, then down to a tenth in half a cosine."""
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    over = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * over))


def parts(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns what is in a checkpoint: DTensors, of which each process writes and reads its own pieces."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def load_newest(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest whole checkpoint, which any number of processes may have written. Returns its step, or 0."""
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    newest = [complete[-1] if complete else None]
    dist.broadcast_object_list(newest, src=0)  # another process may see one more, which is written just now
    if newest[0] is None:
        return 0
    found = parts(model, optimizer, 0)
    dcp.load(found, checkpoint_id=newest[0])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(found["step"])


# --- the training ----------------------------------------------------------------------------------------------------


def meet(cut_by: int) -> DeviceMesh:
    """Returns the mesh of the processes that hold the model together: this group, or all that torchrun has started."""
    if int(os.environ["WORLD_SIZE"]) % cut_by:
        sys.exit(f"llama: {os.environ['WORLD_SIZE']} processes are no multiple of --tensor-parallel {cut_by}")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size() // cut_by, cut_by), mesh_dim_names=("data", "tensor"))


def begin(arguments: argparse.Namespace, mesh: DeviceMesh) -> tuple[Llama, torch.optim.Optimizer, LambdaLR]:
    """Returns the model, cut over the mesh, its optimizer and schedule, from the newest checkpoint if there is one."""
    torch.manual_seed(arguments.seed)  # the same weights in all processes, before they are cut
    names = ("layers", "heads", "kv_heads", "width", "hidden", "block", "recompute")
    model = Llama(LlamaShape(**{name: getattr(arguments, name) for name in names})).to(mesh.device_type)
    cut(model, mesh, arguments.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = load_newest(arguments.out, model, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = arguments.lr
    part = partial(warm_up_and_cosine, warm_up=arguments.warm_up, steps=arguments.steps)
    return model, optimizer, LambdaLR(optimizer, part, last_epoch=first - 1)


def train(arguments: argparse.Namespace) -> None:
    """Trains with all other processes."""
    mesh = meet(arguments.tensor_parallel)
    share, shares = mesh["data"].get_local_rank(), mesh["data"].size()  # tensor-parallel processes have one together
    model, optimizer, schedule = begin(arguments, mesh)
    if schedule.last_epoch >= arguments.steps:
        if dist.get_rank() == 0:
            print(f"{arguments.out} has step {schedule.last_epoch} already: give more --steps or another --out")
        return
    session = None
    if os.environ.get("PS_GROUP_SIZE") or os.environ.get("PS_SERVER"):  # whoever starts groups sets one of them
        session = ps.connect()  # (ps)
        first = schedule.last_epoch
        model, optimizer, schedule = session.prepare(model, optimizer, schedule, group=mesh)  # (ps)
        check_beginning(session, first)  # (ps)
        share, shares = session.rank * shares + share, session.world_size * shares  # (ps) a prepared loader knows it
        left = arguments.steps - schedule.last_epoch  # none, where the job has ended without this group
        session.progress(total=max(1, session.clock + left))  # (ps) for those who watch

    windows = Windows(library_text(), arguments.block, arguments.seed)
    losses = torch.zeros(2, arguments.steps, dtype=torch.float64)  # of each step, and whether this process has made it
    # The schedule counts the steps. Servers that roll back take it back, too, and a group that is started again gets
    # that of the job.
    while schedule.last_epoch < arguments.steps:
        step = schedule.last_epoch
        first = (step * shares + share) * arguments.batch_size
        batch = [windows[(first + index) % len(windows)] for index in range(arguments.batch_size)]
        x, y = (torch.stack(each).to(mesh.device_type) for each in zip(*batch, strict=True))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[:, step] = torch.tensor([loss.item(), 1.0])  # a step that is made again replaces what it was
        if session is not None:
            session.log(loss=loss.item())  # (ps) for those who watch
        step = schedule.last_epoch
        if step % arguments.checkpoint_every == 0 or step == arguments.steps:
            save(arguments.out / f"step-{step:06}", model, optimizer, step, session)
            if dist.get_rank() == 0 and (session is None or session.is_main):
                print(f"step {step}/{arguments.steps}: loss {loss.item():.3f} on this process", flush=True)
    leave_result(arguments.out, losses, session)


def check_beginning(session: ps.Session, first: int) -> None:
    """Ends the process where groups begin a job at unlike steps: each has read an --out of its own."""
    if session.clock == 0:  # the job begins; a group that comes later has got the job's schedule
        begun = session.gather(first)
        if len(set(begun)) > 1:
            sys.exit(f"llama: processes begin at the steps {begun}: --out must be one folder that all machines share")


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, session: ps.Session | None) -> None:
    """Writes a checkpoint: all processes that hold the model; with several groups those of the first one."""
    if session is None or session.rank == 0:
        dcp.save(parts(model, optimizer, step), checkpoint_id=path)
    if session is not None:
        session.barrier()  # (ps) the other groups wait until it is there


def leave_result(out: Path, losses: Tensor, session: ps.Session | None) -> None:
    """Writes the loss of each step, over the batches of the processes that have made it."""
    is_first = dist.get_rank() == 0
    if session is not None:
        losses = session.mean(losses)  # (ps)
        is_first = session.is_main
        session.close()  # (ps)
    else:
        dist.all_reduce(losses)
    if is_first:
        sums, counts = losses[:, losses[1] > 0]  # not the steps from before this run
        (out / "result.json").write_text(json.dumps({"losses": (sums / counts).tolist()}) + "\n")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The defaults are for a laptop: a minute."""
    parser = argparse.ArgumentParser(description="Train a small Llama, cut over processes.")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes that cut a layer (%(default)s)")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks")
    parser.add_argument("--recompute", action="store_true", help="checkpoint activations: less memory, more time")
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps until the full learning rate (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="blocks in a batch of one share (%(default)s)")
    for name in ("layers", "heads", "kv_heads", "width", "hidden", "block"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(LlamaShape, name), help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of a group's gradient, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/llama"), help="checkpoints, results (%(default)s)")
    arguments = parser.parse_args(words)
    cut_by = arguments.tensor_parallel
    if cut_by < 1 or any(each % cut_by for each in (arguments.kv_heads, arguments.hidden, arguments.block)):
        parser.error(f"--kv-heads, --hidden and --block are cut by --tensor-parallel {cut_by}: multiples of it")
    if arguments.heads % arguments.kv_heads or arguments.width % (2 * arguments.heads):
        parser.error("--heads is a multiple of --kv-heads, and --width one of twice --heads")
    return arguments


def main() -> None:
    """Trains in a process that a launcher has started."""
    arguments = parse_arguments(sys.argv[1:])
    if "RANK" not in os.environ:
        sys.exit("llama: start it by torchrun, or by ps-worker run --group; the commands are at the top of the file")
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
