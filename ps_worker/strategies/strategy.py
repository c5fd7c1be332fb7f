"""The three ways to train behind one face: alone, with DDP, or on a parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

# What a script trains with: models and optimizers, in the order in which it has handed them over.
Prepared = tuple[Sequence[nn.Module], Sequence[torch.optim.Optimizer]]


class Strategy(Protocol):
    """What a session asks of the way it trains."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def world_size(self) -> int:
        """How many workers take part now."""

    def share(self) -> tuple[int, int]:
        """Which share of the data is this worker's now, as (index, how many shares)."""

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Prepared:
        """The models and the optimizers to train with. Blocks until all declared workers are there."""

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that does what one is to do."""

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """The values of all that take part, by rank, ascending; see collectives.Exchange."""

    def close(self) -> None:
        """Leaves cleanly; may be called more than once."""


class Single:
    """One process, nothing else: the reference that every other way is compared with."""

    rank = 0
    world_size = 1
    is_main = True

    def share(self) -> tuple[int, int]:
        """All of it."""
        return 0, 1

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Prepared:
        """All as they are."""
        return models, optimizers

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Its own."""
        return {0: value}

    def close(self) -> None:
        """Nothing is open."""
