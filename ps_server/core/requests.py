"""What workers push and pull, as it came over the wire: nothing in it is checked yet."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_protocol.data import DataRange
from ps_protocol.framing import Buffer
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.stages import StageSpec
from ps_protocol.tables import Beginning


class PushKind(enum.Enum):
    """What a push carries."""

    GRADIENT = "gradient"
    INITIAL_VALUE = "initial_value"
    SKIP = "skip"
    DRAFT = "draft"  # a gradient that may still change: kept until its commit
    COMMIT = "commit"  # of the draft of the same clock
    ASSIGN = "assign"
    ASSIGN_STATE = "assign_state"
    NEXT_OPTIMIZER = "next_optimizer"


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
    weight: float = 0.0  # of a gradient, in the mean of its update; 0: all weigh the same
    stage: int = 0  # of the script: that of `groups` and `state`
    next_optimizer: StageSpec | None = None


class RowPushKind(enum.Enum):
    """What a push of rows carries."""

    GRADIENT = "gradient"
    NO_GRADIENT = "no_gradient"  # the step has none for the table: a term of zeros
    SKIP = "skip"  # the step leaves the table out
    ASSIGN = "assign"  # rows that the script has set, for the step of the same clock


@dataclass(frozen=True)
class RowsPush:
    """One message of the rows that a worker pushes to a table at a clock of its own.

    table:        its place in the job's list
    payload:      ids, counts and gradients of `count` rows; of rows that are assigned no counts, and values
    first, total: the number of the first of them among all that the step has here of this kind, and how many these are
    place:        where the payload lies in the worker's segment for rows; None: it is here
    assignment:   the number of the rows that are assigned, or that a step takes along; 0: it takes none
    """

    job: str
    rank: int
    incarnation: int
    table: int
    clock: int
    kind: RowPushKind
    payload: Buffer
    first: int
    count: int
    total: int
    values: HyperParameters
    ranges: tuple[DataRange, ...] = ()
    wire_format: str = ""
    key: bytes = field(default=b"", repr=False)
    run: str = ""
    place: int | None = None
    assignment: int = 0


@dataclass(frozen=True)
class TablePush:
    """One message with what a table begins with, as rank 0 sends it.

    table:     its place in the job's list
    beginning: all of it
    first:     how many rows and ids that wait came before
    rows, waiting: how many of either are in the payload
    last:      no message follows
    """

    job: str
    rank: int
    incarnation: int
    table: int
    beginning: Beginning
    first: int
    rows: int
    waiting: int
    last: bool
    payload: Buffer
    key: bytes = field(default=b"", repr=False)
    run: str = ""


class PullPlaces(NamedTuple):
    """Where in a worker's segment for rows the ids of a pull lie, how many they are, and where its rows go."""

    ids: int
    id_count: int
    rows: int


@dataclass(frozen=True)
class RowsPull:
    """Which rows of a table a worker or a reader wants, at which clock of its own.

    payload: their ids
    places:  of ids and rows in the worker's segment; None: they are in messages
    """

    job: str
    rank: int
    incarnation: int
    table: int
    clock: int
    payload: Buffer
    key: bytes = field(default=b"", repr=False)
    run: str = ""
    places: PullPlaces | None = None


@dataclass(frozen=True)
class TablePull:
    """Which table a worker wants, at which clock of its own. count_only: it only asks how many rows there are"""

    job: str
    rank: int
    incarnation: int
    table: int
    clock: int
    count_only: bool
    key: bytes = field(default=b"", repr=False)
    run: str = ""


@dataclass(frozen=True)
class RowsWatch:
    """Which table a reader follows, by name, from which cursor on, and the seconds between two rounds at least."""

    job: str
    table: str
    cursor: bytes
    period: float


class EditionCall(NamedTuple):
    """Which edition of a job's weights a reader wants of a shard.

    run:      of the job; empty: the one that is here
    timeline: that the version is of
    version:  the updates that each bucket is to have where editions are of one version; elsewhere those that it is to
              have at least
    wire:     the type in which float32 elements are to travel
    buckets:  that are wanted, by index; none: all
    """

    job: str
    run: str
    timeline: int
    version: int
    wire: str
    buckets: tuple[int, ...]


class PushedBucket(NamedTuple):
    """One bucket of a PushCall; the fields are those of Push."""

    bucket: int
    kind: PushKind
    absent: frozenset[int] = frozenset()
    finite: bool = False
    state: str = ""
    wire_format: str = ""
    next_optimizer: StageSpec | None = None


@dataclass(frozen=True)
class PushCall:
    """Buckets that a worker pushes at a clock of its own.

    payload: of all buckets, one after the other; None: their gradients lie in the worker's segment
    run:     of the job that the worker belongs to; empty: any
    weight, stage: see Push
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
    weight: float = 0.0
    stage: int = 0


@dataclass(frozen=True)
class PullCall:
    """Which buckets a worker wants, at which clock of its own.

    in_segment:   they go into the worker's segment
    notify_bytes: it is told of them once they make so many bytes, or all are there; 0: only then
    run:          of the job that the caller belongs to; empty: any
    times_wanted: it records a timeline: see PushTimes in ps_server/shard/waiting.py
    whole:        of the buckets, those of which it has not the version before, where weights travel in blocks
    all_staged:   the answer has every update that is staged when it comes
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
    whole: frozenset[int] = frozenset()
    all_staged: bool = False
