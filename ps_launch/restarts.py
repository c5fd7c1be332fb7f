"""Decides whether, and after which pause, a child process that has ended is restarted."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0
# A child that ran for longer than any pause was well: its next failure is another one.
WELL_SECONDS = 2 * LONGEST_SECONDS
# For shards. All workers wait for a lost shard, so its first restart has no pause, and later ones have shorter pauses
# than a worker's.
SHARD_LONGEST_SECONDS = 10.0
SHARD_WELL_SECONDS = 3 * SHARD_LONGEST_SECONDS


@dataclass
class Restarts:
    """The restarts of a worker: a fixed number, after pauses that grow with each failure in a row.

    most:  the most restarts over the whole run; running well for a while does not raise it
    count: the restarts so far
    """

    most: int
    count: int = 0
    _in_a_row: int = 0

    def after(self, seconds: float) -> float | None:
        """Returns the pause in seconds before a worker is restarted; None if it is not restarted. seconds: how long it
        ran
        """
        if self.count >= self.most:
            return None
        self.count += 1
        self._in_a_row = 1 if seconds >= WELL_SECONDS else self._in_a_row + 1
        return float(min(FIRST_SECONDS * 2.0 ** min(self._in_a_row - 1, 9), LONGEST_SECONDS))


@dataclass
class ShardRestarts:
    """The restarts of a shard: the first in a row at once, then after growing pauses.

    most:     the most restarts in a row: a shard that ran well for a while has all of them again; None: unlimited
    count:    the restarts over the whole run
    in_a_row: the restarts since it last ran well
    """

    most: int | None = None
    count: int = 0
    in_a_row: int = 0

    def after(self, seconds: float) -> float | None:
        """Returns the pause in seconds before a shard is restarted; None if it is not restarted. seconds: how long it
        was ready
        """
        if seconds >= SHARD_WELL_SECONDS:
            self.in_a_row = 0
        if self.most is not None and self.in_a_row >= self.most:
            return None
        self.count += 1
        self.in_a_row += 1
        return 0.0 if self.in_a_row == 1 else float(min(2.0 ** min(self.in_a_row - 2, 9), SHARD_LONGEST_SECONDS))
