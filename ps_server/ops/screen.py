"""What `ps-server status --watch` shows: the table of `status`, and below it the race of each job's workers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ps_protocol.errors import PSError
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.quantities import time_text
from ps_runtime.retry import Peer
from ps_server.ops.status import mode_text, printable, steps_text, table
from ps_server.rpc.coordinator_client import CoordinatorClient
from ps_server.rpc.plain import json_text, plain

LANE = 24  # characters
TRY_AGAIN_SECONDS = 1.0
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

Pause = Callable[[float], object]


def watch(
    server: str,
    access: Access = PLAINTEXT,
    period: float = 1.0,
    as_json: bool = False,
    out: TextIO | None = None,
    pause: Pause = time.sleep,
) -> None:
    """Shows views of a cluster, each in place of the one before, until the caller is interrupted.

    Where `out` is no terminal, each is written below the one before. A coordinator that goes away is waited for; one
    that does not answer at the first time raises Unreachable, or another PSError.
    """
    out = out or sys.stdout
    draw = _json_line if as_json else _redraw if out.isatty() else _append
    seen = False
    while True:
        try:
            with CoordinatorClient(Peer("coordinator", server, access)) as coordinator:
                for response in coordinator.watch(period):
                    seen = True
                    draw(out, plain(response))
            trouble = "the coordinator stops"
        except PSError as error:
            if not seen or not error.retryable:
                raise
            trouble = str(error)
        if not as_json:
            _write(out, [f"{printable(trouble)}; trying again"])
        pause(TRY_AGAIN_SECONDS)


def _json_line(out: TextIO, view: dict[str, Any]) -> None:
    out.write(json_text(view) + "\n")
    out.flush()


def _append(out: TextIO, view: dict[str, Any]) -> None:
    _write(out, [*screen(view), ""])


def _redraw(out: TextIO, view: dict[str, Any]) -> None:
    """Writes over what is there: a screen that is cleared first would flicker."""
    columns, rows = shutil.get_terminal_size()
    lines = screen(view)
    if len(lines) >= rows:  # the last line stays free: writing into its last column would scroll
        lines = [*lines[: rows - 2], f"… and {len(lines) - rows + 2} more lines: make the window higher"]
    text = "".join(f"{line[:columns]}{END_OF_LINE}\n" for line in lines)
    out.write(f"{HOME}{text}{END_OF_SCREEN}")
    out.flush()


def _write(out: TextIO, lines: list[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()


def screen(view: dict[str, Any]) -> list[str]:
    """Returns a view, as plain() has it, as lines for a person."""
    lines = table(view["status"]).splitlines()
    views = {job["job"]: job for job in view["jobs"]}
    for job in view["status"]["jobs"]:
        lines += ["", *_job(job, views[job["name"]])]
    silent = [shard for shard in view["shards"] if shard["silent_duration"]]
    if silent and not view["jobs"]:
        lines += [
            "",
            *(f"shard {each['index']} does not answer for {each['silent_duration']:.0f} s" for each in silent),
        ]
    return lines


def _job(job: dict[str, Any], view: dict[str, Any]) -> Iterator[str]:
    parts = [job["name"], mode_text(job), view["state"]]
    # A worker's rate is known from its second report on; until then the job's is not 0, but not known either.
    known = not view["workers"] or any(does["steps_per_second"] is not None for does in view["workers"])
    parts.append(f"{view['steps_per_second']:.1f} steps/s" if known else "- steps/s")
    if view["age_duration"] is not None:
        parts.append(f"running for {time_text(view['age_duration'])}")
    yield printable(" · ".join(parts))
    if view["diagnosis"]:
        yield printable(view["diagnosis"])
    if progress := _progress(job, view):
        yield printable(" · ".join(progress))
    workers = job["workers"]
    if not workers:
        return
    names = sorted({value["name"] for worker in workers for value in (worker["figures"] or {}).get("values", ())})
    hosts = [printable(worker["host"]) for worker in workers]
    clocks = [worker["clock"] for worker in workers]
    wide, long = max(map(len, [*hosts, "host"])), max(len(str(clock)) for clock in [*clocks, "clock"])
    values = "".join(f"  {name:>10}" for name in names)
    yield f" rank  {'host':<{wide}}  {'clock':>{long}}  {'slowest → fastest':<{LANE}}  steps/s{values}  now"
    for worker, host, does in zip(workers, hosts, view["workers"], strict=True):
        rate = "-" if does["steps_per_second"] is None else f"{does['steps_per_second']:.1f}"
        logged = {value["name"]: value["last"] for value in (worker["figures"] or {}).get("values", ())}
        numbers = "".join(f"  {_number(logged.get(name)):>10}" for name in names)
        lane = _lane(worker["clock"], min(clocks), max(clocks))
        yield (
            f" {worker['rank']:>4}  {host:<{wide}}  {worker['clock']:>{long}}  {lane}  {rate:>7}{numbers}  "
            f"{printable(does['activity'])}"
        )


def _progress(job: dict[str, Any], view: dict[str, Any]) -> list[str]:
    """Returns how far a job is, and what is left, as far as it is known."""
    parts = [steps] if (steps := steps_text(job)) else []
    if view["done_fraction"] is not None:
        parts.append(f"{100 * view['done_fraction']:.0f} %")
    if view["left_duration"]:
        parts.append(f"{time_text(view['left_duration'])} left")
    if view["checkpoint_age_duration"] is not None:
        parts.append(f"checkpoint {time_text(view['checkpoint_age_duration'])} ago")
    return parts


def _lane(clock: int, slowest: int, fastest: int) -> str:
    """Returns where a worker is between the slowest and the fastest; all are in the middle where these are one."""
    spread = fastest - slowest
    place = (clock - slowest) * (LANE - 1) // spread if spread else LANE // 2
    return "─" * place + "●" + "─" * (LANE - 1 - place)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
