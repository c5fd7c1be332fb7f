"""Units of a job on one shard: the base class of buckets and tables, and `Bucket`.

    execute    carries out a worker's command. A repeat of a staged push changes nothing
    pending    holds a worker's messages for its next clock that have no effect yet: drafts, assignments, rows
    count      stages a contribution, with the leased data of its step, and drops the worker's pending messages
    done       records that the operation that the rule returned was applied to the weights

A subclass defines its commands, what may be pending, and how its weights are saved. The rule (consistency.py) decides
what a mode demands, and the room (budget.py) how many bytes may wait.
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
    """A worker's contribution to one update."""

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients, and of the assignment of its script."""

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
        """Adds one contribution to the open update. is_last: no other contribution is expected"""

    def step(self) -> None:
        """Makes an update with the mean of the added contributions."""

    def own(self) -> None:
        """Copies the contributions that the open update borrows from workers' memory."""

    @property
    def wants_last(self) -> bool:
        """Whether `add` uses `is_last`: whether the last contribution of an update is added in another way."""


@dataclass
class Pending:
    """A worker's messages to one unit for its next clock, which have no effect yet."""

    clock: int


class Unit(ABC, Generic[C, W, P]):
    """A bucket or a table of a job on this shard. Not thread-safe, but its weights have a lock of their own.

    index:   the bucket's index in the job, or the table's: tables follow the buckets
    is_trained: an optimizer steps it
    rule:    the rule of its updates
    pending: by rank, the messages for the worker's next clock that have no effect yet
    first:   the name, for error texts, of the values that rank 0 must send before any push
    """

    first: ClassVar[str]
    is_trained = True

    def __init__(self, index: int, rule: UpdateRule[C], weights: W, room: StagingRoom, data: DataCommits) -> None:
        self.index, self.rule, self.weights = index, rule, weights
        self.pending: dict[int, P] = {}
        self._room, self._data = room, data

    # -- pushes of workers ----------------------------------------------------------------------------------------

    def execute(self, command: UnitCommand) -> Staged:
        """Carries out a worker's command. If it raises an error that the command documents, nothing is changed."""
        if isinstance(command, PushCommand):
            self._check_begun(command)
            if self.rule.is_repeat(command.worker.rank, command.clock):
                return self._duplicate()
            if self.pending and self._pending_at(command.worker.rank, command.clock) is None:
                # Messages of another clock are dropped before bytes are reserved for this one.
                self.drop_pending(command.worker.rank)
            return self._push(command)
        if command.worker.rank != 0:
            raise InvalidRequest(f"{self.first} are rank 0's to send, got them from rank {command.worker.rank}")
        return self._begin(command)

    def _check_begun(self, command: PushCommand) -> None:
        """Raises InvalidRequest for a push that may not come before the unit has begun. A table accepts any."""

    @abstractmethod
    def _push(self, command: PushCommand) -> Staged:
        """Carries out a worker's push for its next clock."""

    @abstractmethod
    def _begin(self, command: UnitCommand) -> Staged:
        """Carries out a command of rank 0 with the unit's initial content."""

    def _duplicate(self) -> Staged:
        return Staged(self.rule.version, duplicate=True)

    def _kept(self) -> Staged:
        return Staged(self.rule.version, duplicate=False, kept=True)

    def _clock_of(self, command: PushCommand) -> int:
        """Returns the clock of a contribution, if the clocks in an update may differ; else 0."""
        return command.clock if self.rule.mixes_clocks else 0

    def _reserve(self, command: PushCommand, size: int, borrowed: bool = False, is_here: bool = False) -> None:
        """Reserves the bytes of a contribution. Raises Backlogged if there is no room for them.

        A contribution for which an update waits is always accepted, since all staged ones may wait behind it. In ssp
        and async no update waits for other workers: staged contributions are applied by themselves, and there is room
        again.

        is_here: the contribution has come as a draft: its commit is never refused
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
        """Reserves the bytes of a script's assignment. Raises Backlogged if there is no room for them."""
        self._room.assign(
            self.index,
            command.worker.rank,
            size,
            command.principal,
            always=lambda: self.rule.is_awaited(command.worker.rank, command.clock),
        )

    def _count(self, command: PushCommand, contribution: C, ranges: Sequence[DataRange]) -> Staged:
        """Stages a contribution for which bytes are reserved. The worker's pending messages to this unit are dropped.

        Raises LimitExceeded, and changes nothing, if the leased data is in too many separate ranges.
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

    # -- pending messages ------------------------------------------------------------------------------------------

    def _pending_at(self, rank: int, clock: int) -> P | None:
        pending = self.pending.get(rank)
        return pending if pending is not None and pending.clock == clock else None

    def drop_pending(self, rank: int) -> None:
        """Forgets a worker's pending messages."""
        if self.pending.pop(rank, None) is not None:
            self._room.release_pending(self.index, rank)

    def let_go(self, rank: int) -> None:
        """Forgets the pending messages of a worker that has left, and copies its staged contribution out of its
        memory.
        """
        self.drop_pending(rank)
        waiting = self.rule.waiting.get(rank)
        if waiting is not None:
            self.rule.waiting[rank] = replace(waiting, contribution=waiting.contribution.owned())

    # -- applied updates ------------------------------------------------------------------------------------------

    def completes(self, work: Add[C]) -> bool:
        """Whether this contribution completes the open update. Always False if the weights do not use it: see
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

    def committed(self) -> Committed:
        """Returns the committed data as a snapshot records it: that in the weights. Data is committed once its push is
        staged; what is staged and not applied is left out, because the snapshot does not have it.
        """
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
    """A worker's draft and assignment for one bucket. They take effect with its next push.

    draft:      the gradient, which may still change
    commit:     the worker has ended its step: the draft counts as soon as it comes
    assignment: what the worker's script has assigned
    """

    draft: DraftGradient | None = None
    commit: Commit | None = None
    assignment: Assignment | None = None

    def assigned(self, more: Assignment) -> Assignment:
        """Returns these assignments with another one added."""
        return more if self.assignment is None else self.assignment.union(more)


class Bucket(Unit[Gradient, DenseBucket, PendingGradient]):
    """One bucket: its range in the layout, its update rule, its weights, and each worker's pending messages."""

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
        self.is_trained = not spec.frozen
        # What readers get instead of `weights`: the clock at which rank 0 sent its values, and the values.
        self._for_readers: tuple[int, torch.Tensor] | None = None

    def _begin(self, command: UnitCommand) -> Staged:
        """Handles the initial weights, or the initial optimizer state, which comes before them."""
        if not isinstance(command, Initialise):
            raise TypeError(f"expected a command for a bucket, got {type(command).__name__}")
        if self.rule.initialised:
            return self._kept() if self._keeps_for_readers(command) else self._duplicate()
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

    def _keeps_for_readers(self, command: Initialise) -> bool:
        """Keeps rank 0's values of a bucket that no optimizer steps, for readers. Returns whether they were kept.

        Messages may overtake one another: values that are known, or older ones, are not kept.
        """
        value = command.value
        if self.reader_bytes(command) and isinstance(value, torch.Tensor):
            self._for_readers = command.clock, value.clone()  # the value lies in a message's buffer
            return True
        return False

    def reader_bytes(self, command: Initialise) -> int:
        """Returns the bytes that a command takes on this shard because it has newer values for readers; 0: it
        has none.
        """
        is_newer = command.clock > self.reader_version and not self.is_trained
        is_kept = self.rule.initialised and is_newer and isinstance(command.value, torch.Tensor)
        return self.spec.nbytes if is_kept else 0

    def shown(self) -> tuple[int, torch.Tensor]:
        """Returns the version and the values that readers get.

        The version counts updates; for a bucket that no optimizer steps, the steps of rank 0. The caller keeps the
        bucket from being stepped.
        """
        return (self.rule.version, self.weights.flat) if self._for_readers is None else self._for_readers

    @property
    def reader_version(self) -> int:
        """The clock of rank 0 at which it last sent the readers' values of this bucket; 0: it has sent none."""
        return 0 if self._for_readers is None else self._for_readers[0]

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
        """Stages a contribution, with the assignment of its clock.

        is_here: the gradient has come as a draft, so it is never refused
        """
        gradient = command.gradient
        pending = self._pending_at(command.worker.rank, command.clock) if self.pending else None
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
        """Returns the pending messages of a worker for a clock. Those of another clock were dropped before."""
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
