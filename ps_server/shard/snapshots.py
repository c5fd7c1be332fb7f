"""Taking a snapshot of a job on one shard for a checkpoint, beside training.

A bucket is copied in memory by the thread that steps it, at the moment at which it has applied exactly as many updates
as the checkpoint asks for; or, where the mode has no common moment, at once. When every bucket is there, a thread of
its own writes them. So training waits for copying, never for the disk. Of a table that thread copies the rows, in
pieces between which the table is trained; the copy is of the moment at which it begins. It has only what changed since
the last checkpoint where that will do.

A checkpoint that is not complete yet is nothing to build on. So a shard remembers what its last parts have, by their
checksums, and the coordinator says which of them belongs to the last checkpoint that is complete.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ps_protocol.errors import NotFound, OutOfOrder, PSError, TryLater, anew
from ps_runtime.background import note_error
from ps_server.core.consistency import UpdateRule
from ps_server.core.snapshot import Part, ShardSnapshot, Snapshot, TableSnapshot, VersionRange, union
from ps_server.core.table_rows import TableRows
from ps_server.failpoints import failpoint
from ps_server.shard.threads import Threads
from ps_tables.copies import TableCopy

PIECE_BYTES = 4 * 2**20  # that are copied between two updates
# Of a table's rows, in one part of changes, and in all after the part that has all rows: beyond, there is another of
# these, which takes little longer to write, and less to read.
MOST_CHANGED, MOST_CHANGED_IN_ALL = 0.5, 1.0


@dataclass(frozen=True)
class Saved:
    """What a part has of a table. changed: rows in the parts after the one that has all rows"""

    version: int
    changed: int


class SavedParts:
    """What the last parts that this shard has written have of one table, by the SHA-256 of each.

    base: what the copy that is under way, or the next one, may build on; None: nothing
    """

    def __init__(self) -> None:
        self._parts: dict[str, Saved] = {}
        self._lock = threading.Lock()
        self.base: Saved | None = None

    def build_on(self, sha256: str) -> None:
        """Notes the part that the next one may build on, if it is known. The others are forgotten."""
        with self._lock:
            self._parts = {known: saved for known, saved in self._parts.items() if known == sha256}
            self.base = self._parts.get(sha256)

    def written(self, sha256: str, saved: Saved) -> None:
        """Notes a part."""
        with self._lock:
            self._parts[sha256] = saved


class TableCopying:
    """A table that is being copied. `complete` is for one thread; `end` may be called from any.

    lock:     keeps the table from being trained
    snapshot: of the table when the copy began, to which its rows are still to come
    saved:    what the part will have of it
    now:      the time, in seconds from anywhere
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        snapshot: TableSnapshot,
        copy: TableCopy,
        saved: Saved,
        now: Callable[[], float],
    ) -> None:
        self.saved = saved
        self._lock, self._snapshot, self._copy, self._now = lock, snapshot, copy, now
        self._gap = threading.Event()  # is set when it ends

    def complete(self) -> tuple[TableSnapshot, float]:
        """Copies what is missing; returns the snapshot, and for how many seconds that kept updates from the table.

        Raises NotFound once it has ended.
        """
        held_up = 0.0
        most = max(1, PIECE_BYTES // max(1, self._copy.row_bytes))
        while not self._copy.is_over:
            with self._lock:
                began = self._now()
                if not self._copy.is_over:
                    self._copy.take(most)
                took = self._now() - began
            held_up += took
            if took and not self._copy.is_over:
                self._gap.wait(took)  # an update that waits has its turn: a lock alone goes to who asks at once
        if self._copy.is_ended:
            raise NotFound("another checkpoint took the place of this one")
        return replace(self._snapshot, tensors=self._copy.tensors()), held_up

    def end(self) -> None:
        """Abandons the snapshot."""
        with self._lock:
            self._copy.end()
        self._gap.set()


def begin_copy(
    rows: TableRows,
    lock: AbstractContextManager[object],
    snapshot: TableSnapshot,
    base: Saved | None,
    now: Callable[[], float],
) -> TableCopying:
    """Begins the copy of a table. The caller holds the lock. base: what the part is to build on, of this table"""
    copy = rows.copy(base.version if base is not None else None)
    if base is not None and copy.since is not None:
        most = min(MOST_CHANGED * len(rows), MOST_CHANGED_IN_ALL * len(rows) - base.changed)
        if copy.changed > most:
            copy = rows.copy(None)
    changed = 0 if base is None or copy.since is None else base.changed + copy.changed
    return TableCopying(lock, snapshot, copy, Saved(rows.version, changed), now)


log = logging.getLogger("ps_server")

# Writes the snapshots of a checkpoint's part and describes the file.
Write = Callable[[str, list[Snapshot]], Part]


@dataclass(frozen=True)
class Refusal:
    """After the last snapshot before the servers end, a push that would not be in it is not taken, and so is sent again
    when they are back.

    clock: the version that the snapshot is of; None: none, so that every new push is refused, and a bucket is copied
           when what was staged before is in its weights
    until: when this ends, if the servers have not ended; on the clock `now`
    last_incarnation: a worker of a later one shows that the servers take workers again, which ends this; None: this
           shard itself ends, and no worker shows otherwise
    """

    clock: int | None
    until: float
    now: Callable[[], float]
    last_incarnation: int | None

    def covers(self, clock: int) -> bool:
        """Whether the snapshot keeps out new pushes of a clock."""
        return self.now() < self.until and (self.clock is None or clock > self.clock)


@dataclass
class Refusals:
    """current: set if the last snapshot was the last before the servers end
    seconds: above 0 once this shard is to end: for so long pushes are refused after the next snapshot
    """

    current: Refusal | None = None
    seconds: float = 0.0

    def worker_added(self, incarnation: int) -> None:
        """Ends the refusal for a worker that joined after it. One that was on its way before ends nothing."""
        refusal = self.current
        if refusal is not None and refusal.last_incarnation is not None and incarnation > refusal.last_incarnation:
            self.current = None


@dataclass(frozen=True)
class Copied:
    """A bucket as it was copied, or a table that is being copied, and how far it was."""

    index: int
    content: Snapshot | TableCopying
    reached: VersionRange


class SnapshotTask:
    """One checkpoint of one job on this shard. Tables count as buckets.

    clock:   the version at which each bucket is copied; None: now
    buckets: by index, whether an optimizer steps it
    copy:    copies a bucket, or begins to copy a table, with the leased data that is committed in it
    """

    def __init__(
        self,
        name: str,
        clock: int | None,
        buckets: Mapping[int, bool],
        copy: Callable[[int], Snapshot | TableCopying],
        write: Write,
        threads: Threads,
        now: Callable[[], float],
    ) -> None:
        self.name = name
        self.clock = clock
        self._copy = copy
        self._write = write
        self._threads = threads
        self._now = now
        self._changed = threading.Condition()
        self._trained = {index for index, trained in buckets.items() if trained}
        self._wanted = set(buckets)
        self._copied: list[Copied] = []
        self._held_up = 0.0
        self._complete: ShardSnapshot | None = None
        self._error: PSError | None = None
        self._told: dict[int, int] = {}  # by rank, the clock of the pull that was told first

    def is_at_least(self, other: SnapshotTask) -> bool:
        """Whether the other is this one, asked for once more. Raises OutOfOrder if it is an older one, or has the same
        name from another coordinator: a late call must not take the place of what was begun since."""
        if (self.name, self.clock) == (other.name, other.clock):
            return True
        if int(other.name) <= int(self.name):
            raise OutOfOrder(f"checkpoint {self.name} was begun already, and checkpoint {other.name} is asked for")
        return False

    def check(self, index: int, rule: UpdateRule[Any]) -> None:
        """Raises OutOfOrder if a bucket is at the clock already or past it, TryLater if it has no weights yet."""
        if not rule.initialised:
            raise TryLater("the job has no initial weights yet")
        if self.clock is not None and index in self._trained and rule.has_passed(self.clock):
            version = rule.versions()[1]
            raise OutOfOrder(f"bucket {index} is at version {version}, and the checkpoint is of {self.clock}")

    def begin(self) -> None:
        """Begins. A shard that holds no bucket of the job has its part at once: a file with nothing in it."""
        if not self._wanted:
            self._hand_over()

    def is_due(self, index: int, rule: UpdateRule[Any]) -> bool:
        """Whether the moment at which a bucket is copied is now."""
        if index not in self._wanted:
            return False
        return self.clock is None or index not in self._trained or rule.is_at(self.clock)

    def copy(self, index: int, reached: VersionRange) -> None:
        """Copies a bucket that is due, and so far. The caller holds the bucket's `tensors` lock."""
        if index not in self._wanted:
            return  # another checkpoint took the place of this one meanwhile
        started = self._now()
        snapshot = self._copy(index)
        with self._changed:
            self._held_up += self._now() - started
            self._copied.append(Copied(index, snapshot, reached))
            self._wanted.discard(index)
            if not self._wanted:
                self._hand_over()

    def _hand_over(self) -> None:
        """Hands a unit whose copy is complete to the writing thread."""
        try:
            self._threads.write(self._finish)
        except TryLater as error:
            self._end(error=error)

    def _finish(self) -> None:
        try:
            reached = union(each.reached for each in tuple(self._copied) if each.index in self._trained)
            buckets = sorted(map(self._completed, tuple(self._copied)), key=lambda bucket: bucket.index)
            self._copied.clear()
            part = self._write(self.name, buckets)
            failpoint("shard-file-written")
        except PSError as error:
            self._end(error=error)
        except Exception:
            log.error("checkpoint %s cannot be written", self.name)
            note_error("checkpoint")
            self._end(error=PSError("the checkpoint failed on this shard; its log says why"))
        else:
            changes_only = any(isinstance(each, TableSnapshot) and each.changes_only for each in buckets)
            self._end(ShardSnapshot(part, reached, self._held_up, changes_only))

    def _completed(self, copied: Copied) -> Snapshot:
        if not isinstance(copied.content, TableCopying):
            return copied.content
        snapshot, seconds = copied.content.complete()
        self._held_up += seconds
        return snapshot

    def _end(self, complete: ShardSnapshot | None = None, error: PSError | None = None) -> None:
        with self._changed:
            self._complete, self._error = complete, None if error is None else anew(error)  # its frames hold a copy
            self._changed.notify_all()
        self._drop_copies()

    def _drop_copies(self) -> None:
        with self._changed:
            copied = self._copied.copy()
            self._copied.clear()
        for each in copied:
            if isinstance(each.content, TableCopying):
                each.content.end()

    def abandon(self) -> None:
        """Gives way to another checkpoint: a call that waits for this one ends with NotFound."""
        with self._changed:
            self._wanted.clear()
            if self._complete is None and self._error is None:
                self._error = NotFound(f"checkpoint {self.name} was abandoned for another one")
            self._changed.notify_all()
        self._drop_copies()

    def stop(self) -> None:
        """Ends a call that waits for buckets, with TryLater: the shard stops. What is all copied is still written."""
        with self._changed:
            if self._wanted and self._error is None:
                self._error = TryLater(f"checkpoint {self.name}: the shard stops")
            self._changed.notify_all()

    def wait(self, seconds: float) -> ShardSnapshot:
        """Returns the part, once it is on disk. Raises TryLater if that takes longer, otherwise why it cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._error, seconds)
            if self._error is not None:
                raise anew(self._error)
            if self._complete is None:
                raise TryLater(f"checkpoint {self.name}: {len(self._wanted)} buckets are not at clock {self.clock} yet")
            return self._complete

    def tells(self, rank: int, clock: int, version: int) -> bool:
        """Whether a worker that gets this version by a pull at `clock` is to save its own state.

        At one clock each; but at any pull of that clock: the answer to the first may be lost.
        """
        if self.clock is not None:
            return version == self.clock == clock
        return self._told.setdefault(rank, clock) == clock
