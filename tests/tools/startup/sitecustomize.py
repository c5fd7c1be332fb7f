"""Has a command that a test starts run torch without its compiler, whose import takes as long as torch's own each time.

Python imports this module at its start, because its directory is on the path. torch imports its compiler with the first
optimizer of a process and with the first step of one, and ps_worker with the first table, to have a compiled training
loop leave such calls alone; these processes have none.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _as_it_is(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    """In place of what marks a function as one that is not compiled."""
    return _as_it_is if function is None else function


def _without_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """In place of what has an optimizer's step record no gradients, and a graph end before it."""
    import torch

    @functools.wraps(step)
    def stepped(self: Any, *arguments: Any, **more: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *arguments, **more)

    return stepped


_REPLACED: dict[str, tuple[str, Callable[..., Any]]] = {
    "torch._compile": ("_disable_dynamo", _as_it_is),
    "torch.compiler": ("disable", _as_it_is),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", _without_gradients),
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _REPLACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            setattr(module, *_REPLACED[name])

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
