"""Chooses the next edition that a feed requests: how many updates ahead of the job, and whether as changes.

The distance doubles when a shard was past the version, and is halved after KEEP_AHEAD editions in a row that came.
Changes are asked for on a slow network, which is measured by editions that come whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_AHEAD = 4096  # updates ahead of the job that are asked for
KEEP_AHEAD = 16  # editions after which a smaller distance is tried
CHANGES_BELOW = 2e8  # bytes a second of whole editions, below which changes are asked for
MEASURED_SECONDS = 60.0  # a slow network is measured again after this time, with a whole edition
MEASURED_SHARE = 50  # times what such an edition took, if that is longer: so measuring takes 2 % of the time at most


@dataclass
class UpdatesAhead:
    """How many updates ahead of the job an edition is asked for."""

    updates: int = 0
    _good: int = field(default=0, repr=False)

    def passed(self) -> None:
        """Records that a shard was past the requested version."""
        self._good = 0
        self.updates = min(MOST_AHEAD, max(1, 2 * self.updates))

    def arrived(self) -> None:
        """Records that an edition came."""
        self._good += 1
        if self._good >= KEEP_AHEAD:
            self._good, self.updates = 0, self.updates // 2


class NetworkSpeed:
    """Whether the network is so slow that changes arrive sooner than whole editions."""

    def __init__(self) -> None:
        self._is_slow, self.measured_until = False, 0.0  # measured with a whole edition; valid until then

    def is_slow(self) -> bool:
        """Whether the last measurement found a slow network, and is still valid."""
        return self._is_slow and time.monotonic() < self.measured_until

    def note(self, came: Sequence[tuple[float, int]]) -> None:
        """Notes an edition that was asked for whole. came: when which bytes of it came, the first ones first"""
        seconds, size = came[-1][0] - came[0][0] if came else 0.0, sum(size for _, size in came[1:])
        self._is_slow = size < CHANGES_BELOW * seconds if len(came) > 1 else True
        self.measured_until = time.monotonic() + max(MEASURED_SECONDS, MEASURED_SHARE * seconds)
