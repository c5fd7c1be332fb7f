"""Whether a coordinator is still in charge, or another one has taken over the lock lease that keeps others out.

A coordinator that was suspended or cut off gets no heartbeats, although the workers live: they send them to the other
coordinator. So it must not remove those workers from the shards, nor end or roll back their jobs. It learns from its
lock lease, or from a shard, that it is not in charge. Each call to a shard carries the coordinator's term, and a shard
refuses a term below the highest that it has seen.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ps_protocol.errors import Deposed, TryLater

log = logging.getLogger("ps_server")


class LockState(Protocol):
    """The lock lease that at most one coordinator holds at a time; see storage.files.Files."""

    def term(self) -> int:
        """Returns the number of the lock lease; 0 if there is none."""

    def taken_over(self) -> str:
        """Returns a description of the process that holds the lock lease now; empty if, as far as is known,
        this one does.
        """


class Charge:
    """Whether one coordinator is in charge. Thread-safe; no method waits."""

    def __init__(self) -> None:
        self._lock_state: LockState | None = None
        self._refused = ""  # the reason, from a shard
        self._is_logged = False

    def begin(self, lock_state: LockState) -> None:
        """Sets the lock lease that decides whether this coordinator is in charge. This process must hold it."""
        self._lock_state = lock_state

    @property
    def term(self) -> int:
        """The term of this coordinator, which its calls to shards carry; 0 without a lock lease."""
        return self._lock_state.term() if self._lock_state is not None else 0

    def refused(self, error: Deposed) -> None:
        """Records that a shard has refused a call because it knows a later coordinator."""
        self._refused = str(error)

    @property
    def lost(self) -> str:
        """Why this coordinator is no longer in charge; empty: it is, as far as it knows."""
        why = self._refused or (self._lock_state.taken_over() if self._lock_state is not None else "")
        if why and not self._is_logged:
            self._is_logged = True
            log.error(
                "this coordinator is not in charge any more, and changes nothing: %s. Its workers find the other one "
                "when this process has ended: end it",
                why,
            )
        return why

    def check(self) -> None:
        """Raises TryLater if another coordinator is in charge. A caller that tries again may reach that one."""
        if self.lost:
            raise TryLater(f"another coordinator is in charge: {self.lost}")
