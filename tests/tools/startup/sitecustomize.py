"""Has a command that a test starts run torch without its compiler and its shapes, whose import is most of its start.

Python imports this module at its start, because its directory is on the path. torch imports its compiler with the first
optimizer of a process and with the first step of one, and ps_worker with the first table, to have a compiled training
loop leave such calls alone; these processes have none.

A third of the import of torch itself is code that finds the shape of an operation's result without computing it.
Only the modules of `_COMPUTES_SHAPES` use it, and it is imported with them.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SHAPES = "torch._meta_registrations"
_COMPUTES_SHAPES = {
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torch._export.serde",
    "transformers",
    "accelerate",
}


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
    def __init__(self) -> None:
        self._computes_shapes = False

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name in _COMPUTES_SHAPES:
            self._bring_shapes()
        if name == _SHAPES and not self._computes_shapes:
            return importlib.machinery.ModuleSpec(name, _Nothing())
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

    def _bring_shapes(self) -> None:
        """Imports what was left out, or has torch import it if it has not done so yet."""
        self._computes_shapes = True
        if isinstance(getattr(sys.modules.get(_SHAPES), "__loader__", None), _Nothing):
            del sys.modules[_SHAPES]
            importlib.import_module(_SHAPES)


class _Nothing(importlib.abc.Loader):
    """Loads a module without contents."""

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
