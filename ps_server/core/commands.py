"""Commands: the values that change a partition.

Applying what commands have staged changes a partition, too. In sync without a quorum, in ssp and in async it follows
from the commands: two partitions that execute the same ones in the same order are equal once both have applied all that
they can. With a quorum they may differ. An update takes the contributions that are added before it is made
(QuorumRule.next), and `sent`, `owed`, `end_grace` and `close` change a rule outside of commands.

In all modes what has been applied decides whether a push is refused for now (Backlogged): for lack of room, or because
the worker's push before it is not applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from ps_protocol.batches import DataRange
from ps_protocol.errors import PSError
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.tables import Beginning
from ps_server.core.data_commits import UNUSED, Use
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.membership import ShardProgress
from ps_server.core.snapshot import BucketSnapshot, TableSnapshot
from ps_tables.contributions import RowGradients, RowValues

R = TypeVar("R")


class Command(Generic[R]):
    """A change of a partition. Its execution returns an R."""


@dataclass(frozen=True)
class Staged:
    """The result of a push.

    version:   the unit's version
    duplicate: the push was staged before
    skipped:   the gradient was left out
    use:       the outcome for the leased data that the push names
    kept:      the push is a draft or an assignment, which takes effect with a later push
    seed:      the table's seed, if the table had begun before with another beginning
    """

    version: int
    duplicate: bool
    skipped: bool = False
    use: Use = UNUSED
    kept: bool = False
    seed: int = 0


# -- of the whole partition --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddWorker(Command[ShardProgress]):
    """Counts a worker as live from `clock` on. clock: None: from this shard's frontier on

    An older incarnation of the rank is fenced at once. A repetition changes nothing. Raises Fenced for an incarnation
    that was removed already, because the coordinator had given it up. Counted once more, it would never be removed.
    """

    rank: int
    incarnation: int
    clock: int | None
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class RemoveWorker(Command[None]):
    """Stops counting a worker as live. A newer incarnation of its rank stays.

    Its staged contributions stay, as copies in this process: the worker may overwrite its own memory from now on.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True)
class RestoreSnapshot(Command[None]):
    """Continues from snapshots of all buckets and tables, in a partition that has had no push.

    No worker is live afterwards: workers with an incarnation up to `last_incarnation` must join again.

    owned: the partition may keep the snapshots' tensors; otherwise it copies them
    Raises InvalidRequest if a bucket or a table has no snapshot, before anything is changed.
    """

    snapshots: Mapping[int, BucketSnapshot]
    tables: Mapping[int, TableSnapshot] = field(default_factory=dict, kw_only=True)
    last_incarnation: int
    owned: bool = False


@dataclass(frozen=True)
class Close(Command[None]):
    """Ends the partition: every later command of a worker raises `reason`, and all reservations are released."""

    reason: PSError


# -- of a worker, for one unit: a bucket or a table --------------------------------------------------------------------


@dataclass(frozen=True)
class UnitCommand(Command[Staged]):
    """A worker's command to one unit. unit: the index of a bucket, or of a table: tables follow the buckets"""

    worker: Identity
    unit: int


@dataclass(frozen=True)
class PushCommand(UnitCommand):
    """A push to one unit for the worker's next clock.

    principal: the caller, to whom the bytes are accounted; empty: unknown
    Changes nothing if it raises UnknownWorker, Fenced, OutOfOrder or Backlogged.
    """

    clock: int
    principal: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Initialise(UnitCommand):
    """A bucket's initial weights, [numel] in the bucket's dtype; or its initial optimizer state, which is sent before
    them.

    Raises InvalidRequest if the worker is not rank 0. The first weights count; later ones are repeats.

    clock: 0 for initial values. Above 0, rank 0 sends its current values of a bucket that no optimizer steps: only
           readers of the weights get them
    """

    value: torch.Tensor | Assignment
    clock: int = 0


@dataclass(frozen=True)
class StageGradient(PushCommand):
    """A worker's contribution to a bucket at its next clock."""

    gradient: Gradient
    ranges: tuple[DataRange, ...] = ()

    def with_groups(self, groups: Mapping[int, HyperParameters]) -> StageGradient:
        """Returns the same command with other hyper-parameters."""
        return replace(self, gradient=replace(self.gradient, groups=groups))


@dataclass(frozen=True)
class DraftGradient(PushCommand):
    """A contribution that may still change. It is kept until the Commit of its clock. Raises as PushCommand."""

    gradient: Gradient


@dataclass(frozen=True)
class Assign(PushCommand):
    """Weights or optimizer state that a worker's script has set. Kept until the contribution of its clock.

    Raises as PushCommand.
    """

    assignment: Assignment


@dataclass(frozen=True)
class Commit(PushCommand):
    """Makes the draft of a clock count: at once, or when the draft arrives. Raises as PushCommand.

    groups, ranges: those of the whole step; they replace the draft's
    stage:          the script's stage, to which the groups belong
    """

    groups: Mapping[int, HyperParameters]
    ranges: tuple[DataRange, ...] = ()
    stage: int = 0

    def with_groups(self, groups: Mapping[int, HyperParameters]) -> Commit:
        """Returns the same command with other hyper-parameters."""
        return replace(self, groups=groups)


@dataclass(frozen=True)
class StageRows(PushCommand):
    """One message of a worker's contribution to a table at its next clock. It is staged once all messages have come.

    rows:    the rows of this message; empty if the step is left out
    first:   the number of the message's first row among those of all messages
    count:   the number of its rows
    total:   the number of rows of all messages
    present: the step has a gradient for the table, on this shard or on another one
    in_mean: the step counts as a term of the mean
    values:  hyper-parameters to use from this update on; None: unchanged
    assignment: the number of the assignment that the step includes; 0: none
    Raises as PushCommand; InvalidRequest if messages of one step contradict each other, or rows of the assignment are
    missing; LimitExceeded for too many rows. Nothing changes then.
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
    """One message of the rows that a worker's script has set. They are kept until the worker's next step includes them.

    first, total: as in StageRows, for the rows that are set
    assignment:   its number: a higher one replaces a lower one
    Raises as PushCommand; InvalidRequest if messages contradict each other; LimitExceeded for too many rows.
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
    """One message of rank 0 with a table's initial content on this shard. Messages come in order; with the last one the
    table has begun.

    beginning: describes the whole content; the same in each message of an incarnation
    first:     the number of rows and of waiting ids in the messages before
    part:      rows, or ids that wait for admission, as Table.snapshot returns them
    count:     their number; 0 in a message that only asks whether there is room
    last:      no message follows
    Raises as PushCommand; InvalidRequest for another rank and for messages that contradict each other; OutOfOrder if
    some are missing; LimitExceeded if there is no room. Nothing changes then; but if the disk is full, all rows are
    dropped and must be sent again.
    """

    beginning: Beginning
    first: int
    part: Mapping[str, torch.Tensor]
    count: int
    last: bool
