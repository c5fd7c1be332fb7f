"""What a worker measures of its own work, and what its script logs, for people who watch: sums since the worker
began to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("data", "forward", "backward", "push", "pull", "wait")
MAX_VALUES = 8
MAX_VALUE_NAME = 40
MAX_TOTAL = 2**53  # steps: JSON's numbers are exact up to there
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_OF_A_NAME = _LETTERS | frozenset("0123456789_")


@dataclass(frozen=True)
class LoggedValue:
    """A value that a script logs. last: as it was logged last; mean: the exponential mean of the finite ones"""

    name: str
    last: float
    mean: float


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker's process has measured.

    measured: seconds for which it has
    steps:    made; phases: their seconds, by phase; sent, received: their bytes
    values:   what the script logs, in the order of first mention
    looked_up, distinct: ids looked up in tables, and those of each lookup once
    residual_ratio: norm of what the wire format of gradients has left out, over that of what was pushed last; None: it
                    leaves out nothing that is sent later
    total:    steps that the worker makes in all, as its script says; 0: it does not say
    done:     those that it has made since the job began
    """

    measured: float = 0.0
    steps: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    values: tuple[LoggedValue, ...] = ()
    looked_up: int = 0
    distinct: int = 0
    residual_ratio: float | None = None
    total: int = 0
    done: int = 0


def is_value_name(name: str) -> bool:
    """Whether a logged value may have this name."""
    return 0 < len(name) <= MAX_VALUE_NAME and name[0] in _LETTERS and _OF_A_NAME.issuperset(name)
