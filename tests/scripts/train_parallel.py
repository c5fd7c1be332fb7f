"""One member of a group that trains a model by tensor parallelism, alone or with fully_shard.

python tests/scripts/train_parallel.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves the whole weights that it began and ended with in DIRECTORY, and its errors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

import ps_torch
from ps_torch import InvalidRequest, LimitExceeded, NonFiniteGradient, Session
from tests.scripts.train_in_group import begin_process, fail_before_push, lose_place, make_optimizer, participation_of
from tests.scripts.train_with_state import hold

ROWS, WORDS, LENGTH = 8, 11, 4
OUT = 3


@dataclass(frozen=True)
class Options:
    """How it trains.

    members:   of a group; 0: workers have one process, without a group
    shards:    fully_shard is called, too: over two shares of the data
    context:   fully_shard alone is called, over members that have the same samples
    whole:     the last layer is a plain module in each process
    micro:     backwards in a step
    clip:      the norm that gradients are clipped to, where it is not 0
    mode, connected, prepared: as of connect and prepare
    holds:     the clocks at which it waits
    steps:     the clock at which it ends
    even:      see Model
    unlike:    the last layer gets another gradient in member 1
    unpushed:  the clock after which member 0 fails before it has pushed anything
    lost:      the clock after which member 1 loses the place before it has pushed, and fails in the next one. All leave
               what they have then
    cut_short: the clock after which Ctrl-C comes to member 1 while it mixes in a fragment
    meets:     the clock at which it meets all others in a barrier, and leaves what it has then
    frozen:    the layer that is frozen until `thaws`; empty: none is
    thaws:     the clock before which it is trained again
    asks:      leaves the optimizer's state, too
    loads:     loads its optimizer's own state before the third step
    loops:     it makes so many passes over its loader, in place of steps
    """

    groups: int = 2
    members: int = 2
    shards: bool = False
    context: bool = False
    whole: bool = False
    optimizer: str = "AdamW"
    steps: int = 6
    micro: int = 1
    clip: float = 0.0
    mode: str = "sync"
    connected: dict[str, Any] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)
    holds: list[int] = field(default_factory=list)
    even: bool = False
    unlike: bool = False
    unpushed: int = -1
    lost: int = -1
    cut_short: int = -1
    meets: int = -1
    frozen: str = ""
    thaws: int = 0
    asks: bool = False
    loads: bool = False
    loops: int = 0


class Model(nn.Module):
    """Words in, three numbers out. even: each dimension is a multiple of the number of processes that cut it, and torch
    can put strided shards together. Otherwise rows are no multiple of two.
    """

    def __init__(self, even: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS + even, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12 if even else 10)
        self.down = nn.Linear(12 if even else 10, 6)
        self.head = nn.Linear(6, OUT + even)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(torch.tanh(self.up(self.norm(self.words(words))))))[..., :OUT]
        return found


def parallelized(model: nn.Module, mesh: DeviceMesh, whole: bool) -> None:
    """Cuts a model over a mesh: parameters are cut along either dimension, or replicated."""
    head = (
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
        if whole
        else ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    )
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": head,
    }
    parallelize_module(model, mesh, plan)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one step of all processes."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return words, torch.randn(ROWS, LENGTH, OUT, generator=generator)


def loss(model: nn.Module, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(words), wanted)


def add_gradient(model: nn.Module, part: tuple[torch.Tensor, ...], options: Options) -> None:
    """Adds the gradient of one group, which clips its own, to that of all: their mean."""
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss(model, *part).backward()
    if options.clip:
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        assert norm > options.clip
    for parameter, sum_of_others in zip(model.parameters(), before, strict=True):
        if parameter.grad is not None:
            parameter.grad.div_(options.groups)
            if sum_of_others is not None:
                parameter.grad.add_(sum_of_others)


def one_process(options: Options) -> dict[str, torch.Tensor]:
    """What one process ends with on the combined batches, without servers."""
    model = Model(options.even)
    optimizer = make_optimizer(options.optimizer, model)
    for step in range(options.steps):
        if options.frozen:
            model.get_submodule(options.frozen).requires_grad_(step >= options.thaws)
        for part in zip(*(each.chunk(options.groups) for each in batch(step)), strict=True):
            add_gradient(model, part, options)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        f"state.{index}.{name}": value
        for index, each in enumerate(model.parameters())
        for name, value in optimizer.state[each].items()
    }
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {**weights, **state} if options.asks else weights


def interrupt_landing(session: Session) -> None:
    """Has Ctrl-C come in the next step of this member, while it mixes in a fragment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    at_hand: Any = session._strategy._training.kind._round  # type: ignore[attr-defined]
    land = at_hand.land

    def landing(fragment: int) -> None:
        at_hand.land = land
        signal.raise_signal(signal.SIGINT)
        land(fragment)

    at_hand.land = landing


def lose_place_and_fail(session: Session) -> None:
    """Has this member lose the place in its next step, before it has pushed anything, and fail so in the next place."""
    participation = participation_of(session)
    rejoin = participation.rejoin

    def rejoining(*given: Any) -> bool:
        participation.rejoin = rejoin
        is_wanted: bool = rejoin(*given)
        fail_before_push(session)
        return is_wanted

    participation.rejoin = rejoining
    lose_place(session, "before", lambda: None)


class Member:
    """One process of a group."""

    def __init__(self, directory: Path, group: int, member: int, options: Options) -> None:
        self.directory, self.group, self.member, self.options = directory, group, member, options
        self.model: Any = Model(options.even)
        if group:
            for parameter in self.model.parameters():
                nn.init.zeros_(parameter)  # it is given group 0's
        self.more: dict[str, Any] = {"bucket_bytes": 64, **options.prepared}
        self.share, self.shares = group, options.groups
        if options.members:
            self.cut()
        if options.frozen:  # torch's SequenceParallel thaws
            self.model.get_submodule(options.frozen).requires_grad_(False)
        self.optimizer: Any = make_optimizer(options.optimizer, self.model)

    def cut(self) -> None:
        members, shares = self.options.members, 2 if self.options.shards else 1
        dist.init_process_group(
            "gloo", init_method=f"file://{self.directory}/group-{self.group}", rank=self.member, world_size=members
        )
        names = ("data", "cp" if self.options.context else "cut")
        mesh = init_device_mesh("cpu", (shares, members // shares), mesh_dim_names=names)
        if self.options.context:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (members,)))
        else:
            parallelized(self.model, mesh["cut"], self.options.whole)
        if shares > 1:
            fully_shard(self.model, mesh=mesh["data"])
        self.share = self.share * shares + mesh.get_local_rank("data")
        self.shares *= shares
        self.more["group"] = mesh

    def train(self) -> None:
        place = {"job": os.environ["JOB"], "rank": self.group, "world_size": self.options.groups}
        with ps_torch.connect(mode=self.options.mode, **place, **self.options.connected) as session:
            loader = DataLoader(torch.arange(2 * self.shares), 1)
            self.model, self.optimizer, loader = session.prepare(self.model, self.optimizer, loader, **self.more)
            if self.options.loops:
                self.leave("begin")
                self.loop(session, loader)
                self.leave("end")
                return
            seen = sorted({int(number) for number in loader})
            (self.directory / f"seen-{self.group}-{self.member}").write_text(json.dumps(seen))
            self.leave("begin", **(self.state() if self.options.asks else {}))
            try:
                self.steps(session)
            except InvalidRequest as error:
                if not self.options.unlike:
                    raise
                (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
                return
            self.leave("end", **(self.state() if self.options.asks else {}))

    def loop(self, session: Session, loader: Any) -> None:
        self.pause_at(session.clock)
        for _ in range(self.options.loops):
            for number in loader:
                loss(self.model, *batch(int(number))).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.pause_at(session.clock)

    def steps(self, session: Session) -> None:
        options = self.options
        size = ROWS // self.shares // options.micro
        for step in range(session.clock, options.steps):
            self.pause_at(step)
            if step == options.meets:
                session.barrier()
                self.leave("met")
            if options.frozen:
                self.model.get_submodule(options.frozen).requires_grad_(step >= options.thaws)
            words, wanted = batch(step)
            for part in range(options.micro):
                first = (self.share * options.micro + part) * size
                is_last = part == options.micro - 1
                with nullcontext() if is_last else session.no_sync():
                    (loss(self.model, words[first:][:size], wanted[first:][:size]) / options.micro).backward()
            if options.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
            if options.unlike and self.member and self.model.head.weight.requires_grad:
                self.model.head.weight.grad.mul_(2)
            if options.loads and step == 3:
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            if step == options.unpushed and (self.group, self.member) == (0, 0):
                fail_before_push(session)
            if step == options.lost and (self.group, self.member) == (0, 1):
                lose_place_and_fail(session)
            if step == options.cut_short and self.member:
                interrupt_landing(session)
            try:
                self.optimizer.step()
            except KeyboardInterrupt:
                (self.directory / f"cut-short-{self.group}-{self.member}").touch()
            except (NonFiniteGradient, LimitExceeded) as error:
                (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
                if step == options.lost:
                    self.leave("lost")
            self.optimizer.zero_grad()

    def pause_at(self, clock: int) -> None:
        if clock in self.options.holds:
            self.options.holds.remove(clock)
            self.leave(str(clock))
            hold(self.directory, 10 * self.group + self.member, clock)

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, whole, by number and name."""
        found = self.optimizer.state_dict()["state"]
        return {f"state.{index}.{name}": whole(value) for index, each in found.items() for name, value in each.items()}

    def leave(self, when: str, **more: torch.Tensor) -> None:
        found = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        save_file({**found, **more}, self.directory / f"{when}-{self.group}-{self.member}.safetensors")


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor, or one that a process has whole, as the processes have it together."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def main() -> None:
    directory, group, member = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    begin_process()
    Member(directory, group, member, Options(**json.loads(sys.argv[4]))).train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
