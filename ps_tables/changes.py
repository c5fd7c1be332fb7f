"""What changed in a table after a version: a walk over its rows, some at a time.

Between two steps of a walk the table may be trained. So a row is as of some version from the beginning of the walk on,
and the next walk, which begins where this one began, comes by it again if it changed meanwhile. A copy that takes what
was removed, and then all rows of a walk, equals the table at the beginning of the walk, but for ids that changed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ps_protocol.row_ids import Ids
from ps_tables.entries import BLOCK, Entries
from ps_tables.places import Column


class Changes:
    """A walk. The caller keeps the table from being trained while it is made, and during each `take`.

    version: of the table at its beginning: what the next walk is to begin after
    full:    it brings all rows; what a copy has beside them is no row any more
    """

    def __init__(self, rows: Entries, weights: Column, since: int, version: int, removed: Sequence[Ids] | None) -> None:
        """since: the version before; removed: None: it is not known what was removed since then"""
        self.version, self.full = version, removed is None
        self._removed = removed or ()
        self._rows, self._weights, self._since = rows, weights, since
        # Rows with later numbers are newer than the walk: the next one brings them.
        self._next, self._end = 0, rows.end if since < version else 0

    @property
    def removed(self) -> Ids:
        """Ids that were rows after the version before. Some may be rows again, and then come with the rows.

        They may be many: the table may be trained while they are put together.
        """
        return np.concatenate([np.empty(0, np.int64), *self._removed])

    @property
    def is_over(self) -> bool:
        """Whether all rows have been taken."""
        return self._next >= self._end

    def take(self, most: int) -> tuple[Ids, torch.Tensor]:
        """Returns the next rows, up to so many, of a block of the table: ids [n], weights [n, dim] float32.

        There may be none although the walk is not over.
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
