"""What readers cost training: its steps with readers, and without, in the same processes and in turns."""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from bench.cluster import HERE, START_SECONDS, Group, Host, servers, trainers
from bench.feed_reader import Followed
from bench.feed_ways import OURS, WAYS, reader_result
from bench.results import Result, median_ms, step_times
from bench.talk import end
from bench.training import Task, weight_bytes

SECONDS = 300.0  # for an answer


def one_reader(arguments: argparse.Namespace) -> list[Result]:
    """Measures: a GPT's steps, with a reader of each edition on the same host in both ways, and without."""
    return [_one_reader(arguments, way) for way in WAYS]


def _one_reader(arguments: argparse.Namespace, way: str) -> Result:
    task = Task("gpt", "sync", batch=arguments.batch, layers=arguments.layers, width=arguments.width)
    with servers([HERE] * arguments.shards) as cluster:
        followed = Followed([cluster.address], shared_directory=WAYS[way])
        with (
            trainers([HERE], replace(task, server=cluster.address)) as training,
            Group([HERE], "bench.feed_reader", [asdict(followed)]) as reader,
        ):
            reader.answers(SECONDS)

            @contextlib.contextmanager
            def following() -> Iterator[None]:
                reader.run(SECONDS, open=True)
                yield
                reader.run(SECONDS, close=True)

            seconds = _in_turns(arguments, training, following)
    return _line(arguments, task, way.replace(OURS, "1 reader"), seconds, readers=1)


def many_readers(arguments: argparse.Namespace) -> list[Result]:
    """Measures: steps of a small model, with many readers of each edition through relays, and without."""
    pauses = (arguments.pause_ms / 1e3 / 4,)
    task = Task("vectors", "sync", parameters=int(arguments.relayed_mb * 1e6) // 2, batch=2, pauses=pauses)
    followed, elsewhere = Followed([], readers=arguments.readers), host_of_others(arguments.nice)
    received: list[dict[str, Any]] = []
    with (
        servers([HERE] * arguments.shards) as cluster,
        trainers([HERE], replace(task, server=cluster.address)) as training,
        Group([elsewhere], "bench.feed_reader", [asdict(followed)]) as readers,
    ):
        readers.answers(SECONDS)

        @contextlib.contextmanager
        def following() -> Iterator[None]:
            more = "--max-feeds", str(2 * arguments.readers)
            with relays(elsewhere, cluster.address, arguments.relays, *more) as found:
                readers.run(SECONDS, open=[each.address for each in found])
                yield
                received.extend(readers.run(SECONDS, close=True))

        seconds = _in_turns(arguments, training, following)
    editions = [count for each in received for count in each["editions"]]
    more = {"readers": arguments.readers, "relays": arguments.relays, "least_editions": min(editions)}
    system = f"{arguments.readers} readers, {arguments.relays} relays"
    megabytes = sum(each["received"] for each in received) / 1e6
    return [_line(arguments, task, system, seconds, **more, readers_mb=round(megabytes, 1))]


def _in_turns(
    arguments: argparse.Namespace, training: Group, following: Callable[[], AbstractContextManager[None]]
) -> dict[str, list[float]]:
    """Mean seconds of a step in each turn, with readers and without. A turn's first step does not count."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * arguments.pairs):
        name = "with" if number % 4 in (1, 2) else "without"  # so that what slowly changes tells for neither
        with following() if name == "with" else contextlib.nullcontext():
            [answer] = training.run(SECONDS, seconds=arguments.turn_seconds)
        seconds[name].append(statistics.mean(step_times(answer["ends"])))
    return seconds


def _line(
    arguments: argparse.Namespace, task: Task, system: str, seconds: dict[str, list[float]], **more: Any
) -> Result:
    ratios = [without / using for without, using in zip(seconds["without"], seconds["with"], strict=True)]
    return reader_result(
        "training, steps a second",
        system,
        arguments.shards,
        weight_bytes(task),
        median_ms(seconds["with"]),
        ratios={"without": statistics.median(ratios)},
        alone_ms=median_ms(seconds["without"]),
        pairs=[round(each, 3) for each in ratios],
        **more,
    )


# -- relays ----------------------------------------------------------------------------------------------------------


class Relay(NamedTuple):
    """A running relay. downloads: where it serves files; empty: nowhere"""

    process: subprocess.Popen[str]
    address: str
    downloads: str


def host_of_others(nice: int) -> Host:
    """Returns this machine, for processes that stand for those of others: they take cores that would be idle."""
    return replace(HERE, prefix=("nice", "-n", str(nice)))


@contextlib.contextmanager
def relays(host: Host, upstream: str, count: int, *flags: str, downloads: bool = False) -> Iterator[list[Relay]]:
    """So many relays of a cluster."""
    words = ["relay", "--upstream", upstream, "--port", "0", "--metrics-port", "0", *flags]
    words += ["--http-port", "0"] if downloads else []
    running = [host.start("ps_server", *words) for _ in range(count)]
    try:
        addresses = [_said(each, r"ready at (\S+)") for each in running]
        sites = [_said(each, r"downloads at http://([^/]+)/") if downloads else "" for each in running]
        yield [Relay(*each) for each in zip(running, addresses, sites, strict=True)]
    finally:
        for each in running:
            each.terminate()
        end(running)


def _said(process: subprocess.Popen[str], pattern: str) -> str:
    """Returns what a process says in a line of its output."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(pattern, line)
        if found:
            return found[1]
    raise RuntimeError(f"a relay ended with code {process.wait(START_SECONDS)}")
