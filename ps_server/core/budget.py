"""How many bytes are staged and wait for other workers, without walking over all buckets at each push."""

from __future__ import annotations

from collections.abc import Callable


class Held:
    """What was staged of one job, by bucket and rank.

    is_waiting: whether a bucket still holds what a rank pushed at a clock. Only asked when room is needed; until then
                what was added counts too.
    """

    def __init__(self, is_waiting: Callable[[int, int, int], bool]) -> None:
        self.bytes = 0
        self._is_waiting = is_waiting
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}  # clock and bytes

    def take(self, bucket: int, rank: int, clock: int, size: int, limit: int, always: bool) -> bool:
        """Counts a contribution in if there is room for it, nothing else is held, or it must be let in always."""
        if self.bytes + size > limit:
            self.forget()
        _, before = self._sizes.get((bucket, rank), (0, 0))
        if self.bytes > before and self.bytes - before + size > limit and not always:
            return False
        self._sizes[bucket, rank] = clock, size
        self.bytes += size - before
        return True

    def is_all_of(self, rank: int) -> bool:
        """Whether no other rank's is held."""
        self.forget()
        return all(other == rank for _, other in self._sizes)

    def forget(self) -> None:
        """Counts only what still waits."""
        self._sizes = {key: found for key, found in self._sizes.items() if self._is_waiting(*key, found[0])}
        self.bytes = sum(size for _, size in self._sizes.values())


def derived_limit(weights: int, bucket: int, workers: int) -> int:
    """Bytes that may be staged on a shard where no limit says it: as many as its weights, or two buckets a worker.

    So of two workers none is ever sent away, however far one is ahead in a step, and no bucket travels twice.
    Two buckets are what a worker has under way to one shard.
    """
    return max(weights, 2 * bucket * workers)
