"""The time of a round with more workers and more shards, and a model of constant size.

Each worker moves the model once up and once down, so bytes grow with the workers; more shards share the same bytes. The
dotted line shows a time that is linear in bytes. The ratio is to one worker and one shard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import options
from bench import round as one_round
from bench.pictures import Line, lines
from bench.results import MIB, Result

SHORT = {"mib": 16, "workers": "1,2,4", "shards": "1,2", "rounds": 6}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench scale`."""
    options.add(parser, mib=64, workers="1,2,4,8", shards="1,2,4", rounds=8, transport="shm,grpc")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each number of workers and shards, and each transport."""
    found: list[Result] = []
    plain = {**vars(arguments), "wire": "float32", "bucket_kib": None, "no_peers": True}
    for shards in map(int, arguments.shards.split(",")):
        for workers in map(int, arguments.workers.split(",")):
            found += one_round.run(argparse.Namespace(**{**plain, "workers": workers, "shards": shards}))
    alone = {line["transport"]: line["ms"] for line in reversed(found) if line["workers"] == line["shards"] == 1}
    for line in found:
        first = alone.get(line["transport"])
        line["bench"] = "scale"
        line["ratios"] = {"one worker, one shard": round(line["ms"] / first, 3)} if first else {}
        line["gigabytes_per_second"] = round(2 * line["workers"] * line["bytes"] / line["ms"] / 1e6, 2)
    return found


def draw(found: list[Result], path: Path) -> None:
    """For each transport a line for each number of shards."""
    panels: dict[str, list[Line]] = {}
    for transport in dict.fromkeys(line["transport"] for line in found):
        group = panels[f"One round of {found[0]['bytes'] // MIB} MiB over {transport}"] = []
        mine = [line for line in found if line["transport"] == transport]
        for shards in dict.fromkeys(line["shards"] for line in mine):
            points = [(line["workers"], line["ms"]) for line in mine if line["shards"] == shards]
            group.append(Line(f"{shards} shard{'s' * (shards > 1)}", points))
        (count, ms), *_ = group[0].points
        linear = [(workers, ms * workers / count) for workers, _ in group[0].points]
        group.append(Line("linear in bytes", linear, dotted=True))
    lines(path, "workers", "milliseconds", panels)
