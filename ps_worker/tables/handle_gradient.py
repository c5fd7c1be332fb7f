"""The gradient of a table's handle: it has no elements, and notes when it is set to zeros.

`zero_grad(set_to_none=False)` calls `zero_` of each gradient. Of a gradient without elements nothing tells that later,
but for this class. It counts every operation of torch as torch does, and returns plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_ZERO = (torch.Tensor.zero_, torch.zero_, torch._foreach_zero_)


class HandleGradient(torch.Tensor):
    """A gradient that notes when it is set to zeros. is_zeroed: it was"""

    is_zeroed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Notes what sets gradients to zeros; see torch.overrides."""
        if func in _ZERO:
            each = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            for gradient in each:
                if isinstance(gradient, HandleGradient):
                    gradient.is_zeroed = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Zeroing:
    """Whether the gradient of one table's handle was set to zeros since it was made."""

    def __init__(self) -> None:
        self._noted: HandleGradient | None = None  # the gradient of now, or the one before

    def begin(self, handle: nn.Parameter) -> None:
        """Gives a handle a new gradient."""
        handle.grad = self._noted = torch.zeros_like(handle).as_subclass(HandleGradient)

    def follow(self, handle: nn.Parameter) -> None:
        """Has a handle's gradient note it from here on, where another was put in its place, as DDP does."""
        gradient, before = handle.grad, self._noted
        if gradient is None or gradient.requires_grad or isinstance(gradient, HandleGradient):
            return
        handle.grad = self._noted = gradient.as_subclass(HandleGradient)
        self._noted.is_zeroed = before is not None and before.is_zeroed

    def keeps(self, handle: nn.Parameter) -> bool:
        """Whether a handle has a gradient that was not set to zeros."""
        return handle.grad is not None and (self._noted is None or not self._noted.is_zeroed)
