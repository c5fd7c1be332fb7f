"""How often, and after which pause, a child process that ended is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0
# A child that ran for longer than any pause was well: its next failure is another one.
WELL_SECONDS = 2 * LONGEST_SECONDS


class Policy(Protocol):
    """Decides about the restarts of one child."""

    def after(self, seconds: float) -> float | None:
        """Returns seconds until a child that ended after running for so long is started again; None: it is not."""


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
        """Returns the pause before the next start; None where there were as many as there may be."""
        if self.count >= self.most:
            return None
        self.count += 1
        self._in_a_row = 1 if seconds >= WELL_SECONDS else self._in_a_row + 1
        return float(min(FIRST_SECONDS * 2.0 ** min(self._in_a_row - 1, 9), LONGEST_SECONDS))


@dataclass
class RareRestarts:
    """The restarts of a shard: at once, but for one that ends again and again.

    most, within: how many there may be in so many seconds
    """

    most: int = 5
    within: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _ends: deque[float] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """How often the child has ended lately."""
        return len(self._ends)

    def after(self, seconds: float) -> float | None:
        """Returns no pause; None where the child ended too often lately."""
        now = self.clock()
        self._ends.append(now)
        while now - self._ends[0] >= self.within:
            self._ends.popleft()
        return None if self.count > self.most else 0.0
