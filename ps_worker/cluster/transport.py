"""A transport is one way for buckets between a worker and one shard: network.py and shared_memory.py are two."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import BucketPush
from ps_worker.values import PullResult, PushResult


class Draft:
    """The gradients of one step that leave while backward still runs, until `step` says whether they count."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._counts = False

    def settle(self, counts: bool) -> None:
        """Decides whether they count; otherwise another push takes the place of each. The first decision holds."""
        if not self._settled.is_set():
            self._counts = counts
            self._settled.set()

    @property
    def is_dropped(self) -> bool:
        """Whether the drafts are known not to count."""
        return self._settled.is_set() and not self._counts

    def wait(self) -> bool:
        """Waits until it is known whether they count."""
        self._settled.wait()
        return self._counts


@dataclass(frozen=True)
class ShardStep:
    """The calls to one shard that make up its part of a step.

    pushes:  those that are on their way; each is done when the shard has staged it
    pull:    done when all buckets have landed
    commits: the pull makes drafts and empty pushes count
    rest:    what is still to be pushed, bucket by bucket
    """

    pushes: Sequence[Future[PushResult]]
    pull: Future[PullResult]
    commits: bool
    rest: Sequence[BucketPush]


class Transport(Protocol):
    """Moves buckets between this worker and one shard. Methods return at once; futures raise PSError."""

    @property
    def has_drafts(self) -> bool:
        """Whether it does anything for a gradient that may still change."""

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends a gradient that may still change; returns None where it has nothing to send."""

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Sends a bucket. Done when the shard has staged it."""

    def pull(self, clock: int, buckets: Sequence[BucketSpec], all_staged: bool = False) -> Future[PullResult]:
        """Fetches buckets. Done when all have landed. all_staged: with every update that is staged on the shard"""

    def exchange(
        self,
        clock: int,
        pushes: Sequence[BucketPush],
        buckets: Sequence[BucketSpec],
        drafted: Mapping[int, Future[PushResult]],
    ) -> ShardStep:
        """Asks for buckets at a step's clock; makes as many of its pushes in the same call as it can.

        drafted: by bucket, the drafts of the step; they count
        """

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """Its threads, which end soon after `close`."""

    def close(self) -> None:
        """Ends the threads and the connection."""
