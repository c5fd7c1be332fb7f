"""Workers that train one table of rows: on our servers, replicated by DDP, and on torch's RPC.

All systems live in the same worker processes and take turns of a few steps. A step looks up a batch of ids, and trains
their rows: forward, backward and optimizer, with nothing else in the model. At the end rows are compared with what they
must be: with SGD a row is minus its number of occurrences, times the learning rate and the gradient.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ps_worker
from bench.cluster import job_name
from bench.compiled_loops import compiled
from bench.computing import compute
from bench.machine import cpu_seconds, family
from bench.results import THREADS
from bench.row_rpc import RpcTable
from bench.talk import own_output
from ps_protocol.row_ids import Ids, mix
from ps_tables.native import in_use

ZIPF = 1.05
LR, GRADIENT = 0.01, 1e-3
DDP, ORDINARY = "DDP", ", ordinary loop"
TURN = 5  # steps
SAVING = "ours, with checkpoints"
FILL = 100_000  # ids in a step that fills a table
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Served:
    """One way in which our servers train the table.

    computed: ms of computing in a step, between lookup and backward
    ahead:    each step is told of the next one's ids
    native:   worker and shards use the library for tables
    ordinary: the loop is that of most scripts: backward begins at a loss, which is computed of the rows
    """

    mode: str
    optimizer: str
    transport: str = "auto"
    wire: str = "float32"
    computed: int = 0
    ahead: bool = False
    native: bool = False
    ordinary: bool = False

    @property
    def name(self) -> str:
        """All of it in a word."""
        how = str(self.computed), "ahead" * self.ahead, "native" * self.native, "ordinary" * self.ordinary
        return ":".join(("ours", self.mode, self.optimizer, self.transport, self.wire, *how))

    @classmethod
    def of(cls, name: str) -> Served:
        """Returns what has a name."""
        _, mode, optimizer, transport, wire, computed, *flags = name.split(":")
        return cls(mode, optimizer, transport, wire, int(computed), *map(bool, flags))

    @property
    def title(self) -> str:
        """What people call it."""
        computed = f", {self.computed} ms of computing" if self.computed else ""
        known = ", next ids known" if self.ahead else ", next ids not known" if self.computed else ""
        native, ordinary = ", with the library" * self.native, ORDINARY * self.ordinary
        return f"ours {self.mode} {self.optimizer}{computed}{known}{native}{ordinary}"


@dataclass(frozen=True)
class Order:
    """What the workers of a run measure.

    rows, dim: of the table
    ids:       of a worker's step, with repeats
    steps:     that are counted, of each system
    systems:   ours: fields of Served
    server:    of our job; `rpc` is where torch's RPC meets, or None; `ddp`: whether DDP is beside us
    shards:    that serve the job
    saving:    servers that make checkpoints meanwhile, for the first of `systems` once more; empty: none
    native:    servers that use the library, for those of `systems` that do
    pids:      processes of servers on this machine, by the servers' address
    turn:      steps that a system makes before it is the next one's turn
    compute:   how a step imitates computing, "busy" or "wait": see computing.py
    """

    rows: int
    dim: int
    ids: int
    steps: int
    systems: Sequence[dict[str, Any]]
    server: str
    rpc: str | None = None
    ddp: bool = False
    shards: int = 0
    saving: str = ""
    native: str = ""
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    turn: int = TURN
    compute: str = "busy"


def hashed(numbers: np.ndarray) -> Ids:
    """Returns ids as they come in practice, which are hashes, from numbers."""
    return mix(numbers).astype(np.int64)


def _as_ids(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(hashed(numbers))


def zipf(rows: int, ids: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """Yields so many batches: [ids] int64, row numbers whose popularity follows Zipf's law."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** ZIPF)
    order = np.random.default_rng(7).permutation(rows)  # popular rows lie anywhere, the same for all
    for _ in range(count):
        drawn = shares.searchsorted(random.random(ids) * shares[-1]).clip(0, rows - 1)
        yield order[drawn]


def main() -> None:
    """Runs every system's turns; answers with what its steps took (see `Measured`), and checks its rows."""
    say = own_output()
    order = Order(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(THREADS)
    dist.init_process_group("gloo")
    batches = list(zipf(order.rows, order.ids, order.steps + order.turn, dist.get_rank()))
    systems = _systems(order)
    measured = Measured(systems)
    loops = compiled() if order.native else None
    for first in range(0, len(batches), order.turn):
        for name, system in systems.items():
            in_use.use(loops if system.native else None)
            measured.turn(name, [system.ids(batch) for batch in batches[first : first + order.turn]], counts=first > 0)
    occurred = torch.from_numpy(np.bincount(np.concatenate(batches), minlength=order.rows))
    dist.all_reduce(occurred)
    for name, system in systems.items():
        if system.tolerance:
            _check(name, system, occurred, batches[0])
    say((measured.seconds, measured.cpu, measured.faults))
    dist.barrier()
    os._exit(0)  # sessions end with the servers; nothing here needs an orderly end


# -- the systems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One way to train the table.

    ids:       a batch of row numbers, as the system has them
    step:      looks a batch up and trains it, and is told of the next one; look_up: returns the rows of a batch
    tolerance: of a row's elements at the end; 0: not checked
    mean:      whether an update is the mean over workers
    native:    with the library
    servers:   its processes besides the workers; None: they are not known
    """

    ids: Callable[[np.ndarray], torch.Tensor]
    step: Callable[[torch.Tensor, torch.Tensor | None], None]
    look_up: Callable[[torch.Tensor], torch.Tensor]
    tolerance: float
    mean: bool = False
    native: bool = False
    servers: Sequence[int] | None = ()


class Measured:
    """What turns have taken, by system.

    seconds: of a step of the slowest worker, in each turn
    cpu:     of a core that a worker's step took, in each turn: of all processes of workers and servers, heartbeats'
             among them, divided by the workers. Empty where the servers' processes are not known
    faults:  pages of memory that the kernel gave to a worker in a step, in each turn, without reading them from a disk
    """

    def __init__(self, systems: Mapping[str, System]) -> None:
        self._systems = systems
        self._own = family(os.getpid())
        self.seconds: dict[str, list[float]] = {name: [] for name in systems}
        self.cpu: dict[str, list[float]] = {name: [] for name in systems}
        self.faults: dict[str, list[float]] = {name: [] for name in systems}

    def turn(self, name: str, batches: Sequence[torch.Tensor], counts: bool) -> None:
        """Trains a system with some batches. counts: false in a first turn, which is to warm up"""
        system = self._systems[name]
        servers = system.servers or () if dist.get_rank() == 0 else ()
        pids = [*self._own, *(each for pid in servers for each in family(pid))]
        dist.barrier()
        before, started = _used(pids), time.perf_counter()
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            system.step(ids, following)
        longest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # after it no worker trains any more
        used = _used(pids) - before
        dist.all_reduce(used)
        if not counts:
            return
        cpu, faults = (used / dist.get_world_size() / len(batches)).tolist()
        self.seconds[name].append(longest.item() / len(batches))
        self.faults[name].append(faults)
        if system.servers is not None:
            self.cpu[name].append(cpu)


def _used(pids: Sequence[int]) -> torch.Tensor:
    """Returns what processes have used of the processors' time, and this one of new pages of memory."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return torch.tensor([cpu_seconds(pids), faults], dtype=torch.float64)


def _systems(order: Order) -> dict[str, System]:
    found = {}
    if order.ddp:
        found[DDP] = _ddp(order)
        if any(Served(**fields).ordinary for fields in order.systems):
            found[DDP + ORDINARY] = _ddp(order, ordinary=True)
    if order.rpc is not None:
        found["torch RPC"] = _rpc(order, order.rpc)
    for fields in order.systems:
        served = Served(**fields)
        found[served.name] = _ours(order, served)
    if order.saving:
        found[SAVING] = _ours(replace(order, server=order.saving), Served(**order.systems[0]))
    return found


def _ours(order: Order, served: Served) -> System:
    rank, size = dist.get_rank(), dist.get_world_size()
    server = order.native if served.native else order.server
    session = ps_worker.connect(server, served.mode, job_name(served.name), rank, size, transport=served.transport)
    own = ps_worker.RowWiseAdagrad(lr=LR) if served.optimizer == "RowWiseAdagrad" else None
    table = ps_worker.Embedding(order.dim, optimizer=own, initial="constant", scale=0.0)
    plain = torch.optim.SGD(table.parameters(), lr=LR)
    table, stepped = session.prepare(table, plain, gradient_wire=served.wire, weight_wire=served.wire)
    meanwhile = partial(compute, order.compute, served.computed / 1e3)
    train = trained(table, stepped, meanwhile, ordinary=served.ordinary)
    numbers = np.arange(order.rows)
    fill = trained(table, stepped, gradient=0.0)
    for first in range(0, order.rows, FILL):  # all rows are there, as in the peers' tables; a gradient of 0 trains them
        fill(_as_ids(numbers[first : first + FILL]))
    dist.barrier()

    def step(ids: torch.Tensor, following: torch.Tensor | None) -> None:
        table.announce(following if served.ahead else None)
        train(ids)

    tolerance = 0.0 if own else TOLERANCE[served.wire]
    return System(_as_ids, step, table, tolerance, served.mode == "sync", served.native, order.pids.get(server))


def _ddp(order: Order, ordinary: bool = False) -> System:
    table = torch.nn.Embedding(order.rows, order.dim, sparse=True)
    torch.nn.init.zeros_(table.weight)
    replica = DistributedDataParallel(table)
    train = trained(replica, torch.optim.SGD(replica.parameters(), lr=LR), ordinary=ordinary)
    return System(
        torch.from_numpy,
        lambda ids, following: train(ids),
        table,
        TOLERANCE["float32"],
        mean=True,
    )


def _rpc(order: Order, address: str) -> System:
    table = RpcTable(address, dist.get_rank(), order.shards, dist.get_world_size())

    def step(ids: torch.Tensor, following: torch.Tensor | None) -> None:
        rows = table.look_up(ids).requires_grad_()
        rows.backward(torch.full_like(rows, GRADIENT))
        assert rows.grad is not None
        table.train(ids, rows.grad)

    # It adds each occurrence to its row by itself, so that rows of many occurrences are rounded often.
    return System(torch.from_numpy, step, table.look_up, 100 * TOLERANCE["float32"], servers=None)


def trained(
    module: torch.nn.Module,
    optimizer: Any,
    meanwhile: Callable[[], None] = lambda: None,
    gradient: float = GRADIENT,
    ordinary: bool = False,
) -> Callable[[torch.Tensor], None]:
    """Returns a step of a module alone.

    meanwhile: what else it does; gradient: of each element, which a loss has where the step is an ordinary one
    """

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = module(ids)
        meanwhile()
        if ordinary:
            (rows * gradient).sum().backward()
        else:
            rows.backward(torch.full_like(rows, gradient))  # made anew: DDP divides sparse gradients where they lie
        optimizer.step()

    return step


def _check(name: str, system: System, occurred: torch.Tensor, batch: np.ndarray) -> None:
    """Raises SystemExit unless the rows of a batch are right. occurred: [rows], how often each has, in all"""
    with torch.no_grad():
        rows = system.look_up(system.ids(batch))
    parts = dist.get_world_size() if system.mean else 1
    expected = -LR * GRADIENT / parts * occurred[torch.from_numpy(batch)].double().unsqueeze(1)
    error = float(((rows.double() - expected).abs() / (1 + expected.abs())).max())
    if not error < system.tolerance:
        raise SystemExit(f"wrong result: {name}: a row is {error:g} away from what it must be")


if __name__ == "__main__":
    main()
