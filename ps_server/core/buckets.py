"""A bucket of a job on one shard: a unit whose contributions are gradients in one piece.

A worker may send its gradient before its step as a draft, which counts with its commit, and what its script has set as
an assignment, which counts with the contribution of its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

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
from ps_server.core.consistency import Admission, UpdateRule
from ps_server.core.data_commits import Committed, DataCommits
from ps_server.core.dense import Assignment, DenseBucket, Gradient
from ps_server.core.snapshot import BucketSnapshot
from ps_server.core.unit import Pending, Unit


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
