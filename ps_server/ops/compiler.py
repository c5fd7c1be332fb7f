"""Keeps torch's compiler out of a server: it compiles nothing, and the import takes seconds and memory."""

from __future__ import annotations

import torch


def leave_out_compiler() -> None:
    """Makes torch construct optimizers without importing its compiler.

    torch imports the compiler with the first optimizer of a process, to exclude `add_param_group` from compiled
    training loops. A process with compiled loops must not call this.
    """
    plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if plain is not None:
        # torch caches the compiler's replacement of the method under this name. The method itself takes its place.
        plain.__dict__["__dynamo_disable"] = plain
