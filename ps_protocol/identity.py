"""The identity of a worker, which all its messages carry."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Identity:
    """The identity of a worker of one run of a job.

    key:    its lease key, which proves it
    member: which process of its group this is; 0 for a worker of one process
    """

    job: str
    rank: int
    incarnation: int
    key: bytes = field(default=b"", repr=False)
    run: str = ""
    member: int = 0
