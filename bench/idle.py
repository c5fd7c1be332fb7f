"""What processes take that have nothing to do: wake-ups and CPU of workers and shards between two steps.

Workers train a small model for some steps, and then wait for what their script does next, as it may for minutes. A
wake-up is the end of a wait of any thread of any of the processes, a worker's heartbeat process among them. Afterwards
they train on: none has lost its job meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import options
from bench.cluster import HERE, job_name, servers, trainers
from bench.machine import cpu_seconds, family, waits
from bench.pictures import Bar, bars
from bench.results import Result, label, result, step_ms
from bench.training import Task, weight_bytes

SETTLED_SECONDS = 3.0  # from the last step on until counting begins: what follows a step is over
STEPS = 20
SHORT = {"seconds": 5.0}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench idle`."""
    options.add(parser, workers=2, shards=2, seconds=20.0, transport="shm,tcp,grpc")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for DDP, and one for each transport."""
    plain = Task("small", "ddp")
    systems = [plain] + [
        replace(plain, mode="sync", transport=transport, job=job_name(transport))
        for transport in arguments.transport.split(",")
    ]
    return [_measured(arguments, task) for task in systems]


def _measured(arguments: argparse.Namespace, task: Task) -> Result:
    """One system alone on the machine: whatever else there is of a benchmark would wake as well."""
    ours = task.mode != "ddp"
    with contextlib.ExitStack() as stack:
        shards: Sequence[int] = ()
        if ours:
            cluster = stack.enter_context(servers([HERE] * arguments.shards))
            shards, task = cluster.pids, replace(task, server=cluster.address)
        group = stack.enter_context(trainers([HERE] * arguments.workers, task))
        answers = group.run(steps=STEPS)
        time.sleep(SETTLED_SECONDS)
        found = _idle(group.pids, shards, arguments.seconds)
        group.run(steps=STEPS)
    return result(
        "idle",
        "ours" if ours else "ddp",
        transport=task.transport if ours else "",
        wire=task.wire if ours else "",
        workers=arguments.workers,
        shards=len(shards),
        size=weight_bytes(task),
        ms=step_ms([answers]),
        **found,
    )


def _idle(workers: Sequence[int], shards: Sequence[int], seconds: float) -> dict[str, float]:
    """Waits so long; returns what the processes of workers and shards, and their children, have done meanwhile."""
    both = [[each for pid in pids for each in family(pid)] for pids in (workers, shards)]
    pids = [*both[0], *both[1]]
    began, before, used = time.monotonic(), [waits(each) for each in both], cpu_seconds(pids)
    time.sleep(seconds)
    used, after = cpu_seconds(pids) - used, [waits(each) for each in both]
    taken = time.monotonic() - began
    of_workers, of_shards = (
        sum(count - old.get(thread, 0) for thread, count in new.items()) / taken
        for old, new in zip(before, after, strict=True)
    )
    return {
        "wakeups": round(of_workers + of_shards, 1),
        "workers_wakeups": round(of_workers, 1),
        "shards_wakeups": round(of_shards, 1),
        "idle_cpu_ms": round(1e3 * used / taken, 2),
    }


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system."""
    title = f"{lines[0]['workers']} workers that wait, and their shards"
    bars(path, "wake-ups a second", {title: [Bar(label(line), line["wakeups"], line["shards"] > 0) for line in lines]})
