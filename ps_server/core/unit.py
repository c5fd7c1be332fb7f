"""A unit of a job on one shard: what a bucket and a table have in common, and the unit that is a bucket.

    execute    takes a worker's command. A repeat of what was staged changes nothing
    pending    what has come of a worker's next clock, and does not count yet: drafts, assignments, messages of a step
    count      stages a contribution, with the leased data of its step, in place of what is pending
    done       records that what the rule said comes next was done to the weights

A unit's subclass says what its commands are, what is pending, and how its weights are saved. What a mode asks for is
the rule's to say (consistency.py), and how many bytes may wait the room's (budget.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from ps_protocol.batches import DataRange
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.layout import BucketSpec
from ps_server.core.budget import StagingRoom
from ps_server.core.checking import PushChecker
from ps_server.core.commands import (
    Assign,
    Commit,
    DraftGradient,
    Initialise,
    PushCommand,
    Staged,
    StageGradient,
    UnitCommand,
)
from ps_server.core.consistency import Add, Admission, Step, UpdateRule
from ps_server.core.data_commits import UNUSED, Committed, DataCommits
from ps_server.core.dense import Assignment, DenseBucket, Gradient
from ps_server.core.snapshot import BucketSnapshot, Snapshot

C = TypeVar("C", bound="Contribution")
P = TypeVar("P", bound="Pending")
W = TypeVar("W", bound="Trained[Any]")
Added = TypeVar("Added", contravariant=True)


class Contribution(Protocol):
    """What one worker brings to one update."""

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients, and of what its script has set."""

    @property
    def is_empty(self) -> bool:
        """Whether the contribution has no gradient for this unit."""

    def owned(self) -> Any:
        """Returns the same contribution in memory of this process."""

    def left_out(self) -> Any:
        """Returns the contribution without its gradient: the mean does not count it."""


class Trained(Protocol[Added]):
    """The weights of a unit, with their optimizer. For one caller at a time."""

    def add(self, contribution: Added, is_last: bool = False) -> None:
        """Adds one contribution to the open update. is_last: as far as is known, no other contribution comes"""

    def step(self) -> None:
        """Makes an update with the mean of what was added."""

    def own(self) -> None:
        """Copies what the open update has borrowed from a worker's memory."""

    @property
    def wants_last(self) -> bool:
        """Whether `add` has to know which contribution is the last of its update."""


@dataclass
class Pending:
    """What one worker has sent to one unit for its next clock, and that has no effect yet."""

    clock: int


class Unit(ABC, Generic[C, W, P]):
    """A bucket or a table of a job on this shard. Not thread-safe, but its weights have a lock of their own.

    index:   that of a bucket in the job, or of a table: tables follow the buckets
    rule:    the rule of its updates
    pending: by rank, what is pending for the worker's next clock
    first:   the name, in error texts, of what rank 0 must send before any push
    """

    first: ClassVar[str]

    def __init__(self, index: int, rule: UpdateRule[C], weights: W, room: StagingRoom, data: DataCommits) -> None:
        self.index, self.rule, self.weights = index, rule, weights
        self.pending: dict[int, P] = {}
        self._room, self._data = room, data

    # -- what workers push -----------------------------------------------------------------------------------------

    def execute(self, command: UnitCommand) -> Staged:
        """Carries out a worker's command. If it raises an error that the command documents, nothing is changed."""
        if isinstance(command, PushCommand):
            self._check_begun(command)
            if self.rule.is_repeat(command.worker.rank, command.clock):
                return self._duplicate()
            if self._pending_at(command.worker.rank, command.clock) is None:
                self.drop_pending(command.worker.rank)  # of another clock; before anything is reserved for this one
            return self._push(command)
        if command.worker.rank != 0:
            raise InvalidRequest(f"{self.first} are rank 0's to send, got them from rank {command.worker.rank}")
        return self._begin(command)

    def _check_begun(self, command: PushCommand) -> None:
        """Raises InvalidRequest for a push that may not come before the unit has begun. To a table any may."""

    @abstractmethod
    def _push(self, command: PushCommand) -> Staged:
        """Takes what a worker pushes for its next clock."""

    @abstractmethod
    def _begin(self, command: UnitCommand) -> Staged:
        """Takes what rank 0 sends for the unit to begin with."""

    def _duplicate(self) -> Staged:
        return Staged(self.rule.version, duplicate=True)

    def _kept(self) -> Staged:
        return Staged(self.rule.version, duplicate=False, kept=True)

    def _clock_of(self, command: PushCommand) -> int:
        """Returns the clock of a contribution, where an update may have several; else 0."""
        return command.clock if self.rule.mixes_clocks else 0

    def _reserve(self, command: PushCommand, size: int, borrowed: bool = False, is_here: bool = False) -> None:
        """Reserves the bytes of a contribution. Raises Backlogged if there is no room for them.

        What an update waits for is always taken: all that is staged may be waiting behind it. Where no update waits for
        others (ssp, async), what is staged is applied without others' help, and there is room again.

        is_here: as a draft, whose commit is never refused
        """
        self._room.stage(
            self.index,
            command.worker.rank,
            size,
            command.principal,
            borrowed=borrowed,
            beside_drafts=self.rule.drafts_take_room,
            always=lambda: is_here or self.rule.is_awaited(command.worker.rank, command.clock),
        )

    def _reserve_assigned(self, command: PushCommand, size: int) -> None:
        """Reserves the bytes of what a script has set. Raises Backlogged if there is no room for them."""
        self._room.assign(
            self.index,
            command.worker.rank,
            size,
            command.principal,
            always=lambda: self.rule.is_awaited(command.worker.rank, command.clock),
        )

    def _count(self, command: PushCommand, contribution: C, ranges: Sequence[DataRange]) -> Staged:
        """Stages a contribution for which there is room, in place of what is pending of its worker.

        Raises LimitExceeded, and changes nothing, where the ranges of leased data are in too many pieces.
        """
        rank = command.worker.rank
        use = self._data.use(self.index, ranges) if ranges else UNUSED
        if self.pending.pop(rank, None) is not None:
            self._room.release_pending(self.index, rank)
        if use.spent:
            contribution = contribution.left_out()
        is_empty = contribution.is_empty
        if is_empty:
            self._room.staged.release(self.index, rank)
        self.rule.stage(rank, command.clock, contribution, tuple(ranges))
        return Staged(self.rule.version, duplicate=False, skipped=is_empty, use=use)

    # -- what is pending -------------------------------------------------------------------------------------------

    def _pending_at(self, rank: int, clock: int) -> P | None:
        pending = self.pending.get(rank)
        return pending if pending is not None and pending.clock == clock else None

    def drop_pending(self, rank: int) -> None:
        """Forgets what is pending of a worker."""
        if self.pending.pop(rank, None) is not None:
            self._room.release_pending(self.index, rank)

    def let_go(self, rank: int) -> None:
        """Forgets what is pending of a worker that is gone, and copies what is staged out of its memory."""
        self.drop_pending(rank)
        waiting = self.rule.waiting.get(rank)
        if waiting is not None:
            self.rule.waiting[rank] = replace(waiting, contribution=waiting.contribution.owned())

    # -- what is applied -------------------------------------------------------------------------------------------

    def completes(self, work: Add[C]) -> bool:
        """Whether this contribution completes the open update. False if the weights make no use of it: see
        Trained.wants_last.
        """
        return self.weights.wants_last and self.rule.completes(work)

    def done(self, work: Add[C] | Step) -> None:
        """Records that an operation of the rule has been carried out on the weights."""
        self.rule.done(work)
        if isinstance(work, Add):
            self._room.staged.release(self.index, work.rank)

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(add.contribution.nbytes for add in list(self.rule.waiting.values()))

    # -- pulls and snapshots ---------------------------------------------------------------------------------------

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns for pulls, each a rank and a clock, whether it may be answered."""
        return self.rule.admit_all(pulls)

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer steps this unit."""
        return True

    def committed(self) -> Committed:
        """Returns the leased data in the weights, without that of contributions that are only staged."""
        return self._data.of(self.index, self.rule.unapplied() if self.is_trained else ())

    @abstractmethod
    def snapshot(self, committed: Committed | None = None) -> Snapshot:
        """Returns a copy of the unit as it is, with the leased data in it. The caller keeps it from being stepped."""


# -- the unit that is a bucket -----------------------------------------------------------------------------------------

# The contributions to a bucket are gradients in one piece. A worker may send its gradient before its step as a draft,
# which counts with its commit, and what its script has set as an assignment, which counts with the contribution of its
# clock.


@dataclass
class PendingGradient(Pending):
    """What one worker has sent to one bucket before its next push: it takes effect with that push.

    draft:      the gradient, which may still change
    commit:     the worker has ended its step: the draft counts as soon as it is here
    assignment: what the worker's script has set
    """

    draft: DraftGradient | None = None
    commit: Commit | None = None
    assignment: Assignment | None = None

    def assigned(self, more: Assignment) -> Assignment:
        """Returns these assignments with another one added."""
        return more if self.assignment is None else self.assignment.union(more)


class Bucket(Unit[Gradient, DenseBucket, PendingGradient]):
    """One bucket: its place in the layout, its update rule, its weights, and what each worker has pending."""

    first = "initial values"

    def __init__(
        self,
        spec: BucketSpec,
        rule: UpdateRule[Gradient],
        weights: DenseBucket,
        room: StagingRoom,
        data: DataCommits,
        checker: PushChecker,
    ) -> None:
        super().__init__(spec.index, rule, weights, room, data)
        self.spec, self._checker = spec, checker
        self._told: tuple[int, torch.Tensor] | None = None  # for readers: rank 0's steps by then, and its values

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer steps this bucket."""
        return not self.spec.frozen

    def _begin(self, command: UnitCommand) -> Staged:
        """Takes the first weights, or optimizer state that goes with them and comes before."""
        if not isinstance(command, Initialise):
            raise TypeError(f"expected a command for a bucket, got {type(command).__name__}")
        if self.rule.initialised:
            return self._kept() if self._is_told(command) else self._duplicate()
        if self._pending_at(0, 0) is None:
            self.drop_pending(0)
        pending = self._make_pending(0, 0)
        if isinstance(command.value, Assignment):
            pending.assignment = pending.assigned(command.value)
            return self._kept()
        if pending.assignment is not None:
            self._checker.check_assigned(self.spec, pending.assignment)
            self.weights.assign(pending.assignment)
        self.drop_pending(0)
        self.weights.load(command.value)
        self.rule.initialised = True
        return Staged(self.rule.version, duplicate=False)

    def _is_told(self, command: Initialise) -> bool:
        """Notes what rank 0 has of a bucket that no optimizer steps, unless it is there, or newer: messages may
        overtake one another. Returns whether it was noted.
        """
        value = command.value
        if self.told_bytes(command) and isinstance(value, torch.Tensor):
            self._told = command.clock, value.clone()  # it lies in a message
            return True
        return False

    def told_bytes(self, command: Initialise) -> int:
        """Returns the bytes that a command takes here because it tells readers something newer; 0: it does not."""
        is_newer = command.clock > self.told_version and not self.is_trained
        is_kept = self.rule.initialised and is_newer and isinstance(command.value, torch.Tensor)
        return self.spec.nbytes if is_kept else 0

    def shown(self) -> tuple[int, torch.Tensor]:
        """Returns what readers get, and its version: the updates, or for a bucket that no optimizer steps the steps of
        rank 0. The caller keeps the bucket from being stepped.
        """
        return (self.rule.version, self.weights.flat) if self._told is None else self._told

    @property
    def told_version(self) -> int:
        """The steps of rank 0 after which it has told what readers get; 0: it has told nothing."""
        return 0 if self._told is None else self._told[0]

    def _check_begun(self, command: PushCommand) -> None:
        """Raises InvalidRequest for a push before the initial values. A commit has no gradient, and may come."""
        if not (isinstance(command, Commit) or self.rule.initialised):
            raise InvalidRequest(f"bucket {self.index} has no initial value yet: pull before the first push")

    def _push(self, command: PushCommand) -> Staged:
        match command:
            case StageGradient():
                return self._stage(command)
            case DraftGradient():
                return self._draft(command)
            case Assign():
                return self._assign(command)
            case Commit():
                return self._commit(command)
        raise TypeError(f"expected a command for a bucket, got {type(command).__name__}")

    def _draft(self, command: DraftGradient) -> Staged:
        pending = self._pending_at(command.worker.rank, command.clock)
        if pending is not None and pending.commit is not None:
            return self._stage(_committed(command, pending.commit))
        self._room.draft(
            self.index,
            command.worker.rank,
            command.gradient.nbytes,
            command.principal,
            beside_staged=self.rule.drafts_take_room,
            is_awaited=self.rule.awaits_draft(command.worker.rank, command.clock),
        )
        self._make_pending(command.worker.rank, command.clock).draft = command
        return self._kept()

    def _commit(self, command: Commit) -> Staged:
        pending = self._make_pending(command.worker.rank, command.clock)
        if pending.draft is None:
            pending.commit = command
            return self._kept()
        return self._stage(_committed(pending.draft, command), is_here=True)

    def _assign(self, command: Assign) -> Staged:
        if command.assignment.next is not None:
            self._checker.begin(self.index, command.assignment.next)
        pending = self._pending_at(command.worker.rank, command.clock) or PendingGradient(command.clock)
        assignment = pending.assigned(command.assignment)
        self._reserve_assigned(command, assignment.nbytes)
        self._make_pending(command.worker.rank, command.clock).assignment = assignment
        return self._kept()

    def _stage(self, command: StageGradient, is_here: bool = False) -> Staged:
        """Stages a contribution, with what was assigned for its clock. is_here: as a draft: it is never refused"""
        gradient = command.gradient
        pending = self._pending_at(command.worker.rank, command.clock)
        assignment = None if pending is None else pending.assignment
        if assignment is not None:
            self._checker.check_assigned(self.spec, assignment)
        clock = self._clock_of(command)
        if assignment is not None or clock:
            gradient = replace(gradient, assignment=assignment, clock=clock)
        if gradient.values is not None:
            self._reserve(command, gradient.values.nbytes, gradient.borrowed, is_here)
        try:
            return self._count(command, gradient, command.ranges)
        except LimitExceeded:
            self._room.staged.release(self.index, command.worker.rank)
            raise

    def _make_pending(self, rank: int, clock: int) -> PendingGradient:
        """Returns what is pending of a worker for a clock; what was pending of another one is dropped by now."""
        return self.pending.setdefault(rank, PendingGradient(clock))

    def admit_all(self, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns for each pull, a rank and a clock, whether it may be answered. A frozen bucket only waits for its
        initial value.
        """
        return self.rule.admit_all(pulls if self.is_trained else [(rank, 0) for rank, _ in pulls])

    def snapshot(self, committed: Committed | None = None) -> BucketSnapshot:
        """Returns a copy of the bucket as it is, with the leased data in it. The caller keeps it from being stepped."""
        weights = self.weights
        return BucketSnapshot(
            self.index,
            self.rule.version,
            dict(self.rule.applied),
            weights.flat.clone(),
            weights.copy_state(),
            weights.groups(),
            committed or {},
            None if weights.sent is None else weights.sent.flat.clone(),
            self.rule.joined_at(),
            weights.stage if weights.stage.number else None,
        )

    def restore(self, snapshot: BucketSnapshot, owned: bool = False) -> None:
        """Replaces the bucket's state by a snapshot. owned: the bucket may keep the snapshot's tensors; otherwise it
        copies them
        """
        self.pending.clear()
        values = snapshot.weights, snapshot.state, snapshot.groups
        self.weights.restore(*values, owned, snapshot.sent, snapshot.stage)
        self.rule.restore(snapshot.version, snapshot.clocks, snapshot.pushed)
        if self.weights.stage.number:
            self._checker.begin(self.index, self.weights.stage)


def _committed(draft: DraftGradient, commit: Commit) -> StageGradient:
    """Returns a draft as the contribution that it is with its commit."""
    gradient = replace(draft.gradient, groups=commit.groups, stage=commit.stage)
    return StageGradient(draft.worker, draft.unit, draft.clock, gradient, commit.ranges, principal=draft.principal)
