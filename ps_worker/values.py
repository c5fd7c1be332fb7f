"""Values that the rooms of a worker hand to each other: how it trains, its place in a job, what it pushes and pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.local import Local
from ps_protocol.messages.workers import ShardMap
from ps_protocol.stages import StageSpec


@dataclass(frozen=True)
class PrepareOptions:
    """How models are trained: what `prepare` was told.

    bucket_bytes: of a full bucket; None: what the job has, or the server chooses
    overlap:      whether full buckets leave while backward runs; None: once the script was seen to allow it
    ddp:          arguments for DistributedDataParallel
    local:        how workers step by themselves; None in all modes but local:H
    group:        the processes that together are this worker: a DeviceMesh or a process group; None: this one alone is
    has_scaler:   whether the same call got a GradScaler, which leaves steps out
    """

    bucket_bytes: int | None = None
    non_finite: NonFinite = NonFinite.REFUSE
    gradient_wire: str = "float32"
    weight_wire: str = "float32"
    overlap: bool | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    local: Local | None = None
    group: Any = None
    has_scaler: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Registration:
    """A job that is registered: where its buckets are, the bytes of a full one, and its run.

    stage_limit: how many stages it may come to; 0: the servers know none
    """

    shard_map: ShardMap
    bucket_bytes: int
    run: str
    stage_limit: int = 0


@dataclass(frozen=True)
class Roster:
    """The workers that take part.

    asked: the rank of the one that is to tell what its script has set, and the number of that request
    """

    ranks: tuple[int, ...]
    world_size: int
    started: bool
    asked: tuple[int, int] | None = None


@dataclass(frozen=True)
class BucketAssignment:
    """Weights, or one kind of optimizer state, that a script has set in a bucket before its next step.

    absent:  positions of the slices that stay as they are
    state:   None: the payload is weights; "": the other slices lose all their state, and there is no payload
    payload: in the bucket's own type, or one float32 for each slice where the state is a number
    stage:   of the script: that of the state
    next:    what trains the bucket from the next step on, in place of all this
    """

    bucket: BucketSpec
    absent: Sequence[int]
    state: str | None
    payload: memoryview | None
    stage: int = 0
    next: StageSpec | None = None


@dataclass(frozen=True)
class PushResult:
    """A push that is staged: its bytes, when it was, on the clock of time.perf_counter, and what they travelled as."""

    size: int
    staged: float
    wire: str


@dataclass(frozen=True)
class PullResult:
    """A pull that has landed.

    sizes:      its bytes, by what they travelled as
    waited:     seconds for which a bucket was held back at most
    checkpoint: this worker's own state at this clock belongs to a checkpoint
    """

    sizes: Mapping[str, int]
    waited: float
    checkpoint: bool
