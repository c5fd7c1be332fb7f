"""A worker that trains a small model which others follow, and remembers its weights; and relays in this process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

import ps_torch as ps
from ps_server.config import ServerConfig
from ps_server.relay_config import RelayConfig
from ps_server.relay_server import RelayServer


class FollowedModel(nn.Module):
    """A trained and a frozen layer, and a buffer."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 20)
        self.frozen = nn.Linear(20, 4).requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class FollowedTrainer:
    """Trains the model in a session. `past` has its weights by clock."""

    def __init__(self, session: ps.Session, bucket_bytes: int = 1024, width: int = 40) -> None:
        self.session, own = session, FollowedModel(width)
        optimizer = torch.optim.Adam([each for each in own.parameters() if each.requires_grad], lr=0.01)
        self.model, self._optimizer = session.prepare(own, optimizer, bucket_bytes=bucket_bytes)
        self.past: dict[int, dict[str, torch.Tensor]] = {}
        self._remember()

    def _remember(self) -> None:
        self.past[self.session.clock] = copy.deepcopy(self.model.state_dict())

    def steps(self, count: int = 1) -> int:
        """Makes steps; returns the clock."""
        for _ in range(count):
            self._optimizer.zero_grad()
            x = torch.randn(4, 20)
            (self.model(x) - x).square().sum().backward()
            self._optimizer.step()
            self._remember()
        return self.session.clock

    def has(self, state: dict[str, torch.Tensor], version: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether these were the weights at a clock, to the bit. dtype: of those that are trained"""
        past = self.past[version]
        expected = {name: each.to(dtype) if name.startswith(("first", "last")) else each for name, each in past.items()}
        return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


@contextlib.contextmanager
def relay(upstream: str, server: ServerConfig | None = None, **more: object) -> Iterator[RelayServer]:
    """A relay in this process. more: fields of RelayConfig"""
    config = RelayConfig(server or ServerConfig(), upstream)
    running = RelayServer(replace(config, **more))  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.stop()
