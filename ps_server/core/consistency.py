"""The update rule of one bucket or table: it stages contributions, orders their application and admits pulls.

Three verbs, and the rule between them:

    stage   takes a worker's contribution for its next clock; a repeat is known by its clock and not taken again
    next    returns the next operation: add a staged contribution to the open update, or step the optimizer
    admits  says whether a pull at some clock may be answered, and if not, which workers it waits for

With aggregation (sync), update number r is one step with the mean of one contribution of each live worker, added in
rank order: one that comes early is held back, so that two runs add in the same order and agree to the bit. Without it
(ssp, async), every contribution is an update of its own, in order of arrival.

A contribution once staged is never dropped: if its worker dies before the update is complete, it is in the mean.

**With a quorum** (`QuorumRule`) an update waits for some of the live workers. A contribution that comes late counts in
the next update:

    next    adds staged contributions in order of arrival, and steps once enough live workers are in the open update. A
            late contribution is the first of the next update. A worker is in an update at most once: while its last
            contribution is in the open update, its push for the next clock waits for the following update
    admits  answers a worker's pull once an update was made after the weights with which the worker computed its last
            gradient. As a rule that update has the worker's contribution. If the contribution came late, an update was
            made without it. So each step of a worker begins with newer weights, and no worker waits for a late one

A worker's clock counts its own contributions, and a bucket's version its updates: no two of these need be equal. Each
bucket decides by itself: the same push may be in different updates on different buckets.

No worker waits for ever. Suppose that all live workers wait, worker W on bucket B. If the open update of B lacks a live
worker V, an earlier update of B has V's contribution. No update of B was made since W fetched the weights for its
gradient, or W would not wait. So V's gradient is older than W's. V waits on a bucket, too. If the open update of that
bucket lacks a worker, the gradient of that worker is older still, and so on. There are only as many gradients as
workers, so this ends at a bucket whose open update lacks no live worker. That update is made, and its workers go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

from ps_protocol.batches import DataRange
from ps_protocol.errors import Backlogged, OutOfOrder
from ps_protocol.modes import Consistency
from ps_server.core.snapshot import VersionRange

T = TypeVar("T")

_RANK, _CLOCK = attrgetter("rank"), attrgetter("clock")


@dataclass(frozen=True)
class Live:
    """A live worker, as one shard counts it.

    incarnation: the worker's incarnation
    start:       the clock from which the shard counts it: only updates after this one wait for its contribution
    key:         the lease key, which the worker sends with each call
    """

    incarnation: int
    start: int
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Add(Generic[T]):
    """Add this contribution to the open update. ranges: the leased data that its step used"""

    rank: int
    clock: int
    contribution: T
    ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class Step:
    """The open update is complete: step the optimizer with the mean over `ranks`, in the order in which they were
    added.

    staleness: the highest staleness of a contribution
    clocks:    the clock of each contribution, in the same order
    late:      ranks whose contribution came after an update without it; only with a quorum
    """

    ranks: tuple[int, ...]
    staleness: int
    clocks: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class Admission:
    """Whether a pull may be answered.

    waiting_for: the ranks that the pull waits for; empty: it waits for the shard
    reason:      why the pull waits, as text
    """

    admitted: bool
    waiting_for: tuple[int, ...] = ()
    reason: str = ""


ADMITTED = Admission(True)
NOT_INITIALISED = Admission(False, (0,), "rank 0 has not sent the initial weights yet")
NOT_BEGUN = Admission(False, (0,), "rank 0 has not sent all rows yet that the table begins with")
OWN_PUSH_APPLIED = Admission(False, (), "its own push is being applied")
ALL_STAGED_APPLIED = Admission(False, (), "what was staged when it came is being applied")


def own_push_missing(rank: int, clock: int) -> Admission:
    """Returns the admission of a pull at `clock` whose worker has not pushed this clock yet."""
    return Admission(False, (rank,), f"its own push of clock {clock} has not come")


@dataclass
class UpdateRule(Generic[T]):
    """The protocol state of one bucket. `T` is the type of a contribution; this class only passes it on.

    roster:  the live workers by rank, shared by all buckets of the job on this shard
    staged:  by rank, the highest staged clock: one number a worker is all that exactly-once needs
    pushed:  by rank, the highest clock of a contribution: as `staged`, but without clocks at which the worker joined
    applied: by rank, the highest clock whose update is in the weights
    brought: by rank, the highest clock of a contribution in the weights: as `applied`, but without clocks of a join
    waiting: by rank, the contribution that is staged and not added yet
    added:   the contributions in the open update
    version: the number of updates applied
    awaits:  the admission of a pull before the bucket is initialised
    mixes_clocks: an update may have contributions of several clocks. Their workers go on, and overwrite their memory,
                  before the update is made
    """

    mixes_clocks: ClassVar[bool] = False

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
        """Counts a worker from `clock` on: its steps up to this clock count as made."""
        self.staged[rank] = self.applied[rank] = clock

    def unapplied(self) -> list[DataRange]:
        """Returns the leased data of contributions that are staged and not in the weights yet."""
        waiting = [used for add in self.waiting.values() for used in add.ranges]
        return waiting + [used for add in self.added for used in add.ranges]

    def owed(self) -> dict[int, int]:
        """Returns, by rank, the clock up to which contributions are staged and not applied. A pull that wants all of
        them waits.

        With aggregation it is empty: staged contributions belong to updates that wait for other workers.
        """
        return {} if self.consistency.aggregate else self._staged_only()

    def _staged_only(self) -> dict[int, int]:
        added = {add.rank: add.clock for add in self.added}
        return added | {add.rank: add.clock for add in self.waiting.values()}

    def has(self, owed: Mapping[int, int]) -> bool:
        """Whether the weights include all contributions of `owed`: the result of an earlier call of `owed()`."""
        if not all(self.applied.get(rank, 0) >= clock for rank, clock in owed.items()):
            return False
        # When a rank joins again, all its steps count as applied, although the open update may still hold one of them.
        staged = [(add.rank, add.clock) for add in self.added]
        staged += [(add.rank, add.clock) for add in self.waiting.values()]
        return all(clock > owed.get(rank, 0) for rank, clock in staged)

    def frontier(self) -> int:
        """Returns the highest clock that any worker, live or gone, has reached on this bucket."""
        return max([self.version if self.consistency.aggregate else 0, *self.staged.values()])

    def is_repeat(self, rank: int, clock: int) -> bool:
        """Whether a push was staged before. Raises OutOfOrder or Backlogged if it cannot be staged now."""
        if self.was_staged(rank, clock):
            return True
        if rank in self.waiting or rank in map(_RANK, self.added):
            raise Backlogged(f"worker {rank}: the push of clock {clock - 1} is not applied yet")
        return False

    def is_awaited(self, rank: int, clock: int) -> bool:
        """Whether this contribution would be the next to be added. If so, it must not be refused for lack of room,
        because all workers wait for it. Contributions that come after it in order may be refused.
        """
        if not self.consistency.aggregate:
            return False
        if clock > self.version + 1:
            # All workers may have joined at a later clock than the bucket's version. Then no worker contributes to the
            # updates in between. They are made empty once a first push is staged: only that push is awaited.
            return not (self.waiting or self.added or any(self._is_needed(rank) for rank in self.roster))
        taken = {add.rank for add in self.added}
        before = (other for other in self.waiting.keys() | self.roster.keys() if other < rank and other not in taken)
        return not any(self._is_next(other) or self._is_needed(other) for other in before)

    def stage(self, rank: int, clock: int, contribution: T, ranges: tuple[DataRange, ...] = ()) -> None:
        """Stages a contribution for which `is_repeat` has returned False."""
        self.staged[rank] = self.pushed[rank] = clock
        self.waiting[rank] = Add(rank, clock, contribution, ranges)

    def next(self) -> Add[T] | Step | None:
        """Returns the next operation; None until another push is staged or the roster changes.

        The caller carries it out, then calls `done` with it. Returns None before the bucket is initialised.
        """
        if not self.initialised:
            return None
        if not self.consistency.aggregate:
            if self.added:
                first = self.added[0]
                return Step((first.rank,), self._staleness(first), (first.clock,))
            return next(iter(self.waiting.values()), None)
        if not self.waiting and not self.added:
            return None
        taken = {*map(_RANK, self.added)}
        for rank in sorted(self.waiting.keys() | self.roster.keys()):
            # A worker that joins may stage its first clock while an earlier update is open: that update does not count
            # it.
            if self._is_next(rank):
                return self.waiting[rank]
            if rank not in taken and self._is_needed(rank):
                return None
        # The waiting contributions are for a later update, and no worker is left for this one: it is empty.
        return self._step() if self.added or self.waiting else None

    def completes(self, work: Add[T]) -> bool:
        """Whether `work` completes the open update: with it, no live worker is missing.

        work: the contribution that `next` returned; it is not added yet
        """
        if not self.consistency.aggregate:
            return True
        taken = {add.rank for add in self.added} | {work.rank}
        others = (rank for rank in self.waiting.keys() | self.roster.keys() if rank != work.rank)
        return not any(self._is_next(rank) or (rank not in taken and self._is_needed(rank)) for rank in others)

    def done(self, work: Add[T] | Step) -> None:
        """Records that the operation that `next` returned has been carried out."""
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

    def awaits_draft(self, rank: int, clock: int) -> bool:
        """Whether the next update waits for this draft. If so, the draft becomes the open sum, and its bytes are not
        counted in the budget.
        """
        return self.is_awaited(rank, clock)

    @property
    def drafts_take_room(self) -> bool:
        """Whether drafts and contributions share one budget.

        In sync they do: both wait for other workers, and an awaited one is always taken. In the other modes no
        contribution is awaited. A draft waits only for its own worker there, and must not keep a contribution out.
        """
        return self.consistency.aggregate

    def grace(self) -> float | None:
        """Returns for how many seconds an open update that has its quorum waits for further workers; None: it does not
        wait. See QuorumRule.
        """
        return None

    def end_grace(self, version: int) -> None:
        """Makes the update after `version` stop waiting for workers that it does not need."""

    def close(self) -> None:
        """Allows staged contributions to be applied while no push is accepted.

        In sync an update still waits for all its workers: with fewer of them it would be another update.
        """

    def is_at(self, clock: int) -> bool:
        """Whether a snapshot at `clock`, which is the same for all workers, must be taken now."""
        return self.version == clock

    def has_passed(self, clock: int) -> bool:
        """Whether it is too late to take a snapshot at `clock`."""
        return self.version >= clock

    def releases(self, work: Add[T] | Step) -> bool:
        """Whether waiting pulls may be admitted after this operation."""
        return isinstance(work, Step)

    def sent(self, rank: int, clock: int) -> None:
        """Records that a worker's pull at `clock` is answered with the current version; see QuorumRule."""

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns an admission for each pull, which is a rank and a clock: the one rule of sync, ssp and async.

        The worker's own updates up to `clock` must be applied, and those of every other live worker up to clock -
        max_staleness (Ho et al., NIPS 2013). Only workers in the roster are waited for.

        What the pulls of one clock have in common is computed once. Otherwise a push would cost the square of the
        number of workers.
        """
        if not self.initialised:
            return [self.awaits for _ in pulls]
        late_at: dict[int, set[int]] = {}
        waits: dict[int, Admission] = {}
        found = []
        for rank, clock in pulls:
            if clock not in late_at:
                late_at[clock] = self._late(clock)
            late, is_applied = late_at[clock], self.applied.get(rank, 0) >= clock
            if not is_applied and self.staged.get(rank, 0) < clock:
                found.append(own_push_missing(rank, clock))
            elif len(late) > (rank in late):
                if clock not in waits:
                    waits[clock] = self._waits(clock, late)
                found.append(waits[clock])
            else:
                found.append(ADMITTED if is_applied else OWN_PUSH_APPLIED)
        return found

    def restore(self, version: int, clocks: Mapping[int, int], pushed: Mapping[int, int] | None = None) -> None:
        """Continues from a snapshot: nothing is staged, and all pushes up to its clocks count as staged.

        pushed: by rank, the last clock that the rank has pushed, if the snapshot's clock is one of a join; see
                `joined_at`
        """
        self.initialised = True
        self.version = version
        self.staged, self.applied = dict(clocks), dict(clocks)
        self.pushed = {**clocks, **(pushed or {})}
        self.brought = dict(self.pushed)

    def clocks(self) -> dict[int, int]:
        """Returns the applied clock of each live worker, by rank."""
        return {rank: self.applied.get(rank, 0) for rank in self.roster}

    def versions(self) -> tuple[int, int]:
        """Returns the lowest and the highest version of the bucket."""
        return self.version, self.version

    def extent(self) -> VersionRange:
        """Returns the versions and clocks of a snapshot that would be taken now, also of workers that are gone."""
        return VersionRange(*self.versions(), dict(self.applied))

    def joined_at(self) -> dict[int, int]:
        """Returns the last pushed clock of each rank whose clock in a snapshot comes from a join, and not from a
        push.
        """
        clocks = self.extent().clocks
        pushed = {rank: min(clock, self.brought.get(rank, 0)) for rank, clock in clocks.items()}
        return {rank: clock for rank, clock in pushed.items() if clock != clocks[rank]}

    def _is_next(self, rank: int) -> bool:
        """Whether this worker's staged contribution belongs to the open update."""
        return rank in self.waiting and self.waiting[rank].clock <= self.version + 1

    def _is_needed(self, rank: int) -> bool:
        """Whether the open update waits for this worker."""
        live = self.roster.get(rank)
        return live is not None and live.start <= self.version and self.staged.get(rank, 0) <= self.version

    def _step(self) -> Step:
        return Step(tuple(map(_RANK, self.added)), 0, tuple(map(_CLOCK, self.added)))

    def was_staged(self, rank: int, clock: int) -> bool:
        """Whether a push was staged before. Raises OutOfOrder if it skips a clock."""
        staged = self.staged.get(rank, 0)
        if clock > staged + 1:
            raise OutOfOrder(f"worker {rank} pushed clock {clock} where {staged + 1} comes next")
        return clock <= staged

    def _late(self, clock: int) -> set[int]:
        """Returns the live workers whose updates a pull at this clock needs and the weights lack."""
        bound = self.consistency.max_staleness
        return set() if bound is None else {rank for rank in self.roster if self.applied.get(rank, 0) < clock - bound}

    def _waits(self, clock: int, late: set[int]) -> Admission:
        """Returns why a pull at this clock waits, if its own push is staged."""
        needed = clock - (self.consistency.max_staleness or 0)
        # A worker whose push is staged is not to blame: it waits in the same update, or for the shard.
        blamed = tuple(sorted(rank for rank in late if self.staged.get(rank, 0) < needed))
        if not blamed:
            return Admission(False, (), f"clock {needed} of every live worker has come and is being applied")
        behind = ", ".join(f"worker {rank} is at clock {self.staged.get(rank, 0)}" for rank in blamed[:8])
        return Admission(False, blamed, f"clock {needed} of every live worker is needed; {behind}")

    def _staleness(self, add: Add[None]) -> int:
        """Returns the staleness of a gradient: how many clocks its weights lay behind the fastest worker's."""
        return max(0, max(self.applied.values(), default=0) - (add.clock - 1))


@dataclass
class QuorumRule(UpdateRule[T]):
    """The update rule of one bucket in sync with a quorum.

    weights_of: by rank, the lowest version of the weights with which the worker may compute its next gradient
    cleared:    by rank, the highest clock at which it may pull
    lags:       for each added contribution, how many updates were made since the weights of its gradient
    grace_over: the open update waits for its quorum only
    closing:    no push is accepted for now: the open update is made with the contributions that it has
    """

    mixes_clocks: ClassVar[bool] = True

    weights_of: dict[int, int] = field(default_factory=dict)
    cleared: dict[int, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    grace_over: bool = False
    closing: bool = False

    def add_worker(self, rank: int, clock: int) -> None:
        """Counts a worker from `clock` on: its steps up to this clock count as made."""
        super().add_worker(rank, clock)
        self.cleared[rank], self.weights_of[rank] = clock, self.version

    def owed(self) -> dict[int, int]:
        """As UpdateRule.owed. It also closes the open update with the staged contributions: no further push may
        come.
        """
        self.close()
        return self._staged_only()

    def frontier(self) -> int:
        """Returns the highest clock that any worker, live or gone, has reached on this bucket."""
        return max(self.staged.values(), default=0)

    def is_repeat(self, rank: int, clock: int) -> bool:
        """Whether a push was staged before. Raises OutOfOrder or Backlogged if it cannot be staged now."""
        if self.was_staged(rank, clock):
            return True
        if rank in self.waiting:
            raise Backlogged(f"worker {rank}: the push of clock {clock - 1} is in no update yet")
        return False

    def is_awaited(self, rank: int, clock: int) -> bool:
        """Whether this contribution would be the next to be added: all waiting ones belong to a later update."""
        taken = self._taken()
        return rank not in taken and self.waiting.keys() <= taken

    def next(self) -> Add[T] | Step | None:
        """Returns the next operation; None until another push is staged, the roster changes or the grace is over."""
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
        """Returns False: a worker goes on, and overwrites its memory, before the update with its
        contribution is made.
        """
        return False

    @property
    def drafts_take_room(self) -> bool:
        """Returns False: most staged contributions are added without waiting for others."""
        return False

    def awaits_draft(self, rank: int, clock: int) -> bool:
        """Returns False: no contribution is awaited. Each is added when its worker's step has ended."""
        return False

    def grace(self) -> float | None:
        """Returns for how many seconds the open update, which has its quorum, waits for the others; None if it does not
        wait.
        """
        waits = self.initialised and self.next() is None and bool(self.added) and self._has_quorum()
        return self.consistency.quorum_grace if waits else None

    def end_grace(self, version: int) -> None:
        """Makes the update after `version` wait for its quorum only."""
        self.grace_over = self.grace_over or version == self.version

    def close(self) -> None:
        """Applies the staged contributions while no push is accepted, even with fewer workers than the quorum."""
        self.closing = bool(self.added or self.waiting)

    def done(self, work: Add[T] | Step) -> None:
        """Records that the operation that `next` returned has been carried out."""
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
        """Whether waiting pulls may be admitted after this operation: a step, or the addition of a late
        contribution.
        """
        return isinstance(work, Step) or self.lags[-1] > 0

    def sent(self, rank: int, clock: int) -> None:
        """Records that a worker's pull is answered with the current version, which may be later than the one that
        admitted it.
        """
        if clock == self.staged.get(rank, 0):  # otherwise the worker has computed its next gradient already
            self.weights_of[rank] = self.version

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns an admission for each pull, which is a rank and a clock.

        A pull is admitted when its worker's contribution is in the weights; or when it is in the open update, and an
        update was made since the weights at which its gradient was taken.
        """
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
        """Returns why a pull waits although its worker's push is staged. The reason is the same for all such pulls."""
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
        """Admits a worker's pulls up to `clock`: the current version is new for it.

        A worker that has joined again since this clock is not affected: it was cleared for a later one.
        """
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
    """Returns the rule of a new bucket or table."""
    kind: type[UpdateRule[T]] = QuorumRule if consistency.mixes_clocks else UpdateRule
    return kind(consistency, roster, initialised)
