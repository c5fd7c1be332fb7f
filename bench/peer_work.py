"""What every system of `bench peers` does alike: model, optimizer, gradients or batches, and what must come of it.

In a round gradients are known numbers, which are filled in outside of its time, so that a round is communication and
one step of plain SGD. In a step a GPT reads its batch, makes its gradients and trains with AdamW. Batches are numbered
by step and rank, so that all systems, and one process with the batches of all workers together, read the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench.results import MIB
from bench.round import PARAMETER, PATTERN, check, known_gradient
from bench.training import Task, adamw, build

ROUND, STEP = "round", "step"
WARMUP = 3  # rounds or steps, of which the result is checked
PARTS = 8  # or more, that servers share the weights of a round evenly
# How far AdamW's weights may be from those of one process, as a part of the way that these went: sums are rounded in
# another order, and where a gradient is next to nothing, AdamW goes one way or the other.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Work:
    """What the workers of each system do.

    kind:    "round" or "step"
    workers: that share it; in DataParallel and in the process that says what must come of it, they are one process
    mib:     a round's weights; `layers`, `width` and `batch`, of each worker, are a step's
    device:  "cpu" or "cuda": a worker has the device of its rank
    """

    kind: str
    workers: int
    mib: int = 64
    layers: int = 8
    width: int = 512
    batch: int = 8
    device: str = "cpu"

    @property
    def task(self) -> Task:
        """The GPT as bench.training has it."""
        return Task("gpt", "single", batch=self.batch, layers=self.layers, width=self.width)

    def model(self) -> nn.Module:
        """Returns the model as all begin with it."""
        return Parts(self.mib * MIB // 4) if self.kind == ROUND else build(self.task)[0]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns an optimizer of parameters, which may be some of the model's."""
        return torch.optim.SGD(parameters, lr=1.0, fused=True) if self.kind == ROUND else adamw(parameters)

    def place(self, rank: int) -> torch.device:
        """Returns where a worker's model is."""
        return torch.device(self.device, rank if self.device == "cuda" else None)


class Parts(nn.Module):
    """Nothing but weights, in parts: zeros at first. As a module it hands back known gradients.

    DataParallel needs that, because it brings gradients together in the backward pass alone.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        parts = torch.zeros(elements).split(min(PARAMETER // 4, -(-elements // PARTS)))
        self.names = [f"part{number}" for number in range(len(parts))]
        for name, part in zip(self.names, parts, strict=True):
            self.register_parameter(name, nn.Parameter(part.clone()))

    def forward(self, rank: Tensor) -> Tensor:
        """[1] to [1]; the gradient of what it returns is that of the worker of this rank."""
        found: Tensor = _Known.apply(rank, *(getattr(self, name) for name in self.names))
        return found


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rank: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(rank)
        ctx.sizes = [part.numel() for part in parts]
        return rank.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (rank,) = ctx.saved_tensors
        places = torch.arange(sum(ctx.sizes), device=rank.device) % PATTERN
        return None, *(((places + rank + 1) * above[0]).split(ctx.sizes))


class Rounds:
    """A worker's known gradients, and the weights that must come of them."""

    def __init__(self, work: Work, rank: int, model: nn.Module) -> None:
        self._workers, self._done = work.workers, 0
        self._parameters = list(model.parameters())
        elements = sum(parameter.numel() for parameter in self._parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        self._gradients = known_gradient(elements, rank).to(self._parameters[0].device).split(sizes)

    def fill(self) -> None:
        """Makes the gradients of the next round."""
        self._done += 1
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(gradient)

    def check(self) -> None:
        """Raises SystemExit unless each weight is what the mean of all workers' gradients makes of it, to the bit."""
        check(self._parameters, self._done, self._workers)


class Batches:
    """The batches of one worker, or of all of them together, which are `ranks`."""

    def __init__(self, work: Work, data: Dataset[Any], ranks: range, device: torch.device) -> None:
        self._work, self._data, self._ranks, self._device = work, data, ranks, device
        self._step = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns blocks of text, and the bytes that follow each: [batch, block] both."""
        of_all = self._work.batch * self._work.workers
        first = self._step * of_all
        self._step += 1
        length = len(self._data)  # type: ignore[arg-type]
        places = range(first + self._ranks.start * self._work.batch, first + self._ranks.stop * self._work.batch)
        pairs = [self._data[place % length] for place in places]
        x, y = (torch.stack(column).to(self._device) for column in zip(*pairs, strict=True))
        return x, y


def save_expected(model: nn.Module, path: Path) -> None:
    """Writes the weights that one process has after the warm-up."""
    save_file({name: tensor.detach().cpu() for name, tensor in model.named_parameters()}, path)


def check_weights(work: Work, model: nn.Module, path: Path) -> None:
    """Raises SystemExit unless the weights after the warm-up are those of one process, but for rounding."""
    start, expected = dict(work.model().named_parameters()), load_file(path)
    way = off = 0.0
    for name, parameter in model.named_parameters():
        way += float((expected[name] - start[name].detach()).abs().double().sum())
        off += float((parameter.detach().cpu() - expected[name]).abs().double().sum())
    if not off < TOLERANCE * way:
        raise SystemExit(f"wrong result: weights are {off / way:.3g} of their way off from those of one process")
