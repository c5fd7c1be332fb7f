"""Everything that changes a partition, as values. Two partitions that execute the same commands in the same order are
the same afterwards. What is applied to the weights follows from the commands, and is none itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ps_protocol.batches import DataRange
from ps_protocol.errors import PSError
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.tables import Beginning
from ps_server.core.data_commits import UNUSED, Use
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.membership import Counted
from ps_server.core.snapshot import BucketSnapshot, TableSnapshot
from ps_tables.contributions import RowGradients, RowValues

R = TypeVar("R")


class Command(Generic[R]):
    """A change of a partition. Executing it answers with an R."""


@dataclass(frozen=True)
class Staged:
    """A push is staged, or kept (`kept`) until another makes it count: a draft, an assignment.

    duplicate: it had been staged before
    use:       what became of the leased data that it names
    seed:      of a table that had begun before it was to begin with something else
    """

    version: int
    duplicate: bool
    skipped: bool = False
    use: Use = UNUSED
    kept: bool = False
    seed: int = 0

    @property
    def fresh(self) -> bool:
        """Whether it counts from now on: there may be something to apply."""
        return not (self.duplicate or self.kept)


# -- of the whole partition --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddWorker(Command[Counted]):
    """Counts a worker as live from `clock` on (None: from this shard's frontier on).

    An older incarnation of the rank is fenced at once. Repeating it changes nothing. Raises Fenced for an incarnation
    that was removed already (the coordinator had given up on it): it would never be removed again.
    """

    rank: int
    incarnation: int
    clock: int | None
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class RemoveWorker(Command[None]):
    """Stops counting a worker as live, for good; a newer incarnation is left alone.

    What it had staged stays staged, in memory of this process: from here on the worker may write its own again.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True)
class RestoreSnapshot(Command[None]):
    """Continues from snapshots of all buckets and tables, in a partition that has had no push. No worker is live; those
    of before, up to `last_incarnation`, have to join again.

    owned: the tensors are the partition's to keep; otherwise it copies them
    Raises InvalidRequest if there is a bucket or a table without a snapshot, before anything is changed.
    """

    snapshots: Mapping[int, BucketSnapshot]
    tables: Mapping[int, TableSnapshot] = field(default_factory=dict, kw_only=True)
    last_incarnation: int
    owned: bool = False


@dataclass(frozen=True)
class Close(Command[None]):
    """Ends the partition: from here on every command of a worker raises `reason`, and nothing is reserved any more."""

    reason: PSError


# -- of a worker, for one unit: a bucket or a table --------------------------------------------------------------------


@dataclass(frozen=True)
class UnitCommand(Command[Staged]):
    """What a worker does to one unit. unit: the index of a bucket, or of a table, which come behind the buckets"""

    worker: Identity
    unit: int


@dataclass(frozen=True)
class PushCommand(UnitCommand):
    """What a worker pushes to one unit for its next clock.

    principal: whose bytes they are, where principals are known
    Changes nothing if it raises UnknownWorker, Fenced, OutOfOrder or Backlogged.
    """

    clock: int
    principal: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Initialise(UnitCommand):
    """A bucket's first weights, [numel] in the bucket's dtype; or optimizer state that goes with them and comes before.

    Raises InvalidRequest if they are from another rank than 0. The first weights count, later ones are repeats.
    """

    value: torch.Tensor | Assignment


@dataclass(frozen=True)
class StageGradient(PushCommand):
    """A worker's contribution to a bucket at its next clock."""

    gradient: Gradient
    ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class DraftGradient(PushCommand):
    """A contribution that may still change: kept until the commit of its clock. Raises as PushCommand."""

    gradient: Gradient


@dataclass(frozen=True)
class Assign(PushCommand):
    """What a worker's script has set itself, kept until the contribution of its clock. Raises as PushCommand."""

    assignment: Assignment


@dataclass(frozen=True)
class Commit(PushCommand):
    """Makes the draft of a clock count, now or when it comes. Raises as PushCommand.

    groups, ranges: of the whole step, in place of the draft's
    stage:          of the script: that of the groups
    """

    groups: Mapping[int, HyperParameters]
    ranges: tuple[DataRange, ...] = ()
    stage: int = 0


@dataclass(frozen=True)
class StageRows(PushCommand):
    """One message of a worker's contribution to a table at its next clock. It is staged when all are here.

    rows:    of this message; none where they are left out
    first, count: the numbers of the message's rows, among `total`, those of all messages
    present: the step has a gradient for the table, here or on another shard
    in_mean: it is a term of the mean
    values:  hyper-parameters to use from this update on
    assignment: the number of the assigned rows that it takes along; 0: none
    Raises as PushCommand, InvalidRequest for messages of one step that contradict each other, and where not all rows
    are here that it takes along, LimitExceeded for too many rows. Nothing changes then.
    """

    rows: RowGradients
    first: int
    count: int
    total: int
    present: bool = True
    in_mean: bool = True
    values: HyperParameters | None = None
    ranges: tuple[DataRange, ...] = ()
    assignment: int = 0


@dataclass(frozen=True)
class AssignRows(PushCommand):
    """One message of the rows that a worker's script has set before its next step. They are kept until that is staged.

    first, total: as in StageRows, of what is assigned
    assignment: its number: a higher one takes the place of a lower one
    Raises as PushCommand, InvalidRequest for messages that contradict each other, LimitExceeded for too many rows.
    """

    rows: RowValues
    first: int
    total: int
    assignment: int

    @property
    def count(self) -> int:
        """How many rows the message has."""
        return len(self.rows)


@dataclass(frozen=True)
class BeginRows(UnitCommand):
    """One message of rank 0 with what a table begins with on this shard. They come in order; the last one begins it.

    beginning: all of it, the same in each message of an incarnation
    first:     how many rows and ids came before this message
    part:      rows, or ids that wait, as Table.snapshot has them; `count` of them, none in a message that only asks
    last:      no message follows
    Raises as PushCommand, InvalidRequest for another rank and messages that contradict each other, OutOfOrder where
    some are missing, LimitExceeded for more rows than there is room for. Nothing changes then; but where the disk takes
    no more rows, all are given up, and have to come again.
    """

    beginning: Beginning
    first: int
    part: Mapping[str, torch.Tensor]
    count: int
    last: bool
