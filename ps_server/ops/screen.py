"""The screen of `ps-server status --watch`: for each job its diagnosis and the race of its workers; then the
processes.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ps_protocol.errors import PSError
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.dates import seconds_of
from ps_runtime.quantities import duration_text
from ps_runtime.retry import Peer
from ps_server.ops.columns import cut, printable, wrapped
from ps_server.ops.race import race
from ps_server.ops.status_text import job_lines, mode_text, process_lines, steps_text
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import json_text, plain

LEAST_RACE = 5  # lines of a job's race even in a low window: its head, two workers, how many more, and the fastest
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

    If `out` is no terminal, each view is written below the one before. It waits for a coordinator that stops answering.
    If the first call is not answered, it raises Unreachable, or another PSError.
    """
    out = out or sys.stdout
    draw = _json_line if as_json else _redraw if out.isatty() else _append
    seen = False
    while True:
        try:
            with OperatorClient(Peer("coordinator", server, access)) as coordinator:
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
    """Writes over the present screen: clearing it first would flicker."""
    columns, rows = shutil.get_terminal_size()
    lines = screen(view, columns, rows - 1)  # the last line stays free: writing into its last column would scroll
    if len(lines) >= rows:
        lines = [*lines[: rows - 2], f"… and {len(lines) - rows + 2} more lines: make the window higher"]
    text = "".join(f"{cut(line, columns)}{END_OF_LINE}\n" for line in lines)
    out.write(f"{HOME}{text}{END_OF_SCREEN}")
    out.flush()


def _write(out: TextIO, lines: list[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()


def screen(view: dict[str, Any], width: int | None = None, height: int | None = None) -> list[str]:
    """Returns a view, in the form of plain(), as lines for a person: for each job its diagnosis and the race, and then
    the processes.

    width, height: of the window, for which workers and columns are chosen; None if there is no limit
    """
    status, views = view["status"], {job["job"]: job for job in view["jobs"]}
    heads = [_head(job, views[job["name"]], width) for job in status["jobs"]]
    room = None
    if height is not None and heads:
        room = max(LEAST_RACE, (height - sum(map(len, heads)) - len(heads) + 1) // len(heads))
    lines: list[str] = []
    for head, job in zip(heads, status["jobs"], strict=True):
        lines += [*head, *race(job, views[job["name"]], width, room), ""]
    ended = [cut(printable(text), width) for text in _finished(view)]
    lines += [*ended, ""] if ended else []
    silent = [shard for shard in view["shards"] if shard["silent_duration"]]
    if silent and not view["jobs"]:
        lines += [f"shard {each['index']} does not answer for {each['silent_duration']:.0f} s" for each in silent]
        lines.append("")
    lines += process_lines(status, width)
    for job in status["jobs"]:
        lines += [cut(line, width) for line in job_lines(status, job)]
    return lines


def _finished(view: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each of the last jobs that have ended."""
    for job in view["finished_jobs"]:
        ago = max(0.0, seconds_of(view["view_time"]) - seconds_of(job["end_time"]))
        low, high = job["min_clock"], job["max_clock"]
        parts = [
            f"{job['job']}: {job['text']}, {duration_text(ago)} ago",
            f"{low if low == high else f'{low}-{high}'} steps",
            *(f"{value['name']} {value['mean']:.4g}" for value in job["values"]),
        ]
        if job["age_duration"] is not None:
            parts.append(f"ran for {duration_text(job['age_duration'])}")
        if job["last_checkpoint"] is not None:
            parts.append(f"last checkpoint {job['last_checkpoint']['name']}")
        yield " · ".join(parts)


def _head(job: dict[str, Any], view: dict[str, Any], width: int | None) -> list[str]:
    """Returns the lines above a job's race: its name, mode, state, diagnosis and remaining time."""
    parts = [job["name"], mode_text(job), view["state"]]
    # A worker's rate is known from its second report on; until then the job's is not 0, but not known either.
    known = not view["workers"] or any(does["steps_per_second"] is not None for does in view["workers"])
    parts.append(f"{view['steps_per_second']:.1f} steps/s" if known else "- steps/s")
    if view["age_duration"] is not None:
        parts.append(f"running for {duration_text(view['age_duration'])}")
    lines = wrapped([*map(printable, parts)], width)
    if view["diagnosis"]:
        lines.append(cut(printable(view["diagnosis"]), width))
    return lines + wrapped([*map(printable, _progress(job, view))], width)


def _progress(job: dict[str, Any], view: dict[str, Any]) -> list[str]:
    """Returns a job's progress and its remaining time, as far as they are known."""
    parts = [steps] if (steps := steps_text(job)) else []
    if view["done_fraction"] is not None:
        parts.append(f"{100 * view['done_fraction']:.0f} %")
    if view["left_duration"]:
        parts.append(f"{duration_text(view['left_duration'])} left")
    if view["checkpoint_age_duration"] is not None:
        parts.append(f"checkpoint {duration_text(view['checkpoint_age_duration'])} ago")
    return parts
