"""Copying tables for checkpoints: in pieces, between which they are trained, and only what changed where that will do.

A checkpoint that is not complete yet is nothing to build on. So a shard remembers what its last parts have, by their
checksums, and the coordinator says which of them belongs to the last checkpoint that is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ps_protocol.errors import NotFound
from ps_server.core.snapshot import TableSnapshot
from ps_server.core.tables import TableRows
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
        """Gives it up."""
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
