"""A hash index from ids to rows: open addressing with linear probing, for a whole batch of ids at a time.

It is vectorised: each round of probing looks at one slot of every id that is not found yet. A slot has no id, but a
mark, the upper half of the id's hash, and a row. If the mark is equal, the id is compared with the row's own. So a slot
takes 8 bytes. A search continues past the slot of a removed row, until another id gets this slot.

The index is rebuilt when it is three quarters full, in twice the size if needed: not at once, but some slots with each
insertion, as Redis does with its dictionaries. Meanwhile an id is in the new slots or in the old ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_protocol.row_ids import Ids, Mixed, mix
from ps_tables.native import in_use
from ps_tables.row_arrays import RowNumbers

_FULL = 0.75  # the largest fraction of slots in use: beyond it, searches take long
_NEARLY_FULL = 0.7  # the fraction of slots with a row from which on memory for the next, larger index is prepared
_MOVED = 2**16  # slots of the old index that one insertion moves at least: some milliseconds
_SMALLEST = 2**10
SLOT_BYTES = 8

# The parts of a slot. loops.c has them, too.
_ROW = np.uint64(2**32 - 1)  # the row's number and 1; 0: the slot has no row
_MARK = np.uint64(2**64 - 2**32)
_MARKED = np.uint64(2**33)  # in the mark of every id
_REMOVED = np.uint64(2**32)  # a slot whose row was removed: no id has this mark
_ALL = _ROW | _MARK
_EMPTY = np.uint64(0)


def most_slots(count: int) -> int:
    """Returns the most slots of an index with `count` ids, unless it is the smallest index."""
    return 1 << max(0, 2 * count - 1).bit_length()


class _Slots:
    """Marks and rows, in a power of two of slots.

    ids:    [rows], the id of each row
    values: [slots], a mark and a row each; 0: never used
    used:   the number of slots that are not 0
    """

    def __init__(self, count: int, salt: int, ids: Ids) -> None:
        self.values: Mixed = np.zeros(count, np.uint64)  # the kernel allocates the memory when it is first written
        self.used = 0
        self._mask = count - 1
        self._salt = np.int64(salt)
        self._ids = ids

    def __len__(self) -> int:
        return len(self.values)

    def touch(self, start: int, stop: int) -> None:
        """Writes to empty slots. The kernel clears a page when it is first written: this makes it do so now."""
        self.values[start:stop] = 0

    def find(self, ids: Ids) -> RowNumbers:
        """Returns the row of each id, -1 where it has none."""
        loops = in_use.loops()
        if loops is not None:
            return loops.find(self.values, int(self._salt), self._ids, ids)
        slots, marks = self._begin(ids)
        rows = self._rows(self._probe(slots, marks, _MARK))
        others = np.flatnonzero(self._are_others(rows, ids))
        while len(others):  # another id has the same mark: this happens in one of thousands of millions of searches
            at = (slots[others] + 1) & self._mask
            rows[others] = found = self._rows(self._probe(at, marks[others], _MARK))
            slots[others] = at
            others = others[self._are_others(found, ids[others])]
        return rows

    def _are_others(self, rows: RowNumbers, ids: Ids) -> npt.NDArray[np.bool_]:
        """Returns which of these rows are rows of other ids than these. A negative number is no row."""
        others: npt.NDArray[np.bool_] = (rows >= 0) & (self._ids.take(rows, mode="clip") != ids)
        return others

    def insert(self, ids: Ids, rows: RowNumbers) -> None:
        """Inserts distinct ids with a row each. If two ids want the same slot, either may get it."""
        loops = in_use.loops()
        if loops is not None:
            self.used += loops.insert(self.values, int(self._salt), ids, rows)
            return
        slots, values = self._begin_with(ids, rows)
        while len(values):
            before = self._probe(slots, np.broadcast_to(_EMPTY, len(slots)), _ROW)
            self.values[slots] = values  # if several ids want a slot, the last one gets it
            has_won = self.values.take(slots) == values
            self.used += int(np.count_nonzero(has_won & (before == _EMPTY)))
            slots, values = slots[~has_won], values[~has_won]

    def remove(self, ids: Ids, rows: RowNumbers) -> None:
        """Removes the entries of distinct ids, where there are any."""
        slots, values = self._begin_with(ids, rows)
        self.forget(slots[self._probe(slots, values, _ALL) == values])

    def entries(self, start: int, stop: int) -> tuple[RowNumbers, npt.NDArray[np.int64]]:
        """Returns the rows in some slots, and these slots."""
        slots = np.flatnonzero(self.values[start:stop] & _ROW) + start
        return self._rows(self.values.take(slots)), slots

    def forget(self, slots: npt.NDArray[np.int64]) -> None:
        """Marks slots as removed."""
        self.values[slots] = _REMOVED

    def _begin(self, ids: Ids) -> tuple[RowNumbers, Mixed]:
        """Returns the slot in which the search for each id begins, and its mark."""
        hashes = mix(ids ^ self._salt)
        return hashes.view(np.int64) & self._mask, (hashes | _MARKED) & _MARK

    def _begin_with(self, ids: Ids, rows: RowNumbers) -> tuple[RowNumbers, Mixed]:
        """Returns the slot in which the search for each id begins, and the value of a slot that has this id's mark and
        row.
        """
        slots, values = self._begin(ids)
        values |= rows.astype(np.uint64) + np.uint64(1)
        return slots, values

    def _probe(self, slots: RowNumbers, wanted: Mixed, part: np.uint64) -> Mixed:
        """Moves each slot on, to the first one whose value has the wanted bits in `part`, or to an empty one. Returns
        the values of these slots.
        """
        found: Mixed = self.values.take(slots)
        differs = (found & part) != wanted
        differs &= found != _EMPTY
        searching = np.flatnonzero(differs)
        while len(searching):
            slots[searching] = at = (slots[searching] + 1) & self._mask
            found[searching] = values = self.values.take(at)
            differs = (values & part) != wanted[searching]
            searching = searching[differs & (values != _EMPTY)]
        return found

    @staticmethod
    def _rows(values: Mixed) -> RowNumbers:
        return (values & _ROW).astype(np.int64) - 1


class Index:
    """A map from ids to rows. The caller chooses the row of an id: a number below 2**32 - 1 that no other id has.

    ids:  [rows], the id of each row. The caller writes an id there before it inserts it, and keeps it until it has
          removed it
    salt: is part of the hash, so that an attacker cannot choose ids that share a slot
    """

    def __init__(self, ids: Ids, salt: int = 0) -> None:
        self._ids = ids
        self._salt = salt
        self._slots = self._empty(_SMALLEST)
        self._old: _Slots | None = None  # the slots from which entries are being moved
        self._moved = 0  # slots of the old ones that are done
        self._next: _Slots | None = None  # slots for the next rebuild, which is probably near
        self._touched = 0  # how many slots of `_next` have memory
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all slots."""
        every = (self._slots, self._old, self._next)
        return sum(slots.values.nbytes for slots in every if slots is not None)

    def find(self, ids: Ids) -> RowNumbers:
        """Returns the row of each id, -1 where it has none: [n] to [n]. Ids may repeat."""
        rows = self._slots.find(ids)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            if len(missing):
                rows[missing] = self._old.find(ids[missing])
        return rows

    def insert(self, ids: Ids, rows: RowNumbers) -> None:
        """Inserts distinct ids that have no row, with a row each: [n], [n]."""
        self._count += len(ids)
        self._make_room(len(ids))
        self._slots.insert(ids, rows)

    def remove(self, ids: Ids, rows: RowNumbers) -> None:
        """Removes distinct ids, given with their rows: [n], [n]."""
        self._count -= len(ids)
        for slots in (self._slots, self._old):
            if slots is not None:
                slots.remove(ids, rows)

    def _empty(self, count: int) -> _Slots:
        return _Slots(count, self._salt, self._ids)

    def _make_room(self, more: int) -> None:
        """Makes room for `more` ids, which `_count` includes already. Moves some of the entries that are still in the
        old slots.
        """
        self._move(max(_MOVED, 8 * more))
        if self._slots.used + more <= _FULL * len(self._slots):
            self._prepare(max(_MOVED, 48 * more))
            return
        if self._old is not None:
            self._move(len(self._old))
        count = len(self._slots)
        while self._count > count / 2:  # at most half full: so all entries are moved long before the new slots are full
            count *= 2
        ready, self._next = self._next, None
        self._old, self._moved = self._slots, 0
        self._slots = ready if ready is not None and len(ready) == count else self._empty(count)
        self._move(max(_MOVED, 8 * more))

    def _prepare(self, count: int) -> None:
        """Touches the next `count` slots of the coming index if the present one is nearly full. To touch them all at
        once would take long.
        """
        if self._next is None:
            if self._old is not None or self._count <= _NEARLY_FULL * len(self._slots):
                return
            self._next, self._touched = self._empty(2 * len(self._slots)), 0
        self._next.touch(self._touched, self._touched + count)
        self._touched += count

    def _move(self, count: int) -> None:
        """Moves the entries of the next `count` old slots."""
        if self._old is None:
            return
        stop = min(len(self._old), self._moved + count)
        rows, slots = self._old.entries(self._moved, stop)
        self._slots.insert(self._ids.take(rows), rows)
        self._old.forget(slots)
        self._moved = stop
        if stop == len(self._old):
            self._old = None
