"""What a way for buckets between a worker and one shard must offer: network.py and shared_memory.py are two."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from ps_protocol.layout import BucketSpec
from ps_worker.values import BucketPush, PullResult, PushResult


class Draft:
    """The gradients of one step that leave while backward still runs, until `step` says whether they count."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._counts = False

    def settle(self, counts: bool) -> None:
        """Decides whether they count, or another push takes the place of each. The first decision holds."""
        if not self._settled.is_set():
            self._counts = counts
            self._settled.set()

    @property
    def is_dropped(self) -> bool:
        """Whether it is known that they do not count."""
        return self._settled.is_set() and not self._counts

    def wait(self) -> bool:
        """Waits until it is known whether they count."""
        self._settled.wait()
        return self._counts


class Transport(Protocol):
    """Moves buckets between this worker and one shard. Methods return at once; futures raise PSError."""

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends what may still change, so that little is left to do when it counts; None where nothing is sent."""

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Sends a bucket. Done when the shard has staged it."""

    def pull(self, clock: int, buckets: Sequence[BucketSpec], commit: Sequence[BucketPush] = ()) -> Future[PullResult]:
        """Fetches buckets. Done when all have landed.

        commit: what left as a draft and counts now, and what is empty
        """

    def exchange(
        self, clock: int, pushes: Sequence[BucketPush], buckets: Sequence[BucketSpec]
    ) -> tuple[list[Future[PushResult]], Future[PullResult]] | None:
        """Makes all those pushes, and the pull, in one call; None where that is no gain."""

    def close(self) -> None:
        """Ends the threads and the connection."""
