"""Random faults on a real cluster that trains the counting oracle: what is lost, and what recovery costs.

Each mode trains twice on servers of its own, which make checkpoints: first undisturbed, then with a fault about every
so many seconds. Workers are killed, stopped and continued, or cut off; shards are killed or stopped, or their disks
are full; with --apart, the coordinator is killed. Every push leaves marks in the weights. A violation is an
acknowledged push that is not in them exactly once, a torn update, a pull that is staler than the mode allows, a
worker that gives up, or a job that does not continue. In ssp and async a killed shard is rolled back to its last
checkpoint: the servers must have counted as lost what is missing then. A wait replaces a step's computing.

`samples/s` is the rate with faults. The ratio `undisturbed` compares it with the undisturbed run, and `present` with
that run's rate for the time in which workers were present: a worker is absent from its fault to its next step.
Seconds are medians and maxima over the faults of a kind: `back`, until the affected worker steps again; `stall`, the
longest that the others (after a server's fault, all) stood still. The seed decides which fault happens when, and
where."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import options
from bench.pictures import Bar, bars
from bench.results import Result, result
from tests.chaos.cluster import ServerFlags, Servers, errors_in
from tests.chaos.faults import KINDS, plan
from tests.chaos.links import Links
from tests.chaos.oracle import Cells, Shape, Violation
from tests.chaos.trial import Trace, Trial
from tests.chaos.worker import Task

SHORT = {"minutes": 1.0, "every": 5.0, "undisturbed": 10.0}
SHOWN = 20  # violations of a mode that are written out


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench chaos`."""
    options.add(parser, workers=4, shards=2, seed=0, pause_ms=50.0)
    parser.add_argument("--minutes", type=float, default=6.0, help="of faults, all modes together (%(default)s)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from fault to fault, about (%(default)s)")
    parser.add_argument("--modes", default="sync,ssp:4,async", help="(%(default)s)")
    parser.add_argument("--faults", help="the kinds to draw from: any of " + ", ".join(KINDS) + " (all)")
    parser.add_argument("--apart", action="store_true", help="the coordinator in a process of its own")
    parser.add_argument("--checkpoint-every", default="5s", help="as for ps-server up (%(default)s)")
    parser.add_argument("--lease", type=float, default=3.0, help="seconds a silent worker counts as live (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples that a step stands for (%(default)s)")
    parser.add_argument("--transport", default="shm,grpc", help="of the ranks, in turn (%(default)s)")
    parser.add_argument(
        "--undisturbed", type=float, metavar="SECONDS", help="of each mode's run without faults (as long as with)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to leave ledgers and logs")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each mode."""
    modes = arguments.modes.split(",")
    seconds = 60 * arguments.minutes / len(modes)
    if arguments.keep is not None and arguments.keep.is_dir() and any(arguments.keep.iterdir()):
        raise SystemExit(f"--keep takes a new or an empty folder, and something lies in {arguments.keep}")
    unknown = set(kinds_of(arguments)) - KINDS.keys()
    if unknown:
        raise SystemExit(f"no such faults: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        return [_mode(arguments, mode, seconds, Path(arguments.keep or folder)) for mode in modes]


def kinds_of(arguments: argparse.Namespace) -> list[str]:
    """The kinds of faults to draw from."""
    if arguments.faults is not None:
        return str(arguments.faults).split(",")
    return [name for name, kind in KINDS.items() if kind.to != "coordinator" or arguments.apart]


def _mode(arguments: argparse.Namespace, mode: str, seconds: float, folder: Path) -> Result:
    folder /= mode.replace(":", "-")
    seed = f"{arguments.seed} {mode}"
    sizes = {"worker": arguments.workers, "shard": arguments.shards, "coordinator": int(arguments.apart)}
    plans = plan(seed, seconds, arguments.every, kinds_of(arguments), sizes, arguments.lease)
    every = arguments.checkpoint_every
    flags = ServerFlags(arguments.shards, arguments.lease, folder / "checkpoints", every, arguments.apart)
    servers = Servers(flags, folder)
    network = Links()
    ways = {rank: {address: network.to(address) for address in servers.addresses} for rank in range(arguments.workers)}
    links = {rank: list(way.values()) for rank, way in ways.items()}
    task = Task(
        mode=mode,
        job="undisturbed",
        server=servers.address,
        workers=arguments.workers,
        shape=Shape(),
        pause=arguments.pause_ms / 1e3,
        transports=tuple(arguments.transport.split(",")),
        routes={str(rank): {to: link.address for to, link in way.items()} for rank, way in ways.items()},
    )
    try:
        _say(f"{mode}: undisturbed")
        alone = arguments.undisturbed or seconds
        calm = Trial(servers, links, task, folder / "undisturbed").run(alone)
        _say(f"{mode}: {len(plans)} faults in {seconds:.0f} s, seed {arguments.seed}")
        trial = Trial(servers, links, replace(task, job="chaos"), folder / "chaos")
        wild = trial.run(seconds, plans)
    finally:
        servers.close()
        network.close()
    wild.violations += [Violation("server error", text, {}) for text in errors_in(servers.log)]
    wild.violations += [Violation(v.kind, v.said, {**v.where, "run": "undisturbed"}) for v in calm.violations]
    for violation in wild.violations[:SHOWN]:
        _say(f"{mode}: VIOLATION {violation.kind}: {violation.said} {dict(violation.where)}")
    return {**_result(arguments, mode, calm, wild), "lost_steps": trial.lost_steps}


def _result(arguments: argparse.Namespace, mode: str, calm: Trace, wild: Trace) -> Result:
    size = 4 * sum(parameter.numel() for parameter in Cells(Shape()).parameters())
    seconds = wild.ended - wild.begun
    rate = wild.useful() / seconds
    alone = calm.useful() / (calm.ended - calm.begun)
    present = 1 - wild.missing() / (arguments.workers * seconds)
    return result(
        "chaos",
        mode,
        transport=arguments.transport,
        wire="float32",
        workers=arguments.workers,
        shards=arguments.shards,
        size=size,
        ms=wild.step_ms(),
        ratios={"undisturbed": rate / alone, "present": rate / (alone * present)} if alone and present else {},
        samples_per_second=round(rate * arguments.batch, 1),
        undisturbed_samples_per_second=round(alone * arguments.batch, 1),
        seconds=round(seconds, 1),
        seed=arguments.seed,
        lease=arguments.lease,
        steps=wild.useful(),
        fault_count=len(wild.faults),
        faults=dict(Counter(fault.kind for fault in wild.faults)),
        back_seconds=_by_kind(wild, [wild.back(fault) for fault in wild.faults]),
        stall_seconds=_by_kind(wild, [wild.stall(fault) for fault in wild.faults]),
        violations=len(wild.violations),
        violation_details=[violation.data() for violation in wild.violations[:SHOWN]],
    )


def _by_kind(trace: Trace, seconds: list[float | None]) -> dict[str, dict[str, Any]]:
    """By kind of fault, the median and the most; `never` counts those that did not end in time to be seen."""
    found = {}
    for kind in dict.fromkeys(fault.kind for fault in trace.faults):
        mine = [s for fault, s in zip(trace.faults, seconds, strict=True) if fault.kind == kind]
        known = [s for s in mine if s is not None]
        summary = {"median": round(statistics.median(known), 2), "most": round(max(known), 2)} if known else {}
        found[kind] = {**summary, **({"never": len(mine) - len(known)} if len(known) < len(mine) else {})}
    return found


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def draw(lines: list[Result], path: Path) -> None:
    """For each mode, what was trained beside what the run that was left alone trained."""
    groups = {
        f"{line['system']}: {line['fault_count']} faults in {line['seconds'] / 60:.0f} minutes, "
        f"{line['violations']} violations": [
            Bar("with faults", line["samples_per_second"], True),
            Bar("undisturbed", line["undisturbed_samples_per_second"], False),
        ]
        for line in lines
    }
    bars(path, "samples per second", groups)
