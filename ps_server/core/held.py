"""How many bytes are staged and wait for other workers, without walking over all buckets at each push."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ps_server.core.bucket import Add


class Held:
    """What was staged of one job, by bucket and rank.

    waiting: what waits in a bucket, by rank. Only asked when room is needed; until then what was added counts too.
    """

    def __init__(self, waiting: Callable[[int], Mapping[int, Add[Any]]]) -> None:
        self.bytes = 0
        self._waiting = waiting
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}  # clock and bytes

    def take(self, bucket: int, rank: int, clock: int, size: int, limit: int, always: bool) -> bool:
        """Counts a contribution in if there is room for it, nothing else is held, or it must be let in always."""
        if self.bytes + size > limit:
            self._forget()
            if self.bytes and self.bytes + size > limit and not always:
                return False
        _, before = self._sizes.get((bucket, rank), (0, 0))
        self._sizes[bucket, rank] = clock, size
        self.bytes += size - before
        return True

    def _forget(self) -> None:
        self._sizes = {key: found for key, found in self._sizes.items() if self._is_waiting(*key, found[0])}
        self.bytes = sum(size for _, size in self._sizes.values())

    def _is_waiting(self, bucket: int, rank: int, clock: int) -> bool:
        found = self._waiting(bucket).get(rank)
        return found is not None and found.clock == clock


def derived_limit(weights: int, bucket: int, workers: int) -> int:
    """Bytes that may be staged on a shard where no limit says it: as many as its weights, or two buckets a worker.

    So of two workers none is ever sent away, however far one is ahead in a step, and no bucket travels twice.
    Two buckets are what a worker has under way to one shard.
    """
    return max(weights, 2 * bucket * workers)
