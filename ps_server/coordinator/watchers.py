"""The workers that watch the roster of one job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.coordinator.members import Roster

# Is told the roster; None: the job, or its coordinator, is at its end.
Watcher = Callable[[Roster | None], None]


class Watchers:
    """Tells watchers the roster, each change after the one before it. Thread-safe; watchers do not wait.

    roster: returns it as it is now
    """

    def __init__(self, roster: Callable[[], Roster]) -> None:
        self._roster = roster
        self._told = roster()
        self._lock = threading.RLock()  # a watcher that is told may stop at once, in the same thread
        self._watchers: list[Watcher] = []
        self._over = False

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Tells a watcher the roster and, after every change, the next, and None at the end. Returns how to stop it.

        The roster is the one that was told last.
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
        """Tells the roster as it is now."""
        with self._lock:
            self._told = self._roster()
            for watcher in list(self._watchers):
                watcher(self._told)

    def end(self) -> None:
        """Tells that nothing more comes."""
        with self._lock:
            self._over = True
            for watcher in list(self._watchers):
                watcher(None)
