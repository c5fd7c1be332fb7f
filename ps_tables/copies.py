"""A copy of a table at one version, made some rows at a time. In between, the table may be trained.

It is copy-on-write: an entry that is about to change is copied first (`Entries.before_change`). Every entry is copied
once, with its value at the beginning: by the walk over the numbers, or before its first change. The order of entries
has no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ps_tables.entries import BLOCK, Entries
from ps_tables.row_arrays import RowNumbers

Read = Callable[[RowNumbers, Mapping[str, torch.Tensor]], object]


@dataclass(frozen=True)
class CopiedColumn:
    """A column that is copied with each entry's id and version. dim: elements of an entry; None: [n] and not [n,
    dim]"""

    dim: int | None
    dtype: torch.dtype

    def empty(self, count: int) -> torch.Tensor:
        """Allocates the column for `count` entries."""
        shape = (count,) if self.dim is None else (count, self.dim)
        return torch.empty(shape, dtype=self.dtype, device="cpu")


class EntriesCopy:
    """A copy of the entries that were used after a version. The caller must not change entries during the constructor
    and during each `take`.

    version: the table's present version
    since:   the copy has entries that were used after this version; 0: all entries
    read:    copies the columns of entries, given their numbers
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
        """Whether all entries are copied."""
        return self._next >= self._end

    def take(self, most: int) -> None:
        """Copies the next entries of a block, at most `most`."""
        stop = min(self._end, self._next + BLOCK)
        numbers = self._entries.within(np.arange(self._next, stop), self._first, self._last)
        if len(numbers) > most:
            numbers = numbers[:most]
            stop = int(numbers[-1]) + 1
        self._copy(numbers)
        self._next = stop
        self._end_if_over()

    def end(self) -> None:
        """Ends the copy, complete or not."""
        self._next = self._end
        self._end_if_over()

    def hand_over(self) -> dict[str, torch.Tensor]:
        """Returns the copied entries, and drops its reference to them."""
        tensors, self.tensors = self.tensors, {}
        return tensors

    def _end_if_over(self) -> None:
        if self.is_over:
            self._entries.no_longer(self._keep)

    def _keep(self, numbers: RowNumbers) -> None:
        """Copies entries that are about to change, if the walk has not come to their numbers yet."""
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

    since:   the earlier version; None if the copy has all rows
    changed: the number of rows in the copy
    """

    def __init__(
        self, rows: EntriesCopy, waiting: EntriesCopy | None, since: int | None, others: Mapping[str, torch.Tensor]
    ) -> None:
        """waiting: the copy of ids that are not admitted yet
        others:  tensors that are complete already
        """
        self._rows, self._waiting, self._others = rows, waiting, others
        self.since, self.changed = since, rows.count
        self.is_ended = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._rows.row_bytes

    @property
    def is_over(self) -> bool:
        """Whether the copy is complete."""
        return self._rows.is_over and (self._waiting is None or self._waiting.is_over)

    def take(self, most: int) -> None:
        """Copies the next rows, at most `most`. The caller must not train the table meanwhile."""
        if not self._rows.is_over:
            self._rows.take(most)
        elif self._waiting is not None:
            self._waiting.take(BLOCK)

    def end(self) -> None:
        """Abandons the copy."""
        self.is_ended = True
        for copy in (self._rows, self._waiting):
            if copy is not None:
                copy.end()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of Table.snapshot, with rows in any order; for changes only, see increments.py.

        Call it once, when the copy is over.
        """
        found = {**self._others, **self._rows.hand_over()}
        if self._waiting is not None:
            found |= {f"waiting.{name}": tensor for name, tensor in self._waiting.hand_over().items()}
        return found
