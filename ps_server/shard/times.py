"""When pushes were staged and applied, for workers that record a timeline: of all others nothing is noted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class BucketTimes(NamedTuple):
    """When a bucket that a worker pulls was staged, as that worker had pushed it, applied, and admitted: in seconds of
    the shard's clock."""

    staged: float
    applied: float
    admitted: float


@dataclass
class _Push:
    """One worker's last push of one bucket. applied: None: not yet"""

    clock: int
    staged: float
    applied: float | None = None


class PushTimes:
    """The last push of each bucket, of the workers of one job that record. The caller holds the job's lock.

    A worker's next push of a bucket is staged only after its last one was applied: one of each is enough. With a quorum
    the last one may be applied later; of that nothing is told.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, dict[int, _Push]] = {}  # by rank, then by bucket

    def follow(self, rank: int, wanted: bool) -> None:
        """Notes the pushes of a worker from here on, or forgets all of it."""
        if wanted:
            self._pushes.setdefault(rank, {})
        elif self._pushes:
            self._pushes.pop(rank, None)

    def follows_any(self, ranks: Iterable[int]) -> bool:
        """Whether any of these workers records."""
        return bool(self._pushes) and not self._pushes.keys().isdisjoint(ranks)

    def staged(self, rank: int, bucket: int, clock: int, now: float) -> None:
        """Notes that a worker's push for a clock is staged, if it records."""
        pushes = self._pushes.get(rank)
        if pushes is not None:
            pushes[bucket] = _Push(clock, now)

    def applied(self, pushes: Iterable[tuple[int, int]], bucket: int, now: float) -> None:
        """Notes that an update with pushes is in a bucket's weights. pushes: the rank and the clock of each"""
        for rank, clock in pushes:
            push = self._pushes.get(rank, {}).get(bucket)
            if push is not None and push.clock == clock and push.applied is None:
                push.applied = now

    def of(self, rank: int, bucket: int, clock: int, now: float) -> BucketTimes | None:
        """Returns the times of a bucket that a worker gets now, at its clock; None: they were not noted."""
        push = self._pushes.get(rank, {}).get(bucket)
        if push is None or push.clock != clock or push.applied is None:
            return None
        return BucketTimes(push.staged, push.applied, now)
