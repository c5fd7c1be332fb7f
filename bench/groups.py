"""Groups of processes as workers, compared with torch's own HSDP: two groups of two that `fully_shard` cuts a GPT over.

HSDP has the same four processes: a mesh of 2 x 2, with collectives over gloo at both levels. Both train the same model
with the same batches. --parts takes some of four parts:

* `step`: a step in sync, with all processes on this machine. The systems take turns; a turn's first step does not
  count. CPU are milliseconds of a core that all processes and servers use for a step.
* `link`: a step where each group has a host of its own, with a link of --link-mbit between them. Ours is `local:8` in
  int4, of which whole rounds are counted, with a shard on either host. A third line has each group train by itself,
  with nothing on the link: the ratio to it is what the link adds. It needs root, for network namespaces.
* `lost`: the longest step of one group while a member of the other one is stopped (SIGSTOP), for twice the lease, or
  killed. The ratio is to the lease. Allowed are the lease and two seconds; a longer step ends the benchmark with an
  error, once all results are written. `back` is the time from the end of the stop to the next step of the group that
  was stopped; of one that was killed, from the start of its processes again, which import torch, to their first step.
* `equal`: the largest difference of a weight after --equal-steps steps, as a part of the largest element of its tensor:
  to one process with the batches of all, and to HSDP. Once more with two backwards in a step and clipping, of groups
  that cut the MLPs by tensor parallel, and of pipelines by 1F1B whose embedding is the head, too. A group clips its own
  gradient, and HSDP the mean: two peers clip as groups do. One process clips the gradient of each half of the batch,
  one after the other. Two replicas, which torch cuts in the same way, average their clipped gradients by all_reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench import options
from bench.cluster import HERE, Group, Host, job_name, servers
from bench.group_member import ALONE, APART, HSDP, PIPELINE, REPLICAS, TENSOR, Order
from bench.link import linked, why_no_link
from bench.machine import cpu_seconds
from bench.pictures import Bar, bars
from bench.results import Result, check_loss, label, mean_step_ms, result, step_ms, step_times
from bench.training import Task, weight_bytes
from ps_runtime.free_ports import free_port

PARTS = ("step", "link", "lost", "equal")
GROUPS, MEMBERS = 2, 2
SECONDS = 600.0  # for an answer
LOCAL, ROUND, WIRE = "local:8", 8, "int4"  # on the link
CUTS = TENSOR, PIPELINE  # whose weights are compared, too
CLIP = 0.1  # below the norm of each step
GRACE_SECONDS = 2.0  # beside the lease, in which a group that is gone is noticed
STEADY_SECONDS, AFTER_SECONDS = 4.0, 8.0  # that groups train before one is disturbed, and after that
START_SECONDS = 12.0  # longer where processes are started again, which import torch
SHORT = {"layers": 1, "width": 64, "turns": 2, "steps": 4, "link_steps": 3, "lease": 2.0, "modes": "quorum:1"}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench groups`."""
    options.add(parser, shards=2, layers=8, width=512, batch=8, turns=4, steps=7, transport="shm,tcp")
    parser.add_argument("--parts", default=",".join(PARTS), help="of it (%(default)s)")
    parser.add_argument("--link-mbit", type=float, default=100.0, help="what the link carries each way (%(default)s)")
    parser.add_argument("--link-steps", type=int, default=3, help="of HSDP, in each of two turns there (%(default)s)")
    parser.add_argument("--link-batch", type=int, default=1, help="blocks in a process' batch there (%(default)s)")
    parser.add_argument("--lease", type=float, default=4.0, help="of a group, in seconds (%(default)s)")
    modes = "sync,quorum:1,ssp:4,async,local:8,local:8/2"
    parser.add_argument("--modes", default=modes, help="of groups that are lost; quorum:Q is sync (%(default)s)")
    parser.add_argument("--equal-steps", type=int, default=20, help="until weights are compared (%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; the lines of each part."""
    parts = {"step": steps, "link": over_a_link, "lost": lost, "equal": equal}
    wanted = arguments.parts.split(",")
    unknown = set(wanted) - parts.keys()
    if unknown:
        raise SystemExit(f"expected --parts of {', '.join(parts)}, got {', '.join(map(repr, sorted(unknown)))}")
    found: list[Result] = []
    for name in wanted:
        for line in parts[name](arguments):
            keys = ("ms", "ratios", "difference", "hsdp_difference")
            figures = {key: line[key] for key in keys if line.get(key) not in (None, {})}
            print(f"{line['scenario']}: {label(line)}: {figures}", file=sys.stderr)
            found.append(line)
    return found


def _plain(arguments: argparse.Namespace) -> Order:
    return Order(HSDP, layers=arguments.layers, width=arguments.width, batch=arguments.batch)


def _line(
    arguments: argparse.Namespace, scenario: str, order: Order, ms: float | None, shards: int = 0, **more: Any
) -> Result:
    is_ours = bool(order.server)
    return result(
        "groups",
        _mode_name(order) if is_ours else order.system,
        transport=order.transport if is_ours else "",
        wire=order.wire if is_ours else "",
        workers=1 if order.system == ALONE else GROUPS,
        shards=(shards or arguments.shards) if is_ours else 0,
        size=weight_bytes(Task("gpt", "single", layers=arguments.layers, width=arguments.width)),
        ms=ms,
        scenario=scenario,
        members=1 if order.system == ALONE else MEMBERS,
        **more,
    )


def _mode_name(order: Order) -> str:
    return f"{order.mode}, quorum {order.quorum}" if order.quorum else order.mode


# -- the processes ---------------------------------------------------------------------------------------------------


def orders(plain: Order, places: Sequence[Host]) -> list[Order]:
    """What each process of a system does. places: where they run, group by group"""
    if plain.system == ALONE:
        return [plain]
    if plain.system in (HSDP, REPLICAS):
        meets = f"{places[0].address}:{free_port(HERE.address)}"
        return [replace(plain, meets=meets, rank=rank, size=len(places)) for rank in range(len(places))]
    found = []
    for group in range(GROUPS):
        meets = f"{places[group * MEMBERS].address}:{free_port(HERE.address)}"
        each = replace(plain, meets=meets, group=group, size=MEMBERS)
        found += [replace(each, rank=member) for member in range(MEMBERS)]
    return found


def processes(
    stack: contextlib.ExitStack, systems: Mapping[str, Order], places: Sequence[Host] = (HERE,) * (GROUPS * MEMBERS)
) -> dict[str, Group]:
    """Starts the processes of some systems; returns them once they have taken their warm-up steps."""
    each = {name: orders(plain, places) for name, plain in systems.items()}
    found = {
        name: stack.enter_context(Group(places[: len(own)], "bench.group_member", [asdict(order) for order in own]))
        for name, own in each.items()
    }
    for group in found.values():
        group.answers(SECONDS)
    return found


# -- a step ----------------------------------------------------------------------------------------------------------


def steps(arguments: argparse.Namespace) -> list[Result]:
    """A step in sync, over each transport, and of HSDP."""
    plain = _plain(arguments)
    with servers([HERE] * arguments.shards) as cluster, contextlib.ExitStack() as stack:
        systems = {HSDP: plain}
        for transport in arguments.transport.split(","):
            ours = replace(plain, system="ours", server=cluster.address, transport=transport, job=transport)
            systems[f"sync {transport}"] = ours
        running = processes(stack, systems)
        turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in running}
        cpu = dict.fromkeys(running, 0.0)
        for _ in range(arguments.turns):
            for name, group in running.items():
                before = cpu_seconds(cluster.pids)
                answers = group.run(SECONDS, steps=arguments.steps)
                turns[name].append(answers)
                cpu[name] += cpu_seconds(cluster.pids) - before + sum(each["cpu"] for each in answers)
    losses = {name: statistics.mean(each["loss"] for each in found[-1]) for name, found in turns.items()}
    for name, loss in losses.items():
        check_loss(name, loss, losses[HSDP])
    ms = {name: step_ms(found) for name, found in turns.items()}
    return [
        _line(
            arguments,
            "one host",
            order,
            ms[name],
            ratios={HSDP: ms[name] / ms[HSDP], "HSDP's CPU": cpu[name] / cpu[HSDP]},
            cpu_ms=round(1e3 * cpu[name] / arguments.turns / arguments.steps, 1),
            steps=arguments.turns * (arguments.steps - 1),
            loss=round(losses[name], 4),
        )
        for name, order in systems.items()
    ]


# -- a slow link -----------------------------------------------------------------------------------------------------


def over_a_link(arguments: argparse.Namespace) -> list[Result]:
    """A step of two groups on two hosts with a slow link."""
    scenario = f"a link of {arguments.link_mbit:g} Mbit/s"
    plain, reason = replace(_plain(arguments), batch=arguments.link_batch), why_no_link()
    ours = replace(plain, system="ours", server="-", mode=LOCAL, wire=WIRE, transport="tcp", warmup=ROUND + 1)
    systems = {HSDP: replace(plain, warmup=1), APART: replace(plain, system=APART, warmup=1), LOCAL: ours}
    if reason:
        return [_line(arguments, scenario, order, None, not_measured=reason) for order in systems.values()]
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in systems}
    counts = {HSDP: arguments.link_steps, APART: 2 * ROUND + 1, LOCAL: 2 * ROUND + 1}  # after the first, whole rounds
    with linked(arguments.link_mbit) as pair, contextlib.ExitStack() as stack:
        hosts = [replace(host, variables=("GLOO_SOCKET_IFNAME=eth0",)) for host in pair]
        places = [host for host in hosts for _ in range(MEMBERS)]
        cluster = stack.enter_context(servers(hosts))
        systems[LOCAL] = replace(ours, server=cluster.address)
        running = processes(stack, systems, places)
        for _ in range(2):
            for name, group in running.items():
                turns[name].append(group.run(SECONDS, steps=counts[name]))
    ms = {name: mean_step_ms(found) for name, found in turns.items()}
    # The steps that a turn's bytes are of.
    exchanges = {HSDP: arguments.link_steps, APART: 2 * ROUND + 1, LOCAL: 2 * ROUND}
    moved = {
        name: statistics.mean(max(max(each["traffic"]) for each in answers) for answers in found) / exchanges[name]
        for name, found in turns.items()
    }
    return [
        _line(
            arguments,
            scenario,
            order,
            ms[name],
            ratios={
                HSDP: ms[name] / ms[HSDP],
                "ours": ms[name] / ms[LOCAL],
                "no link": ms[name] / ms[APART],
                "HSDP's bytes": moved[name] / moved[HSDP],
            },
            shards=GROUPS,
            steps=2 * (counts[name] - 1),
            link_mbit=arguments.link_mbit,
            moved_bytes=round(moved[name]),
        )
        for name, order in systems.items()
    ]


# -- a member is lost ------------------------------------------------------------------------------------------------


def lost(arguments: argparse.Namespace) -> list[Result]:
    """The longest step of a group while a member of the other one is stopped, or killed."""
    small = replace(_plain(arguments), system="ours", layers=1, width=64, batch=1, warmup=9)
    found = []
    with servers([HERE] * arguments.shards, ("--lease", str(arguments.lease))) as cluster:
        for mode in arguments.modes.split(","):
            kind, _, quorum = mode.partition("quorum:")
            for name, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
                job = job_name(f"{mode}-{name}")
                order = replace(small, server=cluster.address, mode=kind or "sync", quorum=int(quorum or 0), job=job)
                found.append(lost_line(arguments, order, name, *_disturbed(order, number, arguments.lease)))
    return found


def lost_line(
    arguments: argparse.Namespace, order: Order, name: str, gap: float, back: float | None, usual: float
) -> Result:
    """The result of a mode. A step that takes longer than is allowed is a violation: the benchmark fails.

    name:             what has happened to the member
    gap, back, usual: as `_disturbed` returns them
    """
    allowed = arguments.lease + GRACE_SECONDS
    line = _line(
        arguments,
        f"a member is {name}",
        order,
        round(1e3 * gap, 1),
        ratios={"lease": gap / arguments.lease},
        alone_ms=round(1e3 * usual, 2),
        allowed_ms=1e3 * allowed,
        **({} if back is None else {"back_ms": round(1e3 * back)}),
        **({"violations": 1} if gap > allowed else {}),
    )
    line["bytes"] = weight_bytes(Task("gpt", "single", layers=order.layers, width=order.width))
    return line


def _disturbed(order: Order, number: int, lease: float) -> tuple[float, float | None, float]:
    """Sends a signal to the last member of the last group. Returns the longest step of the other group until it runs
    again, how long it took from there to its next step, and the median step. In seconds."""
    is_stopped = number == signal.SIGSTOP
    away = 2 * lease if is_stopped else lease
    whole = STEADY_SECONDS + away + AFTER_SECONDS + (0.0 if is_stopped else START_SECONDS)
    with contextlib.ExitStack() as stack:
        groups = [_started(stack, order, group) for group in range(GROUPS)]
        pid = [group.answers(SECONDS)[-1]["pid"] for group in groups][-1]
        for group in groups:
            group.tell(seconds=whole)
        time.sleep(STEADY_SECONDS)
        os.kill(pid, number)
        time.sleep(away)
        goes_on = time.perf_counter()
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        else:
            groups[-1] = _started(stack, replace(order, warmup=0), GROUPS - 1)
            groups[-1].answers(SECONDS)
            groups[-1].tell(seconds=AFTER_SECONDS)
        answers, others = (group.answers(SECONDS) for group in groups)
    # Processes that import torch take the cores of those that train.
    took = [
        seconds
        for found in answers
        for end, seconds in zip(_ends(found)[1:], step_times(found["ends"]), strict=True)
        if is_stopped or end - seconds < goes_on
    ]
    after = [min((end for end in _ends(found) if end > goes_on), default=math.inf) - goes_on for found in others]
    if math.inf in after:
        raise SystemExit("wrong result: the group whose member was stopped or killed has not come back")
    return max(took), max(after), statistics.median(took)


def _started(stack: contextlib.ExitStack, order: Order, group: int) -> Group:
    """Starts the processes of one group."""
    own = [asdict(one) for one in orders(order, [HERE] * (GROUPS * MEMBERS)) if one.group == group]
    return stack.enter_context(Group([HERE] * MEMBERS, "bench.group_member", own))


def _ends(found: Mapping[str, Any]) -> list[float]:
    """By the machine's own clock."""
    return [found["began"] + end for end in found["ends"]]


# -- equal weights ---------------------------------------------------------------------------------------------------


def equal(arguments: argparse.Namespace) -> list[Result]:
    """How far the weights of a system are from those of one process, and of HSDP."""
    found = []
    optimizers: list[tuple[str, dict[str, Any]]] = [("AdamW", {}), ("SGD with momentum", {"sgd": True})]
    more = {"micro": 2, "clip": CLIP}
    ways = optimizers + [(f"{name}, {cut}", way | more | {"cut": cut}) for cut in CUTS for name, way in optimizers]
    for name, way in ways:
        plain = replace(_plain(arguments), warmup=0, **way)
        with tempfile.TemporaryDirectory() as folder, servers([HERE] * arguments.shards) as cluster:
            ours = replace(plain, system="ours", server=cluster.address, job="equal")
            peer = REPLICAS if plain.clip else HSDP
            systems = {ALONE: replace(plain, system=ALONE), peer: replace(plain, system=peer), "ours": ours}
            for system, order in systems.items():
                with contextlib.ExitStack() as stack:
                    group = processes(stack, {system: order})[system]
                    group.run(SECONDS, steps=arguments.equal_steps)
                    group.run(SECONDS, save=str(Path(folder) / system))
            weights = {system: load_file(Path(folder) / system) for system in systems}
        for system in (peer, "ours"):
            figures = {"difference": largest_difference(weights[system], weights[ALONE])}
            if system == "ours":
                figures["hsdp_difference"] = largest_difference(weights[system], weights[peer])
            scenario = f"{arguments.equal_steps} steps of {name}"
            figures |= {"steps": arguments.equal_steps}
            found.append(
                _line(arguments, scenario, systems[system], None, not_measured="only weights count", **figures)
            )
    return found


def largest_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of an element, as a part of the largest element of its tensor."""
    if found.keys() != expected.keys():
        raise SystemExit("wrong result: systems have unlike parameters")
    return max(
        float((found[name] - each).abs().max()) / (float(each.abs().max()) or 1.0) for name, each in expected.items()
    )


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system that was timed, by scenario."""
    panels: dict[str, list[Bar]] = {}
    for line in lines:
        if line["ms"] is not None:
            bar = Bar(label(line), line["ms"], line["system"] != HSDP, line.get("allowed_ms"))
            panels.setdefault(f"{line['scenario']}, {line['workers']} groups of {line['members']}", []).append(bar)
    if panels:
        bars(path, "milliseconds", panels)
