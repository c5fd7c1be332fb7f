"""The statistics of a shard or a coordinator: frozen records, read by metrics, RPC, `status` and tests alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.figures import WorkerFigures
from ps_protocol.modes import Consistency
from ps_server.core.agreement import Agreement
from ps_server.core.data_leases import LoaderProgress
from ps_server.core.feed_figures import FeedFigures
from ps_server.core.membership import LiveWorker
from ps_server.core.server_figures import ShardFigures, ShardJobFigures, TableFigures


@dataclass(frozen=True)
class Wait:
    """One worker's wait on a shard.

    clock:        the clock of its pull
    bucket_count: the number of buckets that it waits for
    waiting_for:  the ranks that it waits for
    reason:       why it waits, as text, for one of the buckets
    seconds:      how long it has waited
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

    *_bytes: of the weights, of the optimizer's state, and of contributions that are staged and not yet applied
    version_min, version_max: of the buckets that train
    clocks:  by live rank, the steps that every bucket on this shard has applied
    waits:   the waits of workers, by rank
    waiting_pulls: the number of pulls of single buckets that wait, over all workers
    run:     the job's run
    figures: the shard's measurements of the job; None: unknown
    departed_clocks: as `clocks`, of workers that are no longer live
    sharing, connected: ranks of workers that share memory with this shard, or have a data connection to it
    tables:  the job's tables of rows
    agreement: how alike workers have moved in the last rounds of local:H; None: not known
    feed:    the readers of its weights; None if there are none
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
    run: str = ""
    figures: ShardJobFigures | None = None
    departed_clocks: Mapping[int, int] = field(default_factory=dict)
    sharing: tuple[int, ...] = ()
    connected: tuple[int, ...] = ()
    tables: tuple[TableFigures, ...] = ()
    agreement: Agreement | None = None
    feed: FeedFigures | None = None

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self.tables)


@dataclass(frozen=True)
class ShardStatistics:
    """A shard's jobs, by name. figures: the measurements of its process; None: unknown"""

    jobs: Mapping[str, ShardJobStatistics]
    figures: ShardFigures | None = None

    def progress(self, job: str, by_version: bool) -> int:
        """Returns how far a job is on this shard; 0 if the shard does not have it.

        by_version: return the job's highest version (in sync); otherwise its highest clock
        """
        hosted = self.jobs.get(job)
        if hosted is None:
            return 0
        return hosted.version_max if by_version else max(hosted.clocks.values(), default=0)

    def clocks(self, job: str) -> Mapping[int, int]:
        """Returns the applied steps of a job's workers, by rank, also of workers that have left."""
        hosted = self.jobs.get(job)
        return {**hosted.departed_clocks, **hosted.clocks} if hosted is not None else {}


@dataclass(frozen=True)
class CheckpointStatistics:
    """The checkpoints of a job since this coordinator coordinates it.

    complete, failed: how many were completed, and how many failed
    incomplete:       how many of the complete ones lack a worker's state
    name, clock:      those of the last one; None and 0 before the first
    seconds:          how long the last one took
    held_up_seconds:  for how long it stopped updates, on the shard where this took longest
    age_seconds:      the time since its completion
    without:          ranks of workers whose state it lacks
    """

    complete: int
    failed: int
    incomplete: int
    name: str | None
    clock: int
    seconds: float
    held_up_seconds: float
    age_seconds: float
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobStatistics:
    """One job, as its coordinator knows it.

    started:      whether all declared workers have joined
    imbalance:    most bytes on a shard over the mean of all shards
    restore_count: how many times the whole job was rolled back to a checkpoint
    lost_steps, redone_steps: of all workers; see core.accounting
    rolling_back: a shard has lost its part, and the job is being rolled back
    rejoining:    ranks that are expected to join again
    absent:       ranks of silent workers for which the job waits before it ends: all other workers have left
    workers:      the live workers, by rank; now: the time of this record, on the clock of their leases
    loaders:      the leased data, by loader
    checkpoints:  None where no checkpoints are made
    run:          tells the job from earlier ones of its name
    figures:      the measurements of live workers, by rank and incarnation
    trained_bytes: bytes of the parameters that an optimizer steps: sync moves as many each way in a step without a wire
                   format
    local_steps:  steps of a worker in a round of mode local:H; 0 in other modes
    local_seconds: seconds of a round of mode local:Ts; 0 in other modes
    local_fragments: the number of fragments in mode local:H/F; 0 in other modes
    group_size:   processes of each worker: more than one where workers are groups
    mode:         the name of its mode
    """

    name: str
    consistency: Consistency
    world_size: int
    started: bool
    parameter_bytes: int
    buckets: int
    imbalance: float
    restore_count: int
    lost_steps: int
    redone_steps: int
    rejoining: tuple[int, ...]
    workers: tuple[LiveWorker, ...]
    now: float
    loaders: Mapping[int, LoaderProgress]
    checkpoints: CheckpointStatistics | None
    run: str = ""
    figures: Mapping[tuple[int, int], WorkerFigures] = field(default_factory=dict)
    rolling_back: bool = False
    local_steps: int = 0
    local_seconds: float = 0.0
    local_fragments: int = 0
    trained_bytes: int = 0
    absent: tuple[int, ...] = ()
    group_size: int = 1
    mode: str = ""


@dataclass(frozen=True)
class RecoveryStatistics:
    """Checkpoints that jobs were rolled back to, and those passed over: damaged ones, and ones never completed."""

    restored: int = 0
    damaged: int = 0
    unfinished: int = 0

    def __add__(self, more: RecoveryStatistics) -> RecoveryStatistics:
        restored, damaged = self.restored + more.restored, self.damaged + more.damaged
        return RecoveryStatistics(restored, damaged, self.unfinished + more.unfinished)


@dataclass(frozen=True)
class CoordinatorStatistics:
    """The statistics of a coordinator: the number of shards that have registered, and its jobs by name.

    recovery: None if the servers make no checkpoints
    """

    shards: int
    jobs: Mapping[str, JobStatistics]
    recovery: RecoveryStatistics | None
