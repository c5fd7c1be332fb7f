"""What principals have on a shard, counted over all its jobs, of which each has a lock of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ps_protocol.errors import Backlogged
from ps_server.core.budget import PrincipalBudget


class SharedBudget(PrincipalBudget):
    """A PrincipalBudget that is thread-safe."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self._lock = threading.Lock()

    def reserve(self, principal: str, size: int, instead_of: int = 0, always: bool = False) -> bool:
        with self._lock:
            return super().reserve(principal, size, instead_of, always)

    def release(self, principal: str, size: int) -> None:
        with self._lock:
            super().release(principal, size)


WAITING_BYTES = 640  # that a bucket takes while its pull waits (measured)


class PulledBuckets:
    """The buckets that principals have asked for and that are not sent. Thread-safe.

    A bucket costs some hundred bytes while its pull waits or is not read, and a call may ask for all of a job. What is
    kept for a pull of rows counts as so many buckets as take the same memory. Pulls that wait for other workers and
    pulls that can be sent are counted apart: the others may be waiting for the very worker that is to get on by a pull
    of the second kind.

    limit: buckets of one principal, of either kind; its first pull of a kind may ask for any number
    """

    def __init__(self, limit: float) -> None:
        self._waiting, self._ready = SharedBudget(limit), SharedBudget(limit)

    def take(self, principal: str, count: int, waits: bool, kept_bytes: int = 0) -> Callable[[], None]:
        """Notes that a pull of so many buckets begins; returns what notes that it is over.

        waits:      for other workers
        kept_bytes: for it, of ids or rows

        Raises Backlogged, and notes nothing, where they are too many.
        """
        budget = self._waiting if waits else self._ready
        count += kept_bytes // WAITING_BYTES
        if not budget.reserve(principal, count):
            kind = "wait for other workers" if waits else "are not sent yet"
            raise Backlogged(
                f"the caller has asked for {budget.bytes_of(principal)} buckets, as all its workers, that {kind}, and "
                f"now for {count}: max-pulled-buckets is {budget.limit}"
            )
        return partial(budget.release, principal, count)
