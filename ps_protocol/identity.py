"""Who a worker is: what every message of one names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Identity:
    """A worker as the servers know it; `key` proves that it is that one. run: of the job"""

    job: str
    rank: int
    incarnation: int
    key: bytes = field(default=b"", repr=False)
    run: str = ""


@dataclass(frozen=True)
class BegunStep:
    """The furthest step that workers of one rank have pushed to one shard, whole or in part.

    clock: of that step; 0: they have pushed none
    units: the buckets that have a push of it, by index; a table's index is its number behind the job's last bucket
    """

    clock: int
    units: frozenset[int]
