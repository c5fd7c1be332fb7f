"""A reader on a relay's host that maps the relay's memory, and one that gets messages of the same relay, in turns."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, replace

from bench.cluster import HERE, Group, servers, trainers
from bench.feed_beside import SECONDS, WARMUP, Seen, followed_steps
from bench.feed_reader import Followed
from bench.feed_training import relays
from bench.feed_ways import EDITIONS_IN_MEMORY, ELEMENT_BYTES, OURS, check_way, reader_result
from bench.results import Result, median_ms
from bench.training import Task

SYSTEMS = {OURS: True, "messages of the same relay": False}  # whether the reader maps memory


def mapped(arguments: argparse.Namespace) -> list[Result]:
    """Measures: until a reader on a relay's host has an edition in its model, and the memory that is its own then."""
    elements = int(arguments.mb * 1e6) // ELEMENT_BYTES
    task = Task("vectors", "sync", parameters=elements, batch=2, warmup=WARMUP, pauses=(arguments.pause_ms / 1e3,))
    found: dict[str, list[Seen]] = {system: [] for system in SYSTEMS}
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
                reader.run(SECONDS, close=True)
            check_way(system, SYSTEMS[system], found[system][-1].part)
    return [_line(arguments, task, system, found) for system in SYSTEMS]


def _line(arguments: argparse.Namespace, task: Task, system: str, found: dict[str, list[Seen]]) -> Result:
    # In its first turn the relay follows the job for the first time.
    seconds = {each: [took for turn in turns[1:] or turns for took in turn.seconds] for each, turns in found.items()}
    held = EDITIONS_IN_MEMORY * ELEMENT_BYTES * task.parameters
    private = max(turn.private or 0 for turn in found[system])
    ratios = {
        OURS: statistics.median(seconds[system]) / statistics.median(seconds[OURS]),
        "two copies": private / held,
    }
    return reader_result(
        "a reader on a relay's host",
        system,
        arguments.shards,
        2 * ELEMENT_BYTES * task.parameters,
        median_ms(seconds[system]),
        ratios=ratios,
        worst_ms=round(1e3 * max(seconds[system]), 2),
        editions=len(seconds[system]),
        private_bytes=private,
        held_bytes=held,
    )
