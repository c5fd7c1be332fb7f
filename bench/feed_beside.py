"""How long it takes from an update to the weights in a reader's model, on one host, and over a link of another."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.cluster import HERE, Group, Host, servers, trainers
from bench.feed_peer import Peer
from bench.feed_reader import Followed
from bench.feed_ways import EDITIONS_IN_MEMORY, ELEMENT_BYTES, OURS, WAYS, check_way, reader_result
from bench.link import linked, why_no_link
from bench.peer_ray import ray_here
from bench.results import Result, median_ms
from bench.training import Task
from ps_runtime.free_ports import free_port

SECONDS = 300.0  # for an answer
WARMUP = 3
# A reader of this host may have an edition before the trainer's `step` has returned: it counts as this.
LEAST_SECONDS = 1e-5
LEARNING_RATE = 1e-6  # on the link: that of fine-tuning
PEERS = {
    "sockets": "plain sockets",
    "folder": "safetensors in a folder",
    "copied": "safetensors, copied",
    "gloo": "broadcast over gloo",
    "ray": "Ray's object store",
}


@dataclass(frozen=True)
class Seen:
    """What a system did.

    seconds: from each update until a model had it
    part:    bytes that came, for each byte of weights; None: as many
    private: bytes of memory of the reader alone at the end, beyond those of before it began; None: they do not count
    """

    seconds: list[float]
    part: float | None = None
    private: int | None = None


def same_host(arguments: argparse.Namespace) -> list[Result]:
    """Measures: a feed in both ways and its peers, on this machine; the systems take turns."""
    task = _task(arguments)
    reason = why_no_ray()
    kinds = "sockets", "folder", "gloo", *(() if reason else ("ray",))
    with tempfile.TemporaryDirectory(prefix="feed-") as folder:
        found = _measure(arguments, task, [HERE, HERE], WAYS, kinds, folder, arguments.editions)
    for way, directory in WAYS.items():
        check_way(way, bool(directory), found[way].part)
    lines = _lines(arguments, "one host", found)
    return [*lines, _line(arguments, "one host", PEERS["ray"], None, not_measured=reason)] if reason else lines


def slow_link(arguments: argparse.Namespace) -> list[Result]:
    """Measures: a feed of changes and a file that is copied, between two hosts with a link of so many Mbit/s."""
    scenario = f"a link of {arguments.link_mbit:g} Mbit/s"
    task = replace(_task(arguments), lr=LEARNING_RATE)
    reason = why_no_link()
    if reason:
        return [_line(arguments, scenario, each, None, not_measured=reason) for each in ("ours", PEERS["copied"])]
    with linked(arguments.link_mbit) as hosts, tempfile.TemporaryDirectory() as folder:
        found = _measure(arguments, task, hosts, {OURS: ""}, ("copied",), folder, arguments.copies)
    return _lines(arguments, scenario, found, learning_rate=LEARNING_RATE)


def _task(arguments: argparse.Namespace) -> Task:
    elements = int(arguments.mb * 1e6) // ELEMENT_BYTES
    pauses = (arguments.pause_ms / 1e3,)
    return Task("vectors", "sync", parameters=elements, batch=2, warmup=WARMUP, pauses=pauses)


def _measure(
    arguments: argparse.Namespace,
    task: Task,
    hosts: Sequence[Host],
    ways: Mapping[str, str],
    kinds: Sequence[str],
    folder: str,
    count: int,
) -> dict[str, Seen]:
    """What each system does; they take turns.

    hosts: the trainer's, with the servers, and the reader's
    ways:  of a feed, by system: see WAYS. Each has a cluster of its own: a shard copies editions into memory files as
           long as any reader maps them
    """
    with contextlib.ExitStack() as stack:
        ours = {way: stack.enter_context(_followed(arguments, task, hosts, shared)) for way, shared in ways.items()}
        peers = {kind: stack.enter_context(_peer(kind, task, hosts, folder)) for kind in kinds}
        for group in (*(reader for _, reader in ours.values()), *peers.values()):
            group.answers(SECONDS)
        for _, reader in ours.values():
            reader.run(SECONDS, open=True)
        found: dict[str, list[Seen]] = {system: [] for system in (*ways, *kinds)}
        version = WARMUP
        for _ in range(arguments.turns):
            for way, (training, reader) in ours.items():
                found[way].append(followed_steps(training, reader, version, arguments.editions))
            version += arguments.editions
            for kind, group in peers.items():
                found[kind].append(_published(group, count))
    return {system: _together(seen[1:] or seen) for system, seen in found.items()}


@contextlib.contextmanager
def _followed(
    arguments: argparse.Namespace, task: Task, hosts: Sequence[Host], shared: str
) -> Iterator[tuple[Group, Group]]:
    """A trainer with servers of its own, and a process that will follow it."""
    with servers([hosts[0]] * arguments.shards) as cluster:
        followed = Followed([cluster.address], model=task.parameters, vector=task.vector, shared_directory=shared)
        with (
            trainers(hosts[:1], replace(task, server=cluster.address)) as training,
            Group(hosts[1:], "bench.feed_reader", [asdict(followed)]) as reader,
        ):
            yield training, reader


def _together(seen: Sequence[Seen]) -> Seen:
    parts = [each.part for each in seen if each.part is not None]
    private = [each.private for each in seen if each.private is not None]
    seconds = [seconds for each in seen for seconds in each.seconds]
    return Seen(seconds, statistics.median(parts) if parts else None, max(private, default=None))


@contextlib.contextmanager
def _peer(kind: str, task: Task, hosts: Sequence[Host], folder: str) -> Iterator[Group]:
    told = asdict(Peer(kind, replace(task, mode="single"), free_port(HERE.address), folder))
    if kind == "ray":
        group = Group([ray_here(Path(folder))], "bench.feed_ray", [told])
    else:
        group = Group(hosts, "bench.feed_peer", [told, told])
    with group:
        yield group


def followed_steps(training: Group, reader: Group, version: int, count: int) -> Seen:
    """Has a trainer at a version take steps, and a reader follow it to the last. Versions that no reader saw, because
    the next one came first, are left out."""
    reader.tell(until=version + count)
    [stepped] = training.run(SECONDS, steps=count)
    [answer] = reader.answers(SECONDS)
    [there] = reader.run(SECONDS, until=version + count)  # only its memory is asked for
    ends = {version + number: stepped["began"] + end for number, end in enumerate(stepped["ends"], 1)}
    seconds = [max(LEAST_SECONDS, loaded - ends[each]) for each, loaded in answer["loaded"] if each in ends]
    private = there["memory"]["private"] - there["memory"]["private_before"]
    return Seen(seconds, answer["received"] / max(1, answer["elements"]), private)


def _published(group: Group, count: int) -> Seen:
    """Has a trainer publish so many versions. Raises SystemExit unless the loader has what the trainer has."""
    answers = group.run(SECONDS, count=count)
    trained, loaded = answers[0].get("ends", answers)  # of Ray, one process answers for both
    if trained["checksum"] != loaded["checksum"]:
        raise SystemExit("wrong result: a peer's loader has other weights than its trainer")
    return Seen([after - before for before, after in zip(trained["times"], loaded["times"], strict=True)])


def _lines(arguments: argparse.Namespace, scenario: str, found: Mapping[str, Seen], **more: Any) -> list[Result]:
    medians = {system: statistics.median(seen.seconds) for system, seen in found.items()}
    lines = []
    for kind, seen in found.items():
        ratios = {each: medians[kind] / medians[each] for each in (*WAYS, "sockets") if each in found}
        lines.append(_line(arguments, scenario, PEERS.get(kind, kind), seen, ratios=ratios, **more))
    return lines


def _line(arguments: argparse.Namespace, scenario: str, system: str, seen: Seen | None, **more: Any) -> Result:
    size = int(arguments.mb * 1e6)
    if seen is not None:
        more["worst_ms"] = round(1e3 * max(seen.seconds), 2)
        more["editions"] = len(seen.seconds)
        if seen.part is not None:
            more["received_part"] = round(seen.part, 4)
        if seen.private is not None:
            more["private_bytes"], more["held_bytes"] = seen.private, EDITIONS_IN_MEMORY * size
            more["ratios"] = {**more["ratios"], "two copies": seen.private / more["held_bytes"]}
    shards = arguments.shards if system in WAYS else 0
    ms = None if seen is None else median_ms(seen.seconds)
    return reader_result(scenario, system, shards, ELEMENT_BYTES * size, ms, **more)


def why_no_ray() -> str:
    """Returns why Ray cannot be measured, and how it could be; empty: it can."""
    try:
        metadata.version("ray")
    except metadata.PackageNotFoundError:
        return "Ray is not installed: pip install --group peers"
    return ""
