"""One bucket's protocol in sync with a quorum: an update waits for some of the live workers, and the late count next.

next    adds what is staged in order of arrival, and steps once enough live workers are in the open update. A late
        push is the first in the next one. A worker is in an update once: what it pushes for its next clock, while its
        last contribution is in the open update, waits for the one after
admits  answers a pull when an update has been made since the weights that its worker's gradient was taken at: the
        worker's own, or, for one that came late, one without it. So each step of a worker meets newer weights, and none
        waits for a late one

A worker's clock counts its own contributions, and a bucket's version its updates: no two of these need be equal. Each
bucket decides by itself: the same push may be in different updates on different buckets.

No worker waits for ever. Say that all live workers wait, each on some bucket. If a bucket's open update lacks one of
them, that one's push is in an update there already, and came before the gradient was taken of each worker that waits on
that bucket. Going from each bucket to a worker that it lacks, and to the bucket on which that one waits, gradients
would have to be older and older; there are as many as workers. So some bucket's open update lacks none, and is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import Backlogged
from ps_protocol.modes import Consistency
from ps_server.core.consistency import (
    ADMITTED,
    Add,
    Admission,
    Live,
    Step,
    T,
    UpdateRule,
    own_push_missing,
    was_staged,
)


@dataclass
class QuorumRule(UpdateRule[T]):
    """The state of one bucket.

    weights_of: by rank, the version of the weights that its next gradient is taken at, at least
    cleared:    by rank, the highest clock at which it may pull
    lags:       of what is added, how many updates were made since its weights
    grace_over: the open update waits no longer than for its quorum
    closing:    no push is taken for now: the open update is made with what it has
    """

    weights_of: dict[int, int] = field(default_factory=dict)
    cleared: dict[int, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    grace_over: bool = False
    closing: bool = False

    def add_worker(self, rank: int, clock: int) -> None:
        """Counts a worker from `clock` on: what came before counts as done by it."""
        super().add_worker(rank, clock)
        self.cleared[rank], self.weights_of[rank] = clock, self.version

    def owed(self) -> dict[int, int]:
        """Returns what is staged and not in the weights, and has updates made with that: there may be no other push."""
        self.close()
        return self._staged_only()

    def frontier(self) -> int:
        """Returns the highest clock that any worker has reached here, live or not."""
        return max(self.staged.values(), default=0)

    def is_repeat(self, rank: int, clock: int) -> bool:
        """Whether a push was staged before. Raises OutOfOrder or Backlogged if it cannot be staged now."""
        if was_staged(self, rank, clock):
            return True
        if rank in self.waiting:
            raise Backlogged(f"worker {rank}: the push of clock {clock - 1} is in no update yet")
        return False

    def is_awaited(self, rank: int, clock: int) -> bool:
        """Whether this contribution, once staged, is the next to be added: what waits here waits for a later update."""
        taken = self._taken()
        return rank not in taken and self.waiting.keys() <= taken

    def next(self) -> Add[T] | Step | None:
        """Returns what to do now; None when nothing can be done before something is staged or the roster changes, or
        the grace is over."""
        if not self.initialised:
            return None
        taken = self._taken()
        for rank, add in self.waiting.items():
            if rank not in taken:
                return add
        if not self.added or not (self._has_all() or (self._has_quorum() and self._is_over())):
            return None
        late = tuple(add.rank for add, lag in zip(self.added, self.lags, strict=True) if lag)
        clocks = tuple(add.clock for add in self.added)
        return Step(tuple(add.rank for add in self.added), max(self.lags), clocks, late)

    def completes(self, work: Add[T]) -> bool:
        """Returns False: a worker goes on, and writes its memory, while what it has contributed is here."""
        return False

    def waits_for_grace(self) -> bool:
        """Whether the open update has its quorum, and is held back for those who may still come."""
        return self.initialised and self.next() is None and bool(self.added) and self._has_quorum()

    def end_grace(self, version: int) -> None:
        """Has the open update wait for no more than its quorum, if it is the one after `version`."""
        self.grace_over = self.grace_over or version == self.version

    def close(self) -> None:
        """Has updates made with what is staged, although no push is taken for now: fewer than the quorum will do."""
        self.closing = bool(self.added or self.waiting)

    def done(self, work: Add[T] | Step) -> None:
        """Records that what `next` said has been done."""
        if isinstance(work, Add):
            lag = self.version - self.weights_of.get(work.rank, self.version)
            self.lags.append(lag)
            if lag:
                self._clear(work.rank, work.clock)
            super().done(work)
            return
        added = list(self.added)
        super().done(work)
        for add in added:
            self._clear(add.rank, add.clock)
        self.lags.clear()
        self.grace_over, self.closing = False, self.closing and bool(self.waiting)

    def releases(self, work: Add[T] | Step) -> bool:
        """Whether pulls may be answered now that this has been done: after a late one, its worker's."""
        return isinstance(work, Step) or self.lags[-1] > 0

    def sent(self, rank: int, clock: int) -> None:
        """Notes that a worker gets this version: updates may have been made since it was cleared."""
        if clock == self.staged.get(rank, 0):  # otherwise its next gradient is taken already
            self.weights_of[rank] = self.version

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns whether each pull, a rank and a clock, may be answered: its contribution is in, or in the open update
        and an update was made since the weights that it was taken at."""
        if not self.initialised:
            return [self.awaits for _ in pulls]
        waits = self._waits_for_all()
        return [
            ADMITTED
            if self.cleared.get(rank, 0) >= clock
            else own_push_missing(rank, clock)
            if self.staged.get(rank, 0) < clock
            else waits
            for rank, clock in pulls
        ]

    def _waits_for_all(self) -> Admission:
        """Returns what a pull waits for whose own push is staged."""
        here = self._taken() | self.waiting.keys()
        missing = tuple(sorted(self.roster.keys() - here))
        come, needed = len(self.roster) - len(missing), self.consistency.needed(len(self.roster))
        if come < needed:
            return Admission(False, missing, f"{come} of the {needed} live workers that an update waits for have come")
        if missing and not self._is_over():
            return Admission(False, missing, f"{come} live workers have come, and the grace for the others is not over")
        return Admission(False, (), f"an update with {come} live workers is being applied")

    def restore(self, version: int, clocks: Mapping[int, int], pushed: Mapping[int, int] | None = None) -> None:
        """Continues from a snapshot; see UpdateRule.restore."""
        super().restore(version, clocks, pushed)
        self.cleared, self.weights_of = dict(clocks), {}

    def _clear(self, rank: int, clock: int) -> None:
        """Lets a worker go on from this version. One that joined since has other weights, and a later clock."""
        if clock > self.cleared.get(rank, 0):
            self.cleared[rank], self.weights_of[rank] = clock, self.version

    def _taken(self) -> set[int]:
        return {add.rank for add in self.added}

    def _has_all(self) -> bool:
        return self.closing or self.roster.keys() <= self._taken()

    def _has_quorum(self) -> bool:
        come = len(self.roster.keys() & self._taken())
        return come >= self.consistency.needed(len(self.roster))

    def _is_over(self) -> bool:
        return self.grace_over or not self.consistency.quorum_grace


def update_rule(consistency: Consistency, roster: Mapping[int, Live], initialised: bool = False) -> UpdateRule[T]:
    """Returns the rule of a bucket or a table, at its beginning."""
    kind: type[UpdateRule[T]] = UpdateRule if consistency.quorum is None else QuorumRule
    return kind(consistency, roster, initialised)
