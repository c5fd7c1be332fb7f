"""Maps the numbers of a table's rows to their positions: in memory, where the position is the number; or partly in a
file, see cold.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ps_tables.entries import Entries
from ps_tables.row_arrays import RowArray, RowNumbers

Versions = npt.NDArray[np.int64]
# Writes some of the rows that are restored, given their indices, to these positions in memory.
Fill = Callable[[slice | npt.NDArray[np.int64], RowNumbers], None]


class Column(Protocol):
    """One array of a table's rows: the weights, or a state of the optimizer."""

    @property
    def dim(self) -> int:
        """Elements of a row."""

    def read(self, rows: RowNumbers, out: torch.Tensor) -> None:
        """Copies rows, by their numbers: see RowArray.read."""


class RowPositions(ABC):
    """Maps the numbers of rows, which Entries assigns, to positions in memory. Optimizers work on rows by their
    positions.

    columns: by name, objects that read rows by their numbers
    """

    columns: Mapping[str, Column]

    @property
    @abstractmethod
    def limit(self) -> int:
        """The most rows that fit now."""

    @abstractmethod
    def of(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the positions of distinct rows in memory. Rows in a file are first read into memory."""

    @abstractmethod
    def of_new(self, numbers: RowNumbers) -> RowNumbers:
        """Returns positions in memory for distinct new rows. Their content is undefined."""

    @abstractmethod
    def settle(self, rows: Entries, version: int) -> None:
        """Moves some rows to the file if memory is nearly full. A table calls this at the end of an update.

        version: the version of the update
        """

    @abstractmethod
    def fill(self, numbers: RowNumbers, last: Versions, write: Fill, more: int = 0) -> None:
        """Creates many rows, by calls of `write`. Raises LimitExceeded if there is no room for all.

        last: the version that trained each row
        more: how many rows later calls will add, which were not trained longer ago
        """

    @abstractmethod
    def read(self, numbers: RowNumbers, out: Mapping[str, torch.Tensor]) -> None:
        """Copies rows, by their numbers, out of several columns: see RowArray.read."""

    @property
    @abstractmethod
    def memory_rows(self) -> int:
        """How many rows' memory is in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the map itself."""
        return 0

    @property
    def file_rows(self) -> int:
        """How many rows are in a file."""
        return 0

    @property
    def file_bytes(self) -> int:
        """Bytes of that file."""
        return 0

    @property
    def read_from_file(self) -> int:
        """The number of rows read from the file so far."""
        return 0


class InMemory(RowPositions):
    """All rows are in memory, and the position of a row is its number."""

    def __init__(self, arrays: Mapping[str, RowArray], capacity: int) -> None:
        self.columns = self._arrays = arrays
        self._capacity = capacity
        self._end = 0  # positions from this one on were never written

    @property
    def limit(self) -> int:
        """How many rows there may be."""
        return self._capacity

    def of(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the numbers."""
        return numbers

    def of_new(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the numbers."""
        self._end = max(self._end, int(np.max(numbers, initial=-1)) + 1)
        return numbers

    def settle(self, rows: Entries, version: int) -> None:
        """Moves no row."""

    def fill(self, numbers: RowNumbers, last: Versions, write: Fill, more: int = 0) -> None:
        """Writes all rows at once."""
        write(slice(None), self.of_new(numbers))

    def read(self, numbers: RowNumbers, out: Mapping[str, torch.Tensor]) -> None:
        """Copies rows out of several columns."""
        for name, tensor in out.items():
            self._arrays[name].read(numbers, tensor)

    @property
    def memory_rows(self) -> int:
        """The most rows that there have been."""
        return self._end
