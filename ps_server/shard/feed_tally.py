"""Counts the editions and bytes that readers of a job's weights get from a shard, and refused editions."""

from __future__ import annotations

import threading
from collections import Counter

from ps_protocol.errors import LimitExceeded, PSError
from ps_server.core.feed_figures import FeedFigures

NO_ROOM, HELD = "no_room", "held"  # why an edition was not made


class FeedTally:
    """The counts of one job since the shard has it. Thread-safe."""

    def __init__(self) -> None:
        self._sent = self._elements = 0
        self._newest: tuple[int, float] | None = None  # the version of the newest edition, and when it was complete
        self._trouble = ""
        self._refused: Counter[str] = Counter({NO_ROOM: 0, HELD: 0})
        self._lock = threading.Lock()

    def sent(self, size: int, whole: int) -> None:
        """Counts bytes sent to readers. whole: the bytes of the same elements without changes"""
        with self._lock:
            self._sent += size
            self._elements += whole

    def complete(self, version: int | None, moment: float) -> None:
        """Records that an edition is complete. Repeated calls change nothing.

        version: None: the edition never changes, and is not recorded
        moment:  the time of its completion
        """
        with self._lock:
            if version is not None and (self._newest is None or moment > self._newest[1]):
                self._newest, self._trouble = (version, moment), ""

    def refused(self, error: PSError) -> None:
        """Counts an edition that was not made: memory has no room for it, or other readers hold too many editions.

        Too little memory also becomes the `trouble` of the figures.
        """
        has_no_room = isinstance(error, LimitExceeded)
        with self._lock:
            self._refused[NO_ROOM if has_no_room else HELD] += 1
            self._trouble = str(error) if has_no_room else self._trouble

    def figures(self, readers: int, lowest: int, nbytes: int, now: float) -> FeedFigures:
        """Returns the figures. lowest: the job's lowest version of a bucket now; nbytes: bytes of the editions in
        memory
        """
        with self._lock:
            version, moment = self._newest or (None, now)
            behind = 0 if version is None else max(0, lowest - version)
            counts = self._sent, self._elements, self._trouble, dict(self._refused)
            return FeedFigures(readers, version, max(0.0, now - moment), behind, nbytes, *counts)
