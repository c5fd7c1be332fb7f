"""Workers and shards on separate hosts, with a model bound by communication; DDP (gloo) on the same hosts.

Give the addresses of the hosts, and a command that runs another command on one of them: {host} is its address,
{number} counts from 1:

    python -m bench network --addresses 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 --exec "ssh {host}"
    python -m bench network --addresses 10.0.0.1,10.0.0.2 --exec "ip netns exec host{number}" --link-mbit 1000

The first half of the hosts are workers, the second half shards. The ratio `ddp` is that of the median step times; the
ratio `link` is the payload that the busiest link carries in one direction, divided by its capacity in that time.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

from bench import options
from bench.cluster import host_flags, hosts, servers, take_turns, trainers
from bench.pictures import Bar, bars
from bench.results import Result, label, result, step_ms
from bench.training import Task

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHORT = {"parameters": 2_000_000, "turns": 3, "steps": 4}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench network`."""
    host_flags(parser, required=True)
    parser.add_argument("--workers", type=int, help="how many of the hosts are workers (half)")
    parser.add_argument("--parameters", type=int, default=8_000_000, help="of the model (%(default)s)")
    options.add(parser, wire="float32,bfloat16", bucket_kib=None, turns=3, steps=5)


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each system."""
    places = hosts(arguments)
    count = arguments.workers or len(places) // 2
    workers, shards = places[:count], places[count:]
    if not workers or not shards:
        raise SystemExit("a network needs at least one host for a worker and one for a shard")
    plain = Task("vectors", "ddp", parameters=arguments.parameters)
    with servers(shards) as cluster, contextlib.ExitStack() as stack:
        tasks = {"ddp": plain} if count > 1 else {}
        for wire in arguments.wire.split(","):
            ours = replace(plain, mode="sync", server=cluster.address, job=wire, transport="tcp", wire=wire)
            kib = arguments.bucket_kib  # on the wire; in the model, of float32
            bucket = kib and kib * 1024 * ITEM_BYTES["float32"] // ITEM_BYTES[wire]
            tasks[f"sync {wire}"] = replace(ours, bucket_bytes=bucket)
        groups = {
            name: stack.enter_context(trainers(workers, task, port=arguments.port)) for name, task in tasks.items()
        }
        turns = take_turns(groups, arguments.turns, arguments.steps)
    ms = {name: step_ms(answers) for name, answers in turns.items()}
    found = []
    for name, task in tasks.items():
        ratios = {"ddp": ms[name] / ms["ddp"]} if "ddp" in ms else {}
        if arguments.link_mbit and task.server:
            ratios["link"] = _busiest_link(task, count, len(shards)) * 8 / (arguments.link_mbit * 1e3 * ms[name])
        moved = sum(max(max(each["traffic"]) for each in answers) for answers in turns[name])
        found.append(
            result(
                "network",
                task.mode,
                transport=task.transport if task.server else "",
                wire=task.wire,
                workers=count,
                shards=len(shards) if task.server else 0,
                size=4 * task.parameters,
                ms=ms[name],
                ratios=ratios,
                steps=arguments.turns * (arguments.steps - 1),
                link_mbit=arguments.link_mbit,
                moved_bytes=round(moved / arguments.turns / arguments.steps),
            )
        )
    return found


def _busiest_link(task: Task, workers: int, shards: int) -> float:
    """Bytes of payload that the busiest link carries in one direction in one step: a worker's, or a shard's."""
    return task.parameters * ITEM_BYTES[task.wire] * max(1.0, workers / shards)


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system."""
    rate = f", links of {lines[0]['link_mbit']:g} Mbit/s" if lines[0]["link_mbit"] else ""
    title = f"A step of {lines[0]['bytes'] / 1e6:.0f} MB of weights, {lines[0]['workers']} worker hosts{rate}"
    bars(path, "milliseconds", {title: [Bar(label(line), line["ms"], line["system"] != "ddp") for line in lines]})
