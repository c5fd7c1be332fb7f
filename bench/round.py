"""One synchronous round: every worker's gradient in, the mean applied with plain SGD, the weights out to every worker.

Beside us, interleaved round by round in the same processes: gloo's all-reduce with a local SGD step (whole, and in
25 MiB buckets as DDP does), and bare gRPC echoing the same bytes. A round's time is that of the slowest worker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import torch
import torch.distributed as dist
from torch import nn

import ps_worker
from bench.cluster import environment, median_ms, servers, versions, workers

MIB = 2**20
ECHO_BYTES = 4 * MIB
ECHO_IN_FLIGHT = 4
GLOO_BUCKET = 25 * MIB
PARAMETER = 16 * MIB  # the model is made of parameters of at most this size


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench round`."""
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds; the first two more are warm-up")
    parser.add_argument("--transport", default="shm,grpc", help="shm, grpc or both")
    parser.add_argument("--wire", default="float32", help="float32, bfloat16, float16, or several")
    parser.add_argument("--no-peers", action="store_true", help="only ourselves")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures; one result for each system."""
    found: list[dict[str, Any]] = []
    options = {name: getattr(arguments, name) for name in ("mib", "rounds", "no_peers")}
    options["systems"] = [
        [transport, wire] for transport in arguments.transport.split(",") for wire in arguments.wire.split(",")
    ]
    with servers(arguments.shards) as server, _echo_servers(0 if arguments.no_peers else arguments.shards) as echoes:
        options |= {"server": server, "echoes": echoes}
        times = workers("bench.round", arguments.workers, options, timeout=600)[0]
    gloo = min((median_ms(times[name]), name) for name in times if name.startswith("gloo")) if not arguments.no_peers else None
    ours = {name: median_ms(seconds) for name, seconds in times.items()}
    for name, milliseconds in ours.items():
        system, transport, wire = (*name.split(":"), "", "")[:3]
        line: dict[str, Any] = {
            "bench": "round",
            "system": system,
            "transport": transport,
            "wire": wire,
            "workers": arguments.workers,
            "shards": arguments.shards,
            "bytes": arguments.mib * MIB,
            "ms": milliseconds,
            "rounds": arguments.rounds,
            "threads": 1,
        }
        if gloo is not None:
            line["ratio_to_gloo"] = round(milliseconds / gloo[0], 3)
            line["gloo"] = gloo[1]
        if "echo" in ours:
            line["ratio_to_grpc_echo"] = round(milliseconds / ours["echo"], 3)
        base = ours.get(f"ps:{transport}:float32")
        if system == "ps" and wire != "float32" and base:
            line["ratio_to_float32"] = round(milliseconds / base, 3)
        found.append({**line, "versions": versions()})
    return found


# -- one worker ------------------------------------------------------------------------------------------------------


def worker(options: dict[str, Any]) -> None:
    """Runs every system's rounds in turn; rank 0 writes the times of the slowest worker."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    elements = options["mib"] * MIB // 4
    systems: dict[str, Callable[[], None]] = {}
    checks: list[Callable[[int], None]] = []
    for transport, wire in options["systems"]:
        step, check = _ours(options["server"], transport, wire, rank, count, elements)
        systems[f"ps:{transport}:{wire}"] = step
        checks.append(check)
    if not options["no_peers"]:
        systems["gloo whole"] = _gloo(elements, elements, rank)
        systems["gloo 25 MiB"] = _gloo(elements, GLOO_BUCKET // 4, rank)
        systems["echo"] = _echo(options["echoes"], elements * 4)
    times: dict[str, list[float]] = {name: [] for name in systems}
    rounds = options["rounds"] + 2
    for number in range(rounds):
        for name, step in systems.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            longest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if number >= 2:
                times[name].append(float(longest))
    for check in checks:
        check(rounds)
    if rank == 0:
        Path(options["output"]).write_text(json.dumps(times) + "\n")
    dist.barrier()
    os._exit(0)  # sessions left by the servers' end; nothing here needs an orderly one


class _Numbers(nn.Module):
    """Nothing but parameters."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        sizes = [min(PARAMETER // 4, elements - start) for start in range(0, elements, PARAMETER // 4)]
        self.numbers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


def _ours(
    server: str, transport: str, wire: str, rank: int, count: int, elements: int
) -> tuple[Callable[[], None], Callable[[int], None]]:
    session = ps_worker.connect(
        server, "sync", f"{transport}-{wire}", rank=rank, world_size=count, transport=transport
    )
    model = _Numbers(elements)
    # gloo does not look for infinities either.
    model, optimizer = session.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        non_finite="allow",
        gradient_wire=wire,
        weight_wire=wire,
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank + 1))

    def check(rounds: int) -> None:
        # Small whole numbers: exact in every wire format for as many rounds as are run here.
        expected = -rounds * sum(range(1, count + 1)) / count
        for parameter in model.parameters():
            low, high = parameter.aminmax()
            if float(low) != expected or float(high) != expected:
                raise SystemExit(f"wrong result: expected {expected} everywhere, got {float(low)} to {float(high)}")

    return optimizer.step, check


def _gloo(elements: int, bucket: int, rank: int) -> Callable[[], None]:
    weights = torch.zeros(elements)
    optimizer = torch.optim.SGD([weights], lr=1.0, fused=True)
    gradient = torch.full_like(weights, float(rank + 1))
    pieces = gradient.split(bucket)
    weights.grad = gradient

    def step() -> None:
        gradient.fill_(1.0) if False else None
        pending = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for work in pending:
            work.wait()
        gradient.div_(dist.get_world_size())
        optimizer.step()

    return step


def _echo(addresses: list[str], size: int) -> Callable[[], None]:
    channels = [grpc.insecure_channel(a, options=_echo_options()) for a in addresses]
    calls = [channel.unary_unary("/bench.Echo/Echo") for channel in channels]
    payload = bytes(ECHO_BYTES)
    pools = [futures.ThreadPoolExecutor(ECHO_IN_FLIGHT) for _ in addresses]
    messages = size // ECHO_BYTES

    def step() -> None:
        pending = [
            pools[index % len(calls)].submit(calls[index % len(calls)], payload) for index in range(max(1, messages))
        ]
        for future in pending:
            future.result()

    return step


def _echo_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", 2 * ECHO_BYTES),
        ("grpc.max_send_message_length", 2 * ECHO_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
    ]


class _echo_servers:
    """Processes that answer every message with itself, through nothing but gRPC."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "bench.round", "echo"]
        self._running = [
            subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def __enter__(self) -> list[str]:
        return [f"127.0.0.1:{int(process.stdout.readline())}" for process in self._running if process.stdout]

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()


def _serve_echo() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(16), options=_echo_options())
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()


if __name__ == "__main__":
    _serve_echo() if sys.argv[1] == "echo" else worker(json.loads(sys.argv[1]))
