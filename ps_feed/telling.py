"""What a relay says of itself to those whom it follows, and when.

Each call that asks how far the job is has a report. Such a call comes with each edition. Where the next edition is far
away, reports go in calls of their own, so that the relay is not forgotten, and its number of readers is of now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ps_protocol.messages.editions import RelayReport


class Telling:
    """The reports of one relay about one job. Thread-safe.

    report: returns what is to be said now; None: nothing, as the reader is no relay
    pause:  returns the seconds from one report to the next, at most
    last:   the newest report
    """

    def __init__(self, report: Callable[[], RelayReport | None], pause: Callable[[], float]) -> None:
        self._report, self._pause = report, pause
        self._due = 0.0
        self.last: RelayReport | None = None
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Makes a report, for a call that is made in any case."""
        with self._lock:
            self._renew()

    def is_due(self) -> bool:
        """Whether a call is to be made for a report: `last`, which is new. One thread of those that ask is told so."""
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
