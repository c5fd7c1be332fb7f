"""A worker that trains a small model which others follow, and remembers its weights; and relays in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ps_torch as ps
from ps_server.config import ServerConfig
from ps_server.relay_config import RelayConfig
from ps_server.relay_server import RelayServer
from tests.tools.remembering_trainer import RememberingTrainer


def rebuilding_loss(model: nn.Module) -> torch.Tensor:
    """The loss of a model that is to give back the 20 numbers of each sample."""
    samples = torch.randn(4, 20)
    return (model(samples) - samples).square().sum()  # type: ignore[no-any-return]


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


class FollowedTrainer(RememberingTrainer[FollowedModel]):
    """Trains the model in a session with Adam."""

    def __init__(self, session: ps.Session, bucket_bytes: int = 1024, width: int = 40) -> None:
        own = FollowedModel(width)
        optimizer = torch.optim.Adam([each for each in own.parameters() if each.requires_grad], lr=0.01)
        super().__init__(session, own, rebuilding_loss, optimizer, bucket_bytes=bucket_bytes)


@contextlib.contextmanager
def relay(
    upstream: str, server: ServerConfig | None = None, maps: Path | None = None, **more: object
) -> Iterator[RelayServer]:
    """A relay in this process.

    maps: the directory in which it finds readers of this host; None: it finds none, so that all travels in messages
    more: fields of RelayConfig
    """
    config = RelayConfig(replace(server or ServerConfig(), shared_directory=maps or Path("/nowhere")), upstream)
    running = RelayServer(replace(config, **more))  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.stop()
