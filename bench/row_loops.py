"""The loops of tables one by one, in numpy and torch beside the library: CPU time of this thread alone.

A batch is that of a worker's step: ids of a Zipf distribution, of which some occur several times. Rows lie in a table
that no cache holds; each turn has another batch, and numpy and the library have not the same one in a turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.row_workers import hashed, zipf
from ps_protocol.row_ids import Ids
from ps_tables.contributions import RowGradients
from ps_tables.distinct import distinct
from ps_tables.index import Index
from ps_tables.native import in_use
from ps_tables.native.loops import Loops
from ps_tables.optimizing_rows import row_optimizer
from ps_tables.row_arrays import RowArray
from ps_tables.row_sums import added_up

TURNS = 16
FILLED = 10_000  # ids at a time


def row_loops(rows: int, dim: int, ids: int, loops: Loops) -> dict[str, dict[str, Any]]:
    """Returns by the loop how long a batch took in numpy or torch, and in the library."""
    batches = [hashed(batch) for batch in zipf(rows, ids, TURNS, 7)]
    found: dict[str, dict[str, Any]] = {}
    for name, do in _loops(rows, dim, batches).items():
        seconds: dict[Loops | None, list[float]] = {None: [], loops: []}
        for turn in range(TURNS):
            for number, use in enumerate(seconds):
                in_use.use(use)
                began = time.thread_time()
                do((turn + number * TURNS // 2) % TURNS)  # no batch that the other one has just had
                seconds[use].append(time.thread_time() - began)
        in_use.use(None)
        plain, native = (1e3 * statistics.median(each) for each in seconds.values())
        found[name] = {"ms": round(native, 4), "ratios": {"numpy": native / plain}, "numpy_ms": round(plain, 4)}
    return found


def _loops(rows: int, dim: int, batches: list[Ids]) -> dict[str, Callable[[int], object]]:
    """Returns by name what is done with the batch of a turn."""
    starts = range(rows, rows + 2 * TURNS * FILLED, FILLED)
    ids_of_rows = hashed(np.arange(starts.stop))
    index, more = Index(ids_of_rows), iter(starts)
    for first in range(0, rows, FILLED):
        stop = min(rows, first + FILLED)
        index.insert(ids_of_rows[first:stop], np.arange(first, stop))
    parts = [distinct(batch, 1, 2) for batch in batches]
    numbers = [index.find(each.ids) for each in parts]
    gradients = torch.full((max(map(len, batches)), dim), 1e-3)
    out = [torch.full((len(each), dim), 0.5) for each in numbers]
    weights = RowArray(rows, dim)
    weights.elements[:] = 0.5
    sgd, adagrad = (row_optimizer(name, {"lr": 0.01}, rows, dim) for name in ("SGD", "RowWiseAdagrad"))
    both = [RowGradients(each.ids, each.counts, gradients[: len(each.ids)]) for each in parts]

    def insert(_: int) -> None:
        first = next(more)
        index.insert(ids_of_rows[first : first + FILLED], np.arange(first, first + FILLED))

    def step(optimizer: Any) -> Callable[[int], None]:
        return lambda turn: optimizer.step(weights, numbers[turn], gradients[: len(numbers[turn])], 2, {}, turn + 1)

    def add_up(turn: int) -> None:
        places = parts[turn].positions
        added_up(gradients[: len(places)], torch.from_numpy(places), len(numbers[turn]))

    return {
        "distinct ids": lambda turn: distinct(batches[turn], 1, 2),
        "find ids": lambda turn: index.find(parts[turn].ids),
        "insert ids": insert,
        "read rows": lambda turn: weights.read(numbers[turn], out[turn]),
        "write rows": lambda turn: weights.write(numbers[turn], out[turn]),
        "sum of gradients": add_up,
        "union of two workers": lambda turn: RowGradients.union([both[turn], both[turn - 1]]),
        "step of SGD": step(sgd),
        "step of RowWiseAdagrad": step(adagrad),
    }
