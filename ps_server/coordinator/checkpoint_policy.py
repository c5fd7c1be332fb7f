"""The policy of checkpoints: when they are made, where they go, and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints go, when they are made, and how many are kept.

    steps, seconds: make a checkpoint every `steps` clocks, or every `seconds`; both None: only on request and at a
                    job's end
    keep:           how many checkpoints of a job are kept
    restore:        a job whose name has a checkpoint continues from it, also if it had ended
    resume:         jobs that ran when an earlier coordinator ended are resumed; implied by `restore`
    full_every:     one of this many checkpoints has all rows of tables, the others only rows that changed since the one
                    before
    address:        the coordinator's address, for the error of another coordinator that wants the same directory
    """

    directory: Path
    steps: int | None = None
    seconds: float | None = None
    keep: int = 3
    restore: bool = False
    resume: bool = False
    address: str = ""
    full_every: int = 10
