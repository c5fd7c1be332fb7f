"""The cost of checkpoints, and how long a job stands still when a shard is killed.

`checkpoints`: the same processes train in turns without checkpoints and with one every so many seconds; the ratio is
throughput with them to throughput without, the median of neighbouring turns. `killed`: SIGKILL ends a shard of
`ps-server up` after a checkpoint, while workers train in async; `ms` is the longest pause of a worker's steps,
`restart_ms` how long after the kill the shard was ready again, and `after_restart_ms` how long from then until every
worker had made a step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import options
from bench.cluster import HERE, START_SECONDS, servers, trainers
from bench.pictures import Bar, bars
from bench.results import MIB, Result, result, step_ms, step_times
from bench.training import Task
from ps_protocol.errors import PSError
from ps_server.ops.requests import checkpoint_job, fetch

SHORT = {"mib": 64, "rounds": 2, "seconds": 10.0, "every": 5.0}
READY_SECONDS = 60.0
TRIED_STEPS = 12  # to find out how long one takes


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench recovery`."""
    options.add(parser, mib=256, workers=2, shards=2, pause_ms=0.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between checkpoints (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stretch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="stretches with checkpoints, and without (%(default)s)")
    parser.add_argument("--where", type=Path, help="directory for checkpoints (a temporary one)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures."""
    with tempfile.TemporaryDirectory(dir=arguments.where) as directory:
        elements = arguments.mib * MIB // 4
        pauses = (arguments.pause_ms / 1e3,) if arguments.pause_ms else ()
        task = Task("vectors", "sync", parameters=elements, batch=2, warmup=3, pauses=pauses)
        return [
            _cost(arguments, task, Path(directory)),
            _killed(arguments, replace(task, mode="async"), Path(directory)),
        ]


def _cost(arguments: argparse.Namespace, task: Task, directory: Path) -> Result:
    # The same processes do both: from one start to the next, rates differ by more than checkpoints cost.
    rates: dict[str, list[float]] = {"without": [], "with": []}
    turns: list[list[dict[str, Any]]] = []
    places = [HERE] * arguments.workers
    with (
        servers([HERE] * arguments.shards, ("--checkpoint-dir", str(directory / "cost"))) as cluster,
        trainers(places, replace(task, server=cluster.address)) as group,
    ):
        count = math.ceil(arguments.seconds / step_ms([group.run(steps=TRIED_STEPS)[:1]]) * 1e3)
        made: list[str] = []
        for number in range(2 * arguments.rounds):
            name = "with" if number % 4 in (1, 2) else "without"  # so that what slowly changes tells for neither
            every = arguments.every if name == "with" else math.inf
            with _checkpoints(cluster.address, task.job, every, made):
                found = group.run(START_SECONDS + 2 * arguments.seconds, steps=count)
            rates[name].append(min(len(each["ends"]) / each["ends"][-1] for each in found))
            if name == "with":
                turns.append(found)
    if not made:
        raise SystemExit("no checkpoint was made: a stretch of --seconds must be longer than half of --every")
    return result(
        "recovery",
        "checkpoints",
        workers=arguments.workers,
        shards=arguments.shards,
        size=4 * task.parameters,
        ms=step_ms(turns),
        ratios={"without": statistics.median(w / o for w, o in zip(rates["with"], rates["without"], strict=True))},
        every_seconds=arguments.every,
        checkpoints=len(made),
        steps_per_second={name: [round(rate, 3) for rate in found] for name, found in rates.items()},
    )


@contextlib.contextmanager
def _checkpoints(address: str, job: str, every: float, made: list[str]) -> Iterator[None]:
    """One every so many seconds, the first after half of that; what is said of each goes to `made`."""
    over = threading.Event()

    def ask() -> None:
        due = time.monotonic() + every / 2
        while not over.wait(min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)):
            made.append(checkpoint_job(address, job))
            due += every

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        asking.result()


def _killed(arguments: argparse.Namespace, task: Task, directory: Path) -> Result:
    places = [HERE] * arguments.workers
    times: dict[str, float] = {}
    with (
        _up(arguments, directory / "killed") as address,
        trainers(places, replace(task, server=address)) as group,
    ):

        def disturb() -> None:
            """Has a checkpoint made, for which the workers have to step, and then a shard killed."""
            now = [sys.executable, "-m", "ps_server", "checkpoint", "--server", address]
            subprocess.run(now, check=True, stdout=sys.stderr)
            _kill_and_watch(address, times)

        thread = threading.Thread(target=disturb, daemon=True)
        began = time.perf_counter()
        thread.start()
        found = group.run(seconds=arguments.seconds + 20.0)
        thread.join(READY_SECONDS)
    ready = times["ready"] - began
    after = max(min(end for end in each["ends"] if end > ready) for each in found) - ready
    return result(
        "recovery",
        "killed",
        workers=arguments.workers,
        shards=arguments.shards,
        size=4 * task.parameters,
        ms=round(1e3 * max(max(step_times(each["ends"])) for each in found), 1),
        restart_ms=round(1e3 * (times["ready"] - times["killed"]), 1),
        after_restart_ms=round(1e3 * after, 1),
    )


@contextlib.contextmanager
def _up(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    """`ps-server up` on free ports: its address."""
    command = [sys.executable, "-m", "ps_server", "up", "--shards", str(arguments.shards), "--port", "0"]
    command += ["--metrics-port", "0", "--checkpoint-dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ps-server: ready at ").split(" ")[0]
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _kill_and_watch(address: str, times: dict[str, float]) -> None:
    """Kills the last shard after a few steps, and says when, and when another serves in its place."""
    time.sleep(5.0)  # steps of before, to compare with
    shard = _last_shard(address)
    times["killed"] = time.perf_counter()
    os.kill(shard["pid"], signal.SIGKILL)
    while _last_shard(address).get("pid", shard["pid"]) == shard["pid"]:
        time.sleep(0.05)
    times["ready"] = time.perf_counter()


def _last_shard(address: str) -> dict[str, Any]:
    """What is known of it; nothing while the coordinator, which may be in the same process, does not answer."""
    with contextlib.suppress(PSError):
        return max(fetch(address)["shards"], key=lambda shard: shard["index"])
    return {}


def draw(lines: list[Result], path: Path) -> None:
    """How long a killed shard's workers stood still, and of that, how long the shard took to start."""
    [line] = [line for line in lines if line["system"] == "killed"]
    found = [
        Bar("until it serves again", line["restart_ms"] / 1e3, False),
        Bar("and from then to the workers' next step", line["after_restart_ms"] / 1e3, True),
    ]
    bars(path, "s", {f"A killed shard, {line['bytes'] / MIB:.0f} MiB on {line['shards']} shards": found})
