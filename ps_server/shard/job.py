"""What a shard holds while it runs: the state of `core`, with the locks, segments and waiting pulls beside it.

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
from typing import Any, Protocol

import torch

from ps_protocol.codecs import Cast
from ps_protocol.errors import NotFound, NotShared, PSError, RunEnded, TryLater, UnknownWorker
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.row_memory import RowMemory
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_server.core.budget import Room
from ps_server.core.commands import Close
from ps_server.core.consistency import Add, UpdateRule
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.partition import JobPartition
from ps_server.core.snapshot import Snapshot
from ps_server.core.statistics import ShardJobStatistics, Wait
from ps_server.core.sums import Scratch
from ps_server.core.tables import RowsContribution, TableRows
from ps_server.shard.loans import Loans
from ps_server.shard.snapshots import Refusal, Refusals, SavedParts, SnapshotTask, TableCopying, begin_copy
from ps_server.shard.stage_room import StageRoom
from ps_server.shard.waiting import READER, Pull, PushTimes, Waiter

NARROWED_BUCKETS = 4  # that a job keeps
_HISTORIES = itertools.count(secrets.randbits(62))  # a number that no other table of any process has had
REFUSED_SECONDS = 0.25  # after which a refused push may be sent again: the servers end, or take pushes again


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
    """The data connection of one incarnation of a worker, and what ends it."""

    incarnation: int
    end: Callable[[], None]


@dataclass
class OfWorkers:
    """What workers have here beside their pushes and pulls, by rank. The job's lock guards it.

    attaching: ranks that are handing over a segment
    """

    segments: dict[int, Attached] = field(default_factory=dict)
    row_memory: dict[int, AttachedRows] = field(default_factory=dict)
    attaching: set[int] = field(default_factory=set)
    connected: dict[int, Connected] = field(default_factory=dict)


class Feed(Protocol):
    """A reader's feed of a table: see row_feeds.py. caller: the principal that reads"""

    caller: str

    def end(self, error: PSError) -> None:
        """Ends the feed with an error."""


class Trained(Protocol):
    """Weights, as those need them that apply updates."""

    def add(self, contribution: Any) -> None:
        """Adds one contribution to the open update."""

    def step(self) -> None:
        """Makes an update with what was added."""


@dataclass(eq=False)
class Hosted:
    """A bucket or a table, by its index, with the lock of its weights, its waiting pulls, and whether a thread is
    applying its updates.

    loans: of its weights, to those that send them
    grace_of: the version after which an update was held back last for more than its quorum
    """

    index: int
    rule: UpdateRule[Any]
    weights: Trained
    tensors: AbstractContextManager[object]
    loans: Loans = field(default_factory=Loans)
    waiters: dict[int, Waiter] = field(default_factory=dict)  # by the number of the pull
    busy: bool = False
    grace_of: int = -1

    def completes(self, work: Add[Any]) -> bool:
        """Whether the open update is complete with this, where that matters. The caller holds the job's lock."""
        return False

    def add(self, contribution: Any, is_last: bool) -> None:
        """Adds one contribution to the open update. is_last: what `completes` said of it"""
        self.weights.add(contribution)


@dataclass(eq=False)
class HostedBucket(Hosted):
    """A bucket."""

    rule: UpdateRule[Gradient]
    weights: DenseBucket

    def completes(self, work: Add[Gradient]) -> bool:
        """Whether the open update is complete with this, where that matters. The caller holds the job's lock."""
        return self.weights.steps_in_pieces and self.rule.completes(work)

    def add(self, contribution: Gradient, is_last: bool) -> None:
        """Adds one contribution to the open update. is_last: what `completes` said of it"""
        self.weights.add(contribution, is_last)

    @property
    def spec(self) -> BucketSpec:
        """Its place in the layout."""
        return self.weights.bucket


@dataclass(eq=False)
class HostedTable(Hosted):
    """A table's rows on this shard.

    history: of its updates: see RowCursor in row_feeds.py
    feeds:   of readers; the job's lock guards them
    saved:   what parts of checkpoints have of it
    """

    rule: UpdateRule[RowsContribution]
    weights: TableRows
    history: int = field(default_factory=_HISTORIES.__next__)
    feeds: set[Feed] = field(default_factory=set)
    saved: SavedParts = field(default_factory=SavedParts)


@dataclass(eq=False)
class NarrowedBucket:
    """A bucket in the wire format. users: who sends it now, and the job, as long as it keeps it"""

    version: int
    values: torch.Tensor
    users: int = 1


class Narrowed:
    """The buckets last narrowed to the wire format: what several workers wait for is narrowed once, not once for each.

    A few stay for as long as the job does; workers that read slowly pin no more. Their memory is used again: to get
    fresh memory of that size may take several times as long as to narrow into it (measured).
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
    """A run of a job on this shard."""

    def __init__(self, spec: JobSpec, state: JobPartition, run: str, room: Room) -> None:
        self.name, self.run = spec.name, run
        self.state = state
        self.lock = threading.Lock()
        self.buckets = {
            index: HostedBucket(index, bucket.rule, bucket.weights, threading.Lock())
            for index, bucket in state.buckets.items()
        }
        tables = {
            # Without threads, what takes the lock for the rest of a copy is the thread that has begun it.
            index: HostedTable(index, table.rule, table.rows, threading.RLock())
            for index, table in state.tables.items()
        }
        self.parts: dict[int, Hosted] = {**self.buckets, **tables}
        self.of_workers = OfWorkers()
        self.plan = segment_plan(state.layout)
        self.narrowed = Narrowed()
        self.times = PushTimes()
        self._room = room
        self.stage_room = StageRoom(spec.name, state.checker, self.promised)
        self.failure: PSError | None = None
        self.snapshot_task: SnapshotTask | None = None  # the one under way, or the last
        self.refusals = Refusals()

    @property
    def mode(self) -> str:
        """The job's mode, for metrics."""
        return self.state.spec.mode

    @property
    def tables(self) -> dict[int, HostedTable]:
        """The tables, by index."""
        found = ((index, self.parts[index]) for index in self.state.tables)
        return {index: table for index, table in found if isinstance(table, HostedTable)}

    def check_run(self, run: str) -> None:
        """Raises RunEnded for an earlier run of the job, NotFound for a later one; an empty run is any."""
        if run and run < self.run:
            raise RunEnded(f"run {run} of job {self.name!r} has ended: run {self.run} has its name now")
        if run and run != self.run:
            raise NotFound(f"this shard does not know run {run} of job {self.name!r} yet")

    def segment(self, rank: int, incarnation: int, key: bytes = b"") -> SegmentMap:
        """Returns a worker's segment. Raises NotShared if it has attached none, UnknownWorker if it is not live."""
        with self.lock:
            self.state.check_worker(rank, incarnation, key)
            attached = self.of_workers.segments.get(rank)
        if attached is None or attached.incarnation != incarnation:
            raise NotShared(f"worker {rank} has attached no segment here")
        return attached.segment

    def connect(self, rank: int, connected: Connected, key: bytes) -> Callable[[], None]:
        """Notes a worker's data connection, in place of an earlier one, which ends; returns what forgets it.

        Raises UnknownWorker or Fenced unless the worker is live.
        """
        with self.lock:
            self.state.check_worker(rank, connected.incarnation, key)
            before, self.of_workers.connected[rank] = self.of_workers.connected.get(rank), connected
        if before is not None:
            before.end()

        def forget() -> None:
            with self.lock:
                if self.of_workers.connected.get(rank) is connected:
                    del self.of_workers.connected[rank]

        return forget

    def detach(self, rank: int, before: int) -> None:
        """Lets go of what a worker of an incarnation before this one has here: its data connection, its segments, and
        what updates borrowed of them."""
        with self.lock:
            connected = self.of_workers.connected.get(rank)
            if connected is not None and connected.incarnation < before:
                del self.of_workers.connected[rank]
            else:
                connected = None
        if connected is not None:
            connected.end()
        with self.lock:
            rows = self.of_workers.row_memory.get(rank)
            if rows is not None and rows.incarnation < before:
                del self.of_workers.row_memory[rank]
            attached = self.of_workers.segments.get(rank)
            if attached is None or attached.incarnation >= before:
                return
            del self.of_workers.segments[rank]
        for bucket in self.buckets.values():
            with bucket.tensors:
                bucket.weights.own()

    def snapshot(self, index: int, now: Callable[[], float]) -> Snapshot | TableCopying:
        """Returns a copy of a bucket, or begins that of a table, with the leased data in it. The caller holds its
        `tensors` lock."""
        table = self.state.tables.get(index)
        with self.lock:
            committed = self.state.committed(index)
            snapshot = None if table is None else table.without_rows(committed)
        if table is None or snapshot is None:
            return self.state.buckets[index].snapshot(committed)
        part = self.tables[index]
        return begin_copy(table.rows, part.tensors, snapshot, part.saved.base, now)

    def begin_snapshot(self, task: SnapshotTask, refusal: Refusal | None = None, built_on: str = "") -> None:
        """Begins a snapshot in place of the last, unless that one is the same already. Raises as SnapshotTask.check.

        refusal:  set for the last one before the servers end
        built_on: the SHA-256 of the part that this one may build on; empty: none
        """
        with self.lock:
            if self.snapshot_task is not None and self.snapshot_task.is_at_least(task):
                return
            for part in self.parts.values():
                task.check(part.index, part.rule)
            for table in self.tables.values():  # before a thread looks whether the task wants one
                table.saved.build_on(built_on)
            before, self.snapshot_task, self.refusals.current = self.snapshot_task, task, refusal
            if refusal is not None and refusal.clock is None:
                for part in self.parts.values():
                    part.rule.close()
        if before is not None:
            before.abandon()
        task.begin()
        for part in self.parts.values():
            with part.tensors:
                self.look(part)

    def look(self, bucket: Hosted) -> None:
        """Has a bucket copied for the snapshot that is under way, if its moment is now. The caller holds `tensors`."""
        with self.lock:
            task, refusal, rule = self.snapshot_task, self.refusals.current, bucket.rule
            settles = refusal is not None and refusal.clock is None
            if task is None or not task.is_due(bucket.index, rule) or (settles and rule.next() is not None):
                return
            reached = rule.extent()
        task.copy(bucket.index, reached)

    def look_at_tables(self) -> None:
        """Looks at all tables: with a worker that is gone, one may have all rows of a snapshot's clock."""
        if self.snapshot_task is not None:
            for table in self.tables.values():
                with table.tensors:
                    self.look(table)

    def saves_state(self, pull: Pull, version: int) -> bool:
        """Whether what a pull gets is in a checkpoint for which its worker is to save its own state."""
        task = self.snapshot_task
        return task is not None and pull.incarnation != READER and task.tells(pull.rank, pull.clock, version)

    def check_taken(self, rank: int, bucket: int, clock: int) -> None:
        """Raises TryLater for a new push that would not be in the last snapshot. The caller holds `lock`."""
        refusal = self.refusals.current
        if refusal is not None and refusal.covers(clock) and clock > self.parts[bucket].rule.staged.get(rank, 0):
            later = TryLater(f"job {self.name!r}: the servers are stopping, and the last checkpoint is being made")
            later.retry_after = REFUSED_SECONDS
            raise later

    def feeds(self) -> list[Feed]:
        """Returns the feeds of all tables. One that is added meanwhile looks for itself whether the job is there."""
        if not any(table.feeds for table in self.tables.values()):
            return []
        with self.lock:
            return [feed for table in self.tables.values() for feed in table.feeds]

    def end_feeds(self, error: PSError) -> None:
        """Ends all feeds with an error: to be tried again later, where the job goes on from a checkpoint."""
        if isinstance(error, UnknownWorker):
            error = TryLater(f"job {self.name!r} is being rolled back to a checkpoint")
        for feed in self.feeds():
            feed.end(error)

    def promised(self) -> int:
        """Returns the bytes that the job was admitted with and that are not taken yet."""
        buckets = self.state.buckets
        optimizer = self._room.optimizer + self.stage_room.more
        left = (optimizer - buckets.optimizer_bytes, self._room.staged - buckets.staged_bytes)
        return sum(max(0, size) for size in left) + self.state.tables.promised_bytes

    def statistics(self, now: float) -> ShardJobStatistics:
        """Returns how the job is on this shard."""
        with self.lock:
            waiters = [waiter for part in self.parts.values() for waiter in part.waiters.values()]
            low, high = self.state.reached.versions()
            clocks, departed = self.state.reached.clocks(), self.state.reached.departed_clocks()
            sharing, connected = tuple(sorted(self.of_workers.segments)), tuple(sorted(self.of_workers.connected))
        return ShardJobStatistics(
            bucket_count=len(self.buckets),
            parameter_bytes=self.state.buckets.parameter_bytes,
            optimizer_bytes=self.state.buckets.optimizer_bytes,
            staged_bytes=self.state.buckets.staged_bytes + self.state.tables.staged_bytes,
            version_min=low,
            version_max=high,
            clocks=clocks,
            waits=_waits(waiters, now),
            waiting_pulls=len(waiters),
            run=self.run,
            departed_clocks=departed,
            sharing=sharing,
            connected=connected,
            tables=self.state.tables.figures(),
            agreement=self.state.buckets.agreement(),
        )

    def highest_incarnation(self) -> int:
        """Returns the highest incarnation of a worker that this shard has heard of."""
        with self.lock:
            return self.state.highest_incarnation()

    def close(self, reason: PSError) -> None:
        """Ends the job here: its pushes are refused, and what it has staged and copied counts no more."""
        with self.lock:
            self.state.execute(Close(reason))
            task, self.snapshot_task = self.snapshot_task, None
            connections = [connected.end for connected in self.of_workers.connected.values()]
        for end in connections:
            end()
        if task is not None:
            task.abandon()


def _waits(waiters: list[Waiter], now: float) -> tuple[Wait, ...]:
    """Returns what each worker waits for, by rank."""
    ranks: dict[int, list[Waiter]] = {}
    for waiter in waiters:
        ranks.setdefault(waiter.pull.rank, []).append(waiter)
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
