"""The workers that watch the roster of one job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.coordinator.job_workers import Roster
from ps_server.coordinator.timing import Clock

# Called with each roster; with None at the end of the job or of its coordinator.
Watcher = Callable[[Roster | None], None]

# Pause after a roster was sent, for each watcher. Sending to one costs about 0.15 ms of the coordinator's core: while W
# workers join one after the other, W * W / 2 messages would take most of it.
PAUSE_A_WATCHER = 0.001

# Calls a function after some seconds, in another thread; False: it cannot, and the caller must do it now.
Later = Callable[[float, Callable[[], None]], bool]


class Watchers:
    """Sends the roster of one job to its watchers, in order. Thread-safe; watchers must not wait.

    Changes in quick succession are sent together, a moment later: a watcher gets only the newest roster. The roster
    with which training begins is sent at once.

    roster: returns the current roster
    later:  calls a function after some seconds; see Registry.later
    """

    def __init__(self, roster: Callable[[], Roster], clock: Clock, later: Later) -> None:
        self._roster, self._clock, self._later = roster, clock, later
        self._announced = roster()
        self._lock = threading.RLock()  # a watcher may stop in its callback, in the same thread
        self._watchers: list[Watcher] = []
        self._not_before = clock.now()
        self._is_due = self._over = False

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Adds a watcher, and calls it at once with the roster that was sent last. Returns a function that removes it.

        watcher: is called with each new roster, and with None when no more come
        """
        with self._lock:
            watcher(None if self._over else self._announced)
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
            if wait <= 0 or started != self._announced[2]:
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
        self._announced = self._roster()
        for watcher in list(self._watchers):
            watcher(self._announced)
        self._not_before = self._clock.now() + PAUSE_A_WATCHER * len(self._watchers)

    def end(self) -> None:
        """Calls all watchers with None: no more rosters come."""
        with self._lock:
            self._over, self._is_due = True, False
            for watcher in list(self._watchers):
                watcher(None)
