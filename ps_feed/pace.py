"""How many updates ahead of a job a feed asks for its next edition.

The distance doubles when a shard was past the version, and is halved after KEEP_AHEAD editions in a row that came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_AHEAD = 4096  # updates ahead of the job that are asked for
KEEP_AHEAD = 16  # editions after which a smaller distance is tried


@dataclass
class UpdatesAhead:
    """How many updates ahead of the job an edition is asked for."""

    updates: int = 0
    _good: int = field(default=0, repr=False)

    def passed(self) -> None:
        """Notes that a shard was past the version."""
        self._good = 0
        self.updates = min(MOST_AHEAD, max(1, 2 * self.updates))

    def arrived(self) -> None:
        """Notes that an edition came."""
        self._good += 1
        if self._good >= KEEP_AHEAD:
            self._good, self.updates = 0, self.updates // 2
