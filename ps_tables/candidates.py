"""Ids that are not admitted yet, with the count of each.

They expire as rows do: an id that has not occurred for `expire_after` updates is removed, and its count restarts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.row_ids import Ids, chance_order
from ps_tables.contributions import Counts
from ps_tables.copies import CopiedColumn, EntriesCopy
from ps_tables.entries import Entries
from ps_tables.removed import RemovedIds
from ps_tables.row_arrays import RowNumbers, reserved


class Candidates:
    """The ids of one table that are not admitted yet.

    admit_after: the number of occurrences that admits an id
    capacity: the most ids; beyond it, those that occurred longest ago are removed
    """

    def __init__(self, admit_after: int, capacity: int, salt: int = 0) -> None:
        self._admit_after = admit_after
        self._capacity = capacity
        self._counts: npt.NDArray[np.uint32] = reserved(capacity, np.uint32)
        self.entries = Entries(capacity, salt)
        # Ids that no longer wait: admitted or pushed out, but not those that expired
        self.removed = RemovedIds(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.entries.nbytes + self.entries.end * self._counts.itemsize + self.removed.nbytes

    def snapshot(self) -> dict[str, npt.NDArray[np.int64]]:
        """Returns all ids in no order, the count of each, and the version of its last occurrence; [n] each."""
        ids, numbers = self.entries.entries()
        counts = self._counts.take(numbers).astype(np.int64)
        return {"ids": ids, "counts": counts, "last": self.entries.versions(numbers)}

    def copy(self, version: int, since: int) -> EntriesCopy:
        """Returns a copy, made some ids at a time, of the ids that occurred after version `since`; 0: of all ids.

        version: the table's present version
        """
        return EntriesCopy(self.entries, version, since, {"counts": CopiedColumn(None, torch.int64)}, self._read)

    def restore(self, ids: Ids, counts: Counts, last: npt.NDArray[np.int64], version: int) -> None:
        """Adds ids, as `snapshot` returns them. If there is no room for all, those that occurred last are kept.

        version: that of the table
        """
        newest = np.lexsort((chance_order(ids), -last))[: self._capacity - len(self.entries)]
        self._counts[self.entries.add(ids[newest], last[newest])] = counts[newest]
        self.removed = RemovedIds(self._capacity, version)

    def _read(self, numbers: RowNumbers, out: Mapping[str, torch.Tensor]) -> None:
        out["counts"].copy_(torch.from_numpy(self._counts.take(numbers).astype(np.int64)))

    def admit(self, ids: Ids, counts: Counts, version: int) -> npt.NDArray[np.bool_]:
        """Counts occurrences of distinct ids without a row: [n], [n]. Returns which of them become rows now: [n]."""
        numbers = self.entries.find(ids)
        known = numbers >= 0
        total = counts + np.where(known, self._counts.take(numbers, mode="clip"), 0)
        admitted = total >= self._admit_after
        again = known & ~admitted
        self.entries.use(numbers[again], version)  # before the counts change: a copy under way gets the old counts
        self._counts[numbers[again]] = total[again]
        waited = known & admitted
        self.entries.remove(ids[waited], numbers[waited])
        self.removed.add(version, ids[waited], len(self.entries))
        new = np.flatnonzero(~known & ~admitted)
        gone = self.entries.make_room(len(new), version)
        self.removed.add(version, gone.removed, len(self.entries))
        room = self._capacity - len(self.entries)
        if len(new) > room:
            new = new[np.argsort(chance_order(ids[new]), kind="stable")[:room]]
        self._counts[self.entries.add(ids[new], version)] = total[new]
        return admitted

    def forget(self, ids: Ids, version: int) -> None:
        """Removes distinct ids that have become rows in another way, such as by an assignment. Others are ignored."""
        numbers = self.entries.find(ids)
        waited = numbers >= 0
        self.entries.remove(ids[waited], numbers[waited])
        self.removed.add(version, ids[waited], len(self.entries))
