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
