"""What a shard or a coordinator says about itself: frozen records, read by metrics, RPC, `status` and tests alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitStatistics:
    """A worker whose pull waits on a shard.

    buckets:     how many buckets it waits for
    waiting_for: the ranks that it waits for
    reason:      why, in words
    seconds:     for how long already
    """

    rank: int
    clock: int
    buckets: int
    waiting_for: tuple[int, ...]
    reason: str
    seconds: float


@dataclass(frozen=True)
class HostedJobStatistics:
    """One job on one shard.

    staged_bytes: bytes staged and not yet applied
    version_min, version_max: the lowest and highest version of its buckets
    clocks:       by rank of a live worker, the lowest clock over its buckets
    waits:        the workers that wait, by rank
    """

    name: str
    buckets: int
    parameter_bytes: int
    optimizer_bytes: int
    staged_bytes: int
    version_min: int
    version_max: int
    clocks: Mapping[int, int]
    waits: tuple[WaitStatistics, ...] = ()


@dataclass(frozen=True)
class ShardStatistics:
    """What one shard holds, by the job's name."""

    jobs: Mapping[str, HostedJobStatistics]

    def progress(self, job: str, aggregate: bool) -> int:
        """How far a job is here: its highest version with `aggregate` (sync), otherwise its highest clock."""
        hosted = self.jobs.get(job)
        if hosted is None:
            return 0
        return hosted.version_max if aggregate else max(hosted.clocks.values(), default=0)

    def clocks(self, job: str) -> Mapping[int, int]:
        """By rank, the steps of a job's live workers that are applied here."""
        hosted = self.jobs.get(job)
        return hosted.clocks if hosted is not None else {}
