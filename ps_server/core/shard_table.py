"""A table of a job on one shard: a unit whose contributions are rows, in several messages.

A table has an index, behind those of the job's buckets. A contribution has the rows of a worker's step that are on this
shard. Its messages are pending until all have come. So are the messages with rows that a script has set before a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ps_protocol.errors import InvalidRequest, LimitExceeded, OutOfOrder, PSError
from ps_protocol.tables import MAX_PUSHED_BYTES, Beginning, JobTable, assigned_bytes
from ps_server.core.budget import StagingRoom
from ps_server.core.commands import AssignRows, BeginRows, PushCommand, Staged, StageRows, UnitCommand
from ps_server.core.consistency import NOT_BEGUN, UpdateRule
from ps_server.core.data_commits import Committed, DataCommits
from ps_server.core.placement import TableShare
from ps_server.core.server_figures import TableFigures
from ps_server.core.snapshot import TableSnapshot
from ps_server.core.table_rows import RowsContribution, TableRows, beyond_memory, table_size
from ps_server.core.unit import Pending, Unit
from ps_tables.contributions import RowValues

M = TypeVar("M", StageRows, AssignRows)


@dataclass
class Gathered(Generic[M]):
    """Messages of rows that take effect together, once all have come.

    total:  the number of rows in all of them
    number: the number of the assignment; 0: the messages belong to a step
    parts:  the messages, by the number of their first row
    """

    total: int
    number: int = 0
    parts: dict[int, M] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the push have come."""
        return sum(part.count for part in self.parts.values()) >= self.total

    def in_order(self) -> list[M]:
        """Returns the messages in the order of their rows, whatever their order of arrival."""
        return [part for _, part in sorted(self.parts.items())]


@dataclass
class PendingRows(Pending):
    """A worker's pending messages to a table for its next clock: rows of its step, and rows that its script has set."""

    step: Gathered[StageRows] | None = None
    assigned: Gathered[AssignRows] | None = None


@dataclass
class ComingRows:
    """The initial rows of a table that have come from rank 0 so far. They come in order, and take effect together.

        ask    A message without rows, before the last one, asks whether the table has room. It changes nothing.
        take   A message has the next rows. One that has come before changes nothing.
        begin  The last message begins the table.

    Each incarnation of rank 0 begins anew: the rows of an earlier one are dropped. The rows go into the table at once,
    unlike those of a step, as they may take as much memory as the table.

    incarnation: the sending worker's; 0: none sends
    beginning:   describes the whole content; None: unknown
    came:        the number of rows and ids that have come
    """

    incarnation: int = 0
    beginning: Beginning | None = None
    came: int = 0
    is_complete: bool = False

    def take(self, command: BeginRows, rows: TableRows) -> bool:
        """Handles a message; returns whether it had anything new. See BeginRows."""
        beginning, end = command.beginning, command.first + command.count
        is_known = command.worker.incarnation == self.incarnation
        came = self.came if is_known else 0
        self._check(command, rows, came, is_known)
        if not command.count and not command.last:
            return True  # the message only asks whether there is room
        if not is_known:
            rows.begin(beginning.seed, beginning.version)
            self.incarnation, self.beginning, self.came = command.worker.incarnation, beginning, 0
        is_new = not is_known or end > came
        if end > came:
            try:
                rows.take(command.part, max(0, beginning.rows - end))
            except LimitExceeded:
                self.drop(rows)
                raise
            self.came = end
        self.is_complete = command.last
        return is_new or command.last

    def _check(self, command: BeginRows, rows: TableRows, came: int, is_known: bool) -> None:
        """Raises the error of a message that does not fit. came: rows and ids of this incarnation that have come"""
        name, beginning, end = rows.spec.name, command.beginning, command.first + command.count
        if is_known and beginning != self.beginning:
            raise InvalidRequest(f"table {name!r}: it begins with {self.beginning}, and a message says {beginning}")
        if beginning.rows > rows.capacity:
            share = f" (of max_rows {rows.spec.max_rows} on all)" if rows.spec.max_rows else ""
            raise LimitExceeded(
                f"table {name!r} has {beginning.rows} rows from before on this shard, and has room for "
                f"{rows.capacity} here{share}: raise max_rows, or give the shards more memory or a file for cold rows"
            )
        if command.first > came:
            raise OutOfOrder(f"table {name!r}: row {command.first} came where row {came} comes next")
        if command.count and command.first < came < end:
            raise InvalidRequest(f"table {name!r}: rows {command.first} to {end} came after {came} were here")
        if command.last and max(end, came) != beginning.total:
            raise InvalidRequest(
                f"table {name!r}: the last message came with {max(end, came)} of {beginning.total} rows and ids here"
            )

    def drop(self, rows: TableRows) -> None:
        """Drops the rows that have come: their worker has left, or there is no room for them."""
        if self.came:
            rows.begin(rows.spec.initializer.seed, 0)
        self.incarnation, self.beginning, self.came = 0, None, 0


class ShardTable(Unit[RowsContribution, TableRows, PendingRows]):
    """One table on this shard: its rule, its rows, and each worker's pending messages.

    most_bytes: the memory that it will take, if its job limits the number of rows; 0: unknown
    coming:     the initial rows that have come so far
    """

    first = "rows that a table begins with"

    def __init__(
        self,
        index: int,
        spec: JobTable,
        rule: UpdateRule[RowsContribution],
        share: TableShare,
        room: StagingRoom,
        data: DataCommits,
    ) -> None:
        size = table_size(spec, share)
        weights = TableRows(spec, size.rows, share.salt, beyond_memory(spec, size, share))
        super().__init__(index, rule, weights, room, data)
        self.spec, self.coming = spec, ComingRows()
        self.most_bytes = size.nbytes if spec.rows.max_rows else 0
        if spec.rows.initial_rows:
            rule.awaits = NOT_BEGUN
        else:
            rule.initialised = True

    def _begin(self, command: UnitCommand) -> Staged:
        """Handles a message of the table's initial content. With the last one the table has begun.

        A message to a table that has begun is a duplicate. One that came before is answered as kept again. See
        BeginRows.
        """
        if not isinstance(command, BeginRows):
            raise TypeError(f"expected a command for a table, got {type(command).__name__}")
        if self.rule.initialised:
            return replace(self._duplicate(), seed=self.weights.spec.initializer.seed)
        is_new = self.coming.take(command, self.weights)
        self.rule.initialised = self.coming.is_complete
        return Staged(self.rule.version, duplicate=not is_new, kept=not self.rule.initialised)

    def _push(self, command: PushCommand) -> Staged:
        match command:
            case StageRows():
                return self.stage(command)
            case AssignRows():
                return self.assign(command)
        raise TypeError(f"expected a command for a table, got {type(command).__name__}")

    def assign(self, command: AssignRows) -> Staged:
        """Handles a message with rows that a script has set for the worker's next step; see AssignRows."""
        pending = self._pending_at(command.worker.rank, command.clock) or PendingRows(command.clock)
        known, number = pending.assigned, command.assignment
        if known is not None and number < known.number:
            return self._duplicate()  # a newer assignment has replaced it
        if known is None or number != known.number:
            known = Gathered(command.total, number)
        if self._has(known, command, f"{command.total} rows are assigned here at clock {command.clock}"):
            return self._duplicate()
        if not known.parts:
            self._reserve_assigned(command, self._size(command, "assign", "rows"))
        known.parts[command.first] = command
        pending.assigned, self.pending[command.worker.rank] = known, pending
        return self._kept()

    def stage(self, command: StageRows) -> Staged:
        """Handles a message of a worker's step. Stages the contribution if all messages have come."""
        pending = self._pending_at(command.worker.rank, command.clock) or PendingRows(command.clock)
        known = pending.step
        if known is not None and known.total and not (command.total or command.in_mean):
            # Another message of the step was refused, so the worker leaves the whole step out.
            self._room.staged.release(self.index, command.worker.rank)
            known = pending.step = None
        if known is None:
            known = Gathered(command.total)
        if self._has(known, command, f"clock {command.clock} has {command.total} rows here"):
            return self._duplicate()
        if not known.parts:
            size = self._size(command, "push", "gradients")
            if size:
                self._reserve(command, size)
        known.parts[command.first] = command
        pending.step, self.pending[command.worker.rank] = known, pending
        if not known.is_complete:
            return self._kept()
        try:
            return self._count(command, self._contribution(command, pending, known), command.ranges)
        except PSError:
            self._take_back(command, pending, known)
            raise

    def _has(self, known: Gathered[M], command: M, says: str) -> bool:
        """Whether a message has come already. Raises InvalidRequest if it contradicts the others.

        says: the message's claim, for the error
        """
        if known.total != command.total:
            raise InvalidRequest(
                f"table {self.spec.rows.name!r}: a message of worker {command.worker.rank} says that {says}, and "
                f"another {known.total}"
            )
        return command.first in known.parts

    def _size(self, command: StageRows | AssignRows, verb: str, what: str) -> int:
        """Returns the bytes of all messages of a kind. Raises LimitExceeded for too many."""
        dim, total = self.weights.dim, command.total
        size = 4 * dim * total if isinstance(command, StageRows) else assigned_bytes(dim, total)
        if size > MAX_PUSHED_BYTES:
            raise LimitExceeded(
                f"table {self.spec.rows.name!r}: a worker may {verb} {MAX_PUSHED_BYTES} bytes of {what} in a step to "
                f"one shard, and {total} rows have {size}"
            )
        return size

    def _contribution(self, command: StageRows, pending: PendingRows, known: Gathered[StageRows]) -> RowsContribution:
        """Returns the contribution of a step's messages, with the assigned rows that it includes.

        Raises InvalidRequest if some of the assigned rows are missing.
        """
        assigned: tuple[RowValues, ...] = ()
        if command.assignment:
            found = pending.assigned
            if found is None or found.number != command.assignment or not found.is_complete:
                raise InvalidRequest(
                    f"table {self.spec.rows.name!r}: the step of worker {command.worker.rank} came before all rows "
                    f"that are assigned with it (number {command.assignment})"
                )
            assigned = tuple(part.rows for part in found.in_order())
        rows = tuple(part.rows for part in known.in_order() if len(part.rows))
        made = RowsContribution(
            rows, command.present, command.in_mean, command.values, self._clock_of(command), assigned
        )
        return made if all(part.in_mean for part in known.parts.values()) else made.left_out()

    def _take_back(self, command: StageRows, pending: PendingRows, known: Gathered[StageRows]) -> None:
        """Forgets the last message of a step that was refused, so that it may come again."""
        del known.parts[command.first]
        if not known.parts:
            pending.step = None
            self._room.staged.release(self.index, command.worker.rank)
            if pending.assigned is None:
                del self.pending[command.worker.rank]

    def drop_pending(self, rank: int) -> None:
        """Forgets a worker's pending messages."""
        pending = self.pending.get(rank)
        if pending is not None and pending.step is not None:
            self._room.staged.release(self.index, rank)
        super().drop_pending(rank)

    def let_go(self, rank: int) -> None:
        """Drops the pending messages of a worker that has left; for rank 0 also the initial rows of a table that has
        not begun.
        """
        if rank == 0 and not self.rule.initialised:
            self.coming.drop(self.weights)
        super().let_go(rank)

    @property
    def promised_bytes(self) -> int:
        """Bytes that the table will still allocate for the rows that its job has announced."""
        return max(0, self.most_bytes - self.weights.nbytes)

    def figures(self) -> TableFigures:
        """Returns the table's size and its counts. It may be stepped meanwhile."""
        rows = self.weights
        return TableFigures(
            self.spec.rows.name, len(rows), rows.nbytes, rows.counts, rows.in_file.rows, rows.in_file.nbytes
        )

    def snapshot(self, committed: Committed | None = None) -> TableSnapshot:
        """Returns a copy of the table as it is, with the leased data in it. The caller keeps it from being stepped."""
        return replace(self.without_rows(committed or {}), tensors=self.weights.snapshot())

    def without_rows(self, committed: Committed) -> TableSnapshot:
        """Returns a snapshot of the table without its rows, which are copied later."""
        clocks, seed = self.rule.extent().clocks, self.weights.spec.initializer.seed
        which = self.index, self.rule.version, clocks
        return TableSnapshot(*which, {}, self.weights.values, committed, seed, self.rule.joined_at())

    def restore(self, snapshot: TableSnapshot) -> None:
        """Replaces the state of a table without rows by a snapshot. Raises InvalidRequest if the snapshot
        does not fit.
        """
        self.weights.restore(snapshot.tensors, snapshot.values, snapshot.seed)
        self.rule.restore(snapshot.version, snapshot.clocks, snapshot.pushed)
