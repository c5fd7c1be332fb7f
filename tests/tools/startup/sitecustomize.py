"""Has a command that a test starts import torch without its compiler, which takes a second of the processor each time.

Python imports this module at its start, because its directory is on the path. torch imports its compiler with the first
optimizer of a process, to have a compiled training loop leave such calls alone; these processes have none.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_leave_out(module: ModuleType) -> None:
            execute(module)
            plain = getattr(module.Optimizer.add_param_group, "__wrapped__", None)
            if plain is not None:
                plain.__dict__["__dynamo_disable"] = plain  # where torch keeps what it calls in the method's place

        spec.loader.exec_module = execute_and_leave_out  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
