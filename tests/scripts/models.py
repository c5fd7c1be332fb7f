"""The model of the equivalence tests, which has one of everything that could go wrong; weights as numbers; refusals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ps_worker import PSError

WORDS, WIDTH, LENGTH = 12, 8, 6


class Everything(nn.Module):
    """Guesses the next word: an embedding that is tied to the head, a convolution, a frozen layer, BatchNorm."""

    def __init__(self, seed: int, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(WORDS, WIDTH)
            # BatchNorm takes a bias away again: its gradient would be pure rounding, which Adam blows up to full steps.
            self.conv = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=1, bias=not norm)
            self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        # words: [samples, LENGTH] -> [samples, WORDS, LENGTH]
        x = self.embed(words).transpose(1, 2)  # [samples, WIDTH, LENGTH]
        x = torch.tanh(self.norm(self.conv(x))).transpose(1, 2)  # [samples, LENGTH, WIDTH]
        return self.head(self.frozen(x) + x).transpose(1, 2)

    def groups(self) -> list[dict[str, object]]:
        """Two parameter groups, the second with a learning rate of its own."""
        convolution = list(self.conv.parameters())
        rest = [p for p in self.parameters() if p.requires_grad and all(p is not c for c in convolution)]
        return [{"params": rest}, {"params": convolution, "lr": 0.005}]


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """How well the model tells each word from the one before it, averaged over all."""
    return nn.functional.cross_entropy(model(words[:, :-1]), words[:, 1:])


def batch(rank: int, step: int, samples: int = 4) -> torch.Tensor:
    """One worker's words of one step: [samples, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(WORDS, (samples, LENGTH + 1), generator=generator)


def combined(workers: int, step: int) -> torch.Tensor:
    """All workers' words of one step, in rank order."""
    return torch.cat([batch(rank, step) for rank in range(workers)])


def weights(module: nn.Module) -> list[list[float]]:
    """Parameters and buffers, for a comparison in another process."""
    return [tensor.detach().double().flatten().tolist() for tensor in module.state_dict().values()]


def refusal(call: Callable[[], object]) -> str:
    """What a call says that is refused."""
    try:
        call()
    except PSError as error:
        return str(error)
    raise AssertionError("it was not refused")
