"""An allocator of numbers. The numbers that were given back last are allocated first."""

from __future__ import annotations

import numpy as np

from ps_tables.row_arrays import RowNumbers


class Numbers:
    """A pool of numbers from 0. The caller does not take more numbers than its arrays have.

    end:  numbers from this one on were never taken
    used: how many numbers are taken now
    """

    def __init__(self) -> None:
        self.end = self.used = 0
        self._free: list[RowNumbers] = []  # numbers are taken from the last array first

    def take(self, count: int) -> RowNumbers:
        """Takes `count` free numbers; returns them in ascending order."""
        self.used += count
        taken: list[RowNumbers] = []
        while count and self._free:
            free = self._free.pop()
            if len(free) > count:
                self._free.append(free[:-count])
                free = free[len(free) - count :]
            taken.append(free)
            count -= len(free)
        taken.append(np.arange(self.end, self.end + count))
        self.end += count
        return np.sort(np.concatenate(taken))

    def give_back(self, numbers: RowNumbers) -> None:
        """Returns taken numbers to the pool."""
        if len(numbers):
            self.used -= len(numbers)
            self._free.append(numbers)

    def drop(self, numbers: RowNumbers) -> None:
        """Ends the use of numbers for good: they are never taken again."""
        self.used -= len(numbers)
