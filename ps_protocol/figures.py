"""The measurements of a worker, and the values that its script logs, for dashboards. All are sums since the worker
began to measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("data", "forward", "backward", "push", "pull", "wait")
MAX_VALUES = 8
MAX_VALUE_NAME = 40
MAX_TOTAL = 2**53  # steps: JavaScript, which shows the page, has exact integers up to here
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_OF_A_NAME = _LETTERS | frozenset("0123456789_")


@dataclass(frozen=True)
class LoggedValue:
    """A value that a script logs. last: the last value; mean: the exponential mean of the finite ones"""

    name: str
    last: float
    mean: float


@dataclass(frozen=True)
class WorkerFigures:
    """The measurements of a worker's process.

    measured: seconds of measurement
    steps: steps made; phases: their seconds by phase; sent, received: their bytes
    values: logged values, in the order in which their names were first logged
    looked_up, distinct: ids looked up in tables, and distinct ids of each lookup
    residual_ratio: the norm of the residual of the gradients' wire format, relative to the norm of the last push; None
    without a residual
    total: the steps that the worker makes in all, as its script announces; 0: unknown
    done: the steps that it has made since the job began
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
