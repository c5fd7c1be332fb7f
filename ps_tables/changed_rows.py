"""A walk over the rows of a table that changed after a version, some rows at a time.

The table may be trained between two steps of a walk. Each row that the walk returns therefore has the value of some
version at or after its beginning. The next walk starts from the version at which this one began, so it returns such a
row again. A copy that applies the removals, and then all rows of a walk, equals the table at the beginning of the walk,
except for ids that changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from ps_protocol.row_ids import Ids
from ps_tables.entries import BLOCK, Entries
from ps_tables.positions import Column


class RowWalk:
    """One walk. The caller must not train the table during the constructor and during each `take`.

    version: of the table at the beginning of the walk; the next walk starts after it
    full: whether the walk returns all rows; a reader's copy then drops its other rows
    """

    def __init__(self, rows: Entries, weights: Column, since: int, version: int, removed: Iterable[Ids] | None) -> None:
        """since: the version after which rows count as changed
        removed: the ids removed since then; None: unknown
        """
        self.version, self.full = version, removed is None
        self._removed = deque(removed or ())  # the table's own arrays, which no walk copies
        self._rows, self._weights, self._since = rows, weights, since
        # Rows with later numbers are newer than the walk: the next one brings them.
        self._next, self._end = 0, rows.end if since < version else 0

    def take_removed(self, most: int) -> Ids:
        """Returns the next ids of removed rows, at most `most`. Some of these ids may have a new row; then `take`
        returns it, too.

        The table may be trained meanwhile.
        """
        taken, room = [np.empty(0, np.int64)], most
        while room and self._removed:
            ids = self._removed.popleft()
            if len(ids) > room:
                self._removed.appendleft(ids[room:])
            taken.append(ids[:room])
            room -= len(taken[-1])
        return np.concatenate(taken)

    @property
    def has_removed(self) -> bool:
        """Whether `take_removed` has ids left."""
        return bool(self._removed)

    @property
    def is_over(self) -> bool:
        """Whether `take` has returned all rows."""
        return self._next >= self._end

    def take(self, most: int) -> tuple[Ids, torch.Tensor]:
        """Returns the next rows of a block of the table, at most `most`: ids [n], weights [n, dim] float32.

        It may return none although the walk is not over.
        """
        stop = min(self._end, self._next + BLOCK)
        ids, numbers = self._rows.used_since(self._since, self._next, stop - self._next)
        if len(ids) > most:
            ids, numbers = ids[:most], numbers[:most]
            stop = int(numbers[-1]) + 1
        self._next = stop
        values = torch.empty(len(ids), self._weights.dim, dtype=torch.float32, device="cpu")
        self._weights.read(numbers, values)
        return ids, values
