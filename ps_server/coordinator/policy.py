"""When checkpoints are made, where they go, and how many are kept."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import InvalidRequest

DEFAULT_KEEP = 3


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints go, when they are made, and how many are kept.

    steps, seconds: make one every so many clocks, or seconds; neither: only when asked to, and at a job's end
    restore:        a job of a name that has a checkpoint continues from it, also if it had ended
    resume:         the jobs that ran when an earlier coordinator ended are resumed; implied by `restore`
    """

    directory: Path
    steps: int | None = None
    seconds: float | None = None
    keep: int = DEFAULT_KEEP
    restore: bool = False
    resume: bool = False


def parse_every(text: str) -> tuple[int | None, float | None]:
    """Returns `100steps` or `60s` as (steps, seconds). Raises InvalidRequest for anything else."""
    for unit, kind in (("steps", int), ("s", float)):
        if text.endswith(unit):
            with contextlib.suppress(ValueError):
                value = kind(text.removesuffix(unit))
                if 0 < value < 1e9:
                    return (int(value), None) if unit == "steps" else (None, float(value))
    raise InvalidRequest(f"expected a number of steps or of seconds, such as 100steps or 60s, got {text!r}")
