"""Numbered entries of ids, each with the version that last used it: the rows of a table, or the ids that wait for
admission.

Entries expire by a threshold: an entry whose last use is before this version has expired. Raising the threshold expires
them all at once. Their numbers and their slots in the index are released later, some at a time.

An entry keeps its number as long as it exists. So a walk over the numbers, some at a time, meets every entry that stays
meanwhile, even if the index is rebuilt. A walk that needs the values of its beginning gets a callback before each
change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_protocol.row_ids import Ids, chance_order
from ps_tables.index import Index
from ps_tables.row_arrays import RowNumbers, reserved

BLOCK = 2**16  # numbers looked at in one step of a walk: some tens of microseconds

_HIGHEST = 2**32 - 1  # the highest version, minus the base, that is stored for an entry

Observer = Callable[[RowNumbers], None]


class Gone(NamedTuple):
    """Ids whose entries are gone: those that expired by the threshold, and those that were removed one by one."""

    expired: Ids
    removed: Ids


class Entries:
    """Entries with numbers below `capacity`. Versions begin with 1, and never decrease.

    salt: see Index
    limit: the most entries, up to the capacity; `make_room` enforces it
    """

    def __init__(self, capacity: int, salt: int = 0) -> None:
        self._capacity = self.limit = capacity
        self._end = 0  # the lowest number that was never in use
        self._free = np.empty(0, np.int64)
        # By number, the version minus the base; 0: the number is free.
        self._used: npt.NDArray[np.uint32] = reserved(capacity, np.uint32)
        self._ids: Ids = reserved(capacity, np.int64)  # by number, the id of the entry
        self._index = Index(self._ids, salt)
        self._swept = 0  # the next number that `sweep` looks at
        self._base = 0
        self._threshold = 1  # minus the base: entries whose last use is before it have expired
        self._live = 0
        self._observer: Observer | None = None  # called with entries that are about to change
        self.exact_since = 0  # versions from this one on are as they were; see `_rebase`

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of the index, of versions, and of ids."""
        return self._index.nbytes + self._end * (self._used.itemsize + self._ids.itemsize) + self._free.nbytes

    @property
    def end(self) -> int:
        """How many numbers have ever been in use."""
        return self._end

    def find(self, ids: Ids) -> RowNumbers:
        """Returns the number of each id's entry, -1 where it has none: [n] to [n]. Ids may repeat."""
        numbers = self._index.find(ids)
        if self._live < len(self._index):  # some entries have expired, and are still in the index
            numbers[self._used.take(numbers, mode="clip") < self._threshold] = -1
        return numbers

    def add(self, ids: Ids, version: int | npt.NDArray[np.int64]) -> RowNumbers:
        """Creates entries for distinct new ids. Returns their numbers. The caller has made room.

        version: the version that uses them; or for each the version of its last use
        """
        numbers = self._index.find(ids)  # an expired entry is used again
        missing = np.flatnonzero(numbers < 0)
        if len(missing) > self._capacity - self._end + len(self._free):
            self.sweep(everything=True)
            numbers = self._index.find(ids)
            missing = np.flatnonzero(numbers < 0)
        if len(missing):
            numbers[missing] = new = self._take(len(missing))
            self._ids[new] = ids[missing]
            self._index.insert(ids[missing], new)
        self._live += len(ids)
        self.use(numbers, version)
        return numbers

    def use(self, numbers: RowNumbers, version: int | npt.NDArray[np.int64]) -> None:
        """Records the use of entries by a version, or by one version each."""
        highest = (version if isinstance(version, int) else int(np.max(version, initial=0))) - self._base
        if highest > _HIGHEST:
            self._rebase(highest - _HIGHEST // 2)
        if self._observer is not None:
            self._observer(numbers)
        if isinstance(version, int):
            self._used[numbers] = max(version - self._base, self._threshold)
        else:
            self._used[numbers] = np.maximum(version - np.int64(self._base), self._threshold)

    def remove(self, ids: Ids, numbers: RowNumbers) -> None:
        """Removes distinct entries."""
        self._live -= len(ids)
        self._give_back(ids, numbers)

    def expire(self, before: int) -> Ids:
        """Expires the entries whose last use is before a version. Returns their ids."""
        threshold = before - self._base
        if threshold <= self._threshold:
            return np.empty(0, np.int64)
        used, ends = self._used[: self._end], self._threshold
        self._threshold = threshold
        expired: Ids = self._ids.take(np.flatnonzero((used >= ends) & (used < threshold)))
        self._live -= len(expired)
        return expired

    def make_room(self, more: int, version: int) -> Gone:
        """Removes the entries used longest ago if `more` new ones do not fit: the excess, or a sixteenth of the limit
        if that is more. Entries that were used by `version` stay.

        Within the oldest version of which only some entries are removed, `chance_order` selects the ids. Removing whole
        versions would remove all of a table that one update has filled.
        """
        nothing: Ids = np.empty(0, np.int64)
        missing = more - (self.limit - self._live)
        if missing <= 0 or not self._live:
            return Gone(nothing, nothing)
        used = self._used[: self._end]
        live = used[used >= self._threshold]
        going = min(self._live, max(missing, self.limit // 16))
        # Minus the base: the newest version of which entries must go. All entries of older versions go.
        oldest = int(np.partition(live, going - 1)[going - 1])
        expired = self.expire(min(version, oldest + self._base))
        if oldest + self._base >= version:
            return Gone(expired, nothing)
        numbers = np.flatnonzero(used == oldest)
        ids, rest = self._ids.take(numbers), going - len(expired)
        if rest == len(ids):
            return Gone(np.concatenate([expired, self.expire(oldest + self._base + 1)]), nothing)
        chosen = np.argpartition(chance_order(ids), rest - 1)[:rest]
        self.remove(ids[chosen], numbers[chosen])
        return Gone(expired, ids[chosen])

    def sweep(self, everything: bool = False) -> None:
        """Releases the memory of some expired entries. everything: of all of them"""
        if self._live == len(self._index):
            return
        first = 0 if everything or self._swept >= self._end else self._swept
        self._swept = self._end if everything else min(self._end, first + BLOCK)
        used = self._used[first : self._swept]
        numbers = first + np.flatnonzero((used < self._threshold) & (used > 0))
        self._give_back(self._ids.take(numbers), numbers)

    def entries(self) -> tuple[Ids, RowNumbers]:
        """Returns all ids with an entry, in no order, and their numbers."""
        return self.used_since(0, 0, self._end)

    def used_since(self, version: int, first: int, count: int) -> tuple[Ids, RowNumbers]:
        """Returns the ids and numbers of the entries that were last used after a version.

        first, count: only entries with numbers from `first` to `first + count`, exclusive
        """
        used = self._used[first : min(self._end, first + count)]
        numbers = first + np.flatnonzero(used >= max(self._threshold, version + 1 - self._base))
        return self._ids.take(numbers), numbers

    def gone(self, numbers: slice) -> npt.NDArray[np.bool_]:
        """Returns which of these numbers are free: they have no entry, or an expired one. While a copy is under way,
        expired entries are not free, because the copy may still need them.
        """
        used = self._used[: self._end][numbers]
        without: npt.NDArray[np.bool_] = used == 0 if self._observer is not None else used < self._threshold
        return without

    @property
    def oldest(self) -> int:
        """The threshold: entries whose last use is before this version have expired."""
        return self._threshold + self._base

    def within(self, numbers: RowNumbers, first: int, last: int) -> RowNumbers:
        """Returns the numbers whose entry was last used by a version from `first` to `last`, also if expired."""
        return numbers[_between(self._used.take(numbers), first - self._base, last - self._base)]

    def count_within(self, first: int, last: int) -> int:
        """Returns how many numbers were last used by a version from `first` to `last`."""
        used = self._used[: self._end]
        return int(np.count_nonzero(_between(used, first - self._base, last - self._base)))

    def before_change(self, observer: Observer) -> None:
        """Sets the function that is called with the numbers of entries before these change or are released."""
        self._observer = observer

    def no_longer(self, observer: Observer) -> None:
        """Removes a function of `before_change`, unless another one has replaced it."""
        if self._observer == observer:
            self._observer = None

    def ids(self, numbers: RowNumbers) -> Ids:
        """Returns the id of each number that is an entry's."""
        return self._ids.take(numbers)

    def versions(self, numbers: RowNumbers) -> npt.NDArray[np.int64]:
        """Returns the version that used each entry last."""
        return self._used.take(numbers).astype(np.int64) + self._base

    def last(self, numbers: RowNumbers | slice) -> npt.NDArray[np.int64]:
        """Returns the version that used each number's entry last, 0 where there is none."""
        used = self._used[: self._end][numbers]
        return np.where(used >= self._threshold, used.astype(np.int64) + self._base, 0)

    def _take(self, count: int) -> RowNumbers:
        again, self._free = np.split(self._free, [min(count, len(self._free))])
        first = self._end
        self._end += count - len(again)
        return np.concatenate([again, np.arange(first, self._end)])

    def _give_back(self, ids: Ids, numbers: RowNumbers) -> None:
        if len(ids):
            if self._observer is not None:
                self._observer(numbers)
            self._index.remove(ids, numbers)
            self._used[numbers] = 0
            self._free = np.concatenate([self._free, numbers])

    def _rebase(self, shift: int) -> None:
        """Moves the base of the stored versions forward by `shift`, so that they fit into 32 bits. Versions before the
        new base become the base.
        """
        if self._observer is not None:
            self._observer(np.arange(self._end))
        self.exact_since = self._base + shift + _HIGHEST // 2
        used = self._used[: self._end]
        free, expired = used == 0, used < self._threshold
        np.copyto(used, np.maximum(used.astype(np.int64), shift + 2) - shift, casting="unsafe")
        used[expired] = 1  # below each threshold: they stay expired until `sweep` releases them
        used[free] = 0
        self._threshold = max(2, self._threshold - shift)
        self._base += shift


def _between(used: npt.NDArray[np.uint32], first: int, last: int) -> npt.NDArray[np.bool_]:
    """Returns the numbers whose last use is by a version from `first` to `last`, both relative to the base. A free
    number is never among them.
    """
    between: npt.NDArray[np.bool_] = (used >= max(1, first)) & (used <= max(0, last))
    return between
