"""A reader on a relay's host that maps the relay's memory, and one that gets messages of the same relay, in turns."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, replace

from bench.cluster import HERE, Group, servers, trainers
from bench.feed_beside import ELEMENT_BYTES, SECONDS, WARMUP, Seen, followed_steps
from bench.feed_reader import Followed
from bench.feed_training import relays
from bench.results import Result, median_ms, result
from bench.training import Task

EDITIONS_IN_MEMORY = 2
SYSTEMS = {"ours": True, "messages of the same relay": False}  # whether the reader maps memory


def mapped(arguments: argparse.Namespace) -> list[Result]:
    """Measures: until a reader on a relay's host has an edition in its model, and the memory that is its own then."""
    elements = int(arguments.mb * 1e6) // ELEMENT_BYTES
    task = Task("vectors", "sync", parameters=elements, batch=2, warmup=WARMUP, pauses=(arguments.pause_ms / 1e3,))
    found: dict[str, list[Seen]] = {system: [] for system in SYSTEMS}
    private = dict.fromkeys(SYSTEMS, 0)
    version = WARMUP
    with (
        tempfile.TemporaryDirectory(prefix="feed-") as shared,
        servers([HERE] * arguments.shards) as cluster,
        trainers([HERE], replace(task, server=cluster.address)) as training,
        relays(HERE, cluster.address, 1, "--shared-directory", shared) as [relay],
    ):
        for system in [system for _ in range(arguments.turns) for system in SYSTEMS]:
            directory = shared if SYSTEMS[system] else ""
            followed = Followed([relay.address], model=elements, vector=task.vector, shared_directory=directory)
            with Group([HERE], "bench.feed_reader", [asdict(followed)]) as reader:
                reader.answers(SECONDS)
                reader.run(SECONDS, open=True)
                found[system].append(followed_steps(training, reader, version, arguments.editions))
                version += arguments.editions
                [answered] = reader.run(SECONDS, until=version)  # it is there: only its memory is asked for
                reader.run(SECONDS, close=True)
            _check(system, found[system][-1])
            sizes = answered["memory"]
            private[system] = max(private[system], sizes["private"] - sizes["private_before"])
    return [_line(arguments, task, system, found, private[system]) for system in SYSTEMS]


def _check(system: str, seen: Seen) -> None:
    """Raises SystemExit where editions came another way than the system says."""
    if (seen.part == 0) != SYSTEMS[system]:
        raise SystemExit(f"wrong result: {system}: {seen.part:.2f} of an edition's bytes came in messages")


def _line(arguments: argparse.Namespace, task: Task, system: str, found: dict[str, list[Seen]], private: int) -> Result:
    # In its first turn the relay follows the job for the first time.
    seconds = {each: [took for turn in turns[1:] or turns for took in turn.seconds] for each, turns in found.items()}
    held = EDITIONS_IN_MEMORY * ELEMENT_BYTES * task.parameters
    return result(
        "feed",
        system,
        wire="bfloat16",
        workers=1,
        shards=arguments.shards,
        size=2 * ELEMENT_BYTES * task.parameters,
        ms=median_ms(seconds[system]),
        ratios={
            "ours": statistics.median(seconds[system]) / statistics.median(seconds["ours"]),
            "two copies": private / held,
        },
        scenario="a reader on a relay's host",
        worst_ms=round(1e3 * max(seconds[system]), 2),
        editions=len(seconds[system]),
        private_bytes=private,
        held_bytes=held,
    )
