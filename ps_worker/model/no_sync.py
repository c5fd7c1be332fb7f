"""Lends a session's `no_sync` to the user's model, for scripts written for DistributedDataParallel.

A model is copied (AveragedModel), pickled and loaded in processes that have no session and maybe not this package. A
copy therefore gets a `no_sync` of Python's own, which does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class LentNoSync:
    """A session's `no_sync` as an attribute of the user's model. A copy of the model gets one that does nothing."""

    def __init__(self, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._no_sync = no_sync

    def __call__(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only add to the gradients."""
        return self._no_sync()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the `no_sync` of a copy of the model."""
        return nullcontext

    def __reduce__(self) -> Any:
        """Returns how to make the `no_sync` of a loaded model."""
        return functools.partial, (nullcontext,)


def lend(model: nn.Module, no_sync: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Gives a model a `no_sync`, unless it has one of its own. Returns a function that takes it back."""
    if hasattr(model, "no_sync") and not _is_a_copys(model.no_sync):
        return lambda: None
    lent: Any = LentNoSync(no_sync)
    model.no_sync = lent

    def take_back() -> None:
        if getattr(model, "no_sync", None) is lent:
            del model.no_sync

    return take_back


def _is_a_copys(attribute: object) -> bool:
    """Whether this is the `no_sync` that a copy of a prepared model has."""
    return attribute is nullcontext or (isinstance(attribute, functools.partial) and attribute.func is nullcontext)
