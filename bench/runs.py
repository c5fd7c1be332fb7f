"""Several runs of one benchmark, one after the other: their medians, and how far apart they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.results import Result

# By which a line is the same in each run.
NAMED = ("scenario", "system", "transport", "wire", "workers", "shards")


def merged(lines: Sequence[Result]) -> list[Result]:
    """Returns one line for the lines of several runs that are of the same system; those of one run as they are.

    run: in a line, its run's number; without, there was one
    Every number that all runs have is their median. `runs` says how many there were, and `spread`, by
    peer, the smallest and the largest ratio.
    """
    runs: dict[int, list[Result]] = {}
    for line in lines:
        runs.setdefault(line.get("run", 1), []).append(line)
    if len(runs) == 1:
        return list(lines)
    counts = {len(each) for each in runs.values()}
    if len(counts) > 1:
        raise ValueError(f"expected as many results of each run, got {sorted(counts)}")
    return [_median(same) for same in zip(*runs.values(), strict=True)]


def _median(lines: Sequence[Result]) -> Result:
    first = lines[0]
    for line in lines:
        if any(line.get(name) != first.get(name) for name in NAMED):
            raise ValueError(
                f"expected results of {first['system']} of each run in the same place, got {line['system']}"
            )
    ratios = {peer: [line["ratios"][peer] for line in lines if peer in line["ratios"]] for peer in first["ratios"]}
    numbers = {name: _of_numbers([line.get(name) for line in lines]) for name in first if name != "run"}
    return {
        **{name: first[name] if number is None else number for name, number in numbers.items()},
        "ratios": {peer: statistics.median(found) for peer, found in ratios.items()},
        "spread": {peer: [min(found), max(found)] for peer, found in ratios.items()},
        "runs": len(lines),
    }


def _of_numbers(values: Sequence[Any]) -> float | None:
    """Returns the median of numbers; None: these are none."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return statistics.median(numbers) if len(numbers) == len(values) else None
