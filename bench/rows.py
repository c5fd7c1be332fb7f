"""Tables of rows: a step on servers beside DDP and torch's RPC, one in a process beside torch's, a table that grows.

A step looks up 26,624 ids of a Zipf distribution over a million rows, and trains them: forward, backward and
optimizer, with nothing else in the model. Some systems know the next batch's ids, so that one call brings a step's
rows and asks for the next ones. Some have 10 ms of computing in a step, which keeps a core busy; with fewer cores than
workers and shards a wait replaces it (`compute`), as where a GPU computes. `ids` of the peers are row numbers; ours are
hashes of them. The growing table gets new ids alone: how long its longest update takes, and its peak memory over that
of its rows. Of another table memory holds a quarter, and the rest is in a file: see cold_rows.py. Systems with the
library are beside numpy's in the same run, and each of its loops by itself in CPU time, see row_loops.py. In most
systems backward begins with a gradient that is there, so that little but the table is measured; an ordinary loop has a
loss instead, for us and for DDP beside us. `CPU` is what a worker's step takes: of all processes of workers and shards,
heartbeats' among them, divided by the number of workers. `page faults` are a worker's: memory that a step gets anew.

On separate hosts (--addresses, see `python -m bench network --help`) only steps on servers are measured, over TCP, and
DDP's beside them: the first half of the hosts are workers, the second half shards."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ps_worker
from bench import options
from bench.cluster import HERE, Group, Host, halves, host_flags, servers
from bench.cold_rows import cold_rows
from bench.compiled_loops import compiled
from bench.computing import way_to_compute
from bench.machine import memory
from bench.pictures import Bar, bars
from bench.results import THREADS, Result, label, median_ms, result
from bench.row_loops import row_loops
from bench.row_workers import DDP, FILL, GRADIENT, LR, ORDINARY, SAVING, TURN, Order, Served, hashed, trained, zipf
from bench.rpc_processes import rpc_servers
from ps_protocol.tables import Initializer, TableSpec
from ps_tables.contributions import RowGradients
from ps_tables.native import in_use
from ps_tables.table import Table

SHORT = {"rows": 200_000, "steps": 10, "grow": 1_000_000, "beyond": 200_000, "checkpoints": 1}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
COMPUTED = 10  # ms of computing in a step, where the next batch's ids are known or not
SERVERS = (
    Served("async", "sgd"),
    Served("sync", "sgd"),
    Served("async", "RowWiseAdagrad"),
    Served("async", "sgd", ahead=True),
    Served("sync", "sgd", ahead=True),
    Served("async", "RowWiseAdagrad", ahead=True),
    Served("async", "sgd", "tcp"),
    Served("async", "sgd", "grpc"),
    Served("async", "sgd", "grpc", "bfloat16"),
    *(
        Served(mode, "sgd", transport, computed=COMPUTED, ahead=ahead)
        for mode, transport in (("sync", "auto"), ("async", "auto"), ("sync", "tcp"))
        for ahead in (False, True)
    ),
)
NATIVE = tuple(
    Served(mode, optimizer, native=True, ahead=ahead)
    for mode, optimizer in (("async", "sgd"), ("sync", "sgd"), ("async", "RowWiseAdagrad"))
    for ahead in (False, True)
) + tuple(
    Served("async", "sgd", native=True, ahead=ahead, **more)
    for more in ({"transport": "tcp"}, {"ordinary": True})
    for ahead in (False, True)
)
BETWEEN_HOSTS = tuple(
    Served(mode, "sgd", "tcp", wire) for mode in ("sync", "async") for wire in ("float32", "bfloat16")
)
NUMPY = ("--native", "off")
SAVED_EVERY = 100  # steps
TIMEOUT = 600.0
BATCH = 10_000  # new ids in an update of the growing table


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench rows`."""
    host_flags(parser, required=False)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table that is trained (%(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="elements of a row (%(default)s)")
    parser.add_argument("--ids", type=int, default=26_624, help="of a step, with repeats (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each system, in turns of five (%(default)s)")
    options.add(parser, workers=2, shards=2)
    options.add_only(parser, "title, transport and wire")
    parser.add_argument("--no-peers", action="store_true", help="of the servers: only ourselves")
    parser.add_argument("--no-native", action="store_true", help="without the library")
    parser.add_argument("--no-single", action="store_true", help="no steps in one process, and no loops by themselves")
    parser.add_argument(
        "--checkpoints", type=int, default=5, help="in sync, one every 100 steps; 0: none (%(default)s)"
    )
    parser.add_argument("--grow", type=int, default=10_000_000, help="rows of the growing table; 0: none (%(default)s)")
    parser.add_argument(
        "--beyond", type=int, default=4_000_000, help="rows of a table, a quarter in memory; 0: none (%(default)s)"
    )
    parser.add_argument(
        "--cold-rows-dir", type=Path, default=Path(tempfile.gettempdir()), help="for the others (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures."""
    torch.set_num_threads(THREADS)
    if arguments.addresses:
        return _between_hosts(arguments)
    loops = None if arguments.no_native else compiled()
    lines = _on_servers(arguments, NATIVE if loops is not None else ()) if arguments.shards else []
    if arguments.shards and arguments.checkpoints:
        lines += _checkpointed(arguments)
    for name in () if arguments.no_single else OPTIMIZERS:
        lines += _steps(arguments, name)
    if loops is not None and not arguments.no_single:
        size = 4 * arguments.rows * arguments.dim
        each = row_loops(arguments.rows, arguments.dim, arguments.ids, loops)
        lines += [result("rows", f"library: {what}", workers=1, shards=0, size=size, **of) for what, of in each.items()]
    if arguments.grow:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(grow, (arguments.grow, arguments.dim))
        size = 4 * arguments.grow * arguments.dim
        lines.append(result("rows", "growing table", workers=1, shards=0, size=size, **found))
    if arguments.beyond:
        rows, dim = arguments.beyond, arguments.dim
        each = cold_rows(rows, dim, rows // 4, arguments.cold_rows_dir)
        size = 4 * rows * dim
        lines += [
            result("rows", f"beyond memory: {what}", workers=1, shards=0, size=size, **found)
            for what, found in each.items()
        ]
    return lines


def _between_hosts(arguments: argparse.Namespace) -> list[Result]:
    """Workers and shards, each on a host of its own, beside DDP on the workers' hosts."""
    workers, shards = halves(arguments, "rows between hosts")
    chosen = _chosen(arguments, BETWEEN_HOSTS)
    with servers(shards, NUMPY) as cluster:
        order = _order(arguments, chosen, cluster.address, shards=len(shards), ddp=not arguments.no_peers)
        return _measured(arguments, order, workers, arguments.port)


def _chosen(arguments: argparse.Namespace, systems: Sequence[Served]) -> list[Served]:
    names = {served: f"{served.title} {served.transport} {served.wire}" for served in systems}
    return [served for served, name in names.items() if options.is_chosen(arguments, name)]


def _order(arguments: argparse.Namespace, chosen: Sequence[Served], server: str, **more: Any) -> Order:
    size = {"rows": arguments.rows, "dim": arguments.dim, "ids": arguments.ids, "steps": arguments.steps}
    return Order(**size, systems=list(map(asdict, chosen)), server=server, **more)


def _on_servers(arguments: argparse.Namespace, native: Sequence[Served]) -> list[Result]:
    """Workers and shards, beside what the peers do with as many processes. native: what has servers of its own, with
    the library"""
    table = {"rows": arguments.rows, "dim": arguments.dim}
    chosen = _chosen(arguments, (*SERVERS, *native))
    workers, shards, peers = arguments.workers, arguments.shards, not arguments.no_peers
    with servers([HERE] * shards, NUMPY) as cluster, contextlib.ExitStack() as stack:
        pids, faster = {cluster.address: cluster.pids}, ""
        if any(served.native for served in chosen):
            found = stack.enter_context(servers([HERE] * shards))
            pids[found.address], faster = found.pids, found.address
        rpc = stack.enter_context(rpc_servers("row_rpc", shards, workers=workers, lr=LR, **table)) if peers else None
        more = {"shards": shards, "native": faster, "pids": pids, "ddp": peers}
        more["compute"] = way_to_compute(workers + shards)
        order = _order(arguments, chosen, cluster.address, rpc=rpc, **more)
        return _measured(arguments, order, [HERE] * workers)


def _measured(arguments: argparse.Namespace, order: Order, places: Sequence[Host], port: int = 0) -> list[Result]:
    """Has workers do what they are told; returns how long a step of each system takes."""
    workers = len(places)
    with Group(places, "bench.row_workers", [asdict(order)] * workers, port or None) as group:
        times, used, faults = group.answers(TIMEOUT)[0]
    ms, cpu = ({name: median_ms(seconds) for name, seconds in of.items() if seconds} for of in (times, used))
    lines = []
    for name, found in ms.items():
        system, transport, wire, compute = name, "", "", None
        if name.startswith("ours:"):
            served = Served.of(name)
            system, transport, wire = served.title, served.transport, served.wire
            compute = order.compute if served.computed else None
        lines.append(
            result(
                "rows",
                system,
                transport=transport,
                wire=wire,
                workers=workers,
                shards=0 if system.startswith(DDP) else order.shards,
                size=4 * arguments.rows * arguments.dim,
                ms=found,
                ratios=_ratios(name, ms) | _cpu_ratios(name, cpu),
                cpu_ms=cpu.get(name),
                page_faults=round(statistics.median(faults[name])),
                million_ids_per_s=round(workers * arguments.ids / found / 1e3, 2),
                link_mbit=arguments.link_mbit or None,
                compute=compute,
            )
        )
    return lines


def _ratios(name: str, ms: dict[str, float]) -> dict[str, float]:
    """Returns how long a step takes beside others'; where the next batch's ids are known, beside where they are not;
    with the library, beside numpy."""
    if name.startswith("ours:") and Served.of(name).ordinary:
        return {peer: ms[name] / ms[peer] for peer in (DDP + ORDINARY,) if peer in ms}
    if name == DDP + ORDINARY:
        return {DDP: ms[name] / ms[DDP]}
    if not name.startswith("ours:") or not Served.of(name).computed:
        ratios = {peer: ms[name] / ms[peer] for peer in (DDP, "torch RPC") if peer in ms and peer != name}
        plain = replace(Served.of(name), native=False).name if name.startswith("ours:") else name
        return ratios | ({"numpy": ms[name] / ms[plain]} if plain != name and plain in ms else {})
    served = Served.of(name)
    return {"ids not known": ms[name] / ms[replace(served, ahead=False).name]} if served.ahead else {}


def _cpu_ratios(name: str, cpu: dict[str, float]) -> dict[str, float]:
    """Returns how much CPU a step of ours takes beside DDP's, of as ordinary a loop."""
    if not name.startswith("ours:") or Served.of(name).computed:
        return {}
    peer = DDP + ORDINARY * Served.of(name).ordinary
    return {f"CPU of {peer}": cpu[name] / cpu[peer]} if name in cpu and peer in cpu else {}


def _checkpointed(arguments: argparse.Namespace) -> list[Result]:
    """Training with a checkpoint of changes every so many steps, in turns with the same without, each on its servers.

    A turn has one checkpoint, in its middle: it begins when the table has been filled, a few steps after a full one.
    """
    workers, shards = arguments.workers, arguments.shards
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        every = ["--checkpoint-dir", directory, "--checkpoint-every", f"{SAVED_EVERY}steps"]
        plain, saving = (stack.enter_context(servers([HERE] * shards, [*NUMPY, *more])) for more in ([], every))
        order = Order(
            rows=arguments.rows,
            dim=arguments.dim,
            ids=arguments.ids,
            steps=SAVED_EVERY * arguments.checkpoints,
            systems=[asdict(Served("sync", "sgd"))],
            server=plain.address,
            saving=saving.address,
            turn=SAVED_EVERY,
        )
        with Group([HERE] * workers, "bench.row_workers", [asdict(order)] * workers) as group:
            times: dict[str, list[float]] = group.answers(TIMEOUT)[0][0]
        parts = [path.stat().st_size for path in sorted(Path(directory).rglob("shard-*.safetensors"))]
    name = Served("sync", "sgd").name
    without, found = median_ms(times[name]), median_ms(times[SAVING])
    return [
        result(
            "rows",
            "ours sync sgd, with checkpoints",
            transport="auto",
            wire="float32",
            workers=workers,
            shards=shards,
            size=4 * arguments.rows * arguments.dim,
            ms=found,
            ratios={"without checkpoints": found / without},
            rate_to_without=round(sum(times[name]) / sum(times[SAVING]), 3),
            part_bytes=[min(parts), max(parts)],
        )
    ]


def _steps(arguments: argparse.Namespace, name: str) -> list[Result]:
    """One optimizer, ours beside torch's."""
    hashes = torch.from_numpy(hashed(np.arange(arguments.rows)))
    batches = [torch.from_numpy(batch) for batch in zipf(arguments.rows, arguments.ids, arguments.steps + TURN, 7)]
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    systems = {
        "torch": _step_of(torch.nn.Embedding(arguments.rows, arguments.dim, sparse=True), name),
        "ours": _step_of(ps_worker.Embedding(arguments.dim), name, session=ps_worker.connect(mode="single")),
    }
    ids = {"torch": batches, "ours": [hashes[batch] for batch in batches]}
    in_use.use(None)
    for part in hashes.split(FILL):
        systems["ours"](part)  # all rows are there
    for first in range(0, len(batches), TURN):
        for system, step in systems.items():
            for batch in ids[system][first : first + TURN]:
                before = time.perf_counter()
                step(batch)
                seconds[system].append(time.perf_counter() - before)
    size = 4 * arguments.rows * arguments.dim
    medians = {system: median_ms(found[TURN:]) for system, found in seconds.items()}
    common = {"workers": 1, "shards": 0, "size": size, "optimizer": name}
    return [
        result("rows", f"torch {name}", ms=medians["torch"], **common),
        result(
            "rows", f"ours {name}", ms=medians["ours"], ratios={"torch": medians["ours"] / medians["torch"]}, **common
        ),
    ]


def _step_of(
    module: torch.nn.Module, name: str, session: ps_worker.Session | None = None
) -> Callable[[torch.Tensor], None]:
    """Returns a step of a module alone, by one of OPTIMIZERS."""
    optimizer: Any = OPTIMIZERS[name](module.parameters(), lr=LR)
    if session is not None:
        module, optimizer = session.prepare(module, optimizer)
    return trained(module, optimizer)


def grow(rows: int, dim: int) -> dict[str, Any]:
    """Returns what a table has taken that got so many rows, with row-wise Adagrad."""
    torch.set_num_threads(THREADS)
    table = Table(TableSpec("rows", dim, Initializer("uniform", 0.01)), "RowWiseAdagrad", {"lr": LR}, rows)
    gradients, seconds = torch.full((BATCH, dim), GRADIENT), []
    counts = np.ones(BATCH, np.int64)
    table.apply(RowGradients(hashed(np.arange(BATCH)), counts, gradients), 1, 1)
    before = memory()["peak"]
    for version, first in enumerate(range(BATCH, rows, BATCH), 2):
        ids = hashed(np.arange(first, first + BATCH))
        began = time.perf_counter()
        table.apply(RowGradients(ids, counts, gradients), 1, version)
        seconds.append(time.perf_counter() - began)
    held = (rows - BATCH) * (dim + 1) * 4
    return {
        "ms": median_ms(seconds),
        "longest_ms": round(max(seconds) * 1e3, 1),
        "late_ms": round(statistics.median(seconds[-100:]) * 1e3, 2),
        "ratios": {"rows * (dim + 1) * 4 bytes": (memory()["peak"] - before) / held},
        "index_and_versions_bytes": table.nbytes - rows * (dim + 1) * 4,
    }


def draw(lines: list[Result], path: Path) -> None:
    """Steps beside torch's."""
    found = [Bar(label(line), line["ms"], line["system"].startswith("ours")) for line in lines]
    bars(path, "ms", {"A step of a table, and an update of a growing one": found})
