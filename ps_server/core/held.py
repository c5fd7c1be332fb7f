"""How many bytes are staged and wait for other workers, without walking over all buckets at each push."""

from __future__ import annotations

from collections.abc import Callable


class Held:
    """What was staged of one job, by bucket and rank.

    still: whether the contribution of (bucket, rank, clock) is waiting. It is only asked when room is needed; until then
           what has been added since counts too.
    """

    def __init__(self, still: Callable[[int, int, int], bool]) -> None:
        self.bytes = 0
        self._still = still
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
        self._sizes = {key: found for key, found in self._sizes.items() if self._still(*key, found[0])}
        self.bytes = sum(size for _, size in self._sizes.values())
