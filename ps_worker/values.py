"""Values that pass between the packages of a worker: options of training, rosters, assignments, results of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.local import Local
from ps_protocol.messages.workers import ShardMap
from ps_protocol.stage_spec import StageSpec


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `prepare`.

    bucket_bytes: bytes of a full bucket; None: the running job's, or else the server chooses
    overlap:      whether full buckets are sent while backward runs; None: after some steps that show that the script
                  allows it
    ddp:          arguments for DistributedDataParallel
    local:        the settings of local steps; None in all modes but local:H
    group:        the processes that together are this worker: a DeviceMesh or a process group; None: only this one
    has_scaler:   whether the same call got a GradScaler, which skips steps
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
    """The result of registering a job: the shards of its buckets, the bytes of a full bucket, and its run.

    stage_limit: the most stages that it may have; 0: the servers do not support stages
    """

    shard_map: ShardMap
    bucket_bytes: int
    run: str
    stage_limit: int = 0


@dataclass(frozen=True)
class Roster:
    """The workers that take part.

    asked: the rank that must report its script's settings, and the number of that request
    """

    ranks: tuple[int, ...]
    world_size: int
    started: bool
    asked: tuple[int, int] | None = None


@dataclass(frozen=True)
class BucketAssignment:
    """Weights, or one kind of optimizer state, that a script has set in a bucket before its next step.

    absent:  positions of the slices that stay unchanged
    state:   None: the payload is weights; "": the other slices lose all their state, and there is no payload
    payload: in the bucket's own type, or one float32 for each slice where the state is a number
    stage:   the script's stage, to which the state belongs
    next:    the stage that the bucket enters with the next step, instead of an assignment
    """

    bucket: BucketSpec
    absent: Sequence[int]
    state: str | None
    payload: memoryview | None
    stage: int = 0
    next: StageSpec | None = None


@dataclass(frozen=True)
class PushResult:
    """Staged pushes.

    sizes:  their bytes, by wire format
    staged: the time of staging, on the clock of time.perf_counter
    """

    sizes: Mapping[str, int]
    staged: float


@dataclass(frozen=True)
class PullResult:
    """A pull that has landed.

    sizes:      its bytes, by wire format
    waited:     the longest time in seconds for which a bucket was held back
    checkpoint: this worker's own state at this clock belongs to a checkpoint
    """

    sizes: Mapping[str, int]
    waited: float
    checkpoint: bool
