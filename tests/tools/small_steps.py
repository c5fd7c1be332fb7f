"""A small model, its optimizers and its batches, for tests of local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.tools.small_models import drawn, filled

Make = Callable[[Any], torch.optim.Optimizer]


def make_net() -> Any:
    """Returns the model, always with the same weights."""
    return filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer without state."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns one with state."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(rank: int, number: int) -> torch.Tensor:
    """Returns the batch of one worker's step: [8, 6]."""
    return drawn(1000 * rank + number, 8, 6)
