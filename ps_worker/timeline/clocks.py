"""The clocks of shards, on this worker's own.

A worker asks a shard for its clock, and takes the answer for the time in the middle of the round trip. It is off by
half the round trip at most, however the two ways share it. Of several round trips the smallest counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

# After which clocks are read anew: those of two hosts drift apart by up to some 50 microseconds a second.
READ_AGAIN_SECONDS = 10.0


@dataclass(frozen=True)
class ClockReading:
    """A shard's clock, as it was read: in seconds. asked, answered: on this worker's clock"""

    asked: float
    answered: float
    clock: float

    @property
    def error(self) -> float:
        """Seconds by which `own` may be off, to either side."""
        return (self.answered - self.asked) / 2

    def own(self, moment: float) -> float:
        """Returns a moment of the shard's clock on this worker's."""
        return moment - self.clock + (self.asked + self.answered) / 2


class ShardClocks:
    """The best reading of each shard's clock, by its index."""

    def __init__(self) -> None:
        self._best: dict[int, ClockReading] = {}
        self._read_at: float | None = None

    @property
    def are_due(self) -> bool:
        """Whether the clocks were not read yet, or long ago."""
        return self._read_at is None or time.perf_counter() - self._read_at >= READ_AGAIN_SECONDS

    def read(self, readings: Iterable[tuple[int, ClockReading]]) -> None:
        """Takes readings, each with its shard: the best of them stands in place of all before."""
        for shard, reading in sorted(readings, key=lambda each: -each[1].error):
            self._best[shard] = reading
        self._read_at = time.perf_counter()

    def of(self, shard: int) -> ClockReading | None:
        """Returns the best reading; None: the shard has not told its clock."""
        return self._best.get(shard)

    def forget(self) -> None:
        """Forgets all readings: a shard's process may be another one now."""
        self._best, self._read_at = {}, None
