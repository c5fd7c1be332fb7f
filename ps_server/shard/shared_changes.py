"""The differences between versions of a bucket, for readers that have an older one: computed once for all of them.

A reader may have a version of which no copy is left. If earlier changes lead from it to a copy that exists, undoing
them one after the other restores the elements of that version.

The thread that sends computes a change, never one that trains. Changes take at most as much memory as the bucket. If a
change was no smaller than the bucket, none is computed for the next SKIPPED versions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from ps_protocol.changes import BucketDelta, Bytes, apply_change, encode_change
from ps_protocol.framing import Buffer
from ps_protocol.layout import DATA_TYPES

SKIPPED = 8  # after a change that was no smaller than the bucket, so many versions are sent whole
MOST_KEPT = 16  # changes of a bucket
WORKING_COPIES = 4  # the memory for computing a change, in sizes of the bucket


class BucketCopy(Protocol):
    """A copy of a bucket at one version; see editions.CopiedBucket."""

    @property
    def version(self) -> int:
        """The number of updates in the copy."""

    @property
    def payload(self) -> Buffer:
        """The elements of the copy, encoded."""


class BucketChanges:
    """The changes of one bucket in one element type. Thread-safe.

    has_room: returns whether there is memory for a number of bytes
    """

    def __init__(self, dtype: str, has_room: Callable[[int], bool]) -> None:
        self._itemsize, self._has_room = DATA_TYPES[dtype].itemsize, has_room
        # By both versions, and whether it may be sparse; None: it was no smaller than the bucket.
        self._kept: OrderedDict[tuple[int, int, bool], BucketDelta | None] = OrderedDict()
        self._skip = 0
        self._lock = threading.Lock()  # held while one is computed: others want the same, mostly

    @property
    def nbytes(self) -> int:
        """Bytes of the kept changes."""
        return sum(len(change.payload) for change in list(self._kept.values()) if change is not None)

    def between(
        self, base: int, new: BucketCopy, copies: Sequence[BucketCopy], sparse: bool = False
    ) -> BucketDelta | None:
        """Returns the change from version `base` to `new`; None: send the bucket whole.

        copies: all copies of the bucket that exist
        sparse: the change may be sparse
        """
        key = base, new.version, sparse
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            if not self._has_room(WORKING_COPIES * len(new.payload)):
                return None
            if self._skip:
                self._skip -= 1
                change = None
            else:
                elements = self._elements(base, [new, *copies])
                if elements is None:
                    return None
                change = encode_change(elements, new.payload, self._itemsize, sparse)
                self._skip = 0 if change is not None else SKIPPED
            self._kept[key] = change
            while len(self._kept) > MOST_KEPT or self.nbytes > len(new.payload):
                self._kept.popitem(last=False)
        return change

    def _elements(self, version: int, copies: Sequence[BucketCopy]) -> Buffer | None:
        """Returns the elements of a version, from a copy or by undoing changes; None if neither is possible."""
        there = {each.version: each for each in copies}
        way: list[BucketDelta] = []
        while version not in there:
            # Only towards higher versions, so that this ends: a reader may ask again for the version that it has.
            steps = [(to, change) for (since, to, _), change in self._kept.items() if since == version < to and change]
            if not steps:
                return None
            version, change = max(steps, key=lambda step: step[0])
            way.append(change)
        elements: Buffer = there[version].payload
        own: Bytes | None = None  # one more copy, however long the way is
        for change in reversed(way):
            own = apply_change(change.payload, elements, self._itemsize, own, change.is_sparse)
            elements = own.data
        return elements
