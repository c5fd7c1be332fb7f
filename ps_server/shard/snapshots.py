"""Takes a snapshot of a job on one shard for a checkpoint, while the job trains.

The thread that steps a bucket copies it in memory, as soon as the bucket has applied exactly the updates that the
checkpoint asks for; in modes without a common clock, at once. When every bucket is copied, a separate thread writes
them. So training waits for copying, never for the disk. That thread also copies the rows of tables, in pieces between
which the table is trained. The copy is a table's state at the moment when copying began. If possible, it has only the
rows that changed since the last checkpoint.

A file may only build on a complete checkpoint. So a shard remembers the content of its last files, by their checksums,
and the coordinator names the one that belongs to the last complete checkpoint.
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
from ps_server.core.snapshot import CheckpointFile, ShardSnapshot, Snapshot, TableSnapshot, VersionRange, union
from ps_server.core.table_rows import TableRows
from ps_server.failpoints import failpoint
from ps_server.shard.threads import Threads
from ps_tables.copies import TableCopy

PIECE_BYTES = 4 * 2**20  # the bytes that are copied between two updates
# A checkpoint has all rows of a table, and not only those that changed, if more than MOST_CHANGED of the rows changed,
# or more than MOST_CHANGED_IN_ALL in all increments since the last full one: that takes little longer to write, and
# less to read.
MOST_CHANGED, MOST_CHANGED_IN_ALL = 0.5, 1.0


@dataclass(frozen=True)
class Saved:
    """The content of a table in a shard's file of a checkpoint.

    version: the version of the rows
    changed: the number of rows in all incremental files since the last one with all rows
    """

    version: int
    changed: int


class SavedParts:
    """The content of one table in the last files that this shard has written, by the SHA-256 of the file.

    base: the file on which the current copy, or the next one, may build; None if it must have all rows
    """

    def __init__(self) -> None:
        self._parts: dict[str, Saved] = {}
        self._lock = threading.Lock()
        self.base: Saved | None = None

    def build_on(self, sha256: str) -> None:
        """Sets `base` to the file with this SHA-256, or to None if it is not known. Forgets all other files."""
        with self._lock:
            self._parts = {known: saved for known, saved in self._parts.items() if known == sha256}
            self.base = self._parts.get(sha256)

    def written(self, sha256: str, saved: Saved) -> None:
        """Records a written file."""
        with self._lock:
            self._parts[sha256] = saved


class TableCopying:
    """A table that is being copied. `complete` is for one thread; `end` may be called from any.

    lock:     keeps the table from being trained
    snapshot: the table's snapshot when the copy began, still without rows
    saved:    the content of the table in the file
    now:      returns the time in seconds, from an arbitrary zero
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
        """Copies the remaining rows. Returns the snapshot, and for how many seconds in all the table could not be
        trained.

        Raises NotFound if the copy was abandoned.
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
                # Lets a waiting update take the lock: without a pause, this thread would get it again at once
                self._gap.wait(took)
        if self._copy.is_ended:
            raise NotFound("another checkpoint took the place of this one")
        return replace(self._snapshot, tensors=self._copy.tensors()), held_up

    def end(self) -> None:
        """Abandons the copy."""
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
    """Begins the copy of a table. The caller holds the lock.

    base: the file on which this copy may build. Then it has only changed rows, unless too many have changed. None: it
          has all rows
    """
    copy = rows.copy(base.version if base is not None else None)
    if base is not None and copy.since is not None:
        most = min(MOST_CHANGED * len(rows), MOST_CHANGED_IN_ALL * len(rows) - base.changed)
        if copy.changed > most:
            copy = rows.copy(None)
    changed = 0 if base is None or copy.since is None else base.changed + copy.changed
    return TableCopying(lock, snapshot, copy, Saved(rows.version, changed), now)


log = logging.getLogger("ps_server")

# Writes the snapshots of a checkpoint's part and describes the file.
Write = Callable[[str, list[Snapshot]], CheckpointFile]


@dataclass(frozen=True)
class Refusal:
    """Refuses pushes after the last snapshot before the servers end: workers send them again when the servers are back.

    clock: the version of the snapshot: pushes of later clocks are refused. None: it has no common version, so that
           every new push is refused, and each bucket is copied once all contributions staged before are in its weights
    until: the end of the refusal, on the clock `now`, if the servers have not ended by then
    last_incarnation: a worker with a higher one ends the refusal, as it shows that the servers take workers again.
                      None: no worker ends it, because this shard itself ends
    """

    clock: int | None
    until: float
    now: Callable[[], float]
    last_incarnation: int | None

    def covers(self, clock: int) -> bool:
        """Whether new pushes of `clock` are refused now."""
        return self.now() < self.until and (self.clock is None or clock > self.clock)


@dataclass
class Refusals:
    """Whether the shard refuses new pushes of a job because the servers end.

    current: the refusal, if the last snapshot was the last one before the servers end; otherwise None
    seconds: above 0 if this shard is about to end: how long pushes are refused after the next snapshot
    """

    current: Refusal | None = None
    seconds: float = 0.0

    def worker_added(self, incarnation: int) -> None:
        """Ends the refusal if a worker has joined after the refusal began.

        A worker whose join was under way before does not end it.
        """
        refusal = self.current
        if refusal is not None and refusal.last_incarnation is not None and incarnation > refusal.last_incarnation:
            self.current = None


@dataclass(frozen=True)
class Copied:
    """One unit of a snapshot: the copied bucket or the table that is being copied, and its versions and clocks then."""

    index: int
    content: Snapshot | TableCopying
    reached: VersionRange


class SnapshotTask:
    """One checkpoint of one job on this shard. Tables count as buckets.

    name:    the checkpoint's name, a number that rises
    clock:   the version at which each bucket is copied; None: each is copied now
    buckets: the buckets to copy, by index, each with whether an optimizer steps it
    copy:    copies a bucket, or begins to copy a table, with the leased data in it
    write:   writes all copies to disk
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
        self._abandoned = False
        self._copied: list[Copied] = []
        self._held_up = 0.0
        self._complete: ShardSnapshot | None = None
        self._error: PSError | None = None
        self._asked: dict[int, int] = {}  # by rank, the clock of the first pull that was asked to save

    def is_at_least(self, other: SnapshotTask) -> bool:
        """Returns True if `other` is the same task, False if it is a later one, which may replace this.

        Raises OutOfOrder if it is an earlier one, or has the same name but another clock, from another coordinator: a
        late call must not replace a task that was begun since.
        """
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
        """Begins the task. If this shard holds no bucket of the job, an empty part is written at once."""
        if not self._wanted:
            self._hand_over()

    def is_due(self, index: int, rule: UpdateRule[Any]) -> bool:
        """Whether a bucket must be copied now: it is at the snapshot's clock, or the snapshot has none."""
        if index not in self._wanted:
            return False
        return self.clock is None or index not in self._trained or rule.is_at(self.clock)

    def copy(self, index: int, reached: VersionRange) -> None:
        """Copies a bucket that is due. reached: its versions and clocks. The caller holds the bucket's
        `tensors` lock.
        """
        if index not in self._wanted:
            return  # another checkpoint has replaced this one meanwhile
        started = self._now()
        snapshot = self._copy(index)
        with self._changed:
            if index in self._wanted:
                self._held_up += self._now() - started
                self._copied.append(Copied(index, snapshot, reached))
                self._wanted.discard(index)
                if not self._wanted:
                    self._hand_over()
                return
        if isinstance(snapshot, TableCopying):  # the task was abandoned during the copy
            snapshot.end()

    def _hand_over(self) -> None:
        """Hands a unit whose copy is complete to the writing thread."""
        try:
            self._threads.write(self._finish)
        except TryLater as error:
            self._end(error=error)

    def _finish(self) -> None:
        with self._changed:
            if self._abandoned:
                return
            copied = tuple(self._copied)
        try:
            reached = union(each.reached for each in copied if each.index in self._trained)
            buckets = sorted(map(self._completed, copied), key=lambda bucket: bucket.index)
            with self._changed:
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
        """Abandons the snapshot for another checkpoint: a call that waits for this one ends with NotFound."""
        with self._changed:
            self._abandoned = True
            self._wanted.clear()
            if self._complete is None and self._error is None:
                self._error = NotFound(f"checkpoint {self.name} was abandoned for another one")
            self._changed.notify_all()
        self._drop_copies()

    def stop(self) -> None:
        """Ends waiting calls with TryLater, unless all buckets are copied: then they are still written. The shard
        stops.
        """
        with self._changed:
            if self._wanted and self._error is None:
                self._error = TryLater(f"checkpoint {self.name}: the shard stops")
            self._changed.notify_all()

    def wait(self, seconds: float) -> ShardSnapshot:
        """Waits up to `seconds` for the part to be on disk, and returns it. Raises TryLater if it is not, or the task's
        error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._error, seconds)
            if self._error is not None:
                raise anew(self._error)
            if self._complete is None:
                raise TryLater(f"checkpoint {self.name}: {len(self._wanted)} buckets are not at clock {self.clock} yet")
            return self._complete

    def tells(self, rank: int, clock: int, version: int) -> bool:
        """Whether a worker that pulls at `clock`, and gets `version`, must save its own state.

        Without a common clock, each worker saves at the first clock of a pull after the snapshot began. The answer to
        every pull of that clock asks for it, because the first answer may be lost.
        """
        if self.clock is not None:
            return version == self.clock == clock
        return self._asked.setdefault(rank, clock) == clock
