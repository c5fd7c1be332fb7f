"""Converts the clocks of shards to this worker's clock.

A worker asks a shard for its clock, and assumes that the answer is the time in the middle of the round trip. The error
is at most half the round trip, however unequal the two ways are. Of several round trips the shortest counts (Cristian's
algorithm).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

# Clocks are read again after this time: two hosts drift apart by up to some 50 microseconds a second.
READ_AGAIN_SECONDS = 10.0


@dataclass(frozen=True)
class ClockReading:
    """A reading of a shard's clock, in seconds. asked, answered: on this worker's clock"""

    asked: float
    answered: float
    clock: float

    @property
    def error(self) -> float:
        """Seconds by which `own` may be off, to either side."""
        return (self.answered - self.asked) / 2

    def own(self, moment: float) -> float:
        """Converts a moment of the shard's clock to this worker's clock."""
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
        """Adds readings, each with its shard. The best of them replaces all earlier ones."""
        for shard, reading in sorted(readings, key=lambda each: -each[1].error):
            self._best[shard] = reading
        self._read_at = time.perf_counter()

    def of(self, shard: int) -> ClockReading | None:
        """Returns the best reading; None if there is none."""
        return self._best.get(shard)

    def forget(self) -> None:
        """Forgets all readings: a shard's process may be another one now."""
        self._best, self._read_at = {}, None
