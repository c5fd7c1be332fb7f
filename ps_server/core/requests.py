"""What workers push and pull, as it came over the wire: nothing in it is checked yet."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_protocol.data import DataRange
from ps_protocol.framing import Buffer
from ps_protocol.job import HyperParameters


class PushKind(enum.Enum):
    """What a push carries."""

    GRADIENT = "gradient"
    INITIAL_VALUE = "initial_value"
    SKIP = "skip"
    DRAFT = "draft"  # a gradient that may still change: kept until its commit
    COMMIT = "commit"  # of the draft of the same clock
    ASSIGN = "assign"
    ASSIGN_STATE = "assign_state"


@dataclass(frozen=True)
class Push:
    """What a call pushes to one bucket."""

    job: str
    rank: int
    incarnation: int
    bucket: int
    clock: int
    kind: PushKind
    payload: Buffer  # in the job's wire format for gradients; initial values in the bucket's own type
    absent: frozenset[int] = frozenset()
    groups: Mapping[int, HyperParameters] | None = None
    borrowed: bool = False
    key: bytes = field(default=b"", repr=False)
    finite: bool = False  # its worker has looked for infinities and NaNs
    ranges: tuple[DataRange, ...] = ()  # of leased data, that the step used
    state: str = ""  # the optimizer state that is assigned
    wire_format: str = ""  # of a gradient; empty: the bucket's own type


class PushedBucket(NamedTuple):
    """One bucket of a PushCall; the fields are those of Push."""

    bucket: int
    kind: PushKind
    absent: frozenset[int] = frozenset()
    finite: bool = False
    state: str = ""
    wire_format: str = ""


@dataclass(frozen=True)
class PushCall:
    """Buckets that a worker pushes at a clock of its own.

    payload: of all buckets, one after the other; None: their gradients lie in the worker's segment
    run:     of the job that the worker belongs to; empty: any
    """

    job: str
    rank: int
    incarnation: int
    clock: int
    buckets: tuple[PushedBucket, ...]
    payload: Buffer | None
    groups: Mapping[int, HyperParameters] = field(default_factory=dict)
    ranges: tuple[DataRange, ...] = ()
    key: bytes = field(default=b"", repr=False)
    run: str = ""


@dataclass(frozen=True)
class PullCall:
    """Which buckets a worker wants, at which clock of its own.

    in_segment:   they go into the worker's segment
    notify_bytes: it is told of them once they make so many bytes, or all are there; 0: only then
    run:          of the job that the caller belongs to; empty: any
    times_wanted: it records a timeline: see PushTimes in ps_server/shard/times.py
    """

    job: str
    rank: int
    incarnation: int
    clock: int
    buckets: tuple[int, ...]
    key: bytes = field(default=b"", repr=False)
    in_segment: bool = False
    notify_bytes: int = 0
    run: str = ""
    times_wanted: bool = False
