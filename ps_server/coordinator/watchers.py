"""The workers that watch the roster of one job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.coordinator.members import Roster
from ps_server.coordinator.timing import Clock

# Is told the roster; None: the job, or its coordinator, is at its end.
Watcher = Callable[[Roster | None], None]

# After telling them all, so long for each watcher nothing is told: to tell one costs about 0.15 ms of the coordinator's
# core, and while W workers come one after the other, W * W / 2 messages would take most of it.
PAUSE_A_WATCHER = 0.001

# Calls something after so many seconds, beside the caller; False: it cannot, and the caller is to do it now.
Later = Callable[[float, Callable[[], None]], bool]


class Watchers:
    """Sends the roster of one job to its watchers, in order. Thread-safe; watchers must not wait.

    Changes in quick succession are sent as one, a moment later; a watcher then gets only the newest roster. That
    training begins is sent at once.

    roster: returns the current roster
    later:  calls a function after some seconds; see Registry.later
    """

    def __init__(self, roster: Callable[[], Roster], clock: Clock, later: Later) -> None:
        self._roster, self._clock, self._later = roster, clock, later
        self._told = roster()
        self._lock = threading.RLock()  # a watcher that is told may stop at once, in the same thread
        self._watchers: list[Watcher] = []
        self._not_before = clock.now()
        self._is_due = self._over = False

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Adds a watcher, and calls it at once with the roster that was sent last. Returns a function that removes it.

        watcher: is called with each new roster, and with None when no more come
        """
        with self._lock:
            watcher(None if self._over else self._told)
            self._watchers.append(watcher)

        def stop() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

        return stop

    def tell(self) -> None:
        """Sends the current roster to all watchers, now or with the next round."""
        with self._lock:
            _, _, started = self._roster()
            wait = self._not_before - self._clock.now()
            if wait <= 0 or started != self._told[2]:
                self._tell()
            elif not self._is_due:
                self._is_due = True
                if not self._later(wait, self._tell_due):
                    self._tell()

    def _tell_due(self) -> None:
        with self._lock:
            if self._is_due:
                self._tell()

    def _tell(self) -> None:
        self._is_due = False
        self._told = self._roster()
        for watcher in list(self._watchers):
            watcher(self._told)
        self._not_before = self._clock.now() + PAUSE_A_WATCHER * len(self._watchers)

    def end(self) -> None:
        """Calls all watchers with None: no more rosters come."""
        with self._lock:
            self._over, self._is_due = True, False
            for watcher in list(self._watchers):
                watcher(None)
