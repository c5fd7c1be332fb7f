"""Workers that train one table of rows: on our servers, replicated by DDP, and on torch's RPC.

All systems live in the same worker processes and take turns of a few steps. A step looks up a batch of ids, and trains
their rows: forward, backward and optimizer, with nothing else in the model. At the end rows are compared with what they
must be: with SGD a row is minus its number of occurrences, times the learning rate and the gradient.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ps_worker
from bench.results import THREADS
from bench.row_rpc import RpcTable
from bench.talk import own_output
from ps_protocol.row_ids import mix

ZIPF = 1.05
LR, GRADIENT = 0.01, 1e-3
TURN, WARMUP = 5, 5  # steps
FILL = 100_000  # ids in a step that fills a table
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Order:
    """What the workers of a run measure.

    rows, dim: of the table
    ids:       of a worker's step, with repeats
    steps:     that are counted, of each system
    systems:   ours: (mode, optimizer, transport, wire) each
    server:    of our job; `rpc` is where torch's RPC meets, or None
    """

    rows: int
    dim: int
    ids: int
    steps: int
    systems: Sequence[Sequence[str]]
    server: str
    rpc: str | None = None
    shards: int = 0


def zipf(rows: int, ids: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """Yields so many batches: [ids] int64, row numbers whose popularity follows Zipf's law."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** ZIPF)
    order = np.random.default_rng(7).permutation(rows)  # popular rows lie anywhere, the same for all
    for _ in range(count):
        drawn = shares.searchsorted(random.random(ids) * shares[-1]).clip(0, rows - 1)
        yield order[drawn]


def main() -> None:
    """Runs every system's turns; answers with the seconds of a step of the slowest worker, by system and turn."""
    say = own_output()
    order = Order(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo")
    batches = list(zipf(order.rows, order.ids, order.steps + WARMUP, dist.get_rank()))
    systems = _systems(order)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for first in range(0, len(batches), TURN):
        for name, system in systems.items():
            prepared = [system.ids(batch) for batch in batches[first : first + TURN]]
            dist.barrier()
            started = time.perf_counter()
            for ids in prepared:
                system.step(ids)
            longest = torch.tensor((time.perf_counter() - started) / len(prepared), dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if first >= WARMUP:
                times[name].append(longest.item())
    trained = torch.from_numpy(np.bincount(np.concatenate(batches), minlength=order.rows))
    dist.all_reduce(trained)
    for name, system in systems.items():
        if system.tolerance:
            _check(name, system, trained, batches[0])
    say(times)
    dist.barrier()
    os._exit(0)  # sessions end with the servers; nothing here needs an orderly end


# -- the systems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One way to train the table.

    ids:       a batch of row numbers, as the system has them
    step:      looks a batch up and trains it; look_up: returns the rows of a batch
    tolerance: of a row's elements at the end; 0: not checked
    mean:      whether an update is the mean over workers
    """

    ids: Callable[[np.ndarray], torch.Tensor]
    step: Callable[[torch.Tensor], None]
    look_up: Callable[[torch.Tensor], torch.Tensor]
    tolerance: float
    mean: bool = False


def _systems(order: Order) -> dict[str, System]:
    found = {}
    if order.rpc is not None:
        found["DDP"] = _ddp(order)
        found["torch RPC"] = _rpc(order, order.rpc)
    for mode, optimizer, transport, wire in order.systems:
        found[f"ours:{mode}:{optimizer}:{transport}:{wire}"] = _ours(order, mode, optimizer, transport, wire)
    return found


def _ours(order: Order, mode: str, optimizer: str, transport: str, wire: str) -> System:
    rank, size = dist.get_rank(), dist.get_world_size()
    session = ps_worker.connect(
        order.server, mode, "-".join(("rows", mode, optimizer, transport, wire)), rank, size, transport=transport
    )
    own = ps_worker.RowWiseAdagrad(lr=LR) if optimizer == "RowWiseAdagrad" else None
    table = ps_worker.Embedding(order.dim, optimizer=own, initial="constant", scale=0.0)
    plain = torch.optim.SGD(table.parameters(), lr=LR)
    table, stepped = session.prepare(table, plain, gradient_wire=wire, weight_wire=wire)
    step = _trained(table, stepped)
    numbers = np.arange(order.rows)
    for first in range(0, order.rows, FILL):  # all rows are there, as in the peers' tables; a gradient of 0 trains them
        step(_hashed(numbers[first : first + FILL]), 0.0)
    dist.barrier()
    tolerance = 0.0 if own else TOLERANCE[wire]
    return System(_hashed, step, table, tolerance, mode == "sync")


def _ddp(order: Order) -> System:
    table = torch.nn.Embedding(order.rows, order.dim, sparse=True)
    torch.nn.init.zeros_(table.weight)
    replica = DistributedDataParallel(table)
    return System(
        torch.from_numpy,
        _trained(replica, torch.optim.SGD(replica.parameters(), lr=LR)),
        table,
        TOLERANCE["float32"],
        mean=True,
    )


def _rpc(order: Order, address: str) -> System:
    table = RpcTable(address, dist.get_rank(), order.shards, dist.get_world_size())

    def step(ids: torch.Tensor) -> None:
        rows = table.look_up(ids).requires_grad_()
        rows.backward(torch.full_like(rows, GRADIENT))
        assert rows.grad is not None
        table.train(ids, rows.grad)

    # It adds each occurrence to its row by itself, so that rows of many occurrences are rounded often.
    return System(torch.from_numpy, step, table.look_up, 100 * TOLERANCE["float32"])


def _hashed(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mix(numbers).astype(np.int64))


def _trained(module: torch.nn.Module, optimizer: Any) -> Callable[..., None]:
    """Returns a step of a module alone."""

    def step(ids: torch.Tensor, gradient: float = GRADIENT) -> None:
        optimizer.zero_grad()
        rows = module(ids)
        rows.backward(torch.full_like(rows, gradient))
        optimizer.step()

    return step


def _check(name: str, system: System, trained: torch.Tensor, batch: np.ndarray) -> None:
    """Raises SystemExit unless the rows of a batch are right. trained: [rows], how often each has occurred, in all"""
    with torch.no_grad():
        rows = system.look_up(system.ids(batch))
    parts = dist.get_world_size() if system.mean else 1
    expected = -LR * GRADIENT / parts * trained[torch.from_numpy(batch)].double().unsqueeze(1)
    error = float(((rows.double() - expected).abs() / (1 + expected.abs())).max())
    if not error < system.tolerance:
        raise SystemExit(f"wrong result: {name}: a row is {error:g} away from what it must be")


if __name__ == "__main__":
    main()
