"""How often, and after which pause, a child process that ended is started again."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0
# A child that ran for longer than any pause was well: its next failure is another one.
WELL_SECONDS = 2 * LONGEST_SECONDS
# How often a shard may end in so many seconds.
MOST_ENDS, RECENT_SECONDS = 5, 60.0


@dataclass
class Restarts:
    """The restarts of a worker: a stated number, after pauses that grow with each failure in a row.

    most:  how many there may be, over the whole run: a worker that runs well for a while does not get more
    count: how many there were
    """

    most: int
    count: int = 0
    _in_a_row: int = 0

    def after(self, seconds: float) -> float | None:
        """Returns the pause before a worker that ran for so long starts again; None where it may not."""
        if self.count >= self.most:
            return None
        self.count += 1
        self._in_a_row = 1 if seconds >= WELL_SECONDS else self._in_a_row + 1
        return float(min(FIRST_SECONDS * 2.0 ** min(self._in_a_row - 1, 9), LONGEST_SECONDS))


@dataclass
class RareRestarts:
    """The restarts of a shard: at once, but for one that ends again and again."""

    _ends: deque[float] = field(default_factory=deque)

    @property
    def recent_ends(self) -> int:
        """How often the shard has ended lately."""
        return len(self._ends)

    def is_allowed(self) -> bool:
        """Returns whether a shard that has just ended starts again; counts its end."""
        now = time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] >= RECENT_SECONDS:
            self._ends.popleft()
        return self.recent_ends <= MOST_ENDS
