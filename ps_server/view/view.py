"""The view: how each job, worker and shard does, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.statistics import JobStatistics, ShardStatistics


@dataclass(frozen=True)
class WorkerView:
    """How a worker does.

    activity: what it is doing now, in words
    awaited:  the ranks that it waits for now
    steps_per_second: None: not known
    fractions: of each phase in its time, by phase; empty: not known
    awaited_fraction: the part of the job's waiting that was for this worker
    """

    rank: int
    activity: str
    awaited: tuple[int, ...]
    steps_per_second: float | None
    fractions: Mapping[str, float]
    awaited_fraction: float


@dataclass(frozen=True)
class JobView:
    """How a job does.

    statistics: with the clocks that its shards know, where they know them: heartbeats say older ones
    state, diagnosis: what it is doing, and what limits it, in words
    age:   seconds for which its run has gone on; None: not known
    done:  the part of their steps that its workers have made; None: no script says how many there are
    left:  seconds that the worker which needs longest for the others takes, at its rate now; None: not known
    """

    statistics: JobStatistics
    state: str
    diagnosis: str
    workers: tuple[WorkerView, ...]
    steps_per_second: float
    age: float | None = None
    done: float | None = None
    left: float | None = None


@dataclass(frozen=True)
class ShardWork:
    """What a shard did for one job: each a second, but for `apply_seconds`, which one step of a bucket takes."""

    applies: float = 0.0
    apply_seconds: float | None = None
    received: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class ShardView:
    """How a shard does.

    statistics: its last answer; None: none yet
    silent:     seconds for which it has not answered; 0: it answers
    work:       what it did for each job over the last seconds
    """

    shard: RegisteredShard
    statistics: ShardStatistics | None
    silent: float
    work: Mapping[str, ShardWork]


@dataclass(frozen=True)
class View:
    """The cluster at one moment. time: seconds since 1970"""

    time: float
    lease: float
    jobs: Mapping[str, JobView]
    shards: tuple[ShardView, ...]
