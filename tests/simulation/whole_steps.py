"""Whether steps count as a whole where an update is a mean over workers (sync, local:H): on all buckets, or on none.

Where each push is an update of its own, the counting oracle says so: a step that was acknowledged, or that the servers
say counts, is in every bucket once. In a mean nobody misses a worker. So it is read here from what single updates have
changed who was in them, bucket by bucket: a worker is in as many updates of one bucket as of any other, whichever these
are. A step that a process died over may be in some; so may one of an update that nobody has seen by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from tests.chaos.oracle import Violation


class WholeSteps:
    """What was seen of the updates of one run. broken_off: by row of the weights, steps that nobody has ended"""

    def __init__(self) -> None:
        self.broken_off: Counter[int] = Counter()
        self._seen: dict[int, tuple[int, list[frozenset[int]]]] = {}  # by clock: after how many rollbacks, who was in
        self._restored: dict[int, int] = {}  # by the number of a rollback, the clock that it went back to

    def joined(self, rollbacks: int, clock: int) -> None:
        """Notes a worker that goes on at a clock, after so many rollbacks: the first does so where the job went to."""
        self._restored[rollbacks] = min(clock, self._restored.get(rollbacks, clock))

    def saw(self, clock: int, rollbacks: int, marks: torch.Tensor) -> None:
        """Takes what one update has added to its column: [buckets, rows]."""
        if rollbacks >= self._seen.get(clock, (0, []))[0]:
            self._seen[clock] = rollbacks, [frozenset(each.nonzero().flatten().tolist()) for each in marks]

    def follow(self, earlier: WholeSteps) -> None:
        """Takes what an earlier launch has seen of the same job."""
        self.broken_off.update(earlier.broken_off)
        self._seen = earlier._seen | self._seen
        self._restored = earlier._restored | self._restored

    def judge(self) -> Iterator[Violation]:
        """Yields the workers of which a part of a step counts."""
        seen = {clock: of for clock, (rollbacks, of) in self._seen.items() if not self._is_undone(clock, rollbacks)}
        unseen = max(seen, default=0) - len(seen)
        counts: list[Counter[int]] = []
        for of in seen.values():
            counts = counts or [Counter() for _ in of]
            for count, rows in zip(counts, of, strict=True):
                count.update(rows)
        for row in sorted({row for count in counts for row in count}):
            each = [count[row] for count in counts]
            if max(each) - min(each) > unseen + self.broken_off[row]:
                where = {"row": row, "unseen": unseen, "broken off": self.broken_off[row]}
                yield Violation("half a step", f"its steps are in {each} updates of the buckets", where)

    def _is_undone(self, clock: int, rollbacks: int) -> bool:
        return any(number > rollbacks and to < clock for number, to in self._restored.items())


def marks_of(before: torch.Tensor, view: torch.Tensor, column: int) -> torch.Tensor:
    """Returns what was added to one column between two views: [buckets, rows]."""
    return view[:, :, column] - before[:, :, column]
