"""One bucket's protocol: what may be staged, what is applied next, and which pull is admitted.

Three verbs, and the rule between them:

    stage   takes a worker's contribution for its next clock; a repeat is known by its clock and not taken again
    next    says what to do with what is staged: add a contribution to the open update, or step the optimizer
    admits  says whether a pull at some clock may be answered, and if not, which workers it waits for

With aggregation (sync), update number r is one step with the mean of one contribution of each live worker, added in
rank order: one that comes early is held back, so that two runs add in the same order and agree to the bit. Without it
(ssp, async), every contribution is an update of its own, in order of arrival. With a quorum see core/quorum.py.

A contribution once staged is never dropped: if its worker dies before the update is complete, it is in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ps_protocol.data import DataRange
from ps_protocol.errors import Backlogged, OutOfOrder
from ps_protocol.modes import Consistency
from ps_server.core.snapshot import VersionRange

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """A live worker as a shard counts it: updates after clock `start` need it, and `key` proves its calls."""

    incarnation: int
    start: int
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Add(Generic[T]):
    """Add this contribution to the open update. `ranges`: the leased data that its step used."""

    rank: int
    clock: int
    contribution: T
    ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class Step:
    """The open update is complete: step the optimizer with the mean over `ranks`, in the order they were added.

    staleness: of the stalest contribution
    clocks:    of each contribution
    late:      ranks whose contribution came after an update without it; only with a quorum
    """

    ranks: tuple[int, ...]
    staleness: int
    clocks: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class Admission:
    """Whether a pull is admitted; if not, which ranks it waits for (none: for the shard), and why in words."""

    admitted: bool
    waiting_for: tuple[int, ...] = ()
    reason: str = ""


ADMITTED = Admission(True)
NOT_INITIALISED = Admission(False, (0,), "rank 0 has not sent the initial weights yet")
NOT_BEGUN = Admission(False, (0,), "rank 0 has not sent all rows yet that the table begins with")
OWN_PUSH_APPLIED = Admission(False, (), "its own push is being applied")
ALL_STAGED_APPLIED = Admission(False, (), "what was staged when it came is being applied")


def own_push_missing(rank: int, clock: int) -> Admission:
    """Returns the admission of a pull at a clock whose push has not come."""
    return Admission(False, (rank,), f"its own push of clock {clock} has not come")


@dataclass
class UpdateRule(Generic[T]):
    """The state of one bucket. `T` is what a contribution is; this class only passes it on.

    roster:  the live workers by rank, shared by all buckets of the job on this shard
    staged:  by rank, the highest clock taken: all that exactly-once needs, one number a worker
    pushed:  by rank, the highest clock of a contribution: `staged` without the clocks that were joined at
    applied: by rank, the highest clock whose update is in the weights
    brought: by rank, the highest clock of a contribution that is in the weights: `applied` without those joined at
    version: updates applied
    awaits:  what a pull waits for before it is initialised
    """

    consistency: Consistency
    roster: Mapping[int, Live]
    initialised: bool = False
    version: int = 0
    staged: dict[int, int] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    brought: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, Add[T]] = field(default_factory=dict)
    added: list[Add[None]] = field(default_factory=list)
    awaits: Admission = NOT_INITIALISED

    def add_worker(self, rank: int, clock: int) -> None:
        """Counts a worker from `clock` on: what came before counts as done by it."""
        self.staged[rank] = self.applied[rank] = clock

    def unapplied(self) -> list[DataRange]:
        """Returns the leased data of contributions that are staged and not in the weights yet."""
        waiting = [used for add in self.waiting.values() for used in add.ranges]
        return waiting + [used for add in self.added for used in add.ranges]

    def owed(self) -> dict[int, int]:
        """Returns what is staged and not in the weights, for a pull that wants all of it: a clock by rank.

        With aggregation nothing: what is staged belongs to updates that wait for other workers.
        """
        return {} if self.consistency.aggregate else self._staged_only()

    def _staged_only(self) -> dict[int, int]:
        added = {add.rank: add.clock for add in self.added}
        return added | {add.rank: add.clock for add in self.waiting.values()}

    def has(self, owed: Mapping[int, int]) -> bool:
        """Whether all that was `owed` at some time is in the weights."""
        return all(self.applied.get(rank, 0) >= clock for rank, clock in owed.items())

    def frontier(self) -> int:
        """Returns the highest clock that any worker has reached here, live or not."""
        return max([self.version if self.consistency.aggregate else 0, *self.staged.values()])

    def is_repeat(self, rank: int, clock: int) -> bool:
        """Whether a push was staged before. Raises OutOfOrder or Backlogged if it cannot be staged now."""
        if was_staged(self, rank, clock):
            return True
        if rank in self.waiting or any(add.rank == rank for add in self.added):
            raise Backlogged(f"worker {rank}: the push of clock {clock - 1} is not applied yet")
        return False

    def is_awaited(self, rank: int, clock: int) -> bool:
        """Whether this contribution, once staged, is the next to be added. Kept back, it would stop all workers; those
        behind it can be kept back until it is in."""
        if not self.consistency.aggregate:
            return False
        if clock > self.version + 1:
            # Where all workers have joined further on than the bucket is, none will bring the updates before: the
            # first contribution makes them empty ones, and the others wait for it.
            return not (self.waiting or self.added or any(self._is_needed(rank) for rank in self.roster))
        taken = {add.rank for add in self.added}
        before = (other for other in self.waiting.keys() | self.roster.keys() if other < rank and other not in taken)
        return not any(self._is_next(other) or self._is_needed(other) for other in before)

    def stage(self, rank: int, clock: int, contribution: T, ranges: tuple[DataRange, ...] = ()) -> None:
        """Takes a contribution that `is_repeat` let pass."""
        self.staged[rank] = self.pushed[rank] = clock
        self.waiting[rank] = Add(rank, clock, contribution, ranges)

    def next(self) -> Add[T] | Step | None:
        """Returns what to do now; None when nothing can be done before something is staged or the roster changes.

        Do it, then call `done` with it. Nothing is added while the bucket is not initialised.
        """
        if not self.initialised:
            return None
        if not self.consistency.aggregate:
            if self.added:
                first = self.added[0]
                return Step((first.rank,), _staleness(self, first), (first.clock,))
            return next(iter(self.waiting.values()), None)
        if not self.waiting and not self.added:
            return None
        taken = {add.rank for add in self.added}
        for rank in sorted(self.waiting.keys() | self.roster.keys()):
            # A worker that joins may stage its first clock while an earlier update is open here: that one is not its.
            if self._is_next(rank):
                return self.waiting[rank]
            if rank not in taken and self._is_needed(rank):
                return None
        # What waits is for a later update, and no worker is left to bring this one: it is an empty one.
        return self._step() if self.added or self.waiting else None

    def completes(self, work: Add[T]) -> bool:
        """Whether the open update is complete with a contribution that `next` named, as the roster is now."""
        if not self.consistency.aggregate:
            return True
        taken = {add.rank for add in self.added} | {work.rank}
        others = (rank for rank in self.waiting.keys() | self.roster.keys() if rank != work.rank)
        return not any(self._is_next(rank) or (rank not in taken and self._is_needed(rank)) for rank in others)

    def done(self, work: Add[T] | Step) -> None:
        """Records that what `next` said has been done."""
        if isinstance(work, Add):
            del self.waiting[work.rank]
            self.added.append(Add(work.rank, work.clock, None, work.ranges))
            return
        self.version += 1
        for add in self.added:
            # A worker that rejoined may be further on than the contribution that its older incarnation left.
            self.applied[add.rank] = max(add.clock, self.applied.get(add.rank, 0))
            self.brought[add.rank] = max(add.clock, self.brought.get(add.rank, 0))
        self.added.clear()

    def waits_for_grace(self) -> bool:
        """Whether the open update is held back for workers that it does not need; see QuorumRule."""
        return False

    def end_grace(self, version: int) -> None:
        """Has the open update wait no longer for workers that it does not need, if it is the one after `version`."""

    def close(self) -> None:
        """Has what is staged applied although no push is taken for now. What waits for its worker's peers stays: in
        sync, an update without them would be another one."""

    def is_at(self, clock: int) -> bool:
        """Whether a snapshot of a clock, which all workers share, is to be taken now."""
        return self.version == clock

    def has_passed(self, clock: int) -> bool:
        """Whether it is too late to name a clock for a snapshot."""
        return self.version >= clock

    def releases(self, work: Add[T] | Step) -> bool:
        """Whether pulls may be answered now that this has been done."""
        return isinstance(work, Step)

    def sent(self, rank: int, clock: int) -> None:
        """Notes that a live worker gets this version by a pull at `clock`; see QuorumRule."""

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns whether each pull, a rank and a clock, may be answered: the one rule of sync, ssp and async.

        Its own updates up to `clock` must be in, and those of every other live worker up to clock - max_staleness
        (Ho et al., NIPS 2013). The dead are not waited for: only the roster counts.

        What the pulls of one clock have in common is found out once: otherwise a push would cost as much as there are
        workers, squared.
        """
        if not self.initialised:
            return [self.awaits for _ in pulls]
        of_clock: dict[int, tuple[set[int], Admission]] = {}
        found = []
        for rank, clock in pulls:
            if clock not in of_clock:
                late = _late(self, clock)
                of_clock[clock] = late, _waits(self, clock, late)
            late, waits = of_clock[clock]
            is_applied = self.applied.get(rank, 0) >= clock
            if not is_applied and self.staged.get(rank, 0) < clock:
                found.append(own_push_missing(rank, clock))
            elif len(late) > (rank in late):
                found.append(waits)
            else:
                found.append(ADMITTED if is_applied else OWN_PUSH_APPLIED)
        return found

    def restore(self, version: int, clocks: Mapping[int, int], pushed: Mapping[int, int] | None = None) -> None:
        """Continues from a snapshot: nothing is staged, and what its clocks say counts as pushed.

        pushed: by rank, what counts as pushed where its clock does not; see `joined_at`
        """
        self.initialised = True
        self.version = version
        self.staged, self.applied = dict(clocks), dict(clocks)
        self.pushed = {**clocks, **(pushed or {})}
        self.brought = dict(self.pushed)

    def clocks(self) -> dict[int, int]:
        """Returns the clock of each live worker here."""
        return {rank: self.applied.get(rank, 0) for rank in self.roster}

    def versions(self) -> tuple[int, int]:
        """Returns how far it is, at the least and at the most."""
        return self.version, self.version

    def extent(self) -> VersionRange:
        """Returns how far a snapshot is that is taken now, with the clocks of the dead."""
        return VersionRange(*self.versions(), dict(self.applied))

    def joined_at(self) -> dict[int, int]:
        """Returns, by rank, the last clock that it has pushed, where the clock of a snapshot that is taken now is not
        that of a push, but one that it has joined at."""
        clocks = self.extent().clocks
        pushed = {rank: min(clock, self.brought.get(rank, 0)) for rank, clock in clocks.items()}
        return {rank: clock for rank, clock in pushed.items() if clock != clocks[rank]}

    def _is_next(self, rank: int) -> bool:
        """Whether what this worker has staged belongs to the open update."""
        return rank in self.waiting and self.waiting[rank].clock <= self.version + 1

    def _is_needed(self, rank: int) -> bool:
        """Whether the open update waits for this worker."""
        live = self.roster.get(rank)
        return live is not None and live.start <= self.version and self.staged.get(rank, 0) <= self.version

    def _step(self) -> Step:
        return Step(tuple(add.rank for add in self.added), 0, tuple(add.clock for add in self.added))


def was_staged(rule: UpdateRule[Any], rank: int, clock: int) -> bool:
    """Whether a push was staged before. Raises OutOfOrder if it is not the one that comes next either."""
    staged = rule.staged.get(rank, 0)
    if clock > staged + 1:
        raise OutOfOrder(f"worker {rank} pushed clock {clock} where {staged + 1} comes next")
    return clock <= staged


def _late(rule: UpdateRule[Any], clock: int) -> set[int]:
    """Returns the live workers whose updates a pull at this clock needs and has not."""
    bound = rule.consistency.max_staleness
    return set() if bound is None else {rank for rank in rule.roster if rule.applied.get(rank, 0) < clock - bound}


def _waits(rule: UpdateRule[Any], clock: int, late: set[int]) -> Admission:
    """Returns what a pull at this clock waits for, whose own push is staged."""
    needed = clock - (rule.consistency.max_staleness or 0)
    # Those whose push is staged are not late themselves: they wait in the same update, or for the shard.
    blamed = tuple(sorted(rank for rank in late if rule.staged.get(rank, 0) < needed))
    if not blamed:
        return Admission(False, (), f"clock {needed} of every live worker has come and is being applied")
    behind = ", ".join(f"worker {rank} is at clock {rule.staged.get(rank, 0)}" for rank in blamed[:8])
    return Admission(False, blamed, f"clock {needed} of every live worker is needed; {behind}")


def _staleness(rule: UpdateRule[Any], add: Add[None]) -> int:
    """Returns how many clocks the weights that this gradient was taken at lay behind the fastest worker's."""
    return max(0, max(rule.applied.values(), default=0) - (add.clock - 1))
