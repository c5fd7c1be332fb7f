"""A subscription that receives an edition only if there is memory for it, so that a relay is not killed."""

from __future__ import annotations

from typing import Any

from ps_feed.edition import EditionArrays
from ps_feed.subscription import Subscription
from ps_protocol.errors import LimitExceeded
from ps_runtime.memory import free_bytes


class RoomySubscription(Subscription):
    """Follows a job as others do. Where there is no room for an edition, none is received, and `trouble` says so; it
    tries again. Without that the kernel would kill the relay, with all jobs that it has."""

    def _receive(self, shards: Any, here: Any, version: int, before: EditionArrays | None, least: int) -> EditionArrays:
        contents, free = self._contents, free_bytes()
        if contents is not None and free is not None:
            buckets = [each for each in contents.buckets.values() if before is None or not each.frozen]
            size = sum(map(contents.size, buckets))
            if free < size:
                raise LimitExceeded(f"this relay has no room for an edition of {size} bytes: {free} are free")
        return super()._receive(shards, here, version, before, least)
