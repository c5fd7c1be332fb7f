"""What workers push and pull, as it came over the wire: nothing in it is checked yet."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.data import DataRange
from ps_protocol.framing import Buffer
from ps_protocol.job import HyperParameters


class PushKind(enum.Enum):
    """What a push carries."""

    GRADIENT = "gradient"
    INITIAL_VALUE = "initial_value"
    SKIP = "skip"
    ASSIGN = "assign"
    ASSIGN_STATE = "assign_state"


@dataclass(frozen=True)
class Push:
    """One bucket from a worker, as it came."""

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
    draft: bool = False  # it may still change: kept until its commit
    state: str = ""  # the optimizer state that is assigned


@dataclass(frozen=True)
class SharedBucket:
    """One bucket of a SharedPush; `skip` when this step has no gradient for it; `finite` if its worker has looked."""

    index: int
    skip: bool
    absent: frozenset[int]
    finite: bool = False


@dataclass(frozen=True)
class SharedPush:
    """Several buckets from a worker, whose gradients lie in its segment."""

    job: str
    rank: int
    incarnation: int
    clock: int
    buckets: tuple[SharedBucket, ...]
    groups: Mapping[int, HyperParameters]
    key: bytes = field(default=b"", repr=False)
    ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class StepCommit:
    """What counts as pushed with a pull: drafts of its clock, and buckets without a gradient (`skip`)."""

    buckets: tuple[SharedBucket, ...]
    groups: Mapping[int, HyperParameters]
    ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class PullCall:
    """Which buckets a worker wants, at which clock of its own. `notice_bytes`: into its segment, and it is told of them
    once they make so many bytes, or all are there; 0: only then. `commit`: what counts as pushed before."""

    job: str
    rank: int
    incarnation: int
    clock: int
    buckets: tuple[int, ...]
    key: bytes = field(default=b"", repr=False)
    notice_bytes: int = 0
    commit: StepCommit | None = None
