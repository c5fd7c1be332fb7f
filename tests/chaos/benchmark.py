"""Random faults on a real cluster that trains the counting oracle: what is lost, and what recovery costs.

Each mode trains twice on servers of its own, which make checkpoints: first undisturbed, then with a fault about every
so many seconds, when all have stepped since the last one. Servers are those of `ps-server up`, or, with --servers
containers, started and started again as docker-compose.yml does; workers are those of `ps-worker run --max-restarts`.
Every process can be killed or stopped, connections can be cut or held, and disks be full. In half of the cases (see
--overlap) a second fault begins within three seconds of the first. Every push leaves marks in the weights. A violation
is an acknowledged push that is not in them exactly once, a torn update, a pull that is staler than the mode allows, a
worker that gives up, or one that has not stepped --bound seconds after a fault's end. In ssp and async a killed shard
is rolled back to its last checkpoint, and the servers must count the updates that it lacks then as lost. At the end
rank 0 saves `session.global_weights()`, which must have the same marks. A wait replaces a step's computing.

Readers follow the weights, one from the servers and the others through a relay. They are killed and stopped, too, and
so is the relay. A violation is also a reading in which the model changed, or had buckets of two versions (in sync the
weights tell their version), a version that fell without a rollback, unequal bytes of one bucket's version at any two
readers, and a reader that does not come back.

`samples/s` is the rate with faults. The ratio `undisturbed` compares it with the undisturbed run, and `present` with
that run's rate for the time in which workers were present: a worker is absent from its fault to its next step.
Seconds are medians and maxima over the faults of a kind: `back`, until the affected worker steps again; `stall`, the
longest that the others (after a server's fault, all) stood still; `recovery`, from the end of a fault or pair until
every worker has stepped. The seed decides which fault happens when, and where.

With --goodput, one run takes windows with a fault and windows without in turn, and `undisturbed` compares the two. The
run says a line a minute; SIGTERM ends it early, and it still judges and writes what it has.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import options
from bench.pictures import Bar, bars
from bench.results import Result, result
from tests.chaos.faults import KINDS
from tests.chaos.links import Links
from tests.chaos.oracle import Cells, Shape, Violation
from tests.chaos.plans import Plan, Weather, steady
from tests.chaos.servers import FORMS, ServerFlags, Servers, start_servers
from tests.chaos.trace import Trace, summaries, table
from tests.chaos.trial import Terms, Trial
from tests.chaos.worker import Task

SHORT = {"minutes": 1.0, "every": 5.0, "undisturbed": 10.0}
SHOWN = 20  # violations of a mode that are written out


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench chaos`."""
    options.add(parser, workers=4, shards=2, seed=0, pause_ms=50.0)
    parser.add_argument("--minutes", type=float, default=6.0, help="of faults, all modes together (%(default)s)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from fault to fault, about (%(default)s)")
    parser.add_argument("--modes", default="sync,ssp:4,async", help="(%(default)s)")
    parser.add_argument("--servers", choices=FORMS, default=FORMS[0], help="how they are started (%(default)s)")
    parser.add_argument("--readers", type=int, default=2, help="that follow the weights (%(default)s)")
    parser.add_argument("--elastic", action="store_true", help="jobs without a fixed number of workers")
    parser.add_argument("--faults", help="the kinds to draw from: any of " + ", ".join(KINDS) + " (all)")
    parser.add_argument("--overlap", type=float, default=0.5, help="share of faults with a second one (%(default)s)")
    parser.add_argument("--bound", type=float, default=60.0, help="seconds until all step again (%(default)s)")
    parser.add_argument("--slow-disk", type=float, default=0.0, help="seconds more for each file of a server (0)")
    parser.add_argument("--goodput", action="store_true", help="compare windows with a fault with windows without")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of each, with --goodput (%(default)s)")
    parser.add_argument("--checkpoint-every", default="5s", help="as for ps-server up (%(default)s)")
    parser.add_argument("--lease", type=float, default=3.0, help="seconds a silent worker counts as live (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples that a step stands for (%(default)s)")
    parser.add_argument("--transport", default="shm,tcp,grpc", help="of the workers, in turn (%(default)s)")
    parser.add_argument(
        "--undisturbed", type=float, metavar="SECONDS", help="of each mode's run without faults (as long as with)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to leave ledgers and logs")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each mode that was begun before SIGTERM."""
    if arguments.keep is not None and arguments.keep.is_dir() and any(arguments.keep.iterdir()):
        raise SystemExit(f"--keep takes a new or an empty folder, and something lies in {arguments.keep}")
    kinds, possible = kinds_of(arguments), sizes_of(arguments)
    wrong = [kind for kind in kinds if kind not in KINDS or not possible[KINDS[kind].to]]
    if wrong:
        known = ", ".join(name for name, kind in KINDS.items() if possible[kind.to])
        raise SystemExit(f"no such faults with --servers {arguments.servers}: {', '.join(wrong)}; there are {known}")
    stop = threading.Event()
    usual = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    results: list[Result] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for mode in arguments.modes.split(","):
                if not stop.is_set():
                    results.append(_Run(arguments, mode, Path(arguments.keep or folder), stop).result())
    finally:
        signal.signal(signal.SIGTERM, usual)
    pairs = sum((Counter(line["pairs"]) for line in results), Counter[str]())
    if pairs:
        done = f"{len(pairs)} of {len(kinds) ** 2} pairs of faults"
        _say(f"{done}; a row is the first, a column the second:\n{table(pairs, kinds)}")
    return results


def sizes_of(arguments: argparse.Namespace) -> dict[str, int]:
    """How many there are of what faults are done to."""
    between = arguments.shards if arguments.servers == "containers" else 0
    sizes = {"worker": arguments.workers, "shard": arguments.shards, "coordinator": 1}
    followers = {"reader": arguments.readers, "relay": min(1, arguments.readers)}
    return {**sizes, "between": between, **followers, "cluster": 1}


def kinds_of(arguments: argparse.Namespace) -> list[str]:
    """The kinds of faults to draw from."""
    if arguments.faults is not None:
        return str(arguments.faults).split(",")
    if arguments.goodput:
        return ["kill"]
    sizes = sizes_of(arguments)
    return [name for name, kind in KINDS.items() if sizes[kind.to]]


class _Run:
    """What one mode does."""

    def __init__(self, arguments: argparse.Namespace, mode: str, folder: Path, stop: threading.Event) -> None:
        self._arguments = arguments
        self._mode = mode
        self._folder = folder / mode.replace(":", "-")
        self._terms = Terms(arguments.bound, stop, lambda text: _say(f"{mode}: {text}"))
        self._seconds = 60 * arguments.minutes / len(arguments.modes.split(","))

    def result(self) -> Result:
        """Starts servers, trains without faults and with them, stops the servers, and judges."""
        arguments, network = self._arguments, Links()
        flags = ServerFlags(
            arguments.shards,
            arguments.lease,
            self._folder / "checkpoints",
            arguments.checkpoint_every,
            arguments.slow_disk,
        )
        servers = start_servers(arguments.servers, flags, self._folder, network)
        listening = [*servers.addresses, *servers.data_addresses]
        ways = {slot: {to: network.to(to) for to in listening} for slot in range(arguments.workers)}
        links = {slot: list(way.values()) for slot, way in ways.items()}
        routes = {slot: {to: link.address for to, link in way.items()} for slot, way in ways.items()}
        task = self._task(servers, routes)
        calm, plans = None, self._plans()
        try:
            if not arguments.goodput:
                self._terms.say("undisturbed")
                alone = Trial(servers, links, task, self._folder / "undisturbed", self._terms, arguments.readers)
                calm = alone.run(arguments.undisturbed or self._seconds)
            self._terms.say(f"{len(plans)} faults in {self._seconds:.0f} s, seed {arguments.seed}")
            wild_task = replace(task, job="chaos")
            trial = Trial(servers, links, wild_task, self._folder / "chaos", self._terms, arguments.readers)
            wild = trial.run(self._seconds, plans)
        finally:
            servers.close()
            network.close()
        wild.violations += [Violation("server error", text, {}) for text in servers.errors()]
        if calm is not None:
            wild.violations += [Violation(v.kind, v.said, {**v.where, "run": "undisturbed"}) for v in calm.violations]
        for violation in wild.violations[:SHOWN]:
            self._terms.say(f"VIOLATION {violation.kind}: {violation.said} {dict(violation.where)}")
        of_readers = {"readers": arguments.readers} if arguments.readers else {}
        if of_readers:
            of_readers |= {"editions": trial.audience.editions, "readings": trial.audience.readings}
        return {
            **self._measured(calm, wild),
            "lost_steps": trial.lost_steps,
            "saved_steps": trial.saved_steps,
            **of_readers,
        }

    def _task(self, servers: Servers, routes: dict[int, dict[str, str]]) -> Task:
        """Workers call servers through links, whatever address they are told."""
        told = {where: servers.known_as.get(where, where) for where in servers.addresses}
        both = {slot: {told.get(to, to): link for to, link in way.items()} | way for slot, way in routes.items()}
        arguments = self._arguments
        return Task(
            mode=self._mode,
            job="undisturbed",
            server=servers.address,
            workers=arguments.workers,
            shape=Shape(),
            pause=arguments.pause_ms / 1e3,
            transports=tuple(arguments.transport.split(",")),
            routes={str(slot): way for slot, way in both.items()},
            elastic=arguments.elastic,
        )

    def _plans(self) -> list[Plan]:
        arguments, seed = self._arguments, f"{self._arguments.seed} {self._mode}"
        kinds, sizes = kinds_of(arguments), sizes_of(arguments)
        if arguments.goodput:
            return steady(kinds, sizes, seed, arguments.window, int(self._seconds / arguments.window))
        weather = Weather(kinds, sizes, arguments.lease, arguments.every, arguments.overlap)
        modes = arguments.modes.split(",")
        return weather.plans(seed, self._seconds, weather.pairs(arguments.seed, modes.index(self._mode), len(modes)))

    def _measured(self, calm: Trace | None, wild: Trace) -> Result:
        arguments = self._arguments
        rate, alone = self._windows(wild) if calm is None else (_rate(wild), _rate(calm))
        ratios = {}
        if alone:
            ratios["undisturbed"] = rate / alone
        present = 1 - wild.missing() / (arguments.workers * (wild.ended - wild.begun)) if wild.ended > wild.begun else 0
        if alone and present and calm is not None:
            ratios["present"] = rate / (alone * present)
        return result(
            "chaos",
            self._mode,
            transport=arguments.transport,
            wire="float32",
            workers=arguments.workers,
            shards=arguments.shards,
            size=4 * sum(parameter.numel() for parameter in Cells(Shape()).parameters()),
            ms=wild.step_ms(),
            ratios=ratios,
            samples_per_second=round(rate * arguments.batch, 1),
            undisturbed_samples_per_second=round(alone * arguments.batch, 1),
            **self._seen(wild),
        )

    def _windows(self, trace: Trace) -> tuple[float, float]:
        """Steps per second in windows with a fault, and in those without: as many of each, whole ones only."""
        length = self._arguments.window
        pairs = int((trace.ended - trace.begun) / length) // 2
        starts = [trace.begun + number * length for number in range(2 * pairs)]
        steps = [trace.useful(start, start + length) for start in starts]
        if not pairs:
            return 0.0, 0.0
        return sum(steps[1::2]) / (pairs * length), sum(steps[::2]) / (pairs * length)

    def _seen(self, wild: Trace) -> dict[str, Any]:
        """What the run was, what it did and what came of it."""
        arguments, kinds = self._arguments, [fault.kind for fault in wild.faults]
        return {
            "seconds": round(wild.ended - wild.begun, 1),
            "seed": arguments.seed,
            "lease": arguments.lease,
            "servers": arguments.servers,
            "elastic": arguments.elastic,
            "slow_disk": arguments.slow_disk,
            "goodput": arguments.goodput,
            "steps": wild.useful(),
            "fault_count": len(wild.faults),
            "missed_faults": wild.missed,
            "faults": dict(Counter(kinds)),
            "pairs": wild.pairs(),
            "pair_count": len(wild.pairs()),
            "back_seconds": summaries((fault.kind, wild.back(fault)) for fault in wild.faults),
            "stall_seconds": summaries((fault.kind, wild.stall(fault)) for fault in wild.faults),
            "recovery_seconds": summaries(wild.recoveries()),
            "recovery_bound": arguments.bound,
            "violations": len(wild.violations),
            "violation_details": [violation.data() for violation in wild.violations[:SHOWN]],
        }


def _rate(trace: Trace) -> float:
    """Useful steps per second."""
    seconds = trace.ended - trace.begun
    return trace.useful() / seconds if seconds else 0.0


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
