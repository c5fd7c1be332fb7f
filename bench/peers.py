"""The same sync round, and the same step of a GPT, for us and for whatever else can train that way on this machine.

In a round each worker has a gradient of so many bytes, and all get weights that went one step of SGD along the mean. In
a step each worker reads a batch, makes its gradients, and AdamW trains with their mean. The peers are gloo (all-reduce
in buckets in a round, DDP in a step), Horovod over gloo, torch's RPC and Ray's actors, each as a parameter server with
as many servers as ours, and nn.DataParallel, which needs GPUs. All send float32. Before anything is timed, the weights
of each system are compared with what must come of the same work: in a round to the bit, in a step, except for rounding,
with one process that has the batches of all workers. All processes run from the beginning, and the systems take turns.

A peer that is not measured is a line that says why. `pip install --group peers` brings Ray; gloo and RPC are torch's.
Horovod is compiled as it is installed, with cmake and a C++ compiler: see docs/comparison.md. A ratio is the time of a
line divided by ours over that transport.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from bench import options
from bench.cluster import HERE, Group, Host, servers
from bench.peer_horovod import horovod_hosts
from bench.peer_ray import ray_servers
from bench.peer_work import ROUND, STEP, Work
from bench.peer_worker import IN_ONE_PROCESS, SYSTEMS, Order
from bench.pictures import Bar, bars
from bench.results import Result, check_loss, label, median_ms, result
from bench.rpc_processes import rpc_servers
from bench.training import weight_bytes

SECONDS = 300.0  # for a turn
PEERS = tuple(name for name in SYSTEMS if name not in ("ours", "alone"))
WITH_SERVERS = ("ours", "torch RPC", "Ray")
PACKAGES = {"Horovod": "horovod", "Ray": "ray"}
SHORT = {"mib": 16, "layers": 1, "width": 128, "turns": 2, "rounds": 4, "steps": 3}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench peers`."""
    options.add(parser, mib=64, workers=2, shards=2, transport="shm,tcp,grpc", layers=8, width=512, batch=8, turns=4)
    parser.add_argument("--rounds", type=int, default=6, help="in a turn; the first is not counted (%(default)s)")
    options.add(parser, steps=5)
    parser.add_argument("--only", default=",".join(PEERS), help="of the peers, beside ourselves (%(default)s)")
    parser.add_argument("--work", default=f"{ROUND},{STEP}", help="what is measured (%(default)s)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where models are; cuda: a GPU for each worker"
    )


@dataclass(frozen=True)
class Measured:
    """One system; ours is one for each transport."""

    system: str
    transport: str = ""

    @property
    def name(self) -> str:
        """What a ratio calls it."""
        return f"{self.system} {self.transport}".strip()


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each kind of work and system, whether it can be measured or not."""
    peers = arguments.only.split(",") if arguments.only else []
    unknown = sorted({*peers} - {*PEERS})
    if unknown:
        raise SystemExit(f"peers are {', '.join(PEERS)}; got {', '.join(unknown)}")
    sizes = {name: getattr(arguments, name) for name in ("workers", "mib", "layers", "width", "batch", "device")}
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.workers:
        raise SystemExit(f"{arguments.workers} workers need as many GPUs; torch sees {torch.cuda.device_count()}")
    systems = [Measured("ours", transport) for transport in arguments.transport.split(",")]
    systems += [Measured(name) for name in peers]
    found = []
    for kind in arguments.work.split(","):
        found += _compare(arguments, Work(kind, **sizes), systems)
    used = {package: metadata.version(package) for package in PACKAGES.values() if _is_installed(package)}
    for line in found:
        line["versions"] |= used
    return found


def reason(system: str, work: Work) -> str:
    """Returns why a system cannot be measured here, and how it could be; empty: it can."""
    if system == "Horovod" and not _is_installed("horovod"):
        return "Horovod is not installed, and has to be compiled: see docs/comparison.md"
    if system == "Ray" and not _is_installed("ray"):
        return "Ray is not installed: pip install --group peers"
    if system == "torch RPC" and not rpc.is_available():
        return "this torch was built without RPC: install one of PyTorch's own builds"
    if system == "DataParallel" and (work.device != "cuda" or work.workers < 2):
        return "DataParallel needs --device cuda, and at least 2 GPUs and workers; on a CPU it is a plain module"
    return ""


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _compare(arguments: argparse.Namespace, work: Work, systems: Sequence[Measured]) -> list[Result]:
    """One kind of work."""
    reasons = {each: reason(each.system, work) for each in systems}
    count = arguments.rounds if work.kind == ROUND else arguments.steps
    with contextlib.ExitStack() as stack:
        expected = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "expected.safetensors"
        if work.kind == STEP:
            with _alone(work, expected) as group:
                group.answers(SECONDS)
        running = _started(stack, work, [each for each in systems if not reasons[each]], arguments.shards, expected)
        for group in running.values():
            group.answers(SECONDS)
        seconds: dict[Measured, list[float]] = {each: [] for each in running}
        losses: dict[Measured, float] = {}
        for _ in range(arguments.turns):
            for each, group in running.items():
                answers = group.run(SECONDS, count=count)
                # All workers of a round have the same times.
                seconds[each] += [took for found in answers for took in found["seconds"]]
                losses[each] = sum(found["loss"] for found in answers) / len(answers)
    if work.kind == STEP:
        ours = next(iter(losses.values()))
        for each, loss in losses.items():
            check_loss(each.name, loss, ours)
    ms = {each: median_ms(took) for each, took in seconds.items()}
    return [
        _result(work, each, arguments.shards, ms, round(losses[each], 4), arguments.turns * (count - 1))
        if each in ms
        else _result(work, each, arguments.shards, ms, not_measured=reasons[each])
        for each in systems
    ]


def _result(
    work: Work, each: Measured, shards: int, ms: dict[Measured, float], loss: float = 0.0, count: int = 0, **more: Any
) -> Result:
    weights = work.mib * 2**20 if work.kind == ROUND else weight_bytes(work.task)
    if each in ms:
        more = {"ratios": {peer.name: ms[each] / ms[peer] for peer in ms if peer.system == "ours"}, **more}
        more |= {"rounds": count} if work.kind == ROUND else {"steps": count, "loss": loss}
    name = "DDP (gloo)" if each.system == "gloo" and work.kind == STEP else each.system
    return result(
        "peers",
        name,
        transport=each.transport,
        wire="float32",
        workers=work.workers,
        shards=shards if each.system in WITH_SERVERS else 0,
        size=weights,
        ms=ms.get(each),
        scenario=f"{work.kind} of {weights / 2**20:.4g} MiB",
        device=work.device,
        **more,
    )


# -- the processes ---------------------------------------------------------------------------------------------------


def _alone(work: Work, expected: Path) -> Group:
    """One process with the batches of all workers, which writes the weights that all others must have."""
    order = Order("alone", asdict(work), expected=str(expected))
    return Group(_places([HERE], work), "bench.peer_worker", [asdict(order)])


def _started(
    stack: contextlib.ExitStack, work: Work, systems: Sequence[Measured], shards: int, expected: Path
) -> dict[Measured, Group]:
    """Starts the workers of each system, and its servers."""
    ours = stack.enter_context(servers([HERE] * shards)) if any(each.system == "ours" for each in systems) else None
    found = {}
    for each in systems:
        order = Order(each.system, asdict(work), shards, transport=each.transport, expected=str(expected))
        if each.system == "ours" and ours is not None:
            order = replace(order, address=ours.address)
        found[each] = stack.enter_context(_group(work, order))
    return found


@contextlib.contextmanager
def _group(work: Work, order: Order) -> Iterator[Group]:
    """The workers of one system. A peer's servers end with them."""
    places = [HERE] * (1 if order.system in IN_ONE_PROCESS else work.workers)
    with contextlib.ExitStack() as stack:
        if order.system == "torch RPC":
            address = stack.enter_context(rpc_servers("peer_rpc", order.servers, work=asdict(work)))
            order = replace(order, address=address)
        if order.system == "Ray":
            address, host = stack.enter_context(ray_servers(order.servers, work))
            order, places = replace(order, address=address), [host] * work.workers
        if order.system == "Horovod":
            places = stack.enter_context(horovod_hosts(work.workers))
        orders = [asdict(order)] * len(places)
        yield stack.enter_context(Group(_places(places, work), "bench.peer_worker", orders))


def _places(places: Sequence[Host], work: Work) -> list[Host]:
    """Where workers run, with the GPUs that they are to see: ours takes one that it sees."""
    if work.device == "cuda":
        return [replace(host, variables=(*host.variables, f"LOCAL_RANK={n}")) for n, host in enumerate(places)]
    return [replace(host, variables=(*host.variables, "CUDA_VISIBLE_DEVICES=")) for host in places]


def draw(lines: list[Result], path: Path) -> None:
    """For each kind of work a bar for each system that was measured."""
    panels: dict[str, list[Bar]] = {}
    for line in lines:
        if line["ms"] is not None:
            title = f"A {line['scenario']}, {line['workers']} workers"
            panels.setdefault(title, []).append(Bar(label(line), line["ms"], line["system"] == "ours"))
    bars(path, "milliseconds", panels)
