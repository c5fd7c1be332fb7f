"""A table of which memory holds a part: rows that are looked up and trained in memory, and in a file.

The table gets all its rows as new ones, a batch with each update. Then batches of one kind are looked up, and trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.results import median_ms
from bench.row_workers import hashed
from ps_protocol.row_ids import Ids
from ps_protocol.tables import Initializer, TableSpec
from ps_server.storage.row_files import RowFiles
from ps_tables.contributions import RowGradients
from ps_tables.table import Beyond, Table

BATCH = 10_000  # ids
TURNS = 10  # of each kind


def cold_rows(rows: int, dim: int, in_memory: int, directory: Path) -> dict[str, dict[str, Any]]:
    """Returns by what was done how long a batch took, with row-wise Adagrad."""
    file = RowFiles(directory).open(dim + 1, rows)
    spec = TableSpec("rows", dim, Initializer("uniform", 0.01))
    table = Table(spec, "RowWiseAdagrad", {"lr": 0.01}, rows, 0, Beyond(file, in_memory))
    gradients, counts, out = torch.full((BATCH, dim), 1e-3), np.ones(BATCH, np.int64), torch.empty(BATCH, dim)
    random = np.random.default_rng(7)

    def train(ids: Ids) -> None:
        table.apply(RowGradients(ids, counts, gradients), 1, table.version + 1)

    def batch(first: int, end: int) -> Ids:
        """Distinct ids between two of those that came in turn."""
        return hashed(first + random.choice(end - first, BATCH, replace=False))

    def old() -> Ids:
        return batch(0, rows // 2)

    def new() -> Ids:
        return batch(rows - in_memory // 2, rows)

    def mixed() -> Ids:
        return np.concatenate([old()[: BATCH // 10], new()[BATCH // 10 :]])

    found = {"new rows": _timed(train, [hashed(np.arange(first, first + BATCH)) for first in range(0, rows, BATCH)])}
    found["lookup in memory"] = _timed(lambda ids: table.pull(ids, out), [new() for _ in range(TURNS)])
    found["training in memory"] = _timed(train, [new() for _ in range(TURNS)])
    same = old()
    found["lookup in the page cache"] = _timed(lambda ids: table.pull(ids, out), [same] * TURNS)
    found["lookup on disk"] = _timed(lambda ids: table.pull(ids, out), [old() for _ in range(TURNS)], file.let_go)
    found["training, a tenth on disk"] = _timed(train, [mixed() for _ in range(TURNS)], file.let_go)
    found["training on disk"] = _timed(train, [old() for _ in range(TURNS)], file.let_go)
    for each in found.values():
        each |= {"file_rows": table.in_file.rows, "file_bytes": table.in_file.nbytes, "memory_bytes": table.nbytes}
    return found


def _timed(do: Callable[[Ids], object], batches: list[Ids], before: Callable[[], None] | None = None) -> dict[str, Any]:
    """Returns how long batches took; the first one counts only where there is no other. before: what is done first"""
    seconds = []
    for ids in batches:
        if before is not None:
            before()
        began = time.perf_counter()
        do(ids)
        seconds.append(time.perf_counter() - began)
    seconds = seconds[1:] or seconds
    ms = median_ms(seconds)
    return {"ms": ms, "longest_ms": round(max(seconds) * 1e3, 1), "rows_per_s": round(BATCH / ms * 1e3)}
