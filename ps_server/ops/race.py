"""The race of a job's workers, for a terminal: a line for each worker, as many as fit.

In a job of many workers the slowest and the fastest matter, so those are shown, and the number of workers between.
Workers in trouble come first: those that are silent, then those that are furthest behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ps_server.ops.columns import cut, printable
from ps_server.ops.status_text import clock_unit

SHOWN = 12  # up to so many workers are all shown, in the order of their ranks, if there is room
SLOWEST, FASTEST = 8, 2  # if there are more workers, only so many of the slowest and the fastest are shown
LANES = (24, 12)  # characters
MOST_ACTIVITY = 26  # characters for which a window keeps room, for a worker's present activity


@dataclass(frozen=True)
class Runner:
    """A worker in the race. status: its WorkerStatus; does: its WorkerView; both as plain data"""

    status: dict[str, Any]
    does: dict[str, Any]

    @property
    def trouble(self) -> tuple[bool, int, float, int]:
        """The sort key of a worker: those in trouble come first."""
        silent = self.does["activity"].startswith("silent")
        return not silent, self.status["clock"], -self.does["awaited_fraction"], self.status["rank"]

    @property
    def values(self) -> dict[str, float]:
        """The values that the worker's script has logged last."""
        return {value["name"]: value["last"] for value in (self.status["figures"] or {}).get("values", ())}


def chosen(runners: Sequence[Runner], lines: int | None) -> tuple[list[Runner], list[Runner], list[Runner]]:
    """Returns the workers to show first, those that are left out behind them, and those to show last.

    lines: the number of lines for workers; None: no limit
    """
    most = SHOWN if lines is None else min(SHOWN, lines)
    if len(runners) <= most:
        return list(runners), [], []
    last = min(FASTEST, max(0, most - 2))
    first = max(1, min(SLOWEST, most - 1 - last))
    ordered = sorted(runners, key=lambda runner: runner.trouble)
    end = len(ordered) - last
    return ordered[:first], ordered[first:end], ordered[end:]


def race(
    job: dict[str, Any], view: dict[str, Any], width: int | None = None, lines: int | None = None
) -> Iterator[str]:
    """Yields the race as lines: none without workers. width: of the window; lines: the number of lines"""
    runners = [Runner(status, does) for status, does in zip(job["workers"], view["workers"], strict=True)]
    if not runners:
        return
    first, between, last = chosen(runners, None if lines is None else lines - 1)
    clocks = [runner.status["clock"] for runner in runners]
    unit = clock_unit(job)
    table = _Columns.fitting([*first, *last], width, unit)
    yield cut(table.head(), width)
    for runner in first:
        yield cut(table.row(runner, min(clocks), max(clocks)), width)
    if between:
        at = sorted(runner.status["clock"] for runner in between)
        yield cut(f" {len(between)} more between, at {at[0]} to {at[-1]} {unit}", width)
    for runner in last:
        yield cut(table.row(runner, min(clocks), max(clocks)), width)


@dataclass(frozen=True)
class _Columns:
    """The columns of the race, and their widths.

    host:   the width of the host's column; 0: left out
    unit:   what clocks count
    values: the names of logged values
    """

    host: int
    clock: int
    unit: str
    lane: int
    values: tuple[str, ...]

    @classmethod
    def fitting(cls, runners: Sequence[Runner], width: int | None, unit: str) -> _Columns:
        """Returns the columns that fit into the window beside each worker's present activity."""
        names = tuple(sorted({name for runner in runners for name in runner.values}))
        first = tuple(name for name in names if name == "loss") or names[:1]
        host = max(len(printable(runner.status["host"])) for runner in runners)
        clock = max(len(str(runner.status["clock"])) for runner in runners)
        host, sizes = max(host, len("host")), (max(clock, len(unit)), unit)
        wide, narrow = LANES
        now = max(len(printable(runner.does["activity"])) for runner in runners)
        for columns in (
            cls(host, *sizes, wide, names),
            cls(0, *sizes, wide, names),
            cls(0, *sizes, narrow, names),
            cls(0, *sizes, narrow, first),
        ):
            if width is None or len(columns.head()) - len("now") + min(now, MOST_ACTIVITY) <= width:
                return columns
        return cls(0, *sizes, narrow, ())

    def head(self) -> str:
        """Returns the names of the columns."""
        host = f"  {'host':<{self.host}}" if self.host else ""
        lane = "slowest → fastest" if self.lane >= len("slowest → fastest") else "slow → fast"
        values = "".join(f"  {name:>10}" for name in self.values)
        return f" rank{host}  {self.unit:>{self.clock}}  {lane:<{self.lane}}  steps/s{values}  now"

    def row(self, runner: Runner, slowest: int, fastest: int) -> str:
        """Returns a worker's line."""
        status, does = runner.status, runner.does
        rate = "-" if does["steps_per_second"] is None else f"{does['steps_per_second']:.1f}"
        host = f"  {printable(status['host']):<{self.host}}" if self.host else ""
        values = "".join(f"  {_number(runner.values.get(name)):>10}" for name in self.values)
        lane = _lane(status["clock"], slowest, fastest, self.lane)
        place = f" {status['rank']:>4}{host}  {status['clock']:>{self.clock}}  {lane}"
        return f"{place}  {rate:>7}{values}  {printable(does['activity'])}"


def _lane(clock: int, slowest: int, fastest: int, length: int) -> str:
    """Draws a worker's position between the slowest and the fastest worker, as a line of `length` characters.

    clock, slowest, fastest: clocks of the worker, and of those two. If the two are equal, the worker is in the middle
    """
    spread = fastest - slowest
    place = (clock - slowest) * (length - 1) // spread if spread else length // 2
    return "─" * place + "●" + "─" * (length - 1 - place)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
