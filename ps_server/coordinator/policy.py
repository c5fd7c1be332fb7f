"""When checkpoints are made, where they go, and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints go, when they are made, and how many are kept.

    steps, seconds: make one every so many clocks, or seconds; neither: only when asked to, and at a job's end
    restore:        a job of a name that has a checkpoint continues from it, also if it had ended
    full_every:     of so many checkpoints one has all rows of tables, the others what changed since the one before
    address:        of the coordinator, which others are told that want the directory too
    resume:         the jobs that ran when an earlier coordinator ended are resumed; implied by `restore`
    """

    directory: Path
    steps: int | None = None
    seconds: float | None = None
    keep: int = 3
    restore: bool = False
    resume: bool = False
    address: str = ""
    full_every: int = 10
