"""One job's tables on one shard: the rule, the rows and the pending pushes of each.

A table has an index, behind those of the job's buckets: its rule is one more of them wherever all buckets count. Its
contributions are the rows of a worker's step that are on this shard, which may come in several messages: they are
pending until all are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ps_protocol.errors import Backlogged, InvalidRequest, LimitExceeded
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import Ids, shards_of
from ps_protocol.tables import MAX_PUSHED_BYTES, MAX_ROWS, JobTable, TableSpec, assigned_bytes
from ps_server.core.beginnings import ComingRows
from ps_server.core.budget import StagingRoom
from ps_server.core.checking_rows import RowChecker
from ps_server.core.commands import AssignRows, BeginRows, Staged, StageRows
from ps_server.core.consistency import NOT_BEGUN, Live, UpdateRule, update_rule
from ps_server.core.data_commits import Committed, DataCommits, in_all
from ps_server.core.figures import RowCounts, TableFigures, told
from ps_server.core.named_values import NamedValues, ValuesInUse
from ps_server.core.placement import Place
from ps_server.core.snapshot import TableSnapshot
from ps_tables.changes import Changes
from ps_tables.cold import PLACE_BYTES
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.copies import TableCopy
from ps_tables.increments import merged, newest
from ps_tables.sizes import index_bytes, record_bytes, rows_within
from ps_tables.table import Applied, Beyond, InFile, Table


@dataclass(frozen=True)
class RowsContribution:
    """One worker's contribution to a table on this shard.

    rows:     in the messages that they came in; empty where the step has none of this shard
    assigned: rows that the script has set before the step, likewise: the update begins from them
    present:  the step has a gradient for the table, here or on another shard
    in_mean:  it is a term of the mean
    values:   hyper-parameters to use from this update on
    clock:    as in dense.Gradient
    """

    rows: tuple[RowGradients, ...] = ()
    present: bool = True
    in_mean: bool = True
    values: HyperParameters | None = None
    clock: int = 0
    assigned: tuple[RowValues, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients, and of the rows that are set."""
        return sum(rows.gradients.nbytes for rows in self.rows) + sum(rows.nbytes for rows in self.assigned)


class TableRows:
    """The rows of one table on this shard, and the contributions to its open update. For one caller at a time.

    An update in which no worker has a gradient makes none of the table: what expires is counted in those that do.

    counts: of ids and rows; replaced as a whole: another thread reads them
    """

    def __init__(self, table: JobTable, capacity: int, salt: int, beyond: Beyond | None = None) -> None:
        """capacity: rows; salt: of the index; beyond: where rows are that memory does not hold"""
        self.dim = table.rows.dim

        def made(spec: TableSpec) -> Table:
            return Table(spec, table.optimizer, table.values, capacity, salt, beyond)

        self._made, self._table = made, made(table.rows)
        self._open: list[RowsContribution] = []
        self._in_use = ValuesInUse()
        self.counts = RowCounts()

    def __len__(self) -> int:
        return len(self._table)

    def add(self, contribution: RowsContribution) -> None:
        """Adds one contribution to the open update. The order of calls is the order of the sums."""
        self._open.append(contribution)
        self.counts += RowCounts(pushed=sum(len(rows) for rows in contribution.rows))

    def step(self) -> None:
        """Makes an update with the mean of what was added."""
        added, self._open = self._open, []
        if not any(each.present or each.assigned for each in added):
            return
        version = self._table.version + 1
        for each in reversed(added):  # the first counts: in sync that is the lowest rank
            for set_rows in each.assigned:
                self._count(self._table.assign(set_rows, version))
        parts = [rows for each in added for rows in each.rows]
        update = RowGradients.union(parts) if parts else RowGradients.none(self.dim)
        named = NamedValues()
        for each in added:
            if each.values is not None:
                named.add(0, each.values, each.clock)
        values = self._in_use.newer(named).get(0)
        count = max(1, sum(each.in_mean for each in added))
        self._count(self._table.apply(update, count, version, values))

    def _count(self, done: Applied) -> None:
        self.counts += RowCounts(
            admitted=done.admitted,
            expired=done.expired,
            evicted=done.evicted,
            waiting=done.waiting,
            no_room=done.no_room,
        )

    def pull(self, ids: Ids, out: torch.Tensor) -> int:
        """Reads rows; see Table.pull."""
        before = self._table.in_file.read
        found = self._table.pull(ids, out)
        cold = self._table.in_file.read - before
        self.counts += RowCounts(found=found, missing=len(ids) - found, cold=cold)
        return found

    @property
    def spec(self) -> TableSpec:
        """The table, with the seed that it has: that of the job, or the one that rank 0 or a snapshot brought."""
        return self._table.spec

    @property
    def capacity(self) -> int:
        """How many rows there may be now."""
        return self._table.capacity

    def begin(self, seed: int, version: int) -> None:
        """Becomes empty, for rows that are to come. version: updates that have trained them"""
        self._table = self._made(self.spec.seeded(seed))
        self._table.version = version

    def take(self, part: Mapping[str, torch.Tensor], more: int) -> None:
        """Takes some of the rows that the table begins with; see Table.restore. more: how many come after these"""
        self._table.restore(part, more=more)

    @property
    def in_file(self) -> InFile:
        """What lies in a file; see Table.in_file."""
        return self._table.in_file

    @property
    def nbytes(self) -> int:
        """Bytes of memory; see Table.nbytes."""
        return self._table.nbytes

    @property
    def version(self) -> int:
        """Updates of the rows: those in which no worker had a gradient are not among them."""
        return self._table.version

    def changes(self, since: int | None) -> Changes:
        """Returns a walk over what changed after a version; see Table.changes."""
        return self._table.changes(since)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of all rows; see Table.snapshot."""
        return self._table.snapshot()

    def copy(self, since: int | None) -> TableCopy:
        """Begins a copy that is taken in pieces; see Table.copy."""
        return self._table.copy(since)

    @property
    def values(self) -> HyperParameters:
        """The hyper-parameters of the last update."""
        return self._table.values

    def restore(self, tensors: Mapping[str, torch.Tensor], values: HyperParameters, seed: int | None) -> None:
        """Takes the rows of a snapshot, hyper-parameters, and the seed; see Table.restore.

        Where there is room for fewer rows than when they were saved, those trained longest ago are evicted.
        """
        if seed is not None and seed != self.spec.initializer.seed:
            self._table = self._made(self.spec.seeded(seed))
        self._in_use = ValuesInUse()
        fitting = newest(tensors, self._table.capacity)
        self._table.restore(fitting, values)
        self.counts += RowCounts(evicted=len(tensors["ids"]) - len(fitting["ids"]))


@dataclass
class PendingRows:
    """What one worker has pushed to a table for its next clock, of which messages are missing."""

    clock: int
    total: int
    counts: dict[int, int] = field(default_factory=dict)  # how many rows came, by the number of the first
    parts: dict[int, RowGradients] = field(default_factory=dict)  # likewise
    left_out: bool = False


@dataclass
class PendingAssigned:
    """What one worker's script has set in a table before its next clock, of which messages may be missing.

    number: of the assignment; parts: by the number of the first row
    """

    clock: int
    number: int
    total: int
    parts: dict[int, RowValues] = field(default_factory=dict)

    @property
    def came(self) -> int:
        """How many rows are here."""
        return sum(len(rows) for rows in self.parts.values())


@dataclass(frozen=True, eq=False)
class ShardTable:
    """One table on this shard: its rule, its rows, and by rank what is pending, and set for the step that comes next.

    most_bytes: that it comes to take, where its job says how many rows there may be; 0: it takes what there is
    coming:     what has come of what it begins with
    """

    index: int
    spec: JobTable
    rule: UpdateRule[RowsContribution]
    rows: TableRows
    most_bytes: int = 0
    pending: dict[int, PendingRows] = field(default_factory=dict)
    assigned: dict[int, PendingAssigned] = field(default_factory=dict)
    coming: ComingRows = field(default_factory=ComingRows)

    def snapshot(self, committed: Committed | None = None) -> TableSnapshot:
        """Returns a copy of the table as it is, with the leased data in it. The caller keeps it from being stepped."""
        return replace(self.without_rows(committed or {}), tensors=self.rows.snapshot())

    def without_rows(self, committed: Committed) -> TableSnapshot:
        """Returns a snapshot of the table as it is, to which its rows are still to come."""
        clocks, seed = self.rule.extent().clocks, self.rows.spec.initializer.seed
        which = self.index, self.rule.version, clocks
        return TableSnapshot(*which, {}, self.rows.values, committed, seed, self.rule.joined_at())

    def restore(self, snapshot: TableSnapshot) -> None:
        """Becomes what a snapshot is, from having no rows. Raises InvalidRequest for one that fits no such table."""
        self.rows.restore(snapshot.tensors, snapshot.values, snapshot.seed)
        self.rule.restore(snapshot.version, snapshot.clocks, snapshot.pushed)


class Tables(Mapping[int, ShardTable]):
    """The tables of one job on this shard, by index.

    checker:     makes the command that stages a message
    room, limit: what waits for its update, or for its step, and how many bytes of it may
    """

    def __init__(
        self,
        spec: JobSpec,
        checker: RowChecker,
        roster: Mapping[int, Live],
        room: StagingRoom,
        limit: Callable[[], float],
    ) -> None:
        self.checker = checker
        self._staged, self._assigned, self._limit = room.staged, room.assigned, limit
        self._quorum = spec.consistency.quorum is not None
        self._tables = {}
        for index, table in enumerate(spec.tables, checker.first):
            rule: UpdateRule[RowsContribution] = update_rule(spec.consistency, roster, not table.rows.initial_rows)
            if table.rows.initial_rows:
                rule.awaits = NOT_BEGUN
            size = table_size(table, checker.place)
            rows = TableRows(table, size.rows, checker.place.salt, _beyond(table, size, checker.place))
            self._tables[index] = ShardTable(index, table, rule, rows, size.nbytes if table.rows.max_rows else 0)

    def __getitem__(self, index: int) -> ShardTable:
        return self._tables[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(add.contribution.nbytes for table in self.values() for add in list(table.rule.waiting.values()))

    @property
    def promised_bytes(self) -> int:
        """Bytes that tables come to take for the rows that their job has announced, and have not taken yet."""
        return sum(max(0, table.most_bytes - table.rows.nbytes) for table in self.values())

    def figures(self) -> tuple[TableFigures, ...]:
        """Returns what each table has, and what became of its rows; see `told`. Tables may be stepped meanwhile."""
        return told(
            [
                TableFigures(
                    each.spec.rows.name,
                    len(each.rows),
                    each.rows.nbytes,
                    each.rows.counts,
                    each.rows.in_file.rows,
                    each.rows.in_file.nbytes,
                )
                for each in self.values()
            ]
        )

    def begin(self, command: BeginRows) -> Staged:
        """Takes a message of what a table begins with, from rank 0. Where that was the last one, the table has begun.

        A message to a table that has begun is a duplicate; one that came before is kept, too. See BeginRows.
        """
        table = self._tables[command.table]
        if command.rank != 0:
            raise InvalidRequest(
                f"rows that a table begins with are rank 0's to send, got them from rank {command.rank}"
            )
        if table.rule.initialised:
            return Staged(table.rule.version, duplicate=True, seed=table.rows.spec.initializer.seed)
        is_new = table.coming.take(command, table.rows)
        table.rule.initialised = table.coming.is_complete
        return Staged(table.rule.version, duplicate=not is_new, kept=not table.rule.initialised)

    def assign(self, command: AssignRows) -> Staged:
        """Takes a message of rows that are set for a worker's next step; see AssignRows."""
        table, rank, clock = self._tables[command.table], command.rank, command.clock
        if table.rule.is_repeat(rank, clock):
            return Staged(table.rule.version, duplicate=True)
        coming, number = table.assigned.get(rank), command.assignment
        if coming is not None and coming.clock == clock and number < coming.number:
            return Staged(table.rule.version, duplicate=True)  # another one has taken its place
        if coming is None or (coming.clock, coming.number) != (clock, number):
            coming = PendingAssigned(clock, number, command.total)
        if coming.total != command.total:
            raise InvalidRequest(
                f"table {table.spec.rows.name!r}: a message of worker {rank} says that {command.total} rows are "
                f"assigned here at clock {clock}, and another {coming.total}"
            )
        if command.first in coming.parts:
            return Staged(table.rule.version, duplicate=True)
        if not coming.parts:
            self._reserve_assigned(table, command)
            table.assigned[rank] = coming
        coming.parts[command.first] = command.rows
        return Staged(table.rule.version, duplicate=False, kept=True)

    def _reserve_assigned(self, table: ShardTable, command: AssignRows) -> None:
        """Reserves the bytes of all messages, as `_reserve`. One worker's always fit: they go with its step."""
        rank, size = command.rank, assigned_bytes(table.rows.dim, command.total)
        if size > MAX_PUSHED_BYTES:
            raise LimitExceeded(
                f"table {table.spec.rows.name!r}: a worker may assign {MAX_PUSHED_BYTES} bytes of rows in a step to "
                f"one shard, and {command.total} rows have {size}"
            )
        if not self._assigned.reserve(
            *(table.index, rank, size, self._limit()),
            principal=command.principal,
            charge=size,
            always=lambda: table.rule.is_awaited(rank, command.clock) or self._assigned.is_all_of(rank),
        ):
            raise Backlogged(f"{self._assigned.bytes} bytes are assigned here and wait for their workers' steps")

    def _drop_assigned(self, table: ShardTable, rank: int) -> None:
        if table.assigned.pop(rank, None) is not None:
            self._assigned.release(table.index, rank)

    def stage(self, command: StageRows, data: DataCommits) -> Staged:
        """Takes a message of a contribution that the partition has let pass; stages it if all are here."""
        table, rank, clock = self._tables[command.table], command.rank, command.clock
        if table.rule.is_repeat(rank, clock):
            return Staged(table.rule.version, duplicate=True)
        pending = table.pending.get(rank)
        if pending is None or pending.clock != clock:
            self.drop_pending(rank, table.index)
            pending = PendingRows(clock, command.total)
        if pending.total and not (command.total or command.in_mean):
            self.drop_pending(rank, table.index)  # another message of the step was refused: the worker leaves all out
            pending = PendingRows(clock, 0)
        if pending.total != command.total:
            raise InvalidRequest(
                f"table {table.spec.rows.name!r}: a message of worker {rank} says that clock {clock} has "
                f"{command.total} rows here, and another {pending.total}"
            )
        if command.first in pending.counts:
            return Staged(table.rule.version, duplicate=True)
        if not pending.counts:
            self._reserve(table, command)
            table.pending[rank] = pending
        pending.counts[command.first], pending.parts[command.first] = command.count, command.rows
        pending.left_out |= not command.in_mean
        if sum(pending.counts.values()) < pending.total:
            return Staged(table.rule.version, duplicate=False, kept=True)
        return self._count(table, command, pending, data)

    def _count(self, table: ShardTable, command: StageRows, pending: PendingRows, data: DataCommits) -> Staged:
        assigned = self._assigned_with(table, command)
        try:
            use = data.use(table.index, command.ranges)
        except LimitExceeded:
            self.drop_pending(command.rank, table.index)
            raise
        del table.pending[command.rank]
        present, in_mean = command.present, command.in_mean
        parts = tuple(rows for _, rows in sorted(pending.parts.items()) if len(rows))
        if use.spent or pending.left_out:
            parts, present, in_mean = (), False, False
        if not parts:
            self._staged.release(table.index, command.rank)
        clock = command.clock if self._quorum else 0
        self._drop_assigned(table, command.rank)
        contribution = RowsContribution(parts, present, in_mean, command.values, clock, assigned)
        table.rule.stage(command.rank, command.clock, contribution, command.ranges)
        return Staged(table.rule.version, duplicate=False, skipped=not parts, use=use)

    def _assigned_with(self, table: ShardTable, command: StageRows) -> tuple[RowValues, ...]:
        """Returns the rows that a step takes along. Raises InvalidRequest where not all of them are here."""
        if not command.assignment:
            return ()
        found, key = table.assigned.get(command.rank), (command.clock, command.assignment)
        if found is None or (found.clock, found.number) != key or found.came < found.total:
            self.drop_pending(command.rank, table.index)
            raise InvalidRequest(
                f"table {table.spec.rows.name!r}: the step of worker {command.rank} came before all rows that are "
                f"assigned with it (number {command.assignment})"
            )
        return tuple(rows for _, rows in sorted(found.parts.items()))

    def _reserve(self, table: ShardTable, command: StageRows) -> None:
        """Reserves the bytes of all messages. Raises LimitExceeded for too many, Backlogged if there is no room now.

        What an update waits for is always taken.
        """
        size = 4 * table.rows.dim * command.total
        if size > MAX_PUSHED_BYTES:
            raise LimitExceeded(
                f"table {table.spec.rows.name!r}: a worker may push {MAX_PUSHED_BYTES} bytes of gradients in a step to "
                f"one shard, and {command.total} rows have {size}"
            )
        if size and not self._staged.reserve(
            table.index,
            command.rank,
            size,
            self._limit(),
            principal=command.principal,
            charge=size,
            always=lambda: table.rule.is_awaited(command.rank, command.clock),
        ):
            raise self._staged.full(self._limit())

    def drop_pending(self, rank: int, index: int | None = None) -> None:
        """Forgets what is pending of a worker, in one table or in all; in all, also what tables were to begin with."""
        for table in self.values() if index is None else (self._tables[index],):
            if index is None and rank == 0 and not table.rule.initialised:
                table.coming.drop(table.rows)
            if index is None:
                self._drop_assigned(table, rank)
            if table.pending.pop(rank, None) is not None:
                self._staged.release(table.index, rank)


def chained(parts: list[TableSnapshot]) -> TableSnapshot:
    """Returns the last of some snapshots of one shard with all its rows: the first has all, the others what changed
    after the one before. Raises ValueError or KeyError where they do not fit together.

    Takes the parts out of the list, and gives back the memory of each as soon as it can.
    """
    last = replace(parts[-1], tensors={})
    chain = [dict(part.tensors) for part in parts]
    parts.clear()
    return replace(last, tensors=merged(chain))


def joined(parts: Sequence[TableSnapshot], place: Place) -> TableSnapshot:
    """Returns the rows of some shards that belong to this one, of which there may be another number now.

    Where the parts are of different versions (ssp, async), rows keep the time since they were trained last. What no
    part has had of leased data is not committed. A step that one part has had counts as pushed: its rows are not to
    come twice.
    """
    newest = max(int(part.tensors["version"]) for part in parts)
    kept: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        age = newest - int(part.tensors["version"])
        for prefix in ("", "waiting."):
            ids = part.tensors.get(f"{prefix}ids")
            here = None if ids is None else torch.from_numpy(shards_of(ids.numpy(), place.shards) == place.shard)
            for name, tensor in part.tensors.items():
                if here is not None and name != "version" and name.startswith("waiting.") == bool(prefix):
                    rows = tensor if bool(here.all()) else tensor[here]
                    kept.setdefault(name, []).append(rows + age if name == f"{prefix}last" and age else rows)
    tensors = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in kept.items()}
    tensors["version"] = torch.tensor([newest])
    ranks = sorted({rank for part in parts for rank in part.clocks})
    return TableSnapshot(
        parts[0].index,
        max(part.version for part in parts),
        {rank: min(part.clocks.get(rank, 0) for part in parts) for rank in ranks},
        tensors,
        parts[0].values,
        in_all([part.committed for part in parts]),
        parts[0].seed,
        {rank: max(part.pushed.get(rank, part.clocks.get(rank, 0)) for part in parts) for rank in ranks},
    )


@dataclass(frozen=True)
class TableSize:
    """How large a table may become on one shard.

    rows:      all of them; in_memory: how many memory holds; in_file: for how many there is a file
    nbytes:    of memory
    """

    rows: int
    in_memory: int
    nbytes: int
    in_file: int = 0


def table_size(table: JobTable, place: Place) -> TableSize:
    """Returns how large a table may become: its share of max_rows, as far as memory holds them, and a file.

    Where ids wait for admission, memory is to hold as many of these as rows.
    """
    record = record_bytes(table.rows, table.optimizer, table.values)
    waits, memory = table.rows.admit_after > 1, place.table_bytes
    share = min(MAX_ROWS, -(-table.rows.max_rows // place.shards) if table.rows.max_rows else MAX_ROWS)
    fit = max(1, min(share, rows_within(memory, record, waits)))
    in_memory = TableSize(fit, fit, fit * record + index_bytes(fit, waits))
    if fit == share or not place.file_bytes:
        return in_memory
    # Wherever a row is, memory has its place in the index, and that its weights have: three quarters at most.
    known, both = rows_within(3 * memory // 4, PLACE_BYTES, waits), memory + place.file_bytes
    rows = min(share, known, rows_within(both, record + PLACE_BYTES, waits))
    if rows <= fit:
        return in_memory
    left = memory - rows * PLACE_BYTES - index_bytes(rows, waits)
    return TableSize(rows, left // record, memory, min(rows, place.file_bytes // record))


def _beyond(table: JobTable, size: TableSize, place: Place) -> Beyond | None:
    if not size.in_file or place.open_file is None:
        return None
    elements = record_bytes(table.rows, table.optimizer, table.values) // 4
    return Beyond(place.open_file(elements, size.in_file), size.in_memory)
