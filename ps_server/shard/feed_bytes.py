"""The memory that the feeds of one principal may take on a shard, over all jobs.

A feed has one message under way at a time. A reader that does not read keeps that message in memory until it is cut
off, and a principal may have many feeds of many jobs. So each open feed counts as its largest message.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from ps_protocol.errors import LimitExceeded
from ps_server.shard.waiting import SharedBudget


class FeedBytes:
    """The bytes that the open feeds of each principal may take. Thread-safe.

    limit: bytes of one principal. Its first feed may exceed it
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._budget = SharedBudget(limit)
        self._lock = threading.Lock()
        self._open: set[object] = set()

    def take(self, caller: str, size: int) -> Callable[[], None]:
        """Counts a feed. Returns a function to call when the feed is over; further calls of it do nothing.

        caller: the principal that reads; empty: unknown
        size:   bytes of the feed's largest message

        Raises LimitExceeded, and counts nothing, past the limit.
        """
        if not self._budget.reserve(caller, size):
            raise LimitExceeded(
                f"{caller or 'the caller'} has feeds here whose messages take up to {self._budget.bytes_of(caller)} "
                f"bytes, and this one takes {size}: max-feed-bytes is {self._budget.limit}"
            )
        feed = object()
        with self._lock:
            self._open.add(feed)

        def give_back() -> None:
            with self._lock:
                if feed not in self._open:
                    return
                self._open.discard(feed)
            self._budget.release(caller, size)

        return give_back
