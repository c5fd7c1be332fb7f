"""One member of a group that trains a model in stages of a pipeline, with an embedding that is tied to the last layer.

python tests/scripts/train_pipeline.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves what it has of the weights, and of the optimizer's state, in DIRECTORY: what it
began and ended with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.data import DataLoader

import ps_torch
from ps_torch import InvalidRequest, NonFiniteGradient, Session
from tests.scripts.train_in_group import LOST_STEP, begin_process, lose_place
from tests.scripts.train_with_state import hold

ROWS, WORDS, LENGTH, WIDTH, LAYERS = 8, 11, 4, 6, 4
SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


@dataclass(frozen=True)
class Options:
    """How it trains.

    members:   of a group, each with a stage; 0: workers have one process, without a group
    schedule:  of torch.distributed.pipelining
    each:      stages of each member
    shards:    the model is cut by fully_shard instead
    copies:    each member has the whole model and a part of the batch, and the script sums all gradients
    both:      a member is a stage, which fully_shard cuts over two processes
    micro:     microbatches of a step
    clip:      the norm that all gradients together are clipped to, where it is not 0
    sums:      the script sums the gradient of the tied embedding
    reads:     leaves what it gets of a loader
    counts:    leaves the bytes that this member has sent and received of what several hold alike
    loses, non_finite: as in train_in_group
    poison:    the clock before which a gradient of the last stage of group 0 is not finite, once
    slow:      the clock at which group 1 waits, and no other
    mode, connected, prepared: as of connect and prepare
    holds:     the clocks at which it waits
    steps:     the clock at which it ends
    """

    groups: int = 2
    members: int = 2
    schedule: str = "1F1B"
    each: int = 1
    shards: bool = False
    copies: bool = False
    both: bool = False
    micro: int = 2
    optimizer: str = "AdamW"
    clip: float = 0.0
    sums: bool = True
    reads: bool = False
    counts: bool = False
    loses: str = ""
    poison: int = -1
    non_finite: str = "refuse"
    slow: int = -1
    steps: int = 6
    mode: str = "sync"
    connected: dict[str, Any] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)
    holds: list[int] = field(default_factory=list)


class Layer(nn.Module):
    """Counts how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.is_meta:
            self.calls += 1
        found: torch.Tensor = rows + torch.tanh(self.linear(rows))
        return found


class Model(nn.Module):
    """Words in, numbers for each word out. A layer is frozen, and all layers but the first share a complex table."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words: Any = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.layers[2].requires_grad_(False)
        self.table: Any
        self.register_buffer("table", torch.polar(torch.ones(WIDTH), torch.rand(WIDTH)), persistent=False)
        self.is_first = self.is_last = True

    def stage(self, index: int, count: int) -> Model:
        """Leaves one stage of this model."""
        own = range(index * LAYERS // count, (index + 1) * LAYERS // count)
        for number in range(LAYERS):
            if number not in own:
                self.layers[number] = nn.Identity()
        self.is_first, self.is_last = index == 0, index == count - 1
        if not (self.is_first or self.is_last):
            self.words = None
        if not self.is_last:
            self.norm = None
        if own[-1] == 0:
            self.table = None
        return self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            rows = self.words(rows)
        for number, layer in enumerate(self.layers):
            if number and isinstance(layer, Layer):
                rows = rows * self.table.real
            rows = layer(rows)
        return nn.functional.linear(self.norm(rows), self.words.weight) if self.is_last else rows


def trained(*models: nn.Module) -> dict[str, nn.Parameter]:
    return {n: each for model in models for n, each in model.named_parameters() if each.requires_grad}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one step of all processes."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return words, torch.randn(ROWS, LENGTH, WORDS, generator=generator)


def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(found, wanted)


def gradients(model: Model, part: Iterable[torch.Tensor], clip: float) -> list[torch.Tensor]:
    """The gradient of one group, which clips its own."""
    model.zero_grad()
    words, wanted = part
    loss(model(words), wanted).backward()
    own = [*trained(model).values()]
    if clip:
        assert nn.utils.clip_grad_norm_(own, clip) > clip
    return [parameter.grad for parameter in own if parameter.grad is not None]


def one_process(options: Options) -> dict[str, torch.Tensor]:
    """What one process ends with on the combined batches, without servers; not how often layers were called."""
    model = Model()
    own = trained(model)
    optimizer = make_optimizer(options.optimizer, own.values())
    for step in range(options.steps):
        if step == options.poison and options.non_finite == "skip":
            continue
        parts = zip(*(each.chunk(options.groups) for each in batch(step)), strict=True)
        of_groups = [gradients(model, part, options.clip) for part in parts]
        for parameter, each in zip(own.values(), zip(*of_groups, strict=True), strict=True):
            parameter.grad = torch.stack(each).mean(0)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


class Member:
    """One process of a group."""

    def __init__(self, directory: Path, group: int, member: int, options: Options) -> None:
        self.directory, self.group, self.member, self.options = directory, group, member, options
        self.share, self.shares = group, options.groups
        self.more: dict[str, Any] = {"bucket_bytes": 64, "non_finite": options.non_finite, **options.prepared}
        self.bytes: list[int] = []
        self.parts = [Model(group)]  # those of the other groups are given group 0's
        self.ends: Any = None
        if options.members:
            self.meet()
        self.own = trained(*self.parts)
        self.optimizer: Any = make_optimizer(options.optimizer, self.own.values())

    def meet(self) -> None:
        options, members = self.options, self.options.members
        dist.init_process_group(
            "gloo", init_method=f"file://{self.directory}/group-{self.group}", rank=self.member, world_size=members
        )
        self.more["group"] = dist.group.WORLD
        if options.copies:
            return
        if options.shards:
            mesh = init_device_mesh("cpu", (members,))
            fully_shard(self.parts[0], mesh=mesh)
            self.share, self.shares = self.share * members + self.member, self.shares * members
            return
        place, places = self.member, members
        mesh: Any = None
        if options.both:
            mesh = init_device_mesh("cpu", (members // 2, 2), mesh_dim_names=("stage", "data"))
            place, places = mesh.get_local_rank("stage"), members // 2
            self.share, self.shares = self.share * 2 + mesh.get_local_rank("data"), self.shares * 2
        self.indices = range(place, places * options.each, places)
        self.parts = [Model(self.group).stage(index, places * options.each) for index in self.indices]
        first = next((part.table for part in self.parts if part.table is not None), None)
        for part in self.parts:
            part.table = first if part.table is not None else None  # one tensor in all stages of a process
        if mesh is not None:
            for part in self.parts:
                fully_shard(part, mesh=mesh["data"])
        self.line: Any = dist.group.WORLD if mesh is None else mesh["stage"].get_group()
        self.places = places
        ranks = dist.get_process_group_ranks(self.line)
        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True) if place in (0, places - 1) else 0
        self.ends = ends or None

    def train(self) -> None:
        place = {"job": os.environ["JOB"], "rank": self.group, "world_size": self.options.groups}
        with ps_torch.connect(mode=self.options.mode, **place, **self.options.connected) as session:
            *self.parts, self.optimizer = session.prepare(*self.parts, self.optimizer, **self.more)
            if self.options.reads:
                loader = session.prepare(DataLoader(torch.arange(2 * self.shares), 1))
                seen = sorted({int(number) for number in loader})
                (self.directory / f"seen-{self.group}-{self.member}").write_text(json.dumps(seen))
            self.leave("begin")
            if self.options.counts:
                self.count_bytes()
            try:
                self.steps(session)
            except InvalidRequest as error:
                if self.options.sums:
                    raise
                (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
                return
            (self.directory / f"bytes-{self.group}-{self.member}").write_text(json.dumps(self.bytes))
            self.leave("end")

    def count_bytes(self) -> None:
        """Notes the size of each broadcast of this process from now on: the script itself makes none."""
        broadcast = dist.broadcast

        def noted(tensor: torch.Tensor, *given: Any, **more: Any) -> Any:
            self.bytes.append(tensor.nbytes)
            return broadcast(tensor, *given, **more)

        dist.broadcast = noted

    def steps(self, session: Session) -> None:
        options, size = self.options, ROWS // self.shares
        schedule = self.schedule() if hasattr(self, "line") else None
        step, poisoned = session.clock, {options.poison}
        while step < options.steps:
            if step in options.holds or (step == options.slow and self.group == 1):
                self.leave(str(step))
                hold(self.directory, 10 * self.group + self.member, step)
            words, wanted = (each[self.share * size :][:size] for each in batch(step))
            if options.copies:
                own = slice(self.member * size // options.members, (self.member + 1) * size // options.members)
                (loss(self.parts[0](words[own]), wanted[own]) / options.members).backward()
                for parameter in self.own.values():
                    dist.all_reduce(parameter.grad)
            elif schedule is None:
                loss(self.parts[0](words), wanted).backward()
            else:
                is_first, is_last = self.parts[0].is_first, self.parts[-1].is_last
                schedule.step(*([words] if is_first else []), **({"target": wanted} if is_last else {}))
                if options.sums and self.ends is not None:
                    gradient = self.own["words.weight"].grad
                    dist.all_reduce(local(gradient), group=self.ends)
            if options.clip:
                self.clip()
            if step in poisoned:
                poisoned.remove(step)
                if self.group == 0 and self.parts[-1].is_last:
                    self.own["norm.bias"].grad[0] = float("nan")
            if step == LOST_STEP and options.loses and (self.group, self.member) == (options.groups - 1, 1):
                lose_place(session, options.loses, lambda: None)
            try:
                self.optimizer.step()
            except NonFiniteGradient as error:
                (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
            self.optimizer.zero_grad()
            step = min(step + 1, session.clock)  # a rollback takes it back

    def schedule(self) -> Any:
        count, device = self.places * self.options.each, torch.device("cpu")
        stages = [
            PipelineStage(part, index, count, device, group=self.line)
            for part, index in zip(self.parts, self.indices, strict=True)
        ]
        made = SCHEDULES[self.options.schedule]
        return made(stages if self.options.each > 1 else stages[0], self.options.micro, loss_fn=loss)

    def clip(self) -> None:
        """Clips the gradients of all stages together. What two of them have counts once, in the first."""
        counted = [each.grad for name, each in self.own.items() if name != "words.weight" or self.parts[0].is_first]
        squared = sum(gradient.square().sum() for gradient in counted)
        if self.options.members:
            dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(self.own.values(), self.options.clip, squared.sqrt())

    def leave(self, when: str) -> None:
        found = {f"table-{n}": part.table.real.clone() for n, part in enumerate(self.parts) if part.table is not None}
        for part in self.parts:
            found |= {name: whole(tensor) for name, tensor in part.state_dict().items()}
        names = list(self.own)
        state = {} if self.options.mode.startswith("local") else self.optimizer.state_dict()["state"]
        for index, of_parameter in state.items():
            found |= {f"optimizer/{names[index]}/{name}": whole(value) for name, value in of_parameter.items()}
        save_file(found, self.directory / f"{when}-{self.group}-{self.member}.safetensors")


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


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
