"""A worker that trains any model for those who follow its job, and remembers its weights by clock."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import ps_torch as ps

M = TypeVar("M", bound=nn.Module)


class RememberingTrainer(Generic[M]):
    """Trains a model in a session. `past` has its weights by clock.

    loss:      of the model that is given to it
    optimizer: without one, SGD
    """

    def __init__(
        self,
        session: ps.Session,
        own: M,
        loss: Callable[[M], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        **more: Any,
    ) -> None:
        self.session, self._loss = session, loss
        once, often = dict(own.named_parameters()), dict(own.named_parameters(remove_duplicate=False))
        self._tied = often.keys() - once.keys()
        self._trained = {name for name, each in own.named_parameters() if each.requires_grad}
        optimizer = optimizer or torch.optim.SGD(own.parameters(), lr=0.1)
        self.model, self._optimizer = session.prepare(own, optimizer, **more)
        self.past: dict[int, dict[str, torch.Tensor]] = {}
        self._remember()

    def _remember(self) -> None:
        self.past[self.session.clock] = copy.deepcopy(self.model.state_dict())

    def step(self) -> int:
        """Makes a step; returns the clock."""
        self._optimizer.zero_grad()
        self._loss(self.model).backward()
        self._optimizer.step()
        self._remember()
        return self.session.clock

    def steps(self, count: int) -> int:
        """Makes steps; returns the clock."""
        for _ in range(count):
            self.step()
        return self.session.clock

    def has(self, state: dict[str, torch.Tensor], version: int, dtype: torch.dtype | None = None) -> bool:
        """Whether these were the weights at a clock, to the bit: of tied ones the job has the first name alone.

        dtype: of those that are trained; None: their own
        """
        past = {name: each for name, each in self.past[version].items() if name not in self._tied}
        expected = {name: each.to(dtype) if dtype and name in self._trained else each for name, each in past.items()}
        return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Starts a thread that does some work."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread
