"""A job on a running shard: the state of `core`, with its locks, segments and waiting pulls.

Locks: a job's `lock` guards its protocol state and is held for microseconds. A bucket's `tensors` lock guards its
weights while they are stepped, copied out or lent. Where both are needed, `tensors` is taken first.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from ps_frames.loans import Loan, Loans
from ps_protocol.errors import (
    InvalidRequest,
    NotFound,
    NotShared,
    PSError,
    RunEnded,
    TryLater,
    UnknownWorker,
)
from ps_protocol.framing import Buffer
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.rows import PullOffsets, RowsPull, RowsPush
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES
from ps_protocol.segment_layout import MAX_ROW_BYTES, PAGE_BYTES, RowMemory, SegmentMap, pushed_bytes, segment_plan
from ps_protocol.tensors import Cast
from ps_server.core.budget import JobRoom
from ps_server.core.checking_rows import PushedRows
from ps_server.core.commands import Close
from ps_server.core.limits import check_feeds
from ps_server.core.partition import JobPartition
from ps_server.core.shard_table import ShardTable
from ps_server.core.snapshot import Snapshot
from ps_server.core.statistics import ShardJobStatistics, Wait
from ps_server.core.sums import Scratch
from ps_server.core.unit import Bucket, Unit
from ps_server.shard.editions import Editions
from ps_server.shard.optimizer_room import OptimizerRoom
from ps_server.shard.snapshots import Refusal, Refusals, SavedParts, SnapshotTask, TableCopying, begin_copy
from ps_server.shard.waiting import READER, Pull, PushTimes, Waiter
from ps_tables.row_sums import copy_numbers

NARROWED_BUCKETS = 4  # narrowed buckets that a job keeps for reuse
_HISTORIES = itertools.count(secrets.randbits(62))  # a number that no other table of any process has had
REFUSED_SECONDS = 0.25  # pause before a refused push is sent again: by then the servers end, or accept pushes again


@dataclass(frozen=True)
class Attached:
    """The segment of one incarnation of a worker."""

    incarnation: int
    segment: SegmentMap


@dataclass(frozen=True)
class AttachedRows:
    """The segment for rows of one incarnation of a worker."""

    incarnation: int
    memory: RowMemory


@dataclass(frozen=True)
class Connected:
    """The data connection of one incarnation of a worker. end: closes it"""

    incarnation: int
    end: Callable[[], None]


@dataclass
class OfWorkers:
    """The segments and data connections of workers, by rank and member. The job's lock guards them.

    attaching: workers that are handing over a segment
    connected: data connections
    """

    segments: dict[tuple[int, int], Attached] = field(default_factory=dict)
    row_memory: dict[tuple[int, int], AttachedRows] = field(default_factory=dict)
    attaching: set[tuple[int, int]] = field(default_factory=set)
    connected: dict[tuple[int, int], Connected] = field(default_factory=dict)


class Feed(Protocol):
    """A reader's feed of a table, or an edition that it gets: see row_feeds.py and weight_feeds.py.

    caller: the principal that reads
    """

    caller: str

    def end(self, error: PSError) -> None:
        """Ends the feed with an error."""


U = TypeVar("U", bound=Unit[Any, Any, Any])


class HostedUnit(Generic[U]):
    """A unit of a job, a bucket or a table, with its lock and its waiting pulls.

    tensors:  the lock that guards the unit's weights
    loans:    loans of the weights to threads that send them; None if there was none yet
    waiters:  the pulls that wait for the unit, by the number of the pull
    busy:     a thread is applying updates of the unit
    grace_of: the version after which an update last had a grace, see `Updates`; -1: none had
    """

    def __init__(self, unit: U, tensors: AbstractContextManager[object]) -> None:
        self.unit, self.tensors = unit, tensors
        self.index, self.rule = unit.index, unit.rule
        self.loans: Loans | None = None
        self.waiters: dict[int, Waiter] = {}
        self.busy, self.grace_of = False, -1

    def lend(self) -> AbstractContextManager[Loan]:
        """Lends the weights to the calling thread, which holds `tensors`."""
        if self.loans is None:
            self.loans = Loans()
        return self.loans.lend()

    def recall(self) -> None:
        """Waits until all loans of the weights are given back, so that they may be changed. The caller
        holds `tensors`.
        """
        if self.loans is not None:
            self.loans.recall()

    def begin_copy(self, lock: AbstractContextManager[object], now: Callable[[], float]) -> Snapshot | TableCopying:
        """Returns a copy of the unit for a checkpoint, with the leased data that is in it. The caller holds `tensors`.

        lock: the job's lock
        now:  returns the time in seconds, from an arbitrary zero
        """
        with lock:
            committed = self.unit.committed()
        return self.unit.snapshot(committed)


class HostedTable(HostedUnit[ShardTable]):
    """A table's rows on this shard.

    history: the number of the current history of updates: see RowCursor in row_feeds.py
    feeds:   the readers' feeds of this table; the job's lock guards them
    saved:   the versions of the table in the shard's files of checkpoints
    """

    def __init__(self, unit: ShardTable) -> None:
        # Reentrant: without threads (NoThreads), the thread that begins a copy under this lock also makes the rest of
        # it, and takes the lock once more.
        super().__init__(unit, threading.RLock())
        self.history = next(_HISTORIES)
        self.feeds: set[Feed] = set()
        self.saved = SavedParts()

    def begin_copy(self, lock: AbstractContextManager[object], now: Callable[[], float]) -> TableCopying:
        """Begins a copy, which is completed in pieces between updates."""
        with lock:
            snapshot = self.unit.without_rows(self.unit.committed())
        return begin_copy(self.unit.weights, self.tensors, snapshot, self.saved.base, now)


@dataclass(eq=False)
class NarrowedBucket:
    """A bucket's weights in the wire format. users: the number of users, each of which calls `Narrowed.give` once

    The users are the messages that send it, and the cache of the job.
    """

    version: int
    values: torch.Tensor
    users: int = 1


class Narrowed:
    """A cache of buckets in the wire format, so that a bucket is converted once for all workers that wait for it.

    A few buckets stay as long as the job does; workers that read slowly do not add to them. The memory is reused: to
    allocate fresh memory may take several times as long as the conversion (measured).
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, NarrowedBucket] = OrderedDict()
        self._memory = Scratch()
        self._lock = threading.Lock()

    def take(self, index: int, version: int, weights: torch.Tensor, codec: Cast) -> NarrowedBucket:
        """Returns a bucket's weights in the wire format, until `give`. The caller holds the bucket's `tensors` lock."""
        with self._lock:
            kept = self._kept.get(index)
            if kept is not None and kept.version == version:
                self._kept.move_to_end(index)
                kept.users += 1
                return kept
        made = NarrowedBucket(version, codec.encode(weights, self._memory.take), users=2)
        with self._lock:
            old = [self._kept.pop(index)] if index in self._kept else []
            self._kept[index] = made
            while len(self._kept) > NARROWED_BUCKETS:
                old.append(self._kept.popitem(last=False)[1])
        for bucket in old:
            self.give(bucket)
        return made

    def give(self, bucket: NarrowedBucket) -> None:
        """Ends a use."""
        with self._lock:
            bucket.users -= 1
            is_free = not bucket.users
        if is_free:
            self._memory.give(bucket.values)


class HostedJob:
    """A run of a job on this shard.

    timeline: the number of this series of updates; a restore begins another one, with a higher number
    readers:  the readers of editions; the job's lock guards them
    """

    def __init__(self, spec: JobSpec, partition: JobPartition, run: str, room: JobRoom) -> None:
        self.name, self.run = spec.name, run
        self.partition = partition
        self.lock = threading.Lock()
        self.buckets = {index: HostedUnit(bucket, threading.Lock()) for index, bucket in partition.buckets.items()}
        self.tables = {index: HostedTable(table) for index, table in partition.tables.items()}
        self.units: dict[int, HostedUnit[Any]] = {**self.buckets, **self.tables}
        self.of_workers = OfWorkers()
        self.plan = segment_plan(partition.layout)
        self.narrowed = Narrowed()
        self.times = PushTimes()
        self._room = room
        self.optimizer_room = OptimizerRoom(spec.name, partition.checker, self.promised)
        self.failure: PSError | None = None
        self.snapshot_task: SnapshotTask | None = None  # the snapshot under way, or the last one
        self.refusals = Refusals()
        self.timeline = 0
        self.editions = Editions(spec.name, partition.buckets, self.promised)
        self.readers: set[Feed] = set()

    @property
    def mode(self) -> str:
        """The job's mode, for metrics."""
        return self.partition.spec.mode

    def check_run(self, run: str) -> None:
        """Raises RunEnded for an earlier run of the job, NotFound for a later one; an empty run is any."""
        if run and run < self.run:
            raise RunEnded(f"run {run} of job {self.name!r} has ended: run {self.run} has its name now")
        if run and run != self.run:
            raise NotFound(f"this shard does not know run {run} of job {self.name!r} yet")

    def check_worker(self, worker: Identity) -> None:
        """Raises UnknownWorker, Fenced or Forbidden unless this is a live worker with its key."""
        with self.lock:
            self.partition.check_worker(worker)

    def segment(self, worker: Identity) -> SegmentMap:
        """Returns a worker's segment. Raises NotShared if it has attached none, UnknownWorker if it is not live."""
        with self.lock:
            self.partition.check_worker(worker)
            attached = self.of_workers.segments.get((worker.rank, worker.member))
        if attached is None or attached.incarnation != worker.incarnation:
            raise NotShared(f"worker {worker.rank} has attached no segment here")
        return attached.segment

    def segment_bytes(self, row_bytes: int) -> int:
        """Returns the size of a segment with `row_bytes` bytes for rows; 0: the size of a segment for all buckets.

        Raises InvalidRequest if `row_bytes` is too large, or if the job has no table.
        """
        if not row_bytes:
            return self.plan.size
        tables = len(self.partition.spec.tables)
        if not tables or row_bytes > MAX_ROW_BYTES:
            raise InvalidRequest(
                f"expected a segment for rows of at most {MAX_ROW_BYTES} bytes, in a job with tables; got one of "
                f"{row_bytes}, and the job has {tables} tables"
            )
        return PAGE_BYTES + row_bytes

    # Rows in a worker's segment are copied before they are checked: the worker may overwrite them at any time.

    def pushed(self, push: RowsPush, place: int, memory: RowMemory | None) -> PushedRows:
        """Returns a copy of the rows of a push, which lie at an offset of the worker's segment.

        memory: the segment; None: not looked up yet. Raises as `row_memory`
        """
        dim, count = self.partition.row_checker.table(push.table).rows.dim, push.count
        memory = memory or self.row_memory(push.worker)
        there, head = memory.array(place, pushed_bytes(count, dim), np.uint8), (ID_BYTES + COUNT_BYTES) * count
        here = np.empty_like(there)
        here[:head] = there[:head]
        return PushedRows(here.data, copy_numbers(there[head:].view(np.float32), here[head:].view(np.float32)))

    def pulled(self, pull: RowsPull, places: PullOffsets, memory: RowMemory) -> tuple[Buffer, torch.Tensor]:
        """Reads a pull from the worker's segment. Returns a copy of its ids, and the memory in the segment for their
        rows: [n, dim].
        """
        dim = self.partition.row_checker.table(pull.table).rows.dim
        ids = memory.array(places.ids, ID_BYTES * places.id_count, np.uint8).copy()
        return ids.data, memory.rows(places.rows, places.id_count, dim)

    def row_memory(self, worker: Identity) -> RowMemory:
        """Returns a worker's segment for rows. Raises NotShared if there is none, UnknownWorker if it is not live."""
        with self.lock:
            self.partition.check_worker(worker)
            attached = self.of_workers.row_memory.get((worker.rank, worker.member))
        if attached is None or attached.incarnation != worker.incarnation:
            raise NotShared(f"worker {worker.rank} has attached no segment for rows here")
        return attached.memory

    def connect(self, worker: Identity, end: Callable[[], None]) -> Callable[[], None]:
        """Registers a worker's data connection, and closes an earlier one. Returns a function that removes it again.

        end: closes the connection
        Raises UnknownWorker or Fenced unless the worker is live.
        """
        of, connected = (worker.rank, worker.member), Connected(worker.incarnation, end)
        with self.lock:
            self.partition.check_worker(worker)
            before, self.of_workers.connected[of] = self.of_workers.connected.get(of), connected
        if before is not None:
            before.end()

        def forget() -> None:
            with self.lock:
                if self.of_workers.connected.get(of) is connected:
                    del self.of_workers.connected[of]

        return forget

    def detach(self, rank: int, before: int) -> None:
        """Closes the data connections, and unmaps the segments, of a rank's incarnations below `before`.

        Contributions that open updates borrowed from such a segment are copied first.
        """
        with self.lock:
            ended = _taken_out(self.of_workers.connected, rank, before)
        for connected in ended:
            connected.end()
        with self.lock:
            _taken_out(self.of_workers.row_memory, rank, before)
            if not _taken_out(self.of_workers.segments, rank, before):
                return
        for bucket in self.buckets.values():
            with bucket.tensors:
                bucket.unit.weights.own()

    def begin_snapshot(self, task: SnapshotTask, refusal: Refusal | None = None, built_on: str = "") -> None:
        """Begins a snapshot, in place of the last one. Does nothing if it was begun already. Raises as
        SnapshotTask.check.

        refusal:  the pushes to refuse from now on, for the last snapshot before the servers end; None: refuse none
        built_on: the SHA-256 of the file on which this one may build; empty: it must have all rows
        """
        with self.lock:
            if self.snapshot_task is not None and self.snapshot_task.is_at_least(task):
                return
            for unit in self.units.values():
                task.check(unit.index, unit.rule)
            for table in self.tables.values():  # before a thread looks whether the task wants one
                table.saved.build_on(built_on)
            before, self.snapshot_task, self.refusals.current = self.snapshot_task, task, refusal
            if refusal is not None and refusal.clock is None:
                for unit in self.units.values():
                    unit.rule.close()
        if before is not None:
            before.abandon()
        task.begin()
        for unit in self.units.values():
            with unit.tensors:
                self.look(unit)

    def stepped(self, unit: HostedUnit[Any], now: float) -> None:
        """Copies a unit after its step, if a snapshot or an edition needs this version. The caller holds `tensors`."""
        if self.snapshot_task is not None:
            self.look(unit)
        if self.editions.waiting and isinstance(unit.unit, Bucket):
            self.editions.look(unit.unit, now)

    def look(self, unit: HostedUnit[Any]) -> None:
        """Copies a unit for the snapshot that is under way, if its moment is now. The caller holds `tensors`."""
        with self.lock:
            task, refusal, rule = self.snapshot_task, self.refusals.current, unit.rule
            settles = refusal is not None and refusal.clock is None
            if task is None or not task.is_due(unit.index, rule) or (settles and rule.next() is not None):
                return
            reached = rule.extent()
        task.copy(unit.index, reached)

    def look_at_tables(self) -> None:
        """Calls `look` for each table. After a worker has left, a table may have all contributions of the snapshot's
        clock.
        """
        if self.snapshot_task is not None:
            for table in self.tables.values():
                with table.tensors:
                    self.look(table)

    def saves_state(self, pull: Pull, version: int) -> bool:
        """Whether the pulling worker must save its own state, because the weights that it gets are in a checkpoint.

        version: the version of the weights that the pull gets
        """
        task = self.snapshot_task
        return (
            task is not None and pull.worker.incarnation != READER and task.tells(pull.worker.rank, pull.clock, version)
        )

    def check_taken(self, rank: int, unit: int, clock: int) -> None:
        """Raises TryLater for a new push that comes too late for the last snapshot before the servers end. The caller
        holds `lock`.
        """
        refusal = self.refusals.current
        if refusal is not None and refusal.covers(clock) and clock > self.units[unit].rule.staged.get(rank, 0):
            later = TryLater(f"job {self.name!r}: the servers are stopping, and the last checkpoint is being made")
            later.retry_after = REFUSED_SECONDS
            raise later

    def feeds(self) -> list[Feed]:
        """Returns the feeds of all tables and of the weights.

        A feed that is added at the same moment may be missing. It checks by itself whether the job was dropped.
        """
        if not self.readers and not any(table.feeds for table in self.tables.values()):
            return []
        with self.lock:
            return [*self.readers, *(feed for table in self.tables.values() for feed in table.feeds)]

    def add_feed(self, feeds: set[Feed], feed: Feed, limit: float) -> None:
        """Adds a feed to `feeds`: the feeds of a table or of the weights.

        limit: the largest number of feeds of the job; one principal may have half of it
        Raises LimitExceeded past either.
        """
        with self.lock:
            tables = (each for table in self.tables.values() for each in table.feeds)
            check_feeds(self.name, [each.caller for each in (*self.readers, *tables)], feed.caller, limit)
            feeds.add(feed)

    def end_feeds(self, error: PSError) -> None:
        """Ends all feeds with an error. If the job is rolled back, readers get TryLater."""
        if isinstance(error, UnknownWorker):
            error = TryLater(f"job {self.name!r} is being rolled back to a checkpoint")
        self.editions.close(error)
        for feed in self.feeds():
            feed.end(error)

    def promised(self) -> int:
        """Returns the bytes that the job was promised and has not allocated yet."""
        partition = self.partition
        optimizer = self._room.optimizer + self.optimizer_room.more
        left = (optimizer - partition.optimizer_bytes, self._room.staged - partition.reserved_bytes)
        return sum(max(0, size) for size in left) + partition.promised_bytes

    def nbytes(self) -> int:
        """Returns about how many bytes of memory and files the job takes on this shard."""
        with self.lock:
            shared = len(self.of_workers.segments) * self.plan.size
        tables = self.partition.table_figures()
        return self._room.total + shared + sum(each.nbytes + each.file_bytes for each in tables)

    def statistics(self, now: float) -> ShardJobStatistics:
        """Returns the job's statistics on this shard."""
        with self.lock:
            waiters = [waiter for unit in self.units.values() for waiter in unit.waiters.values()]
            low, high = self.partition.reached.versions()
            clocks, departed = self.partition.reached.clocks(), self.partition.reached.departed_clocks()
            sharing = {rank for rank, _ in self.of_workers.segments}
            connected = {rank for rank, _ in self.of_workers.connected}
            readers = len(self.readers)
        return ShardJobStatistics(
            bucket_count=len(self.buckets),
            parameter_bytes=self.partition.parameter_bytes,
            optimizer_bytes=self.partition.optimizer_bytes,
            staged_bytes=self.partition.staged_bytes,
            version_min=low,
            version_max=high,
            clocks=clocks,
            waits=_waits(waiters, now),
            waiting_pulls=len(waiters),
            run=self.run,
            departed_clocks=departed,
            sharing=tuple(sorted(sharing)),
            connected=tuple(sorted(connected)),
            tables=self.partition.table_figures(),
            agreement=self.partition.agreement(),
            feed=self.editions.figures(readers, low, now),
        )

    def highest_incarnation(self) -> int:
        """Returns the highest incarnation of a worker that this shard has seen."""
        with self.lock:
            return self.partition.highest_incarnation()

    def close(self, reason: PSError) -> None:
        """Ends the job on this shard: pushes are refused with `reason`, and all that is staged or copied
        is released.
        """
        with self.lock:
            self.partition.execute(Close(reason))
            task, self.snapshot_task = self.snapshot_task, None
            connections = [connected.end for connected in self.of_workers.connected.values()]
        for end in connections:
            end()
        if task is not None:
            task.abandon()


E = TypeVar("E", Attached, AttachedRows, Connected)


def _taken_out(of_workers: dict[tuple[int, int], E], rank: int, before: int) -> list[E]:
    """Removes and returns the entries of a rank's incarnations below `before`, of all its members."""
    old = [of for of, each in of_workers.items() if of[0] == rank and each.incarnation < before]
    return [of_workers.pop(of) for of in old]


def _waits(waiters: list[Waiter], now: float) -> tuple[Wait, ...]:
    """Returns the waits of workers, by rank."""
    ranks: dict[int, list[Waiter]] = {}
    for waiter in waiters:
        ranks.setdefault(waiter.pull.worker.rank, []).append(waiter)
    return tuple(
        Wait(
            rank,
            clock=last.pull.clock,
            bucket_count=len(each),
            waiting_for=frozenset(other for waiter in each for other in waiter.admission.waiting_for),
            reason=last.admission.reason,
            seconds=now - last.pull.since,
        )
        for rank, each in sorted(ranks.items())
        for last in each[-1:]
    )
