"""Keeps torch's compiler out of a server: it compiles nothing, and the import takes seconds and memory."""

from __future__ import annotations

import torch


def leave_out_compiler() -> None:
    """Has torch make optimizers without importing its compiler.

    torch imports it with the first optimizer of a process, to have a compiled training loop leave such calls alone. A
    process with such loops must not call this.
    """
    plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if plain is not None:
        # Where torch keeps what it calls in the method's place, once the compiler has made it: here the method itself.
        plain.__dict__["__dynamo_disable"] = plain
