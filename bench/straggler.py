"""Stragglers: one worker of four is always four times slower, or each worker is at random five times slower for a step.

The figure is samples per second of all workers; the ratio is to DDP's. `most` is the ratio that the same delays would
allow if communication cost nothing. The model is small, so that communication is not the bound. With fewer cores than
workers a wait replaces a step's computing (`"compute": "wait"`); otherwise computing keeps a core busy. The workers of
every mode take the same delays in the same order, and the modes take turns.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import options
from bench.cluster import HERE, START_SECONDS, job_name, servers, trainers
from bench.computing import way_to_compute
from bench.pictures import Bar, bars
from bench.results import Result, result
from bench.training import Task, weight_bytes

DELAYS = 4000  # steps after which a worker's delays repeat
ROUNDING = 1e-6  # seconds: the sum of many delays is not exact
AHEAD = {"ddp": 0, "sync": 0, "ssp:8": 8, "async": math.inf}  # how many steps a worker may be ahead, by mode
QUORUM = "sync all-1"  # one more system: sync with a quorum of all but one
SYSTEMS = (*AHEAD, QUORUM)
SHORT = {"seconds": 4.0, "turns": 1}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench straggler`."""
    options.add(parser, workers=4, shards=2, turns=2, seed=0)
    parser.add_argument("--base-ms", type=float, default=50.0, help="computing of a step, if not slow (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each mode's turn (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples in a worker's batch (%(default)s)")


def delays(scenario: str, workers: int, base: float, seed: int) -> list[list[float]]:
    """By worker, the seconds that each step takes to compute."""
    if scenario == "steady":
        return [[base * 4]] + [[base]] * (workers - 1)
    draws = [random.Random(f"{seed} {rank}") for rank in range(workers)]
    return [[base * (5 if draw.random() < 0.1 else 1) for _ in range(DELAYS)] for draw in draws]


def steps_possible(pauses: Sequence[Sequence[float]], ahead: float, seconds: float) -> list[int]:
    """How many steps each worker can finish in that time, if it may be `ahead` steps ahead of the slowest.

    A step ends when it is computed and the step `ahead` steps before it is computed everywhere.
    """
    computed: list[list[float]] = []  # by step, by worker
    free = [0.0] * len(pauses)
    steps = [0] * len(pauses)
    while min(free) < seconds:
        number = len(computed)
        computed.append([start + row[number % len(row)] for start, row in zip(free, pauses, strict=True)])
        slowest = max(computed[number - int(ahead)]) if number >= ahead else 0.0
        free = [max(end, slowest) for end in computed[number]]
        steps = [count + (end <= seconds + ROUNDING) for count, end in zip(steps, free, strict=True)]
    return steps


def steps_with_quorum(pauses: Sequence[Sequence[float]], needed: int, seconds: float) -> int:
    """How many steps all workers together can finish in that time, if an update waits for so many of them.

    A worker is in an update once. One that is in time waits for its update; one that is late goes on at once.
    """
    version, steps = 0, [0] * len(pauses)
    weights, inside, waiting, held = [0] * len(pauses), set[int](), set[int](), list[int]()
    arrivals = [(row[0], rank) for rank, row in enumerate(pauses)]
    heapq.heapify(arrivals)

    def go_on(rank: int, now: float) -> None:
        weights[rank] = version
        steps[rank] += 1
        heapq.heappush(arrivals, (now + pauses[rank][steps[rank] % len(pauses[rank])], rank))

    while arrivals[0][0] <= seconds + ROUNDING:
        now, arrived = heapq.heappop(arrivals)
        held.append(arrived)
        while (rank := next((rank for rank in held if rank not in inside), None)) is not None:
            held.remove(rank)
            inside.add(rank)
            if weights[rank] < version:
                go_on(rank, now)
            else:
                waiting.add(rank)
            if len(inside) >= needed:
                version += 1
                for ready in sorted(waiting):
                    go_on(ready, now)
                inside.clear()
                waiting.clear()
    return sum(steps)


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each scenario and mode."""
    compute = way_to_compute(arguments.workers)
    plain = Task("small", "ddp", batch=arguments.batch, compute=compute)
    found = []
    with servers([HERE] * arguments.shards) as cluster:
        for scenario in ("steady", "random"):
            pauses = delays(scenario, arguments.workers, arguments.base_ms / 1e3, arguments.seed)
            rates: dict[str, list[float]] = {mode: [] for mode in SYSTEMS}
            for turn in range(arguments.turns):
                for mode, seen in rates.items():
                    job = job_name(f"{scenario}-{mode}-{turn}")
                    name, _, quorum = mode.partition(" ")
                    task = replace(plain, mode=name, quorum=quorum or None, job=job)
                    if quorum:  # a worker that has stopped after a warm-up would be missing for the others' quorum
                        task = replace(task, warmup=0)
                    if mode != "ddp":
                        task = replace(task, server=cluster.address)
                    seen.append(_rate(task, pauses, arguments.seconds))
            found += _results(arguments, scenario, compute, pauses, rates)
    return found


def _rate(task: Task, pauses: list[list[float]], seconds: float) -> float:
    """Steps per second of all workers together."""
    patience = START_SECONDS + 2 * seconds
    with trainers([HERE] * len(pauses), task, pauses=pauses) as group:
        if AHEAD[task.mode] == 0 and task.quorum is None:  # in lockstep all must take as many steps
            answers = group.run(patience, steps=max(1, steps_possible(pauses, 0, seconds)[0]))
            took = max(found["ends"][-1] for found in answers)
            return sum(len(found["ends"]) for found in answers) / took
        answers = group.run(patience, seconds=seconds, leave=True)
        return sum(end <= seconds for found in answers for end in found["ends"]) / seconds


def _results(
    arguments: argparse.Namespace, scenario: str, compute: str, pauses: list[list[float]], rates: dict[str, list[float]]
) -> list[Result]:
    most = {mode: sum(steps_possible(pauses, ahead, arguments.seconds)) for mode, ahead in AHEAD.items()}
    most[QUORUM] = steps_with_quorum(pauses, arguments.workers - 1, arguments.seconds)
    mean = {mode: sum(seen) / len(seen) for mode, seen in rates.items()}
    return [
        result(
            "straggler",
            mode,
            transport="" if mode == "ddp" else "shm",
            wire="" if mode == "ddp" else "float32",
            workers=arguments.workers,
            shards=0 if mode == "ddp" else arguments.shards,
            size=weight_bytes(Task("small", "single")),
            ms=round(1e3 * arguments.workers / mean[mode], 2),
            ratios={"ddp": mean[mode] / mean["ddp"]},
            scenario=scenario,
            samples_per_second=round(mean[mode] * arguments.batch, 1),
            most=round(most[mode] / most["ddp"], 3),
            compute=compute,
            base_ms=arguments.base_ms,
        )
        for mode in rates
    ]


def draw(lines: list[Result], path: Path) -> None:
    """For each scenario a bar for each mode."""
    names = {"steady": "one worker four times slower", "random": "each worker five times slower in one step of ten"}
    groups = {
        f"{lines[0]['workers']} workers, {names[scenario]}": [
            Bar(line["system"], line["ratios"]["ddp"], line["system"] != "ddp", line["most"])
            for line in lines
            if line["scenario"] == scenario
        ]
        for scenario in dict.fromkeys(line["scenario"] for line in lines)
    }
    bars(path, "samples per second, as a multiple of DDP's", groups)
