"""One worker of a benchmark: an ordinary training script that takes steps when it is told to.

The first line of its input is its Task; each line after it is an order, {"steps": N} or {"seconds": S}, answered with
the times at which its steps ended, from `began` on, a time by the machine's own clock. With {"leave": true} it leaves
the job afterwards, so that no worker waits for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ps_worker
from bench.computing import compute
from bench.machine import memory, traffic
from bench.talk import own_output

WEIGHT_SCALE = 0.02  # the deviation of weights with which GPT-2 begins


@dataclass(frozen=True)
class Task:
    """What one worker trains, and how.

    model:   "gpt", of `layers` and `width`; "vectors", of `parameters` elements and next to no computing; "counted", as
             vectors, but each element is the number of updates; "small"
    vector:  elements of a parameter of "vectors", at most
    lr:      of AdamW for "vectors", whose weights are then as small as a language model's; None: SGD
    mode:    as ps_worker.connect takes it; in "single" the workers know nothing of each other
    warmup:  steps before the first order
    pauses:  seconds that each step takes longer, one after the other and again from the start
    compute: what happens in a pause, "busy" or "wait": see computing.py
    quorum:  as ps_worker.connect takes it
    """

    model: str
    mode: str
    rank: int = 0
    world_size: int = 1
    server: str | None = None
    job: str = "default"
    transport: str = "auto"
    wire: str = "float32"
    batch: int = 8
    block: int = 64
    layers: int = 8
    width: int = 512
    parameters: int = 0
    vector: int = 2**20
    lr: float | None = None
    bucket_bytes: int | None = None
    warmup: int = 4
    pauses: tuple[float, ...] = ()
    compute: str = "wait"
    quorum: str | None = None


# -- the models ------------------------------------------------------------------------------------------------------


class Vectors(nn.Module):
    """Nothing but parameters; their squares are the loss, so that every element has a gradient of its own."""

    def __init__(self, values: Tensor, size: int) -> None:
        """values: those of all parameters, each of which has at most `size` elements"""
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(part.clone()) for part in values.split(size))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) to one number."""
        total = torch.stack([vector.dot(vector) for vector in self.vectors]).sum()
        return x.mean() * total


class Counted(Vectors):
    """The negative sum of all elements is the loss: with a learning rate of 1 each update adds 1 to each."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) to one number."""
        return -torch.stack([vector.sum() for vector in self.vectors]).sum()


Built = tuple[nn.Module, torch.optim.Optimizer, Dataset[Any], Callable[[Tensor, Tensor], Tensor]]


def build(task: Task) -> Built:
    """The task's model, optimizer, data and loss, the same on all workers."""
    torch.manual_seed(0)
    if task.model == "gpt":
        from examples.char_gpt import CharGPT, Shape, Windows, library_text

        gpt = CharGPT(Shape(task.layers, task.width // 64, task.width, task.block))
        return gpt, adamw(gpt.parameters()), Windows(library_text(), task.block), _cross_entropy
    numbers = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    if task.model == "vectors":
        if task.lr is not None:
            vectors = Vectors(torch.randn(task.parameters).mul_(WEIGHT_SCALE), task.vector)
            return vectors, torch.optim.AdamW(vectors.parameters(), task.lr, fused=True), numbers, lambda loss, _: loss
        vectors = Vectors(torch.randn(task.parameters), task.vector)
        return vectors, torch.optim.SGD(vectors.parameters(), lr=1e-4, fused=True), numbers, lambda loss, _: loss
    if task.model == "counted":
        counted = Counted(torch.zeros(task.parameters), task.vector)
        return counted, torch.optim.SGD(counted.parameters(), lr=1.0, fused=True), numbers, lambda loss, _: loss
    small = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return small, torch.optim.SGD(small.parameters(), lr=1e-3, fused=True), numbers, F.cross_entropy


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The GPT's optimizer: the fastest AdamW there is on a CPU, for every mode and every peer."""
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weight_bytes(task: Task) -> int:
    """The size of the task's model."""
    return 4 * sum(parameter.numel() for parameter in build(task)[0].parameters())


# -- the training ----------------------------------------------------------------------------------------------------


def losses(task: Task, session: ps_worker.Session) -> Iterator[float]:
    """Trains; yields after each step."""
    model, optimizer, data, loss_of = build(task)
    loader: Any = DataLoader(data, task.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = session.prepare(
        model,
        optimizer,
        loader,
        bucket_bytes=task.bucket_bytes,
        gradient_wire=task.wire,
        weight_wire=task.wire,
        outer={"warm_up": 0},
    )
    waits = _pauses(task)
    for x, y in _endless(loader):
        next(waits)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _pauses(task: Task) -> Iterator[None]:
    """The computing of each step, or what stands in for it: none in the warm-up."""
    for _ in range(task.warmup):
        yield
    while True:
        for seconds in task.pauses or (0.0,):
            compute(task.compute, seconds)
            yield


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    imports = memory()["peak"]
    task = Task(**json.loads(sys.stdin.readline()))
    with ps_worker.connect(
        task.server, task.mode, task.job, task.rank, task.world_size, transport=task.transport, quorum=task.quorum
    ) as session:
        training = losses(task, session)
        for _ in range(task.warmup):
            next(training)
        say({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            before = traffic()
            began = time.perf_counter()
            ends, loss = _take_steps(training, order)
            moved = [now - then for now, then in zip(traffic(), before, strict=True)]
            if order.get("leave"):
                session.close()
            sizes = {"imports": imports, **memory()}
            say({"began": began, "ends": ends, "loss": loss, "traffic": moved, "memory": sizes})


def _take_steps(training: Iterator[float], order: dict[str, Any]) -> tuple[list[float], float]:
    """As many steps as ordered, or as begin in that time: when each ended, from the order on, and the last loss."""
    ends: list[float] = []
    loss = float("nan")
    started = time.perf_counter()
    while len(ends) < order.get("steps", sys.maxsize) and (not ends or ends[-1] < order.get("seconds", sys.maxsize)):
        loss = next(training)
        ends.append(time.perf_counter() - started)
    return ends, loss


if __name__ == "__main__":
    main()
