"""Memory for payloads that arrive, used again and again: fresh memory costs a pass of its own to be made (measured)."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import numpy as np


class ReceiveBuffers:
    """Lends memory by its size. It comes back by itself, when nothing refers to it any more. Thread-safe.

    Sizes are rounded up, by an eighth at most: rows have another size in each step, and find memory of the step before.

    keep: bytes that are kept for the next payloads; of more, those of the sizes that were used longest ago go
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: OrderedDict[int, list[np.ndarray]] = OrderedDict()  # by size, of which each list has some
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        self._lock = threading.RLock()  # memory comes back in whatever thread, in the middle of whatever it does

    def take(self, size: int) -> memoryview:
        """Returns memory of so many bytes, with anything in it."""
        rounded = _rounded(size)
        with self._lock:
            whole = self._take_free(rounded)
        if whole is None:
            whole = np.empty(rounded, np.uint8)
        lent = whole[:size]  # an array of its own, which lives as long as any view or tensor over it
        number = id(lent)
        with self._lock:
            self._lent[number] = weakref.ref(lent, lambda _: self._back(number, whole))
        return lent.data

    def _take_free(self, size: int) -> np.ndarray | None:
        free = self._free.get(size)
        if free is None:
            return None
        self._kept -= size
        whole = free.pop()
        if not free:
            del self._free[size]
        return whole

    def _back(self, number: int, whole: np.ndarray) -> None:
        with self._lock:
            self._lent.pop(number, None)
            self._free.setdefault(whole.nbytes, []).append(whole)
            self._free.move_to_end(whole.nbytes)
            self._kept += whole.nbytes
            while self._kept > self._keep:
                self._take_free(next(iter(self._free)))


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
