"""What readers of a job's weights have had on a shard, and what they have not, for people who watch."""

from __future__ import annotations

import threading
from collections import Counter

from ps_protocol.errors import LimitExceeded, PSError
from ps_server.core.feed_figures import FeedFigures

NO_ROOM, HELD = "no_room", "held"  # why an edition was not taken


class FeedTally:
    """Counts what readers have had of one job since the shard has it. Thread-safe."""

    def __init__(self) -> None:
        self._sent = self._elements = 0
        self._newest: tuple[int, float] | None = None  # the version of the newest edition, and when it was complete
        self._trouble = ""
        self._refused: Counter[str] = Counter({NO_ROOM: 0, HELD: 0})
        self._lock = threading.Lock()

    def sent(self, size: int, whole: int) -> None:
        """Counts bytes that readers were sent, and those of the elements that they stand for."""
        with self._lock:
            self._sent += size
            self._elements += whole

    def complete(self, version: int | None, moment: float) -> None:
        """Notes an edition that is complete since a moment; it may be told again. version: None: it never changes"""
        with self._lock:
            if version is not None and (self._newest is None or moment > self._newest[1]):
                self._newest, self._trouble = (version, moment), ""

    def refused(self, error: PSError) -> None:
        """Counts an edition that was not taken: memory has no room, which is a trouble, or readers hold others."""
        has_no_room = isinstance(error, LimitExceeded)
        with self._lock:
            self._refused[NO_ROOM if has_no_room else HELD] += 1
            self._trouble = str(error) if has_no_room else self._trouble

    def figures(self, readers: int, lowest: int, nbytes: int, now: float) -> FeedFigures:
        """Returns what is known. lowest: the lowest version of the job's buckets now; nbytes: of editions in memory"""
        with self._lock:
            version, moment = self._newest or (None, now)
            behind = 0 if version is None else max(0, lowest - version)
            counts = self._sent, self._elements, self._trouble, dict(self._refused)
            return FeedFigures(readers, version, max(0.0, now - moment), behind, nbytes, *counts)
