"""A pull while it is under way: what was asked for, where the answers go, and which of its buckets wait.

Its answers go to an `Outbox` (outbox.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ps_protocol.identity import Identity
from ps_protocol.messages.data import BucketTimes, PulledBucket
from ps_protocol.messages.envelope import Awaited
from ps_protocol.messages.rows import PulledRows, PulledTable, TablePull
from ps_protocol.row_ids import Ids
from ps_protocol.segment_layout import SegmentMap
from ps_server.core.consistency import Admission
from ps_server.shard.outbox import Answer, Outbox


@dataclass
class _Push:
    """One worker's last push of one bucket. applied: None: not yet"""

    clock: int
    staged: float
    applied: float | None = None


class PushTimes:
    """The last push of each bucket, of the workers of one job that record. The caller holds the job's lock.

    A worker's next push of a bucket is mostly staged after its last one was applied: one of each is enough. Where the
    last one is applied later, nothing is said of that.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, dict[int, _Push]] = {}  # by rank, then by bucket

    def follow(self, rank: int, wanted: bool) -> None:
        """Notes the pushes of a worker from here on, or forgets all of it."""
        if wanted:
            self._pushes.setdefault(rank, {})
        elif self._pushes:
            self._pushes.pop(rank, None)

    def follows_any(self, ranks: Iterable[int]) -> bool:
        """Whether any of these workers records a timeline."""
        return bool(self._pushes) and not self._pushes.keys().isdisjoint(ranks)

    def staged(self, rank: int, bucket: int, clock: int, now: float) -> None:
        """Notes that a worker's push for a clock is staged, if it records."""
        pushes = self._pushes.get(rank)
        if pushes is not None:
            pushes[bucket] = _Push(clock, now)

    def applied(self, pushes: Iterable[tuple[int, int]], bucket: int, now: float) -> None:
        """Notes that an update with pushes is in a bucket's weights. pushes: the rank and the clock of each"""
        for rank, clock in pushes:
            push = self._pushes.get(rank, {}).get(bucket)
            if push is not None and push.clock == clock and push.applied is None:
                push.applied = now

    def of(self, rank: int, bucket: int, clock: int, now: float) -> BucketTimes | None:
        """Returns the times of a bucket that a worker gets now, at its clock; None: they were not noted."""
        push = self._pushes.get(rank, {}).get(bucket)
        if push is None or push.clock != clock or push.applied is None:
            return None
        return BucketTimes(push.staged, push.applied, now)


READER = 0  # the incarnation of a caller that is no worker


@dataclass
class Pull:
    """One pull: which worker asks at which clock, how many of its buckets are still to be sent, and where to.

    segment:      where the buckets are written; None: they go over the network
    notified:     when the worker was last told which others it waits for
    notify_bytes: see PullCall
    pending:      buckets that are in the segment, and that the worker was not told of yet; pending_bytes: of those
    number:       tells it from all others
    with_pushes:  it came with pushes, and the worker was not told yet that they are staged
    principal:    whose it is
    times_wanted, whole, all_staged: see PullCall
    wanted:       what it asks for of a table; None: it asks for buckets
    rows:         where its rows are written; None: they go over the network
    id_bytes:     of the rows that it asks for; copy_bytes: of the whole table. They are kept until it has been sent
    """

    worker: Identity
    clock: int
    outbox: Outbox
    left: int
    since: float
    segment: SegmentMap | None = None
    notified: float = 0.0
    notify_bytes: int = 0
    pending: list[PulledBucket] = field(default_factory=list)
    pending_bytes: int = 0
    with_pushes: bool = False
    principal: str = ""
    times_wanted: bool = False
    whole: frozenset[int] = frozenset()
    all_staged: bool = False
    wanted: Ids | TablePull | None = None
    rows: torch.Tensor | None = None
    id_bytes: int = 0
    copy_bytes: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    def landed(self, bucket: PulledBucket, size: int) -> tuple[PulledBucket, ...]:
        """Keeps a bucket of `size` bytes that is in the segment; returns all that are kept once they are enough to
        tell the worker of, or the last."""
        self.pending.append(bucket)
        self.pending_bytes += size
        if self.left and not 0 < self.notify_bytes <= self.pending_bytes:
            return ()
        buckets = tuple(self.pending)
        self.pending, self.pending_bytes = [], 0
        return buckets

    def staged_seconds(self, now: float) -> float | None:
        """Returns for how long pushes that came with the pull are staged; None after the first time, or without."""
        if not self.with_pushes:
            return None
        self.with_pushes = False
        return now - self.since


@dataclass(slots=True)
class Waiter:
    """One bucket of a pull that is not admitted: why, since when for that reason, and how long for others so far.

    owed: what has to be in the bucket besides; see UpdateRule.owed
    """

    pull: Pull
    admission: Admission
    since: float
    waited: float = 0.0
    owed: Mapping[int, int] = field(default_factory=dict)

    def notice(self, index: int) -> Answer:
        """Returns what its worker hears of the wait. index: of the bucket or the table"""
        awaited = Awaited(self.admission.waiting_for, self.admission.reason)
        if isinstance(self.pull.wanted, TablePull):
            return PulledTable(waiting=awaited)
        return PulledBucket(index, waiting=awaited) if self.pull.wanted is None else PulledRows(waiting=awaited)
