"""Values that the rooms of a worker hand to each other: its place in a job, and what it pushes and pulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_protocol.data import DataRange
from ps_protocol.job import HyperParameters
from ps_protocol.layout import BucketSpec


@dataclass(frozen=True)
class Identity:
    """Who this worker is to the servers; `key` proves it."""

    job: str
    rank: int
    incarnation: int
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ShardMap:
    """Addresses of the shards by index, and the shard of each bucket."""

    addresses: dict[int, str]
    bucket_shards: tuple[int, ...]


@dataclass(frozen=True)
class JoinResult:
    """What a worker got when it joined.

    clock:          the one it starts from
    lease:          seconds for which it counts as live without a heartbeat
    shard_map:      where the buckets are now; None from servers that do not say
    restore_count:  how often the whole job was set back to a checkpoint
    state:          what a worker of this rank had saved; None if there is nothing
    """

    identity: Identity
    clock: int
    lease: float
    shard_map: ShardMap | None = None
    restore_count: int = 0
    state: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Roster:
    """Who takes part."""

    ranks: tuple[int, ...]
    world_size: int
    started: bool


@dataclass(frozen=True)
class BucketPush:
    """One bucket's part of a step.

    absent: positions of segments without a gradient in this step
    empty:  none of them has one: nothing is sent; with `absent` naming all it counts as zero in a mean, with none named
            the worker's step is left out of it
    groups: hyper-parameters of the groups that have parameters in the bucket
    ranges: the leased data that the step used
    """

    bucket: BucketSpec
    clock: int
    empty: bool
    absent: Sequence[int]
    groups: dict[int, HyperParameters]
    ranges: Sequence[DataRange] = ()


@dataclass(frozen=True)
class PushResult:
    """What was pushed: its bytes, and when it was staged, on the clock of time.perf_counter."""

    size: int
    staged: float


@dataclass(frozen=True)
class PulledBucket:
    """One message of a pull: a bucket's payload, or (`waiting`) whom the shard waits for and why.

    checkpoint:  this version is kept for a checkpoint, to which this worker's own state belongs
    wire_format: of the payload's elements; empty: the bucket's own type
    """

    bucket: int
    version: int
    waited: float
    payload: memoryview
    waiting: tuple[tuple[int, ...], str] | None
    checkpoint: bool = False
    wire_format: str = ""


@dataclass(frozen=True)
class PullResult:
    """What a pull brought.

    size:       its bytes
    waited:     seconds for which a bucket was held back at most
    checkpoint: this worker's own state at this clock belongs to a checkpoint
    """

    size: int
    waited: float
    checkpoint: bool


@dataclass(frozen=True)
class StateChunk:
    """One kind of optimizer state of one bucket; `absent`: positions of the segments that have none."""

    bucket: int
    version: int
    state: str
    absent: frozenset[int]
    payload: memoryview


@dataclass(frozen=True)
class Offer:
    """This worker's value for a round; see GatherValuesRequest.

    number: of the round; 0: there is no value, only the question which round is next
    """

    number: int
    clock: int
    value: bytes = field(default=b"", repr=False)


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
