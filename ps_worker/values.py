"""Values that the rooms of a worker hand to each other: how it trains, its place in a job, what it pushes and pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.identity import Identity
from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.local import Local
from ps_protocol.stages import StageSpec


@dataclass(frozen=True)
class PrepareOptions:
    """How models are trained: what `prepare` was told.

    bucket_bytes: of a full bucket; None: what the job has, or the server chooses
    overlap:      whether full buckets leave while backward runs; None: once the script was seen to allow it
    ddp:          arguments for DistributedDataParallel
    local:        how workers step by themselves; None in all modes but local:H
    """

    bucket_bytes: int | None = None
    non_finite: NonFinite = NonFinite.REFUSE
    gradient_wire: str = "float32"
    weight_wire: str = "float32"
    overlap: bool | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    local: Local | None = None


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
class ShardMap:
    """Addresses of the shards by index, and the shard of each bucket."""

    addresses: dict[int, str]
    bucket_shards: tuple[int, ...]


@dataclass(frozen=True)
class SavedState:
    """A worker's own state. clock: of the checkpoint that has it, or the worker's own when it left"""

    clock: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Continued:
    """What a worker's launch goes on with: when the job began, when it was trained last (None: not known), in seconds
    since 1970, and how many other workers are live."""

    began: float
    trained: float | None
    live: int


@dataclass(frozen=True)
class ShardPushed:
    """How far workers of one rank have pushed on one shard.

    clock:   the last of which they have pushed every bucket that trains there, and its part of every table
    further: by bucket or table, the last clock that they have pushed of it, where it is a later one. Tables are behind
             all buckets of the job
    """

    clock: int
    further: Mapping[int, int]


@dataclass(frozen=True)
class JoinResult:
    """A worker's place in its job, as it got it when it joined.

    clock:         the one it starts from
    lease:         seconds for which it counts as live without a heartbeat
    shard_map:     where the buckets are now; None: where they were at the registration
    restore_count: how often the whole job was rolled back to a checkpoint
    state:         what a worker of this rank had saved; None if there is nothing
    pushed:        the last clock of which workers of this rank had pushed every bucket that trains; None: not known
    on_shards:     the same for each shard; empty: not known
    continued:     for the first worker of a launch, if others have trained the job
    """

    identity: Identity
    clock: int
    lease: float
    shard_map: ShardMap | None = None
    restore_count: int = 0
    state: SavedState | None = None
    pushed: int | None = None
    on_shards: Mapping[int, ShardPushed] = field(default_factory=dict)
    continued: Continued | None = None

    def has_had(self, shard: int, part: int, clock: int) -> bool:
        """Whether a bucket or a table there has had what workers of this rank push for a clock."""
        pushed = self.on_shards.get(shard)
        return pushed is not None and max(pushed.clock, pushed.further.get(part, 0)) >= clock

    def has_some(self, clock: int) -> bool:
        """Whether any bucket or table has had what workers of this rank push for a clock."""
        every = [(pushed.clock, *pushed.further.values()) for pushed in self.on_shards.values()]
        return any(clock <= most for each in every for most in each)


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
class HeartbeatAnswer:
    """What the coordinator answers to a sign of life.

    script_request: this worker is to tell what its script has set; 0: it is not
    script:         what the job's script has set, for a worker that asked
    script_coming:  another worker is to tell it, and has not yet
    """

    script_request: int
    script: SavedState | None
    script_coming: bool


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


@dataclass(frozen=True)
class RoundNews:
    """One message about a round.

    complete:    nothing more comes; if not `refused`, the values are all there
    values:      by rank; perhaps only some of them
    refused:     why there are none, in words
    waiting_for: ranks that have not given their value
    step_wanted: one of those is in a step that waits for a step of this worker
    """

    number: int
    complete: bool
    values: dict[int, bytes] = field(repr=False)
    refused: str
    waiting_for: tuple[int, ...]
    step_wanted: bool
