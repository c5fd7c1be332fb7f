"""The memory of a shard and of a worker that train a GPT with AdamW.

A shard's figure is its peak, less its memory before its first job (interpreter, torch, gRPC), divided by its weights
and optimizer state. With shared memory a shard also maps the segments of its workers. Those pages hold the workers'
weights and gradients and count as theirs: `shared` says how much of them the shard has touched, and is subtracted
from its peak. A worker's peak includes its segment, and is divided by a DDP worker's."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import options
from bench.cluster import HERE, Servers, servers, trainers
from bench.machine import memory
from bench.pictures import Bar, bars
from bench.results import MIB, Result, label, result, step_ms
from bench.training import Task, weight_bytes
from ps_server.ops.requests import fetch

SHORT = {"layers": 4, "width": 384}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench memory`."""
    options.add(parser, workers=4, shards=2, layers=8, width=512, batch=8, bucket_kib=None, transport="tcp,grpc,shm")
    parser.add_argument("--steps", type=int, default=4, help="after four of warm-up (%(default)s)")
    parser.add_argument("--max-staged-mib", type=int, help="the shards' --max-staged-bytes (what they choose)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; DDP's largest worker, then for each transport the largest worker and the shard with the worst ratio."""
    places = [HERE] * arguments.workers
    plain = Task("gpt", "ddp", batch=arguments.batch, layers=arguments.layers, width=arguments.width)
    size = weight_bytes(plain)
    with trainers(places, plain) as group:
        ddp = group.run(steps=arguments.steps)
    lines = [_worker(arguments, "", size, ddp, ddp)]
    bucket_bytes = arguments.bucket_kib * 1024 if arguments.bucket_kib else None
    limit = ["--max-staged-bytes", str(arguments.max_staged_mib * MIB)] if arguments.max_staged_mib else []
    for transport in arguments.transport.split(","):
        sync = replace(plain, mode="sync", transport=transport, bucket_bytes=bucket_bytes)
        with servers([HERE] * arguments.shards, limit) as cluster:
            imports = [memory(pid)["peak"] for pid in cluster.pids]
            with trainers(places, replace(sync, server=cluster.address)) as group:
                ours = group.run(steps=arguments.steps)
                shards = _shards(cluster, imports)
        lines.append(_worker(arguments, transport, size, ours, ddp))
        worst = max(shards, key=lambda shard: shard["ratios"]["weights + optimizer state"])
        lines.append({**lines[-1], "system": "shard", **worst})
    return lines


def _worker(
    arguments: argparse.Namespace, transport: str, size: int, answers: list[dict[str, Any]], ddp: list[dict[str, Any]]
) -> Result:
    largest = max((found["memory"] for found in answers), key=lambda sizes: sizes["peak"])
    return result(
        "memory",
        "worker" if transport else "ddp worker",
        transport=transport,
        wire="float32" if transport else "",
        workers=arguments.workers,
        shards=arguments.shards if transport else 0,
        size=size,
        ms=step_ms([answers]),
        ratios={"ddp worker": largest["peak"] / max(found["memory"]["peak"] for found in ddp)},
        peak_bytes=largest["peak"],
        imports_bytes=largest["imports"],
        shared_bytes=largest["shared"],
    )


def _shards(cluster: Servers, imports: list[int]) -> list[dict[str, Any]]:
    """What each shard holds, and what it takes."""
    found = []
    for process, before in zip(fetch(cluster.address)["shards"], imports, strict=True):
        sizes = memory(process["pid"])
        held = sum(job["parameter_bytes"] + job["optimizer_bytes"] for job in process["jobs"])
        own = sizes["peak"] - sizes["shared"] - before
        found.append(
            {
                "ratios": {"weights + optimizer state": round(own / held, 3)},
                "peak_bytes": sizes["peak"],
                "imports_bytes": before,
                "shared_bytes": sizes["shared"],
                "held_bytes": held,
            }
        )
    return found


def draw(lines: list[Result], path: Path) -> None:
    """What processes hold in memory, beside what they must."""
    title = f"Peak memory of one process, {lines[0]['workers']} workers, a GPT with AdamW"
    found = [Bar(label(line), line["peak_bytes"] / MIB, line["system"] != "ddp worker") for line in lines]
    bars(path, "MiB", {title: found})
