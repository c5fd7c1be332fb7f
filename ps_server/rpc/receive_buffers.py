"""Memory for payloads that arrive, used again and again: fresh memory costs a pass of its own to be made (measured)."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict

import numpy as np


class ReceiveBuffers:
    """Lends memory by its size. It comes back by itself, when nothing refers to it any more. Thread-safe.

    keep: bytes that are kept for the next payloads
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        self._lock = threading.RLock()  # memory comes back in whatever thread, in the middle of whatever it does

    def take(self, size: int) -> memoryview:
        """Returns memory of so many bytes, with anything in it."""
        with self._lock:
            free = self._free.get(size)
            whole = free.pop() if free else None
            if whole is not None:
                self._kept -= size
        if whole is None:
            whole = np.empty(size, np.uint8)
        lent = whole[:]  # an array of its own, which lives as long as any view or tensor over it

        number = id(lent)
        with self._lock:
            self._lent[number] = weakref.ref(lent, lambda _: self._back(number, whole))
        return lent.data

    def _back(self, number: int, whole: np.ndarray) -> None:
        with self._lock:
            self._lent.pop(number, None)
            if self._kept + whole.nbytes <= self._keep:
                self._free[whole.nbytes].append(whole)
                self._kept += whole.nbytes
