"""Few bytes: what a slow link costs each way of training, in time and in loss.

Two forms. On separate hosts, each system trains a GPT of its own for the same time, one after the other:

    python -m bench lowcomm --addresses 10.0.0.1,...,10.0.0.8 --exec "ssh {host}" --link-mbit 100 --seconds 240

The first half of the hosts are workers, the second half shards; `python -m bench network --help` says how hosts are
named. The loss is that on held-out text, evaluated every so many steps; the time of evaluations does not count. `to
ddp's loss` is the time in which a system first has the loss that DDP has at the end, divided by DDP's. DDP is measured
with torch's bfloat16 hook and with PowerSGD, too. Bytes are those that a worker's interface counts. With --warm-up 0
local modes take and send what they do after their warm-up.

Without hosts, all systems train the same number of samples from a common start, for several seeds, and only their
losses count; the ratio is to that of `sync` in float32, the median over the seeds. The start takes the place of the
warm-up of local steps; with --start-steps 0 each system begins anew, and has its own:

    python -m bench lowcomm --samples 20480 --width 256 --layers 2

A system is a mode and what travels: ddp, ddp-bf16, ddp-powersgd, sync, sync-bfloat16, sync-int4, local:8-int4, ...
After a plus it may have a quorum, and after another one its grace in seconds: sync+all-1, sync+all-1+0.5. With
--stall-ms each worker stalls in one step of ten, at random, and the same way in every system.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import options
from bench.cluster import HERE, Group, Host, halves, host_flags, job_name, servers
from bench.pictures import Line, curves
from bench.results import Result, result
from bench.slow_link_worker import Order
from examples.char_gpt import CharGPT, Shape

ANSWER_SECONDS = 600.0
HOOKS = ("bf16", "powersgd")
BUCKET_BYTES = 256 * 2**10  # without hosts, where models are small: all fragments have some
SHORT = {"samples": 1024, "layers": 1, "width": 64, "seeds": 1, "systems": "sync,sync-bfloat16"}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench lowcomm`."""
    host_flags(parser, required=False)
    parser.add_argument("--seconds", type=float, default=240.0, help="that each system trains on hosts (%(default)s)")
    parser.add_argument("--samples", type=int, default=20480, help="that each system trains without (%(default)s)")
    parser.add_argument(
        "--start-steps",
        type=int,
        default=100,
        help="without hosts: of the common start, in place of a warm-up; 0: each begins anew (%(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="without hosts: runs of each system (%(default)s)")
    parser.add_argument("--every", type=int, default=0, help="steps between evaluations (on hosts 4; without: all)")
    parser.add_argument("--warm-up", type=int, help="of local modes, in steps (as many as they have by default)")
    parser.add_argument("--clip", type=float, default=0.0, help="without hosts: norm of a gradient (0: any)")
    parser.add_argument("--stall-ms", type=float, default=0.0, help="of a worker that stalls (%(default)s)")
    default = "ddp,ddp-bf16,ddp-powersgd,sync,sync-int4,local:8-int4,local:32-int4"
    parser.add_argument("--systems", default=default, help="(%(default)s)")
    options.add(parser, workers=4, shards=4, layers=8, width=512, batch=8)


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each system."""
    if arguments.addresses:
        return _on_hosts(arguments)
    return _from_a_common_start(arguments)


@dataclass
class Run:
    """What one system did.

    seconds: of training, without evaluations
    moved:   bytes through a worker's interface, in the busier direction
    points:  (seconds, bytes, loss) at each evaluation
    """

    system: str
    steps: int = 0
    seconds: float = 0.0
    moved: float = 0.0
    points: list[tuple[float, float, float]] = field(default_factory=list)

    def seconds_to(self, loss: float) -> float | None:
        """Returns after how many seconds its loss was as low; None: it never was."""
        return next((seconds for seconds, _, reached in self.points if reached <= loss), None)


def _order(system: str, plain: Order, server: str) -> Order:
    """Returns what the workers of a system do."""
    trained, quorum, grace = (*system.split("+"), "", "")[:3]
    mode, _, what = trained.partition("-")
    if mode == "ddp":
        if quorum:
            raise SystemExit(f"in DDP all wait for all: it has no quorum, got {system!r}")
        if what and what not in HOOKS:
            raise SystemExit(f"ddp has the hooks {' and '.join(HOOKS)}, got {what!r}")
        return replace(plain, mode="ddp", hook=what)
    job = job_name(f"{system}-{plain.seed}")
    waits = {"quorum": quorum or None, "grace": float(grace or 0)}
    return replace(plain, mode=mode, wire=what or "float32", server=server, job=job, **waits)


def _train(system: str, order: Order, places: Sequence[Host], steps: int, seconds: float, every: int, port: int) -> Run:
    """Trains a system for so many steps or seconds, whichever come first."""
    orders = [asdict(replace(order, rank=rank, world_size=len(places))) for rank in range(len(places))]
    found = Run(system)
    with Group(places, "bench.slow_link_worker", orders, port or None) as group:
        group.answers(ANSWER_SECONDS)
        while found.steps < steps and found.seconds < seconds:
            told = group.run(ANSWER_SECONDS, steps=min(every, steps - found.steps))
            found.steps += told[0]["steps"]
            found.seconds += max(each["seconds"] for each in told)
            found.moved += statistics.mean(max(each["traffic"]) for each in told)
            losses = [each["loss"] for each in group.run(ANSWER_SECONDS, evaluate=True)]
            found.points.append((round(found.seconds, 2), round(found.moved), round(statistics.mean(losses), 4)))
            print(f"{system}: step {found.steps}, {found.seconds:.1f} s, loss {found.points[-1][2]}", file=sys.stderr)
    return found


def _weight_bytes(arguments: argparse.Namespace) -> int:
    model = CharGPT(Shape(arguments.layers, max(1, arguments.width // 64), arguments.width))
    return 4 * sum(parameter.numel() for parameter in model.parameters())


# -- on hosts --------------------------------------------------------------------------------------------------------


def _on_hosts(arguments: argparse.Namespace) -> list[Result]:
    workers, shards = halves(arguments, "slow links")
    plain = Order("ddp", layers=arguments.layers, width=arguments.width, batch=arguments.batch, transport="tcp")
    plain = replace(plain, warm_up=arguments.warm_up, stall=arguments.stall_ms / 1e3)
    runs = {}
    for number, system in enumerate(arguments.systems.split(",")):
        with servers(shards) if not system.startswith("ddp") else contextlib.nullcontext() as cluster:
            order = _order(system, plain, cluster.address if cluster is not None else "")
            timed = {"steps": sys.maxsize, "seconds": arguments.seconds, "every": arguments.every or 4}
            runs[system] = _train(system, order, workers, **timed, port=arguments.port + number)
    return [_timed(each, runs, arguments, len(workers), len(shards)) for each in runs.values()]


def _timed(found: Run, runs: dict[str, Run], arguments: argparse.Namespace, workers: int, shards: int) -> Result:
    step = found.seconds / found.steps
    ratios: dict[str, float] = {}
    for name in ("ddp", "ddp-bf16"):
        if name in runs:
            peer = runs[name]
            ratios[name] = step / (peer.seconds / peer.steps)
            ratios[f"bytes of {name}"] = (found.moved / found.steps) / (peer.moved / peer.steps)
            loss = peer.points[-1][2]
            reached, first = found.seconds_to(loss), peer.seconds_to(loss)
            if reached is not None and first is not None:
                ratios[f"to {name}'s loss"] = reached / first
    more = {"link_mbit": arguments.link_mbit, "moved_bytes": round(found.moved / found.steps)}
    return _result(found, arguments, workers, shards, ratios, ms=round(step * 1e3, 2), **more)


def _result(
    found: Run,
    arguments: argparse.Namespace,
    workers: int,
    shards: int,
    ratios: dict[str, float],
    **more: Any,
) -> Result:
    is_ddp = found.system.startswith("ddp")
    return result(
        "lowcomm",
        found.system,
        transport="" if is_ddp else "tcp",
        workers=workers,
        shards=0 if is_ddp else shards,
        size=_weight_bytes(arguments),
        ratios=ratios,
        steps=found.steps,
        samples=found.steps * workers * arguments.batch,
        loss=found.points[-1][2],
        points=found.points,
        **more,
    )


# -- from a common start ---------------------------------------------------------------------------------------------


def _from_a_common_start(arguments: argparse.Namespace) -> list[Result]:
    systems = arguments.systems.split(",")
    systems = ["sync", *(system for system in systems if system != "sync" and not system.startswith("ddp"))]
    found: dict[str, list[Run]] = {system: [] for system in systems}
    for seed in range(arguments.seeds):
        for each in _seed(arguments, systems, seed):
            found[each.system].append(each)
    lines = []
    for runs in found.values():
        ratios = [own.points[-1][2] / plain.points[-1][2] for own, plain in zip(runs, found["sync"], strict=True)]
        middle = sorted(zip(ratios, runs, strict=True), key=lambda pair: pair[0])[len(runs) // 2][1]
        spread = {"loss of sync": [round(end(ratios), 4) for end in (min, max)]}
        loss = {"loss of sync": statistics.median(ratios)}
        more = {"ms": None, "not_measured": "only losses count", "spread": spread}
        lines.append(_result(middle, arguments, arguments.workers, arguments.shards, loss, **more))
    return lines


def _seed(arguments: argparse.Namespace, systems: Sequence[str], seed: int) -> Iterator[Run]:
    """Yields the run of each system with the same data, from the same weights and optimizer state."""
    places = [HERE] * arguments.workers
    steps = max(1, arguments.samples // (arguments.batch * arguments.workers))
    shape = {"layers": arguments.layers, "width": arguments.width, "batch": arguments.batch}
    plain = Order(
        "sync",
        **shape,
        transport="tcp",
        bucket_bytes=BUCKET_BYTES,
        seed=seed,
        total=arguments.start_steps + steps,
        held_out=8192,
        clip=arguments.clip,
    )
    with tempfile.TemporaryDirectory() as folder, servers([HERE] * arguments.shards) as cluster:
        after = replace(plain, warm_up=arguments.warm_up, stall=arguments.stall_ms / 1e3)
        if arguments.start_steps:
            start = Path(folder) / "start.safetensors"
            alone = {"world_size": 1, "batch": arguments.batch * arguments.workers}
            first = replace(plain, server=cluster.address, job=f"start-{seed}", **alone)
            with Group([HERE], "bench.slow_link_worker", [asdict(first)]) as group:
                group.answers(ANSWER_SECONDS)
                group.run(ANSWER_SECONDS, steps=arguments.start_steps)
                group.run(save=str(start))
            more = {"start": str(start), "before": arguments.start_steps, "warm_up": 0}
            after = replace(after, seed=seed + 1000, **more)
        for system in systems:
            order = _order(system, after, cluster.address)
            yield _train(system, order, places, steps, float("inf"), arguments.every or steps, 0)


def draw(lines: list[Result], path: Path) -> None:
    """The loss against time, and against bytes where links were counted."""
    seconds = [Line(line["system"], [(x, loss) for x, _, loss in line["points"]]) for line in lines]
    panels = {"seconds": seconds}
    if any(line.get("moved_bytes") for line in lines):
        panels["MB through a worker's link"] = [
            Line(line["system"], [(moved / 1e6, loss) for _, moved, loss in line["points"]]) for line in lines
        ]
    curves(path, "loss on held-out text, nats a byte", panels)
