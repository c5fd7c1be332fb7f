"""A result is one line of JSON; these are the fields that all have."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import machine, versions

THREADS = 1  # for computing, in every process of a benchmark, whatever the system
MIB = 2**20
LOSS_TOLERANCE = 0.01  # where a model is trained the same way with the same batches

Result = dict[str, Any]


def result(
    bench: str,
    system: str,
    *,
    workers: int,
    shards: int,
    size: int,
    ms: float | None,
    transport: str = "",
    wire: str = "",
    ratios: Mapping[str, float] | None = None,
    **more: Any,
) -> Result:
    """One result.

    size:   bytes of the model's weights in float32
    ms:     the median of what was measured, in milliseconds; None: nothing was, and `not_measured` says why
    ratios: by the peer's name, this result divided by the peer's in the same run
    more:   what only this benchmark has
    """
    return {
        "bench": bench,
        "system": system,
        "transport": transport,
        "wire": wire,
        "workers": workers,
        "shards": shards,
        "bytes": size,
        "ms": ms,
        "ratios": {peer: round(ratio, 3) for peer, ratio in (ratios or {}).items()},
        **more,
        "threads": THREADS,
        "machine": machine(),
        "versions": versions(),
    }


def median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 2)


def step_times(ends: Sequence[float]) -> list[float]:
    """Seconds of each step but the first, from the times at which they ended."""
    return [after - before for before, after in itertools.pairwise(ends)]


def step_ms(turns: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The median of all workers' steps in milliseconds, from their answers in each turn."""
    return median_ms([seconds for answers in turns for found in answers for seconds in step_times(found["ends"])])


def mean_step_ms(turns: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """As `step_ms`, where not all steps do the same: the median over the turns of all workers' mean step."""
    return median_ms([statistics.mean(step_times(found["ends"])) for answers in turns for found in answers])


def check_loss(name: str, loss: float, expected: float) -> None:
    """Raises SystemExit unless a loss is the expected one, or close to it.

    A system that is fast because it trains something else does not count.
    """
    if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
        raise SystemExit(f"wrong result: the loss of {name} is {loss:.4f}, expected {expected:.4f}")


def label(line: Result) -> str:
    """What a picture calls a result's system."""
    return " ".join(part for part in (line["system"], line["transport"], line["wire"]) if part)
