"""The gradient of a table's handle: it has no elements, and records when it is set to zeros.

`zero_grad(set_to_none=False)` calls `zero_` of each gradient. A gradient without elements looks the same afterwards, so
its class records the call. All operations work as for any tensor, and return plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_ZERO = (torch.Tensor.zero_, torch.zero_, torch._foreach_zero_)


class HandleGradient(torch.Tensor):
    """A gradient that records when it is set to zeros. is_zeroed: whether it was"""

    is_zeroed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Records calls that set gradients to zeros; see torch.overrides."""
        if func in _ZERO:
            for gradient in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if isinstance(gradient, HandleGradient):
                    gradient.is_zeroed = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Zeroing:
    """Detects whether the gradient of one table's handle was cleared since it was made: set to None, or to zeros."""

    def __init__(self) -> None:
        self._noted: HandleGradient | None = None  # the present gradient, or the last one

    def begin(self, handle: nn.Parameter) -> None:
        """Gives a handle a gradient that counts."""
        if not isinstance(handle.grad, HandleGradient):
            handle.grad = _noting(torch.zeros_like(handle))
        self._noted = handle.grad
        self._noted.is_zeroed = False

    def follow(self, handle: nn.Parameter) -> None:
        """Makes a handle's gradient record zeros, even if a plain tensor has replaced it, as in DDP."""
        gradient, before = handle.grad, self._noted
        if gradient is None or gradient.requires_grad or isinstance(gradient, HandleGradient):
            return
        handle.grad = self._noted = _noting(gradient)
        self._noted.is_zeroed = before is not None and before.is_zeroed

    def keeps(self, handle: nn.Parameter) -> bool:
        """Whether a handle has a gradient that was not set to zeros."""
        gradient = handle.grad
        noted = gradient if isinstance(gradient, HandleGradient) else self._noted
        return gradient is not None and (noted is None or not noted.is_zeroed)


def _noting(gradient: torch.Tensor) -> HandleGradient:
    """Returns a gradient that records when it is set to zeros. It is no view, so `detach_` works on it."""
    return torch.Tensor._make_subclass(HandleGradient, gradient)
