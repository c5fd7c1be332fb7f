"""The memory into which a relay receives: an edition only if there is room for it, so that the relay is not killed."""

from __future__ import annotations

import logging
import threading
import time

from ps_feed.edition import Arriving, ReceivingRoom
from ps_feed.mapping import RETRY_SECONDS
from ps_protocol.errors import LimitExceeded, NotShared
from ps_runtime.memory import free_bytes
from ps_runtime.memory_files import MemoryFile
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_server")


class EditionRoom(ReceivingRoom):
    """The memory of one relay, for the editions of all of its jobs. Thread-safe.

    Where there is none for an edition, none is received, and the subscription's `trouble` says so; it tries again.
    Without that the kernel would kill the relay, with all jobs that it has.

    What several editions take that arrive at the same time is free at first, and each of them would find it. So an
    edition is promised its memory with its first bucket. One that is only waited for is promised nothing: its job may
    stand still.

    is_shared: editions are to lie in memory files, which readers of this host can map
    """

    def __init__(self, is_shared: bool = False) -> None:
        self._is_shared, self._again = is_shared, 0.0  # when it is tried again where that has failed
        self._troubles = Troubles(log, None)
        self._arriving: set[Arriving] = set()
        self._lock = threading.Lock()

    def memory(self, size: int) -> MemoryFile | None:
        """See ReceivingRoom."""
        if not self._is_shared or time.monotonic() < self._again:
            return None
        try:
            file = MemoryFile(size)
        except NotShared as error:
            text = "readers of this host get editions in messages, and not as memory: %s"
            self._troubles.met(None, text, error)
            self._again = time.monotonic() + RETRY_SECONDS
            return None
        self._troubles.over(None)
        return file

    def check(self, arriving: Arriving) -> None:
        """See ReceivingRoom."""
        with self._lock:
            self._check(arriving.left)

    def begin(self, arriving: Arriving) -> None:
        """See ReceivingRoom."""
        if arriving in self._arriving:
            return
        with self._lock:
            if arriving not in self._arriving:
                self._check(arriving.left)
                self._arriving.add(arriving)

    def end(self, arriving: Arriving) -> None:
        """See ReceivingRoom."""
        with self._lock:
            self._arriving.discard(arriving)

    def has(self, size: int) -> bool:
        """Whether there is room for so many bytes that are given back soon."""
        with self._lock:
            free = free_bytes()
            return free is None or size < free - self._promised()

    def check_joined(self, size: int) -> None:
        """Raises LimitExceeded where there is no room to join a tensor of so many bytes that is in pieces."""
        if not self.has(size):
            raise LimitExceeded(f"this relay has no room to join the pieces of a tensor of {size} bytes")

    def _promised(self) -> int:
        return sum(each.left for each in self._arriving)

    def _check(self, size: int) -> None:
        free, promised = free_bytes(), self._promised()
        if free is not None and size > free - promised:
            others = f", of which editions that are arriving still take {promised}" if promised else ""
            raise LimitExceeded(f"this relay has no room for an edition of {size} bytes: {free} are free{others}")
