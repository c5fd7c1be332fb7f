"""What each principal uses of a shard, over all jobs. Each job has its own lock, so these counts have theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
    """The buckets that principals have asked for and that are not sent yet. Thread-safe.

    A bucket costs some hundred bytes while its pull waits or is unread, and a call may ask for all buckets of a job.
    The ids of a pull of rows count as the number of buckets that take the same memory. There are three separate counts:

    - pulls that wait for other workers;
    - pulls that can be sent. A pull of the first kind may wait for the very worker that needs one of this kind to go
    on;
    - copies of whole tables, which may be large, so that they keep no other pull waiting.

    limit: the largest number of buckets of one principal, of each kind. A principal's first pull of a kind may exceed
           it
    """

    def __init__(self, limit: float) -> None:
        self._waiting, self._ready = SharedBudget(limit), SharedBudget(limit)
        self._copies = SharedBudget(limit * WAITING_BYTES)

    def take(
        self, principal: str, count: int, waits: bool, id_bytes: int = 0, copy_bytes: int = 0
    ) -> Callable[[], None]:
        """Counts a pull of `count` buckets; returns a function to call when the pull is over.

        waits:      the pull waits for other workers
        id_bytes:   bytes of the ids of a pull of rows
        copy_bytes: bytes of the whole table that the pull asks for

        Raises Backlogged, and counts nothing, past the limit.
        """
        budget = self._waiting if waits else self._ready
        count += id_bytes // WAITING_BYTES
        if not budget.reserve(principal, count):
            kind = "wait for other workers" if waits else "are not sent yet"
            raise Backlogged(
                f"the caller has asked for {budget.bytes_of(principal)} buckets, as all its workers, that {kind}, and "
                f"now for {count}: max-pulled-buckets is {budget.limit}"
            )
        if copy_bytes and not self._copies.reserve(principal, copy_bytes):
            budget.release(principal, count)
            raise Backlogged(
                f"the caller has asked for {self._copies.bytes_of(principal)} bytes of whole tables, as all its "
                f"workers, that are not sent yet, and now for {copy_bytes}: max-pulled-buckets allows "
                f"{self._copies.limit}"
            )

        def over() -> None:
            budget.release(principal, count)
            self._copies.release(principal, copy_bytes)

        return over
