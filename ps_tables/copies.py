"""A copy of a table as it is at one version, taken in pieces between which the table may be trained.

What is about to change is copied before it does (`Entries.before_change`). So every entry comes once, as it was when
the copy began: from the walk over the numbers, or because it changed first. The order says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ps_tables.entries import BLOCK, Entries
from ps_tables.memory import RowNumbers

Read = Callable[[RowNumbers, Mapping[str, torch.Tensor]], object]


@dataclass(frozen=True)
class CopiedColumn:
    """What is copied of each entry beside its id and its version. dim: elements of it; None: [n] and not [n, dim]"""

    dim: int | None
    dtype: torch.dtype

    def empty(self, count: int) -> torch.Tensor:
        """Returns room for so many entries."""
        shape = (count,) if self.dim is None else (count, self.dim)
        return torch.empty(shape, dtype=self.dtype, device="cpu")


class EntriesCopy:
    """A copy of the entries that were used last after a version. The caller keeps them from being changed while it is
    made, and during each `take`.

    version: of the table now
    since:   the version before; 0: all entries
    read:    copies the columns of some numbers
    """

    def __init__(
        self, entries: Entries, version: int, since: int, columns: Mapping[str, CopiedColumn], read: Read
    ) -> None:
        self._entries, self._columns, self._read = entries, tuple(columns), read
        self._first, self._last = max(since + 1, entries.oldest), version
        self._next, self._end = 0, entries.end
        self.count = entries.count_within(self._first, version)
        self.tensors = {name: column.empty(self.count) for name, column in columns.items()}
        self.tensors |= {name: torch.empty(self.count, dtype=torch.int64, device="cpu") for name in ("ids", "last")}
        self.row_bytes = sum(tensor[:1].nbytes for tensor in self.tensors.values())
        self._filled = 0
        entries.before_change(self._keep)
        self._end_if_over()

    @property
    def is_over(self) -> bool:
        """Whether all entries are there."""
        return self._next >= self._end

    def take(self, most: int) -> None:
        """Copies the next entries, up to so many, of a block."""
        stop = min(self._end, self._next + BLOCK)
        numbers = self._entries.within(np.arange(self._next, stop), self._first, self._last)
        if len(numbers) > most:
            numbers = numbers[:most]
            stop = int(numbers[-1]) + 1
        self._copy(numbers)
        self._next = stop
        self._end_if_over()

    def end(self) -> None:
        """Ends it, whatever is missing: nothing is copied any more."""
        self._next = self._end
        self._end_if_over()

    def hand_over(self) -> dict[str, torch.Tensor]:
        """Returns what was copied, and keeps none of it."""
        tensors, self.tensors = self.tensors, {}
        return tensors

    def _end_if_over(self) -> None:
        if self.is_over:
            self._entries.no_longer(self._keep)

    def _keep(self, numbers: RowNumbers) -> None:
        ahead = numbers[(numbers >= self._next) & (numbers < self._end)]
        self._copy(self._entries.within(ahead, self._first, self._last))

    def _copy(self, numbers: RowNumbers) -> None:
        if not len(numbers):
            return
        here = slice(self._filled, self._filled + len(numbers))
        self._filled += len(numbers)
        self.tensors["ids"][here] = torch.from_numpy(self._entries.ids(numbers))
        self.tensors["last"][here] = torch.from_numpy(self._entries.versions(numbers))
        self._read(numbers, {name: self.tensors[name][here] for name in self._columns})


class TableCopy:
    """A copy of a table at one version: of all its rows, or of those that changed after an earlier version.

    since:   that version; None: all rows are there
    changed: how many rows there are
    """

    def __init__(
        self, rows: EntriesCopy, waiting: EntriesCopy | None, since: int | None, others: Mapping[str, torch.Tensor]
    ) -> None:
        """waiting: ids that are not admitted yet; others: what is complete already"""
        self._rows, self._waiting, self._others = rows, waiting, others
        self.since, self.changed = since, rows.count
        self.is_ended = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._rows.row_bytes

    @property
    def is_over(self) -> bool:
        """Whether all of it is there."""
        return self._rows.is_over and (self._waiting is None or self._waiting.is_over)

    def take(self, most: int) -> None:
        """Copies the next rows, up to so many. The caller keeps the table from being trained."""
        if not self._rows.is_over:
            self._rows.take(most)
        elif self._waiting is not None:
            self._waiting.take(BLOCK)

    def end(self) -> None:
        """Gives it up."""
        self.is_ended = True
        for copy in (self._rows, self._waiting):
            if copy is not None:
                copy.end()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what Table.snapshot does, in any order; of changes, see increments.py. Once, when it is over."""
        found = {**self._others, **self._rows.hand_over()}
        if self._waiting is not None:
            found |= {f"waiting.{name}": tensor for name, tensor in self._waiting.hand_over().items()}
        return found
