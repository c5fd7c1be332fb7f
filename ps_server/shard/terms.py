"""The terms of coordinators: a shard obeys only the coordinator with the latest one."""

from __future__ import annotations

import threading

from ps_protocol.errors import Deposed


class CoordinatorTerms:
    """The highest term that a shard has seen. Thread-safe."""

    def __init__(self) -> None:
        self._highest = 0
        self._lock = threading.Lock()

    def check(self, term: int, is_look: bool = False) -> None:
        """Records the term of a call. Raises Deposed if it is lower than the highest so far.

        term:    0: the caller has no term. It may be a coordinator without a lease, or of an earlier version
        is_look: the call only reads. It is allowed without a term, because it may not come from a coordinator
        """
        with self._lock:
            if term < self._highest and not (is_look and not term):
                caller = f"term {term}" if term else "one without a term"
                raise Deposed(
                    f"this shard obeys the coordinator of term {self._highest}, the call came from {caller}. If that "
                    "is the right one, because the lock was removed by hand, start the shard again"
                )
            self._highest = max(term, self._highest)
