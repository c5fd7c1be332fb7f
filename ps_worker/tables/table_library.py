"""Loads the compiled library for tables in a worker's process, if a model has tables."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ps_tables.choosing import Choice, choose
from ps_worker.tables.modules import Embedding


def loops_for(models: Iterable[nn.Module], how: str) -> Choice | None:
    """Makes this process use the library, if a model has tables and there is one: see ps_tables.choosing. Returns None
    without tables.
    """
    if not any(isinstance(module, Embedding) for model in models for module in model.modules()):
        return None
    return choose(how)
