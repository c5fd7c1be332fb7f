"""Where the rows of a table lie: all in memory, at their numbers; or, with a file beside it, as cold.py says."""

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
# Writes some of the rows that are restored: which of them, to these places in memory.
Fill = Callable[[slice | npt.NDArray[np.int64], RowNumbers], None]


class Column(Protocol):
    """One array of a table's rows: the weights, or a state of the optimizer."""

    @property
    def dim(self) -> int:
        """Elements of a row."""

    def read(self, rows: RowNumbers, out: torch.Tensor) -> None:
        """Copies rows, by their numbers: see RowArray.read."""


class Places(ABC):
    """The places of rows. Rows have the numbers that Entries give them; what trains rows works on places in memory.

    columns: by name, what reads rows by their numbers
    """

    columns: Mapping[str, Column]

    @property
    @abstractmethod
    def limit(self) -> int:
        """How many rows there may be now."""

    @abstractmethod
    def of(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the places of distinct rows in memory. What lies elsewhere is fetched."""

    @abstractmethod
    def of_new(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the places in memory of distinct rows that come into being, with anything in them."""

    @abstractmethod
    def settle(self, rows: Entries, version: int) -> None:
        """Ends an update of this version: moves some rows, where that is due."""

    @abstractmethod
    def fill(self, numbers: RowNumbers, last: Versions, write: Fill, more: int = 0) -> None:
        """Makes many rows. Raises LimitExceeded if there is no room for all.

        last: the version that trained each
        more: how many come in calls after this one, which were not trained longer ago
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
        """Bytes of memory that knowing the places takes."""
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
        """How often a row was read from the file so far."""
        return 0


class InMemory(Places):
    """All rows are in memory, and the number of a row is its place."""

    def __init__(self, arrays: Mapping[str, RowArray], capacity: int) -> None:
        self.columns = self._arrays = arrays
        self._capacity = capacity
        self._end = 0  # no place from here on was ever written

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
        """As many as there ever were."""
        return self._end
