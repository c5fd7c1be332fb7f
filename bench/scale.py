"""The time of a round with more workers and more shards, and a model of constant size; and the bytes of its links.

Each worker moves the model once up and once down, so bytes grow with the workers; more shards share the same bytes. The
dotted line shows a time that is linear in bytes. The ratio is to one worker and one shard.

With N workers and K bytes of weights, one interface carries, of a round: the root of DataParallel 2(N-1)K, because it
sends weights to all others and receives their gradients; a worker of a ring 2(N-1)K/N in each direction; one of ours
2K, its gradients up and the weights down. Those are the predictions. Bytes are counted where each process is on a host
of its own, named as for `python -m bench network`, beside DDP's ring on the same workers:

    python -m bench scale --workers 2,4 --shards 2 --addresses 10.0.0.1,... --exec "ip netns exec host{number}"

Elsewhere processes share the loopback interface, and a line says that nothing was counted. The ratio `predicted` is
what was counted, in both directions together, divided by what is predicted of that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench import options
from bench import round as one_round
from bench.cluster import Host, host_flags, hosts, servers, trainers
from bench.pictures import Line, lines
from bench.results import MIB, Result, median_ms, result, step_times
from bench.training import Task

NOT_COUNTED = "bytes are not counted: processes share loopback; --addresses names hosts with interfaces of their own"
SHORT = {"mib": 16, "workers": "1,2,4", "shards": "1,2", "rounds": 6}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench scale`."""
    options.add(parser, mib=64, workers="1,2,4,8", shards="1,2,4", rounds=8, transport="shm,grpc")
    host_flags(parser, required=False)


def predicted(workers: int, size: int) -> dict[str, int]:
    """Returns the bytes of a round that one interface carries: of DataParallel's root, of a ring's worker, of ours.

    A ring's are those in each direction; the others are those of both together.
    """
    return {
        "DataParallel": 2 * (workers - 1) * size,
        "ring": 2 * (workers - 1) * size // workers,
        "ours": 2 * size,
    }


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each number of workers and shards, and each transport."""
    found = list(_on_hosts(arguments)) if arguments.addresses else _here(arguments)
    alone = {line["transport"]: line["ms"] for line in reversed(found) if line["workers"] == line["shards"] == 1}
    for line in found:
        first = alone.get(line["transport"]) if line["system"] == "ours" else None
        line["ratios"] |= {"one worker, one shard": round(line["ms"] / first, 3)} if first else {}
        line["predicted_bytes"] = predicted(line["workers"], line["bytes"])
    return found


def _here(arguments: argparse.Namespace) -> list[Result]:
    found: list[Result] = []
    plain = {**vars(arguments), "wire": "float32", "bucket_kib": None, "tls": False, "no_peers": True}
    for shards in map(int, arguments.shards.split(",")):
        for workers in map(int, arguments.workers.split(",")):
            found += one_round.run(argparse.Namespace(**{**plain, "workers": workers, "shards": shards}))
    for line in found:
        line["bench"], line["ratios"], line["not_counted"] = "scale", {}, NOT_COUNTED
        line["gigabytes_per_second"] = round(2 * line["workers"] * line["bytes"] / line["ms"] / 1e6, 2)
    return found


# -- on hosts --------------------------------------------------------------------------------------------------------


def _on_hosts(arguments: argparse.Namespace) -> Iterator[Result]:
    """Ours on the first hosts as workers and the last ones as shards, and DDP on the same workers."""
    places = hosts(arguments)
    counts, parts = (list(map(int, text.split(","))) for text in (arguments.workers, arguments.shards))
    transports = [transport for transport in arguments.transport.split(",") if transport != "shm"]
    if max(counts) + max(parts) > len(places):
        raise SystemExit(f"{max(counts)} workers and {max(parts)} shards need as many hosts; got {len(places)}")
    plain = Task("vectors", "ddp", parameters=arguments.mib * MIB // 4)
    port = arguments.port
    for workers in counts:
        if workers > 1:
            port += 1
            yield _counted(plain, places[:workers], 0, arguments.rounds, port)
        for shards in parts:
            with servers(places[-shards:]) as cluster:
                for transport in transports:
                    task = replace(plain, mode="sync", server=cluster.address, job=transport, transport=transport)
                    yield _counted(task, places[:workers], shards, arguments.rounds, port)


def _counted(task: Task, places: Sequence[Host], shards: int, rounds: int, port: int) -> Result:
    """One system: the bytes that the workers' interfaces count in so many rounds, and the median of these rounds."""
    with trainers(places, task, port=port) as group:  # their warm-up has come before
        answers = group.run(steps=rounds)
    workers, size = len(places), 4 * task.parameters
    received, sent = (round(statistics.mean(each["traffic"][way] for each in answers) / rounds) for way in (0, 1))
    expected = predicted(workers, size)
    both_ways = expected["ours"] if task.server else 2 * expected["ring"]
    return result(
        "scale",
        "ours" if task.server else "ddp",
        transport=task.transport if task.server else "",
        wire=task.wire,
        workers=workers,
        shards=shards,
        size=size,
        ms=median_ms([seconds for each in answers for seconds in step_times(each["ends"])]),
        ratios={"predicted": (received + sent) / both_ways},
        rounds=rounds,
        sent_bytes=sent,
        received_bytes=received,
    )


# -- the picture -----------------------------------------------------------------------------------------------------


def draw(found: list[Result], path: Path) -> None:
    """For each transport a line for each number of shards; and the bytes, over what is predicted."""
    panels: dict[str, list[Line]] = {}
    for transport in dict.fromkeys(line["transport"] for line in found if line["system"] == "ours"):
        group = panels[f"One round of {found[0]['bytes'] // MIB} MiB over {transport}: milliseconds"] = []
        mine = [line for line in found if line["transport"] == transport]
        for shards in dict.fromkeys(line["shards"] for line in mine):
            points = [(line["workers"], line["ms"]) for line in mine if line["shards"] == shards]
            group.append(Line(f"{shards} shard{'s' * (shards > 1)}", points))
        (count, ms), *_ = group[0].points
        linear = [(workers, ms * workers / count) for workers, _ in group[0].points]
        group.append(Line("linear in bytes", linear, dotted=True))
    panels["Sent and received by one interface: MB"] = _bytes(found)
    lines(path, "workers", "", panels)


def _bytes(found: list[Result]) -> list[Line]:
    """What is predicted, dotted; and what was counted."""
    size, counts = found[0]["bytes"], sorted({line["workers"] for line in found})
    drawn = []
    for system, name, ways in (
        ("DataParallel", "DataParallel's root, 2(N−1)K", 1),
        ("ring", "a ring's worker, 2(N−1)K/N each way", 2),
        ("ours", "our worker, 2K", 1),
    ):
        points = [(count, ways * predicted(count, size)[system] / 1e6) for count in counts]
        drawn.append(Line(name, points, dotted=True))
    counted = [line for line in found if "sent_bytes" in line]
    names = {"ours": "ours, {transport}, shards: {shards}; counted", "ddp": "DDP's ring; counted"}
    for name in dict.fromkeys(names[line["system"]].format(**line) for line in counted):
        mine = [line for line in counted if names[line["system"]].format(**line) == name]
        drawn.append(Line(name, [(each["workers"], _both_ways(each) / 1e6) for each in mine]))
    return drawn


def _both_ways(line: Result) -> int:
    total: int = line["sent_bytes"] + line["received_bytes"]
    return total
