"""A server's part of a model, for the parameter servers that torch's RPC and Ray are made into here.

Each parameter is on one server. A server adds up gradients as they come; with those of all workers it makes a step of
its optimizer with their mean, and all get the weights. That is what our servers do in sync.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bench.peer_work import Work

Answer = Callable[[], Sequence[Tensor]]
Send = Callable[[int, list[Tensor]], Answer]


def owned(model: nn.Module, servers: int) -> list[list[nn.Parameter]]:
    """Returns the parameters of each server: the largest first, each to the server that has the fewest bytes."""
    parts: list[list[nn.Parameter]] = [[] for _ in range(servers)]
    sizes = [0] * servers
    for parameter in sorted(model.parameters(), key=lambda each: -each.numel()):
        least = sizes.index(min(sizes))
        parts[least].append(parameter)
        sizes[least] += parameter.numel()
    return parts


class Part:
    """The parameters of one server, and their optimizer."""

    def __init__(self, work: Work, number: int, servers: int) -> None:
        self.parameters = owned(work.model(), servers)[number]
        self._optimizer = work.optimizer(self.parameters)
        self._workers, self._arrived = work.workers, 0
        self._lock = threading.Lock()

    def add(self, gradients: Sequence[Tensor]) -> bool:
        """Adds a worker's gradients; returns whether they were the last ones, and the weights are new."""
        with self._lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if self._arrived:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad.copy_(gradient)
            self._arrived = (self._arrived + 1) % self._workers
            if self._arrived:
                return False
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.div_(self._workers)
            self._optimizer.step()
            return True


class Served:
    """A worker's optimizer where servers step: `step` sends gradients to each server, and takes weights from it.

    send: starts to send gradients to a server by its number; returns what waits for the weights
    """

    def __init__(self, model: nn.Module, servers: int, send: Send) -> None:
        self._owned, self._send = owned(model, servers), send

    def step(self) -> None:
        """To all servers at the same time."""
        answers = [self._send(number, [_gradient(each) for each in part]) for number, part in enumerate(self._owned)]
        with torch.no_grad():
            for part, answer in zip(self._owned, answers, strict=True):
                for parameter, weights in zip(part, answer(), strict=True):
                    parameter.copy_(weights)

    def zero_grad(self) -> None:
        """As an optimizer's."""
        for part in self._owned:
            for parameter in part:
                parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.cpu()
