"""The ids of rows that were removed lately, for readers that follow a table.

Rows that changed are found by their versions; a removed row has no version to be found by.
"""

from __future__ import annotations

import itertools
from collections import deque

from ps_protocol.row_ids import Ids

LEAST_KEPT = 2**16  # ids that are kept in any case, unless the table has room for fewer rows: 512 KiB
_FEW = 2**10  # ids that even the smallest table keeps: 8 KiB, as much as its index has
# Of a large table, a quarter as many ids as it has rows are kept. With more, sending the changes would cost hardly less
# than a copy of all rows.
_SHARE = 4


def most_kept(rows: int, capacity: int) -> int:
    """Returns how many removed ids of a table are kept at most. rows: its present rows; capacity: its most rows"""
    return min(capacity, max(LEAST_KEPT, rows // _SHARE))


class RemovedIds:
    """The ids that the last versions of a table removed: 8 bytes each, as many as `most_kept` allows.

    capacity: the most rows of the table
    since:    all ids that were removed after this version are kept
    """

    def __init__(self, capacity: int, since: int = 0) -> None:
        self.since, self._capacity = since, capacity
        self._kept: deque[tuple[int, Ids]] = deque()  # by version
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 8 * self._count

    def add(self, version: int, ids: Ids, rows: int) -> None:
        """Adds the ids that a version removed. Versions never decrease. rows: the table's present rows"""
        if not len(ids):
            return
        self._kept.append((version, ids))
        self._count += len(ids)
        while self._count > max(_FEW, most_kept(rows, self._capacity)):
            self.since, gone = self._kept.popleft()
            self._count -= len(gone)

    def after(self, version: int) -> list[Ids] | None:
        """Returns the ids that were removed after a version, in the order of versions; None if not all of them are kept
        any more.
        """
        if version < self.since:
            return None
        newest = itertools.takewhile(lambda kept: kept[0] > version, reversed(self._kept))
        return [ids for _, ids in newest][::-1]
