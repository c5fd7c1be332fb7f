"""Compiled loops for tables in a worker's process: it uses them where a model has tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import nn

from ps_tables.choosing import Choice, choose
from ps_worker.tables.modules import Embedding


def loops_for(models: Iterable[nn.Module], how: str, folder: Path, compiler: Callable[[], Sequence[str]]) -> Choice:
    """Has this process use compiled loops, where a model has tables and they can be had: see ps_tables.choosing."""
    if not any(isinstance(module, Embedding) for model in models for module in model.modules()):
        return Choice(False)
    return choose(how, folder, compiler)
