"""Keeps a table that does not fit into memory: the rows trained longest ago are in a file, the others in memory.

    trained  a row that is trained moves from the file to memory
    moved    when memory is nearly full, the rows trained longest ago move to the file, some with each update
    read     a row that is only read does not move

No row changes while it is in the file. Its record there has the weights and the optimizer's state. Moving a row changes
neither its bits nor the rows that expire or make room.

The number of rows in memory is a target, which an update may exceed while it runs. If the disk is full, rows stay in
memory, and the capacity of the table becomes that of memory and file together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import LimitExceeded
from ps_tables.entries import BLOCK, Entries
from ps_tables.numbers import Numbers
from ps_tables.positions import Fill, RowPositions, Versions
from ps_tables.row_arrays import RowArray, RowNumbers, reserved

Records = npt.NDArray[np.float32]  # [n, elements of a record]

POSITION_BYTES = 4  # memory for the position of a row

_STEPS = 16  # steps of the walk with one update: some milliseconds
_LEAST_MOVED = 1024  # rows that may move with one update, besides as many as have come
_COPIED = 2**14  # rows copied at a time
_SAMPLE = 2**14  # rows whose versions estimate the ages of all


class ColdFile(Protocol):
    """A file of records, numbered from 0."""

    @property
    def room(self) -> int:
        """The number of records that fit. It decreases when the disk is full."""

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""

    def read(self, positions: RowNumbers) -> Records:
        """Returns records that were written, by their numbers."""

    def write(self, positions: RowNumbers, records: Records) -> bool:
        """Writes records in ascending order of their numbers. Returns False if the disk refuses; their content is then
        undefined."""


class _Column:
    """One array of rows, which are read by their numbers, from memory or from the file."""

    def __init__(self, positions: WithFile, name: str, dim: int) -> None:
        self._positions, self._name, self.dim = positions, name, dim

    def read(self, rows: RowNumbers, out: torch.Tensor) -> None:
        """Copies rows: see RowArray.read."""
        self._positions.read(rows, {self._name: out})


class WithFile(RowPositions):
    """Maps the number of each row to its position, in memory or in a file. Most rows may be in the file.

    arrays:    by name, memory for the rows
    capacity:  the most rows, in memory and in the file together
    in_memory: the most rows in memory
    """

    def __init__(self, arrays: Mapping[str, RowArray], capacity: int, in_memory: int, file: ColdFile) -> None:
        self._arrays, self._capacity, self._in_memory, self._file = arrays, capacity, in_memory, file
        self.columns = {name: _Column(self, name, array.dim) for name, array in arrays.items()}
        # By number, the position of a row. 0: it has none; above 0: the position in memory, plus 1; below 0: -1 minus
        # the position in the file.
        self._positions: npt.NDArray[np.int32] = reserved(capacity, np.int32)
        self._memory, self._cold = Numbers(), Numbers()
        self._end = 0  # numbers from this one on never had a position
        self._moves = False  # rows are being moved to the file, until enough memory is free
        self._next = 0  # the number at which the walk goes on
        self._before = 0  # the walk moves rows that were last trained before this version
        self._came = 0  # rows that came into memory since the last update ended
        self._read = 0

    # -- training ----------------------------------------------------------------------------------------------------

    def of(self, numbers: RowNumbers) -> RowNumbers:
        """Returns the positions of rows in memory. Rows that are in the file are first read into memory."""
        positions = self._positions.take(numbers).astype(np.int64)
        cold = np.flatnonzero(positions < 0)
        for first in range(0, len(cold), _COPIED):
            some = cold[first : first + _COPIED]
            left = -1 - positions[some]
            records = self._file.read(left)
            positions[some] = self._taken(numbers[some]) + 1
            for name, values in self._cut(records).items():
                self._arrays[name].write(positions[some] - 1, values)
            self._cold.give_back(left)
        self._read += len(cold)
        return positions - 1

    def of_new(self, numbers: RowNumbers) -> RowNumbers:
        """Returns positions in memory for new rows. A number that still has the position of an expired row keeps it."""
        positions = self._positions.take(numbers).astype(np.int64)
        self._cold.give_back(-1 - positions[positions < 0])
        missing = np.flatnonzero(positions <= 0)
        positions[missing] = self._taken(numbers[missing]) + 1
        return positions - 1

    def fill(self, numbers: RowNumbers, last: Versions, write: Fill, more: int = 0) -> None:
        """Writes rows by calls of `write`, some at a time. The rows trained longest ago come first, and move to the
        file.

        last: the version that trained each row
        more: how many rows later calls will write
        """
        order = np.argsort(last, kind="stable")
        # Rows move until an eighth of memory is free, as far as the file has room. A full table fills both.
        cold = self._memory.used + len(order) + more - (self._in_memory - self._in_memory // 8)
        for first in range(0, len(order), _COPIED):
            which = order[first : first + _COPIED]
            write(which, self.of_new(numbers[which]))
            self._move(numbers[which[: max(0, cold - first)]])
            if self._memory.used > self._in_memory:
                raise LimitExceeded(
                    f"{len(numbers)} rows do not fit: memory for tables holds {self._in_memory} of them, and the disk "
                    "of cold rows takes no more"
                )
        self._came = 0

    # -- moving rows -------------------------------------------------------------------------------------------------

    def settle(self, rows: Entries, version: int) -> None:
        """Moves some of the rows trained longest ago to the file if memory is nearly full."""
        left, self._came = _LEAST_MOVED + self._came + self._came // 4, 0
        for _ in range(_STEPS):
            spare = self._in_memory - self._memory.used
            self._moves = spare < self._in_memory // (8 if self._moves else 16)
            if not self._moves or left <= 0:
                return
            left -= self._walk(rows, version, left)

    def _walk(self, rows: Entries, version: int, most: int) -> int:
        """Visits the next block of numbers: releases the positions of rows that were removed, and moves rows to the
        file. Returns how many rows it moved.
        """
        if self._next >= self._end:
            self._next, self._before = 0, min(version, self._age(rows))
        block = slice(self._next, min(self._end, self._next + BLOCK))
        last, positions = rows.last(block), self._positions[block]
        gone = np.flatnonzero(rows.gone(block) & (positions != 0))
        self._give_back(positions[gone])
        positions[gone] = 0
        old = np.flatnonzero((positions > 0) & (last < self._before))
        self._next = block.start + int(old[most]) if len(old) > most else block.stop
        return self._move(block.start + old[:most])

    def _age(self, rows: Entries) -> int:
        """Returns a version before which about an eighth of the rows in memory were last trained."""
        sample = np.arange(0, self._end, max(1, self._end // _SAMPLE))
        last = rows.last(sample)[self._positions.take(sample) > 0]
        last = last[last > 0]
        eighth = len(last) // 8
        return int(np.partition(last, eighth)[eighth]) + 1 if len(last) else 0

    def _move(self, numbers: RowNumbers) -> int:
        """Moves rows from memory to the file. Returns the number moved, which is smaller if the file is full."""
        numbers = numbers[: max(0, self._file.room - self._cold.used)]
        if not len(numbers):
            return 0
        positions = self._positions.take(numbers)
        records = np.empty((len(numbers), sum(array.dim for array in self._arrays.values())), np.float32)
        first = 0
        for array in self._arrays.values():
            values = torch.empty(len(numbers), array.dim, dtype=torch.float32, device="cpu")
            array.read(positions.astype(np.int64) - 1, values)
            records[:, first : first + array.dim] = values.numpy()
            first += array.dim
        to = self._cold.take(len(numbers))
        if not self._file.write(to, records):
            # Only positions that still fit in the file are given back: the others would be the next ones to be taken.
            self._cold.give_back(to[to < self._file.room])
            self._cold.drop(to[to >= self._file.room])
            return self._move(numbers)  # as many as fit now
        self._give_back(positions)
        self._positions[numbers] = -1 - to
        return len(numbers)

    def _taken(self, numbers: RowNumbers) -> RowNumbers:
        """Allocates a position in memory for each of these rows. Returns the positions."""
        taken = self._memory.take(len(numbers))
        self._positions[numbers] = taken + 1
        self._end = max(self._end, int(np.max(numbers, initial=-1)) + 1)
        self._came += len(numbers)
        return taken

    def _give_back(self, positions: npt.NDArray[np.int32]) -> None:
        wide = positions.astype(np.int64)
        self._memory.give_back(wide[wide > 0] - 1)
        self._cold.give_back(-1 - wide[wide < 0])

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, numbers: RowNumbers, out: Mapping[str, torch.Tensor]) -> None:
        """Copies rows out of several columns: first those in memory, then those in the file, in its order."""
        positions = self._positions.take(numbers, mode="clip").astype(np.int64)
        for name, tensor in out.items():
            self._arrays[name].read(positions - 1, tensor)  # rows in the file get any value until they are read below
        cold = np.flatnonzero((positions < 0) & (numbers >= 0))
        cold = cold[np.argsort(-positions[cold])]
        for first in range(0, len(cold), _COPIED):
            some = cold[first : first + _COPIED]
            columns = self._cut(self._file.read(-1 - positions[some]))
            for name, tensor in out.items():
                tensor.numpy().reshape(len(numbers), -1)[some] = columns[name].numpy()
        self._read += len(cold)

    def _cut(self, records: Records) -> dict[str, torch.Tensor]:
        """Returns the columns of records, contiguous."""
        columns: dict[str, torch.Tensor] = {}
        first = 0
        for name, array in self._arrays.items():
            columns[name] = torch.from_numpy(np.ascontiguousarray(records[:, first : first + array.dim]))
            first += array.dim
        return columns

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """The capacity of the table, which decreases when the disk is full."""
        return min(self._capacity, self._in_memory + max(self._file.room, self._cold.used))

    @property
    def memory_rows(self) -> int:
        """The number of rows whose memory is in use."""
        return self._memory.end

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map from numbers to positions takes."""
        return self._end * self._positions.itemsize

    @property
    def file_rows(self) -> int:
        """The number of rows in the file, including some that were removed."""
        return self._cold.used

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.nbytes

    @property
    def read_from_file(self) -> int:
        """The number of rows read from the file so far."""
        return self._read
