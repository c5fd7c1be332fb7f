"""What the feeds of one shard have in common, those of rows and those of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ps_server.shard.feed_bytes import FeedBytes
from ps_server.shard.hosted import HostedJobs


class FeedContext(NamedTuple):
    """The jobs that are read, and the limits of who reads them.

    clock: returns the time in seconds, from an arbitrary zero
    wake:  is called when a feed's `needs_ticks` has become true
    limit: the largest number of feeds of one job, of rows and of weights together; one principal may have half of it
    taken: counts the memory of the feeds of each principal
    """

    hosted: HostedJobs
    clock: Callable[[], float]
    wake: Callable[[], None]
    limit: float
    taken: FeedBytes
