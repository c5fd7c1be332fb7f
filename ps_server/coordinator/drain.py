"""Whether the coordinator is told to stop, and has made the last checkpoints of its jobs.

What stops a cluster signals its servers one after the other, some milliseconds apart. A shard that hears first asks for
a checkpoint and would end with it, while the coordinator's last checkpoint needs this shard, too. So the coordinator
holds such a request: for a moment, in which it may be told to stop itself, and then until it has made its last ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ps_protocol.errors import TryLater


class Drain:
    """The end of one coordinator. Thread-safe.

    together: seconds in which a coordinator is told to stop if one of its shards was
    """

    def __init__(self, together: float) -> None:
        self._together = together
        self._begun, self._over = threading.Event(), threading.Event()

    def check(self) -> None:
        """Raises TryLater once the coordinator is told to stop."""
        if self._begun.is_set():
            raise TryLater("the cluster is stopping")

    @contextmanager
    def begin(self) -> Iterator[None]:
        """A `with` block that makes the last checkpoints."""
        self._begun.set()
        try:
            yield
        finally:
            self._over.set()

    def awaited(self, seconds: float) -> bool:
        """Waits for the last checkpoints if the coordinator is told to stop about now, or has been. Returns whether it
        is. Raises TryLater if they take longer than `seconds`.
        """
        until = time.monotonic() + seconds
        if not self._begun.wait(min(self._together, seconds)):
            return False
        if not self._over.wait(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
            raise TryLater("the cluster is stopping, and its last checkpoints are not complete")
        return True
