"""A step of training a GPT on real text, in every mode, with the same script.

The processes of all systems run from the beginning and take turns: a few steps of one, a few of the next, and again,
so that other load on the machine affects all alike. A turn's first step does not count, because it finds the caches
full of another system's data. `independent` has as many processes without communication: the upper bound on this
machine. Every mode has torch's fastest AdamW for CPUs. The ratio is that of the median step times."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

from bench.cluster import HERE, Group, servers
from bench.pictures import Bar, bars
from bench.results import Result, label, median_ms, result
from bench.training import Task, build

LOSS_TOLERANCE = 0.01  # sync and ddp train the same model with the same batches
SHORT = {"layers": 2, "width": 256, "turns": 3, "steps": 4}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench train`."""
    parser.add_argument("--workers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--shards", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model; 8 with a width of 512: 25M parameters")
    parser.add_argument("--width", type=int, default=512, help="of the model, a multiple of 64 (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="blocks of 64 bytes in a worker's batch (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each system (%(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="in a turn; the first is not counted (%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each system."""
    plain = Task("gpt", "single", batch=arguments.batch, layers=arguments.layers, width=arguments.width)
    times: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    with servers([HERE] * arguments.shards) as cluster, contextlib.ExitStack() as stack:
        tasks = _systems(plain, cluster.address)
        workers = {name: 1 if name == "single" else arguments.workers for name in tasks}
        groups = {name: stack.enter_context(Group([HERE] * workers[name], task)) for name, task in tasks.items()}
        for _ in range(arguments.turns):
            for name, group in groups.items():
                answers = group.run(steps=arguments.steps)
                times.setdefault(name, []).extend(step for found in answers for step in step_times(found["ends"]))
                losses[name] = answers[0]["loss"]
    _check(losses)
    ms = {name: median_ms(found) for name, found in times.items()}
    size = 4 * sum(parameter.numel() for parameter in build(plain)[0].parameters())
    return [
        result(
            "train",
            name.split()[0],
            transport=task.transport if task.server else "",
            wire=task.wire if task.server else "",
            workers=workers[name],
            shards=arguments.shards if task.server else 0,
            size=size,
            ms=ms[name],
            ratios={"ddp": ms[name] / ms["ddp"]},
            steps=len(times[name]) // workers[name],
            loss=round(losses[name], 4),
        )
        for name, task in tasks.items()
    ]


def _systems(plain: Task, server: str) -> dict[str, Task]:
    """By name: what the workers of each system do."""
    found = {"ddp": replace(plain, mode="ddp")}
    for mode, transport in (("sync", "shm"), ("sync", "grpc"), ("ssp:4", "shm"), ("async", "shm")):
        name = f"{mode} {transport}"
        job = f"{mode}-{transport}".replace(":", "-")
        found[name] = replace(plain, mode=mode, server=server, transport=transport, job=job)
    return {**found, "independent": plain, "single": plain}


def step_times(ends: list[float]) -> list[float]:
    """Seconds of each step but the first, from the times at which they ended."""
    return [after - before for before, after in itertools.pairwise(ends)]


def _check(losses: dict[str, float]) -> None:
    """A system that is fast because it trains something else does not count."""
    for name, loss in losses.items():
        if name.startswith("sync") and abs(loss - losses["ddp"]) > LOSS_TOLERANCE * losses["ddp"]:
            raise SystemExit(f"wrong result: the loss of {name} is {loss:.4f}, that of ddp {losses['ddp']:.4f}")


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system."""
    title = f"A step of a {lines[0]['bytes'] / 4e6:.1f}M-parameter GPT, {lines[0]['workers']} workers, one thread each"
    bars(path, "milliseconds", {title: [Bar(label(line), line["ms"], bool(line["transport"])) for line in lines]})
