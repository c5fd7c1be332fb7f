"""Small models: weights and data that follow from a seed, one step of training, and comparisons of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

Net = TypeVar("Net", bound=nn.Module)


def filled(net: Net, seed: int = 0, std: float = 0.3) -> Net:
    """Draws every parameter anew, in the same way in each worker: workers are threads, and share torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return net


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    """One step towards an output of zero. The gradient stays until the next one."""
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def weights_of(*models: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether all are equal, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def close(
    found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], rtol: float = 1e-4, atol: float = 1e-6
) -> bool:
    """Whether all have the same shape, and are equal but for rounding."""
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in zip(found, expected, strict=True)
    )


def assert_apart(tensors: Iterable[torch.Tensor]) -> None:
    """Each has a storage that begins and ends with it, and that no other has."""
    tensors = list(tensors)
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
