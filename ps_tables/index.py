"""Which row an id has: open addressing with linear probing, a whole batch of ids at a time.

Vectorised: each round of probing looks at one slot of every id that is not found yet. A slot keeps its key when the row
is removed (row 0), so that searches go on past it. Such slots are left behind when the index is next made anew.

The index is made anew, twice as large where that is needed, when it is three quarters full: not at once, but some slots
with each insertion, as Redis does with its dictionaries. Meanwhile an id is in the new slots or in the old ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_protocol.row_ids import Ids, mix
from ps_tables.memory import RowNumbers
from ps_tables.native import in_use

_FULL = 0.75  # of the slots have a key: beyond, searches take long
_NEARLY_FULL = 0.7  # have a row: the memory of the next slots is prepared
_MOVED = 2**16  # slots of the old index that one insertion moves at least: some milliseconds
_SMALLEST = 2**10


class _Slots:
    """Keys and rows, in a power of two of slots.

    keys: 0 where nothing ever was; the id 0 is kept elsewhere
    rows: the row's number and 1; 0: the key has no row
    used: slots with a key
    """

    def __init__(self, count: int, salt: int) -> None:
        self.keys = np.zeros(count, np.int64)  # untouched memory: it is there when it is written
        self.rows = np.zeros(count, np.int32)
        self.used = 0
        self._mask = np.uint64(count - 1)
        self._salt = np.int64(salt)

    def __len__(self) -> int:
        return len(self.keys)

    def touch(self, start: int, stop: int) -> None:
        """Writes to empty slots, so that their memory is there: the kernel clears it when it is first written."""
        self.keys[start:stop] = 0
        self.rows[start:stop] = 0

    def probe(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Returns the slot of each id, or the empty one where its search ends."""
        slots = (mix(ids ^ self._salt) & self._mask).astype(np.int64)
        keys = self.keys.take(slots)
        searching = np.flatnonzero((keys != ids) & (keys != 0))
        while len(searching):
            next_slots = (slots[searching] + 1) & int(self._mask)
            slots[searching] = next_slots
            keys = self.keys.take(next_slots)
            searching = searching[(keys != ids[searching]) & (keys != 0)]
        return slots

    def find(self, ids: Ids) -> RowNumbers:
        """Returns the row of each id, -1 where it has none."""
        loops = in_use.loops()
        if loops is not None:
            return loops.find(self.keys, self.rows, int(self._salt), ids)
        slots = self.probe(ids)
        rows = self.rows.take(slots).astype(np.int64) - 1
        rows[self.keys.take(slots) != ids] = -1
        return rows

    def insert(self, ids: Ids, rows: RowNumbers) -> None:
        """Gives distinct ids without a row one each. Which of two ids gets the slot that both want, may be either."""
        loops = in_use.loops()
        if loops is not None:
            self.used += loops.insert(self.keys, self.rows, int(self._salt), ids, rows)
            return
        slots = self.probe(ids)
        waiting = np.arange(len(ids))
        while len(waiting):
            at, new = slots[waiting], ids[waiting]
            free = self.keys.take(at) == 0
            self.keys[at] = np.where(free, new, self.keys.take(at))  # of several ids, the last one gets the slot
            won = self.keys.take(at) == new
            self.used += int(np.count_nonzero(won & free))
            self.rows[at[won]] = rows[waiting[won]] + 1
            waiting = waiting[~won]
            slots[waiting] = self.probe(ids[waiting])

    def entries(self, start: int, stop: int) -> tuple[Ids, RowNumbers, npt.NDArray[np.int64]]:
        """Returns the ids in some slots that have a row, their rows, and their slots."""
        slots = np.flatnonzero(self.rows[start:stop]) + start
        return self.keys.take(slots), self.rows.take(slots).astype(np.int64) - 1, slots


class Index:
    """The rows of ids. The row of an id is any number below 2**31 - 1 that the caller gives it.

    salt: what slots depend on besides ids, so that ids that share a slot cannot be chosen
    """

    def __init__(self, salt: int = 0) -> None:
        self._salt = salt
        self._slots = _Slots(_SMALLEST, salt)
        self._old: _Slots | None = None  # what is being moved
        self._moved = 0  # slots of the old ones that are done
        self._next: _Slots | None = None  # what the index will probably be made anew in
        self._touched = 0  # slots of the next ones whose memory is there
        self._zero = -1  # the row of id 0, whose key would look like an empty slot
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all slots counted."""
        every = (self._slots, self._old, self._next)
        return sum(slots.keys.nbytes + slots.rows.nbytes for slots in every if slots is not None)

    def find(self, ids: Ids) -> RowNumbers:
        """Returns the row of each id, -1 where it has none: [n] to [n]. Ids may repeat."""
        rows = self._slots.find(ids)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            if len(missing):
                rows[missing] = self._old.find(ids[missing])
        rows[ids == 0] = self._zero
        return rows

    def insert(self, ids: Ids, rows: RowNumbers) -> None:
        """Gives distinct ids that have none a row each: [n], [n]."""
        self._count += len(ids)
        zero = np.flatnonzero(ids == 0)
        if len(zero):
            self._zero = int(rows[zero[0]])
            ids, rows = np.delete(ids, zero), np.delete(rows, zero)
        self._make_room(len(ids))
        self._slots.insert(ids, rows)

    def remove(self, ids: Ids) -> None:
        """Takes their rows from distinct ids that have one."""
        self._count -= len(ids)
        if bool((ids == 0).any()):
            self._zero = -1
            ids = ids[ids != 0]
        for slots in (self._slots, self._old):
            if slots is not None and len(ids):
                at = slots.probe(ids)
                there = slots.keys.take(at) == ids
                slots.rows[at[there]] = 0

    def _make_room(self, more: int) -> None:
        """Sees to it that so many ids more fit, which are counted, and moves some of what is still in the old slots."""
        self._move(max(_MOVED, 8 * more))
        if self._slots.used + more <= _FULL * len(self._slots):
            self._prepare(max(_MOVED, 48 * more))
            return
        if self._old is not None:
            self._move(len(self._old))
        count = len(self._slots)
        while self._count > count / 2:  # half of them at most: so all is moved long before it is full
            count *= 2
        ready, self._next = self._next, None
        self._old, self._moved = self._slots, 0
        self._slots = ready if ready is not None and len(ready) == count else _Slots(count, self._salt)
        self._move(max(_MOVED, 8 * more))

    def _prepare(self, count: int) -> None:
        """Touches so many of the next slots, where these are soon full: all at once would take long."""
        if self._next is None:
            if self._old is not None or self._count <= _NEARLY_FULL * len(self._slots):
                return
            self._next, self._touched = _Slots(2 * len(self._slots), self._salt), 0
        self._next.touch(self._touched, self._touched + count)
        self._touched += count

    def _move(self, count: int) -> None:
        """Moves the entries of so many old slots."""
        if self._old is None:
            return
        stop = min(len(self._old), self._moved + count)
        ids, rows, slots = self._old.entries(self._moved, stop)
        self._slots.insert(ids, rows)
        self._old.rows[slots] = 0
        self._moved = stop
        if stop == len(self._old):
            self._old = None
