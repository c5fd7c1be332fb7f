"""The memory budget for editions that a relay receives. It receives one only if memory has room, or it would be
killed.
"""

from __future__ import annotations

import threading

from ps_feed.edition import Arriving, ReceivingRoom
from ps_protocol.errors import LimitExceeded
from ps_runtime.memory import free_bytes
from ps_runtime.memory_files import MemoryFile
from ps_server.shard.mapped import NewFiles


class EditionRoom(ReceivingRoom):
    """The memory of one relay, for the editions of all of its jobs. Thread-safe.

    If there is too little for an edition, it is not received. The subscription's `trouble` has the reason, and it tries
    again. Otherwise the kernel would kill the relay, with all its jobs.

    Several editions that arrive at the same time would each find the same free memory. So an edition is promised its
    memory with its first bucket. An edition that is only awaited is promised nothing: its job may be idle.

    is_shared: editions lie in memory files, which readers on this host can map
    """

    def __init__(self, is_shared: bool = False) -> None:
        self._files = NewFiles(MemoryFile) if is_shared else None
        self._arriving: set[Arriving] = set()
        self._lock = threading.Lock()

    def memory(self, size: int) -> MemoryFile | None:
        """See ReceivingRoom."""
        return None if self._files is None else self._files.make(size)

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
        """Whether there is room for `size` bytes of short-lived memory."""
        with self._lock:
            free = free_bytes()
            return free is None or size < free - self._promised()

    def check_joined(self, size: int) -> None:
        """Raises LimitExceeded if there is no room to join the pieces of a tensor of `size` bytes."""
        if not self.has(size):
            raise LimitExceeded(f"this relay has no room to join the pieces of a tensor of {size} bytes")

    def _promised(self) -> int:
        return sum(each.left for each in self._arriving)

    def _check(self, size: int) -> None:
        free, promised = free_bytes(), self._promised()
        if free is not None and size > free - promised:
            others = f", of which editions that are arriving still take {promised}" if promised else ""
            raise LimitExceeded(f"this relay has no room for an edition of {size} bytes: {free} are free{others}")
