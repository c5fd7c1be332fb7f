"""What one more worker costs the servers: up to 64 workers in sync, each with a model of 1 MiB; and that 512 join.

The workers are threads of one process: what they cost themselves is not measured, but the seconds of a core that the
shards use for each step of each worker. The ratio is to the fewest workers. At the end every weight must be exactly the
expected number.

`joins` is the start of up to 512 workers on 16 shards: all join at once, and each watches the roster until it has heard
of all others. The coordinator and the shards' logic are those of a cluster, in one process and without sockets; CPU is
the coordinator's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import torch

import ps_worker
from bench import options
from bench.cluster import HERE, Group, servers
from bench.machine import cpu_seconds
from bench.pictures import Line, lines
from bench.results import MIB, Result, median_ms, result
from bench.talk import own_output
from bench.training import Vectors

WARMUP = 3
TIMEOUT = 600.0
SHORT = {"workers": "2,8", "mib": 1, "rounds": 4, "joins": "64"}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench crowd`."""
    options.add(parser, mib=1, workers="1,8,16,32,64", shards=2, rounds=20, transport="shm,tcp,grpc")
    parser.add_argument("--joins", default="64,256,512", help="workers that join at once; none: '' (%(default)s)")
    parser.add_argument("--join-shards", type=int, default=16, help="that they join (%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each transport and number of workers."""
    found: list[Result] = []
    for transport in arguments.transport.split(","):
        fewest = None
        for workers in map(int, filter(None, arguments.workers.split(","))):
            order = {"workers": workers, "mib": arguments.mib, "rounds": arguments.rounds, "transport": transport}
            with servers([HERE] * arguments.shards) as cluster:
                order |= {"server": cluster.address, "pids": cluster.pids}
                with Group([HERE], "bench.crowd", [order]) as group:
                    answer = group.answers(TIMEOUT)[0]
            cost = 1e3 * answer["cpu"] / (workers * arguments.rounds)
            fewest = fewest or cost
            found.append(
                result(
                    "crowd",
                    "ours",
                    transport=transport,
                    wire="float32",
                    workers=workers,
                    shards=arguments.shards,
                    size=arguments.mib * MIB,
                    ms=answer["ms"],
                    ratios={"CPU of the fewest": cost / fewest} if fewest else {},  # a clock tick is 10 ms
                    shards_cpu_ms=round(cost, 3),
                )
            )
    return found + _joins(arguments)


def _joins(arguments: argparse.Namespace) -> list[Result]:
    """One result for each number of workers that join."""
    found: list[Result] = []
    for workers in map(int, filter(None, arguments.joins.split(","))):
        with Group([HERE], "bench.joins", [{"workers": workers, "shards": arguments.join_shards}]) as group:
            answer = group.answers(TIMEOUT)[0]
        found.append(result("crowd", "joins", workers=workers, shards=arguments.join_shards, **answer))
    return found


def draw(found: list[Result], path: Path) -> None:
    """A line for each transport."""
    found = [line for line in found if line["system"] == "ours"]
    transports = dict.fromkeys(line["transport"] for line in found)
    group = [
        Line(name, [(line["workers"], line["shards_cpu_ms"]) for line in found if line["transport"] == name])
        for name in transports
    ]
    title = f"A step of a worker, {found[0]['bytes'] // MIB} MiB, {found[0]['shards']} shards"
    lines(path, "workers", "milliseconds of a core on the shards", {title: group})


# -- the workers' process ----------------------------------------------------------------------------------------------


def main() -> None:
    """Trains all workers; answers with the time of a round, and the CPU that the servers used for all of them."""
    say = own_output()
    order = json.loads(sys.stdin.readline())
    count, rounds = order["workers"], order["rounds"]
    barrier = threading.Barrier(count + 1)
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            _train(order, rank, barrier)
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()  # all have warmed up
    before, started = cpu_seconds(order["pids"]), time.perf_counter()
    barrier.wait()
    barrier.wait()  # all have ended
    seconds = (time.perf_counter() - started) / rounds
    used = cpu_seconds(order["pids"]) - before
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"a worker failed: {failed[0]}")
    say({"ms": median_ms([seconds]), "cpu": used})


def _train(order: dict[str, object], rank: int, barrier: threading.Barrier) -> None:
    count, rounds = int(str(order["workers"])), int(str(order["rounds"]))
    session = ps_worker.connect(
        str(order["server"]), "sync", "crowd", rank, count, transport=str(order["transport"]), metrics_port=0
    )
    with session:
        model = Vectors(torch.zeros(int(str(order["mib"])) * MIB // 4), MIB)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), non_finite="allow")
        parameters = list(model.parameters())

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, float(rank))
            optimizer.step()

        for _ in range(WARMUP):
            step()
        barrier.wait()
        barrier.wait()
        for _ in range(rounds):
            step()
        barrier.wait()
        expected = -(WARMUP + rounds) * (count - 1) / 2
        if any((parameter != expected).any() for parameter in parameters):
            raise SystemExit(f"wrong result: the weights of worker {rank} are not all {expected}")


if __name__ == "__main__":
    main()
