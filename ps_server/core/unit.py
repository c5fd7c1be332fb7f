"""A unit of a job on one shard: a bucket or a table. What both have in common is written here, once.

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

from ps_protocol.batches import DataRange
from ps_protocol.errors import InvalidRequest
from ps_server.core.budget import StagingRoom
from ps_server.core.commands import PushCommand, Staged, UnitCommand
from ps_server.core.consistency import Add, Admission, Step, UpdateRule
from ps_server.core.data_commits import UNUSED, Committed, DataCommits
from ps_server.core.snapshot import Snapshot

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
