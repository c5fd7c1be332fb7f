"""A pull under way: its request, its outbox, and its waiting buckets. And the limit of the buckets that each principal
has asked for.

Its answers go to an `Outbox` (outbox.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ps_protocol.convert import Awaited
from ps_protocol.errors import Backlogged
from ps_protocol.identity import Identity
from ps_protocol.messages.data import BucketTimes, PulledBucket
from ps_protocol.messages.rows import PulledRows, PulledTable, TablePull
from ps_protocol.row_ids import Ids
from ps_protocol.segment_layout import RowMemory, SegmentMap
from ps_server.core.budget import PrincipalBudget
from ps_server.core.consistency import Admission
from ps_server.shard.outbox import Answer, Outbox


@dataclass
class _Push:
    """One worker's last push of one bucket. applied: when its update was made; None: not yet"""

    clock: int
    staged: float
    applied: float | None = None


class PushTimes:
    """The times of the last push of each bucket, for the workers of a job that record a timeline. The caller holds the
    job's lock.

    Of each bucket only a worker's last push is kept: as a rule it is applied before the worker pushes the bucket again.
    If it is not, its times are lost.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, dict[int, _Push]] = {}  # by rank, then by bucket

    def follow(self, rank: int, wanted: bool) -> None:
        """Begins to note the times of a worker's pushes if `wanted`; otherwise forgets them."""
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
        """Returns the times of a bucket that a worker gets now, at its clock; None if they are unknown."""
        push = self._pushes.get(rank, {}).get(bucket)
        if push is None or push.clock != clock or push.applied is None:
            return None
        return BucketTimes(push.staged, push.applied, now)


READER = 0  # the incarnation of a caller that is no worker


@dataclass
class Pull:
    """One pull: the worker and its clock, and where the buckets or rows go.

    unsent:       how many of its buckets and tables are still to be sent
    segment:      where the buckets are written; None if they go over the network
    notified:     when the worker was last told which workers it waits for
    notify_bytes: see PullCall
    pending:      buckets that are in the segment, and of which the worker was not told yet
    pending_bytes: bytes of these buckets
    number:       identifies the pull
    with_pushes:  the pull came with pushes, and the worker was not told yet that they are staged
    principal:    the caller, to whom the pull counts
    times_wanted, whole, all_staged: see PullCall
    wanted:       the ids or the table that it asks for; None if it asks for buckets
    row_memory:   the worker's segment for rows; None: the call names no place in it
    rows:         where its rows are written; None if they go over the network
    id_bytes, copy_bytes: bytes of the ids, or of the whole table, that it asks for; they are kept until the pull is
                          sent
    """

    worker: Identity
    clock: int
    outbox: Outbox
    unsent: int
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
    row_memory: RowMemory | None = None
    rows: torch.Tensor | None = None
    id_bytes: int = 0
    copy_bytes: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    def landed(self, bucket: PulledBucket, size: int) -> tuple[PulledBucket, ...]:
        """Adds a bucket of `size` bytes that is written to the segment. Returns the buckets to tell the worker of: all
        that are pending, once these have `notify_bytes` or the pull has no bucket left; otherwise none.
        """
        self.pending.append(bucket)
        self.pending_bytes += size
        if self.unsent and not 0 < self.notify_bytes <= self.pending_bytes:
            return ()
        buckets = tuple(self.pending)
        self.pending, self.pending_bytes = [], 0
        return buckets

    def staged_seconds(self, now: float) -> float | None:
        """Returns for how many seconds the pushes of the pull have been staged; None if it has none, and after the
        first call.
        """
        if not self.with_pushes:
            return None
        self.with_pushes = False
        return now - self.since


@dataclass(slots=True)
class Waiter:
    """A unit of a pull that is not admitted yet.

    admission: why, and which workers it waits for
    since:     when this reason began
    waited:    seconds for which it waited for earlier reasons
    owed:      contributions that must be in the unit, too; see UpdateRule.owed
    """

    pull: Pull
    admission: Admission
    since: float
    waited: float = 0.0
    owed: Mapping[int, int] = field(default_factory=dict)

    def notice(self, index: int) -> Answer:
        """Returns the message that tells the worker which others it waits for. index: of the bucket or the table"""
        awaited = Awaited(self.admission.waiting_for, self.admission.reason)
        if isinstance(self.pull.wanted, TablePull):
            return PulledTable(waiting=awaited)
        return PulledBucket(index, waiting=awaited) if self.pull.wanted is None else PulledRows(waiting=awaited)


# -- how many buckets each principal may have asked for ----------------------------------------------------------------


class SharedBudget(PrincipalBudget):
    """A PrincipalBudget that is thread-safe: it counts over all jobs of a shard, and each job has its own lock."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self._lock = threading.Lock()

    def reserve(self, principal: str, size: int, instead_of: int = 0, always: bool = False) -> bool:
        with self._lock:
            return super().reserve(principal, size, instead_of, always)

    def release(self, principal: str, size: int) -> None:
        with self._lock:
            super().release(principal, size)


WAITING_BYTES = 640  # memory that a bucket takes while its pull waits (measured)


class PulledBuckets:
    """The buckets that principals have asked for and that are not sent yet. Thread-safe.

    A bucket costs some hundred bytes while its pull waits or is unread, and a call may ask for all buckets of a job.
    The ids of a pull of rows count as the number of buckets that take the same memory. There are three separate counts:

    - pulls that wait for other workers;
    - pulls that can be sent. A pull of the first kind may wait for the very worker that needs one of this kind to go
    on;
    - copies of whole tables, which may be large, so that they keep no other pull waiting.

    limit: the largest number of buckets of one principal, of each kind. A principal's first pull of a kind may exceed
           it
    """

    def __init__(self, limit: float) -> None:
        self._waiting, self._ready = SharedBudget(limit), SharedBudget(limit)
        self._copies = SharedBudget(limit * WAITING_BYTES)

    def take(
        self, principal: str, count: int, waits: bool, id_bytes: int = 0, copy_bytes: int = 0
    ) -> Callable[[], None]:
        """Counts a pull of `count` buckets; returns a function to call when the pull is over.

        waits:      the pull waits for other workers
        id_bytes:   bytes of the ids of a pull of rows
        copy_bytes: bytes of the whole table that the pull asks for

        Raises Backlogged, and counts nothing, past the limit.
        """
        budget = self._waiting if waits else self._ready
        count += id_bytes // WAITING_BYTES
        if not budget.reserve(principal, count):
            kind = "wait for other workers" if waits else "are not sent yet"
            raise Backlogged(
                f"the caller has asked for {budget.bytes_of(principal)} buckets, as all its workers, that {kind}, and "
                f"now for {count}: max-pulled-buckets is {budget.limit}"
            )
        if copy_bytes and not self._copies.reserve(principal, copy_bytes):
            budget.release(principal, count)
            raise Backlogged(
                f"the caller has asked for {self._copies.bytes_of(principal)} bytes of whole tables, as all its "
                f"workers, that are not sent yet, and now for {copy_bytes}: max-pulled-buckets allows "
                f"{self._copies.limit}"
            )

        def over() -> None:
            budget.release(principal, count)
            if copy_bytes:
                self._copies.release(principal, copy_bytes)

        return over
