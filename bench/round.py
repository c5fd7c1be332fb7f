"""One synchronous round: workers push gradients, shards apply their mean with plain SGD, workers pull the weights.

The peers take turns round by round in the same processes: gloo's all-reduce with a local SGD step (whole, and in 25
MiB buckets as DDP does), and bare gRPC and plain sockets that send the same bytes back in 4 MiB messages. A round's
time is that of the slowest worker. Gradients are filled anew before each round, outside of its time, for every system
alike. At the end every weight must be exactly the expected number, which depends on its place. `CPU` are seconds of a
core that all workers and servers use for each GB that is moved; ours have the arithmetic of the round in them, too.
With --tls ours are encrypted, with certificates of both ends; the peers are not."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ps_worker
from bench import options
from bench.cluster import HERE, Group, encrypted, servers
from bench.echo import echo, echo_servers
from bench.machine import cpu_seconds
from bench.pictures import Bar, bars
from bench.results import MIB, Result, label, median_ms, result
from bench.socket_echo import socket_echo, socket_servers
from bench.talk import own_output
from bench.training import Vectors

GLOO_BUCKET = 25 * MIB
PARAMETER = 16 * MIB  # the model is made of parameters of at most this size
WARMUP = 2
TIMEOUT = 600.0
PATTERN = 5  # a gradient is its worker's rank + 1, and 0 to 4 by place: no bucket can be taken for another
EXACT = 128  # up to here bfloat16 holds whole numbers and halves
SHORT = {"mib": 64, "rounds": 8, "wire": "float32,bfloat16"}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench round`."""
    options.add(parser, mib=256, workers=2, shards=2, rounds=12, transport="shm,tcp,grpc", wire="float32,bfloat16")
    options.add(parser, bucket_kib=None)
    parser.add_argument("--tls", action="store_true", help="between our workers and servers")
    parser.add_argument("--no-peers", action="store_true", help="only ourselves")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each system."""
    systems = [(t, w) for t in arguments.transport.split(",") for w in arguments.wire.split(",")]
    if (arguments.rounds + WARMUP) * (PATTERN - 1 + (arguments.workers + 1) / 2) > EXACT:
        raise SystemExit(f"with {arguments.workers} workers so many rounds cannot be checked exactly: fewer --rounds")
    order: dict[str, Any] = {"mib": arguments.mib, "rounds": arguments.rounds, "systems": systems}
    order["bucket_bytes"] = arguments.bucket_kib and arguments.bucket_kib * 1024
    with (
        encrypted() if arguments.tls else contextlib.nullcontext((HERE, HERE)) as (of_servers, of_workers),
        servers([of_servers] * arguments.shards) as cluster,
        echo_servers(0 if arguments.no_peers else arguments.shards) as echoes,
        socket_servers(0 if arguments.no_peers else arguments.shards) as sockets,
    ):
        order |= {"server": cluster.address, "echoes": echoes, "sockets": sockets.addresses}
        order["pids"] = {"ours": cluster.pids, "sockets": sockets.pids}
        with Group([of_workers] * arguments.workers, "bench.round", [order] * arguments.workers) as group:
            times, cpu = group.answers(TIMEOUT)[0]
    ms = {name: median_ms(seconds) for name, seconds in times.items()}
    moved = 2 * arguments.workers * arguments.mib * MIB * arguments.rounds / 1e9
    found = []
    for name, seconds in ms.items():
        system, transport, wire = (*name.split(":"), "", "")[:3]
        peers = {"gloo": min((t for n, t in ms.items() if n.startswith("gloo")), default=0.0)}
        peers |= {name: ms.get(name, 0.0) for name in ("bare gRPC", "sockets")}
        peers["float32"] = ms.get(f"ours:{transport}:float32", 0.0) if wire != "float32" else 0.0
        found.append(
            result(
                "round",
                system,
                transport=transport,
                wire=wire,
                workers=arguments.workers,
                shards=0 if system.startswith("gloo") else arguments.shards,
                size=arguments.mib * MIB,
                ms=seconds,
                ratios={peer: seconds / other for peer, other in peers.items() if other} | _more_cpu(cpu, name),
                rounds=arguments.rounds,
                cpu_seconds_per_gigabyte=round(cpu[name] / moved, 3) if name in cpu else None,
            )
        )
    return found


def _more_cpu(cpu: dict[str, float], name: str) -> dict[str, float]:
    return {"sockets' CPU": cpu[name] / cpu["sockets"]} if name.startswith("ours") and cpu.get("sockets") else {}


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system."""
    title = f"One round of {lines[0]['bytes'] // MIB} MiB, {lines[0]['workers']} workers, {lines[0]['shards']} shards"
    bars(path, "milliseconds", {title: [Bar(label(line), line["ms"], line["system"] == "ours") for line in lines]})


# -- one worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One way to make a round. `fill` makes this worker's gradient anew; `check` raises unless the result is right."""

    fill: Callable[[], object]
    step: Callable[[], object]
    check: Callable[[int], None]


def worker() -> None:
    """Runs every system's rounds in turn; answers with the times of the slowest worker, and the CPU that all used."""
    say = own_output()
    order = json.loads(sys.stdin.readline())
    dist.init_process_group("gloo")
    systems = _systems(order)
    times: dict[str, list[float]] = {name: [] for name in systems}
    used = dict.fromkeys(systems, 0.0)
    rounds = order["rounds"] + WARMUP
    for number in range(rounds):
        for name, system in systems.items():
            system.fill()
            dist.barrier()
            before, started = _cpu(order, name), time.perf_counter()
            system.step()
            longest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if number >= WARMUP:
                times[name].append(longest.item())
                used[name] += _cpu(order, name) - before
    for system in systems.values():
        system.check(rounds)
    say((times, _of_all(used)))
    dist.barrier()
    os._exit(0)  # sessions end with the servers; nothing here needs an orderly end


def _cpu(order: dict[str, Any], name: str) -> float:
    """Returns seconds of a core that this worker has used; rank 0's include those of the system's servers."""
    servers = order["pids"].get(name.partition(":")[0], []) if dist.get_rank() == 0 else []
    return time.process_time() + cpu_seconds(servers)


def _of_all(used: dict[str, float]) -> dict[str, float]:
    """Returns what all workers have used together, of the systems whose servers are known."""
    total = torch.tensor(list(used.values()), dtype=torch.float64)
    dist.all_reduce(total)
    seconds = dict(zip(used, total.tolist(), strict=True))
    return {name: seconds[name] for name in used if name.partition(":")[0] in ("ours", "sockets")}


def _systems(order: dict[str, Any]) -> dict[str, System]:
    elements = order["mib"] * MIB // 4
    gradient = known_gradient(elements, dist.get_rank())
    found = {
        f"ours:{transport}:{wire}": _ours(order, transport, wire, gradient) for transport, wire in order["systems"]
    }
    if order["echoes"]:
        found["gloo, whole"] = _gloo(gradient, elements)
        found["gloo, 25 MiB"] = _gloo(gradient, GLOO_BUCKET // 4)
        step = echo(order["echoes"], elements * 4)
        found["bare gRPC"] = System(fill=lambda: None, step=step, check=lambda rounds: None)
        step = socket_echo(order["sockets"], elements * 4)
        found["sockets"] = System(fill=lambda: None, step=step, check=lambda rounds: None)
    return found


def _ours(order: dict[str, Any], transport: str, wire: str, gradient: torch.Tensor) -> System:
    rank, size, job = dist.get_rank(), dist.get_world_size(), f"{transport}-{wire}"
    session = ps_worker.connect(order["server"], "sync", job, rank, size, transport=transport)
    model = Vectors(torch.zeros_like(gradient), PARAMETER // 4)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    # gloo does not look for infinities either.
    model, optimizer = session.prepare(
        model,
        plain,
        bucket_bytes=order["bucket_bytes"],
        non_finite="allow",
        gradient_wire=wire,
        weight_wire=wire,
    )
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def fill() -> None:
        for parameter, values in zip(parameters, gradient.split(PARAMETER // 4), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(values)

    return System(fill, optimizer.step, lambda rounds: check(parameters, rounds, size))


def _gloo(values: torch.Tensor, bucket: int) -> System:
    weights = torch.zeros_like(values)
    weights.grad = gradient = torch.zeros_like(values)
    optimizer = torch.optim.SGD([weights], lr=1.0, fused=True)
    pieces = gradient.split(bucket)
    count = dist.get_world_size()

    def step() -> None:
        pending = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for work in pending:
            work.wait()
        gradient.div_(count)
        optimizer.step()

    return System(lambda: gradient.copy_(values), step, lambda rounds: check([weights], rounds, count))


def known_gradient(elements: int, rank: int) -> torch.Tensor:
    """Returns a worker's gradient: [elements], its rank + 1, and 0 to 4 by place."""
    return (torch.arange(elements) % PATTERN + rank + 1).float()


def check(weights: Sequence[torch.Tensor], rounds: int, workers: int) -> None:
    """Raises SystemExit unless all are right. They are whole numbers and halves, exact in every wire format."""
    start = 0
    for tensor in weights:
        place = torch.arange(start, start + tensor.numel()) % PATTERN
        wrong = tensor.detach().flatten().cpu() != -rounds * (place + (workers + 1) / 2)
        if wrong.any():
            raise SystemExit(f"wrong result: {int(wrong.sum())} of {tensor.numel()} weights, from {start} on")
        start += tensor.numel()


if __name__ == "__main__":
    worker()
