"""What a shard can say of itself, as values: metrics, status and pages read these and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """What one worker waits for on a shard: so many buckets at a clock of its own, for these ranks, for so long.

    reason: why, in words, for one of the buckets
    """

    rank: int
    clock: int
    bucket_count: int
    waiting_for: frozenset[int]
    reason: str
    seconds: float


@dataclass(frozen=True)
class ShardJobStatistics:
    """A job on one shard.

    *_bytes: of the weights, of the optimizer's state, and of what is staged and not yet part of an update
    version_min, version_max: of the buckets that train
    clocks:  by live rank, the steps that every bucket here has applied
    waits:   by rank; waiting_pulls: buckets of pulls, of all of them
    """

    bucket_count: int
    parameter_bytes: int
    optimizer_bytes: int
    staged_bytes: int
    version_min: int
    version_max: int
    clocks: Mapping[int, int]
    waits: tuple[Wait, ...]
    waiting_pulls: int


@dataclass(frozen=True)
class ShardStatistics:
    """A shard, by the names of its jobs."""

    jobs: Mapping[str, ShardJobStatistics]
