"""How far a job is on one shard: over all its buckets that train, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ps_server.core.consistency import Live, UpdateRule
from ps_server.core.snapshot import VersionRange, union


class Reached:
    """Reads the rules of a job's buckets and tables together. What no optimizer steps is none of them.

    rules:  by index
    roster: the live workers by rank, as the partition keeps them
    """

    def __init__(self, rules: Mapping[int, UpdateRule[Any]], roster: Mapping[int, Live]) -> None:
        self._rules = list(rules.values())
        self._indices = list(rules)
        self._roster = roster

    def frontier(self) -> int:
        """Returns the highest clock that any worker has reached on a bucket or table."""
        return max((rule.frontier() for rule in self._rules), default=0)

    def pushed(self, rank: int) -> int | None:
        """Returns the last clock of which every bucket and table has a push of this rank; None: nothing trains here."""
        return min((rule.pushed.get(rank, 0) for rule in self._rules), default=None)

    def further(self, rank: int) -> dict[int, int]:
        """Returns, by index, the last clock that this rank has pushed of a bucket or table, where it is a later one."""
        least = self.pushed(rank) or 0
        pushed = {index: rule.pushed.get(rank, 0) for index, rule in zip(self._indices, self._rules, strict=True)}
        return {index: clock for index, clock in pushed.items() if clock > least}

    def versions(self) -> tuple[int, int]:
        """Returns the lowest and the highest version of a bucket or table."""
        versions = [rule.versions() for rule in self._rules]
        return min((low for low, _ in versions), default=0), max((high for _, high in versions), default=0)

    def clocks(self) -> dict[int, int]:
        """Returns the lowest clock over this shard's buckets and tables, by live rank."""
        each = [rule.clocks() for rule in self._rules]
        return {rank: min((clocks[rank] for clocks in each), default=0) for rank in self._roster}

    def departed_clocks(self) -> dict[int, int]:
        """Returns the same by rank of a worker that is not live any more."""
        return {rank: clock for rank, clock in self.extent().clocks.items() if rank not in self._roster}

    def extent(self) -> VersionRange:
        """Returns how far they are, with the clocks of the dead."""
        return union(rule.extent() for rule in self._rules)
