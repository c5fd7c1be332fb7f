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
    """The gradients of one step that are sent while backward still runs, and the decision whether they count."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._counts = False

    def settle(self, counts: bool) -> None:
        """Decides whether the drafts count; if not, another push replaces each. Only the first call has an effect."""
        if not self._settled.is_set():
            self._counts = counts
            self._settled.set()

    @property
    def is_dropped(self) -> bool:
        """Whether it is decided that the drafts do not count."""
        return self._settled.is_set() and not self._counts

    def wait(self) -> bool:
        """Waits for the decision. Returns whether the drafts count."""
        self._settled.wait()
        return self._counts


@dataclass(frozen=True)
class ShardStep:
    """The calls to one shard for its part of a step.

    pushes:  the pushes that are sent; each is done when the shard has staged it
    pull:    done when all buckets have landed
    commits: the pull's call commits drafts and empty pushes
    rest:    the pushes that the caller must still send, bucket by bucket
    """

    pushes: Sequence[Future[PushResult]]
    pull: Future[PullResult]
    commits: bool
    rest: Sequence[BucketPush]


class Transport(Protocol):
    """Moves buckets between this worker and one shard. Methods return at once; futures raise PSError."""

    @property
    def has_drafts(self) -> bool:
        """Whether `draft` does anything."""

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends a gradient that may still change. Returns None if there is nothing to send yet."""

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Sends a bucket. Done when the shard has staged it."""

    def pull(self, clock: int, buckets: Sequence[BucketSpec], all_staged: bool = False) -> Future[PullResult]:
        """Pulls buckets; the future is done when all have landed.

        all_staged: with every update that is staged on the shard when the call comes
        """

    def exchange(
        self,
        clock: int,
        pushes: Sequence[BucketPush],
        buckets: Sequence[BucketSpec],
        drafted: Mapping[int, Future[PushResult]],
    ) -> ShardStep:
        """Pulls buckets at a step's clock, and makes as many of the step's pushes in the same call as it can.

        drafted: by bucket, the drafts of the step, all of which count
        """

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """Its threads, which end soon after `close`."""

    def close(self) -> None:
        """Ends the threads and the connection."""
