"""Ids that are not rows yet: how often each has occurred.

They expire as rows do: an id that has not occurred for `expire_after` updates is forgotten, and begins anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_protocol.row_ids import Ids, mix
from ps_tables.contributions import Counts
from ps_tables.entries import Entries
from ps_tables.memory import reserved


class Candidates:
    """The ids of one table that wait to become rows.

    admit_after: how often an id has to occur
    capacity:    the most that may wait; beyond, those that occurred longest ago are forgotten
    """

    def __init__(self, admit_after: int, capacity: int, salt: int = 0) -> None:
        self._admit_after = admit_after
        self._capacity = capacity
        self._counts: npt.NDArray[np.uint32] = reserved(capacity, np.uint32)
        self.entries = Entries(capacity, salt)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.entries.nbytes + self.entries.end * self._counts.itemsize

    def snapshot(self) -> dict[str, npt.NDArray[np.int64]]:
        """Returns all of it: ids, in no order, how often each has occurred, and with which version last; [n] each."""
        ids, numbers = self.entries.entries()
        counts = self._counts.take(numbers).astype(np.int64)
        return {"ids": ids, "counts": counts, "last": self.entries.versions(numbers)}

    def restore(self, ids: Ids, counts: Counts, last: npt.NDArray[np.int64]) -> None:
        """Takes the place of an empty one; see `snapshot`."""
        self._counts[self.entries.add(ids, last)] = counts

    def admit(self, ids: Ids, counts: Counts, version: int) -> npt.NDArray[np.bool_]:
        """Counts occurrences of distinct ids that are no rows; returns which become rows now: [n], [n] to [n]."""
        numbers = self.entries.find(ids)
        known = numbers >= 0
        total = counts + np.where(known, self._counts.take(numbers, mode="clip"), 0)
        admitted = total >= self._admit_after
        again = known & ~admitted
        self._counts[numbers[again]] = total[again]
        self.entries.use(numbers[again], version)
        self.entries.remove(ids[known & admitted], numbers[known & admitted])
        new = np.flatnonzero(~known & ~admitted)
        self.entries.make_room(len(new), version)
        room = self._capacity - len(self.entries)
        if len(new) > room:
            new = new[np.argsort(mix(ids[new]), kind="stable")[:room]]
        self._counts[self.entries.add(ids[new], version)] = total[new]
        return admitted
