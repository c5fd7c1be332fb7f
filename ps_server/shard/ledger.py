"""Limits the bytes that one caller may have staged on this shard, over all its workers and jobs.

Bytes are given back when the last contribution that holds their ticket is gone: applied, dropped with its job, or
refused. So no way out of a job can forget to give them back.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque


class Ticket:
    """Stands for bytes of one caller, for as long as something holds it. `within` is false past the caller's limit."""

    def __init__(self, within: bool) -> None:
        self.within = within


class Ledger:
    """The bytes of all callers. Thread-safe.

    limit: bytes of one caller
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._given: deque[tuple[str, int]] = deque()  # not booked out yet: a ticket may die while the lock is held

    def take(self, caller: str, size: int) -> Ticket:
        """Books bytes on a caller. Beyond the limit too: whether they may stay is for who stages them to say."""
        with self._lock:
            self._settle()
            before = self._held[caller]
            self._held[caller] = before + size
        ticket = Ticket(not before or before + size <= self.limit)
        weakref.finalize(ticket, self._given.append, (caller, size)).atexit = False
        return ticket

    def held(self, caller: str) -> int:
        """Bytes booked on a caller now."""
        with self._lock:
            self._settle()
            return self._held.get(caller, 0)

    def _settle(self) -> None:
        while self._given:
            caller, size = self._given.popleft()
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]
