"""The reports that a relay sends to the servers that it follows: its name, its readers, its version.

A report travels with each call that asks for the job's version, and a relay makes such a call for each edition. While
the next edition takes long, the relay sends reports in calls of their own. So the servers do not forget the relay, and
its number of readers stays current.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ps_protocol.messages.editions import RelayReport


class Telling:
    """The reports of one relay about one job. Thread-safe.

    report: makes a report; returns None for a reader that is no relay
    pause:  returns the seconds from one report to the next, at most
    last:   the newest report
    """

    def __init__(self, report: Callable[[], RelayReport | None], pause: Callable[[], float]) -> None:
        self._report, self._pause = report, pause
        self._due = 0.0
        self.last: RelayReport | None = None
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Makes a new report, for a call that is about to be made."""
        with self._lock:
            self._renew()

    def is_due(self) -> bool:
        """Whether the caller must send `last` in a call of its own. True for one thread only, however many ask."""
        if self.last is None:
            return False
        with self._lock:
            is_due = time.monotonic() >= self._due
            if is_due:
                self._renew()
            return is_due

    def _renew(self) -> None:
        self.last = self._report()
        if self.last is not None:
            self._due = time.monotonic() + self._pause()
