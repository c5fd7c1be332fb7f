"""The view: the state of each job, worker and shard, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.statistics import JobStatistics, ShardStatistics


@dataclass(frozen=True)
class WorkerView:
    """The state of a worker.

    activity: its present activity, as text
    awaited:  the ranks that it waits for now
    steps_per_second: None: not known
    fractions: the fraction of its time in each phase; empty: unknown
    awaited_fraction: the fraction of the job's waiting time that was for this worker
    """

    rank: int
    activity: str
    awaited: tuple[int, ...]
    steps_per_second: float | None
    fractions: Mapping[str, float]
    awaited_fraction: float


@dataclass(frozen=True)
class JobView:
    """The state of a job.

    statistics: with clocks from its shards if they know them, because those of heartbeats are older
    state, diagnosis: see diagnosis.py
    age:   seconds since its run began; None: unknown
    done:  the fraction of steps that its workers have made; None: no script announces its number of steps
    left:  seconds until the slowest worker is done, at its present rate; None: unknown
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
    """A shard's work for one job: rates per second, except for `apply_seconds`, the time of one step of a bucket."""

    applies: float = 0.0
    apply_seconds: float | None = None
    received: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class ShardView:
    """The state of a shard.

    statistics: the shard's last answer; None if it has not answered yet
    silent:     seconds for which it has not answered; 0: it answers
    work:       its work for each job over the last seconds
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
