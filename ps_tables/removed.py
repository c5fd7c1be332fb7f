"""Ids that were rows and are none any more, of late: those who follow a table have to be told of them.

Rows that changed are found by their versions; of a row that is gone there is nothing left to find.
"""

from __future__ import annotations

import itertools
from collections import deque

from ps_protocol.row_ids import Ids

LEAST_KEPT = 2**16  # ids that are kept in any case, unless the table has room for fewer rows: 512 KiB
_FEW = 2**10  # of the smallest table: 8 KiB, as its index
_SHARE = 4  # and a quarter as many as there are rows: beyond, a copy of all rows costs little more


def most_kept(rows: int, capacity: int) -> int:
    """Returns how many removed ids are kept of a table at most. rows: it has; capacity: it may have"""
    return min(capacity, max(LEAST_KEPT, rows // _SHARE))


class RemovedIds:
    """The ids that the last versions of a table removed: 8 bytes each, as many as `most_kept` says.

    capacity: rows that the table may have
    since:    all that was removed after this version is here
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
        """Notes what a version removed. Versions never go down. rows: how many the table has now"""
        if not len(ids):
            return
        self._kept.append((version, ids))
        self._count += len(ids)
        while self._count > max(_FEW, most_kept(rows, self._capacity)):
            self.since, gone = self._kept.popleft()
            self._count -= len(gone)

    def after(self, version: int) -> list[Ids] | None:
        """Returns what was removed after a version, in the order of versions; None where that is not known any more."""
        if version < self.since:
            return None
        newest = itertools.takewhile(lambda kept: kept[0] > version, reversed(self._kept))
        return [ids for _, ids in newest][::-1]
