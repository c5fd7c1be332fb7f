"""A step of training a GPT on real text, in every mode, with the same script.

The processes of all systems run from the beginning and take turns: a few steps of one, a few of the next, and again,
so that other load on the machine affects all alike. A turn's first step does not count, because it finds the caches
full of another system's data. `independent` has as many processes without communication: the upper bound on this
machine. Every mode has torch's fastest AdamW for CPUs. The ratio is that of the median step times; of local:8, where
one step of eight exchanges, it is that of mean ones, and `independent` is what its steps are without that.

With --vectors the model is so many parameters of 16 MiB whose step is nothing but memory: their squares are the loss,
and plain SGD steps them. --vector-kib gives them another size: small models are steps of calls, not of memory."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

from bench import options
from bench.cluster import HERE, job_name, servers, take_turns, trainers
from bench.pictures import Bar, bars
from bench.results import Result, check_loss, label, mean_step_ms, result, step_ms
from bench.training import Task, weight_bytes

LOCAL, ROUND = "local:8", 8  # measured where a turn's counted steps are whole rounds: one step of a round exchanges
KIB = 2**10 // 4  # elements
SHORT = {"layers": 2, "width": 256, "turns": 3, "steps": 4}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench train`."""
    options.add(parser, workers=2, shards=2, layers=8, width=512, batch=8, turns=3, steps=9)
    parser.add_argument("--vectors", type=int, default=0, help="parameters of a model of vectors (0: the GPT)")
    options.add_only(parser, "mode and transport")
    parser.add_argument("--vector-kib", type=int, default=16 * 2**10, help="of each of these (%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each system."""
    plain = Task("gpt", "single", batch=arguments.batch, layers=arguments.layers, width=arguments.width)
    if arguments.vectors:
        vector = arguments.vector_kib * KIB
        plain = Task("vectors", "single", parameters=arguments.vectors * vector, vector=vector)
    with servers([HERE] * arguments.shards) as cluster, contextlib.ExitStack() as stack:
        tasks = _systems(plain, cluster.address, arguments)
        workers = {name: 1 if name == "single" else arguments.workers for name in tasks}
        groups = {name: stack.enter_context(trainers([HERE] * workers[name], task)) for name, task in tasks.items()}
        turns = take_turns(groups, arguments.turns, arguments.steps)
    losses = {name: answers[-1][0]["loss"] for name, answers in turns.items()}
    for name in losses:
        if name.startswith("sync"):  # trains the same model as ddp with the same batches
            check_loss(name, losses[name], losses["ddp"])
    ms = {name: step_ms(answers) for name, answers in turns.items()}
    means = {name: mean_step_ms(answers) for name, answers in turns.items()}
    size = weight_bytes(plain)
    return [
        result(
            "train",
            name.split()[0],
            transport=task.transport if task.server else "",
            wire=task.wire if task.server else "",
            workers=workers[name],
            shards=arguments.shards if task.server else 0,
            size=size,
            ms=(means if task.mode == LOCAL else ms)[name],
            ratios=_ratios(task.mode, means if task.mode == LOCAL else ms, name),
            steps=arguments.turns * (arguments.steps - 1),
            loss=round(losses[name], 4),
        )
        for name, task in tasks.items()
    ]


def _ratios(mode: str, ms: dict[str, float], name: str) -> dict[str, float]:
    return {peer: ms[name] / ms[peer] for peer in ("ddp", *["independent"] * (mode == LOCAL))}


def _systems(plain: Task, server: str, arguments: argparse.Namespace) -> dict[str, Task]:
    """By name: what the workers of each system do."""
    found = {"ddp": replace(plain, mode="ddp")}
    ways = [("sync", "shm"), ("sync", "tcp"), ("sync", "grpc"), ("ssp:4", "shm"), ("async", "shm")]
    for mode, transport in ways + [(LOCAL, "shm")] * (arguments.steps % ROUND == 1):
        name = f"{mode} {transport}"
        if options.is_chosen(arguments, name):
            found[name] = replace(plain, mode=mode, server=server, transport=transport, job=job_name(name))
    return {**found, "independent": plain, "single": plain}


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system."""
    title = f"A step of {lines[0]['bytes'] / 4e6:.3g}M parameters, {lines[0]['workers']} workers, one thread each"
    bars(path, "milliseconds", {title: [Bar(label(line), line["ms"], bool(line["transport"])) for line in lines]})
