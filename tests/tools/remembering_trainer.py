"""A worker that trains any model for those who follow its job, and remembers its weights by clock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn

import ps_torch as ps

M = TypeVar("M", bound=nn.Module)


class RememberingTrainer(Generic[M]):
    """Trains a model in a session.

    loss: of the model that is given to it
    """

    def __init__(self, session: ps.Session, own: M, loss: Callable[[M], torch.Tensor], lr: float = 0.1) -> None:
        self.session, self._loss = session, loss
        self.model, self._optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=lr))
        self.past = {session.clock: copy.deepcopy(self.model.state_dict())}

    def step(self) -> int:
        """Makes a step; returns the clock."""
        self._optimizer.zero_grad()
        self._loss(self.model).backward()
        self._optimizer.step()
        self.past[self.session.clock] = copy.deepcopy(self.model.state_dict())
        return self.session.clock

    def has(self, state: dict[str, torch.Tensor], version: int) -> bool:
        """Whether these were the weights at a clock, to the bit."""
        expected = self.past[version]
        return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
