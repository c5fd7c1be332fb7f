"""A table's rows on one shard, the contributions of workers to them, and the number of rows that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_ids import Ids
from ps_protocol.tables import MAX_ROWS, JobTable, TableSpec
from ps_server.core.placement import TableShare
from ps_server.core.server_figures import RowCounts
from ps_server.core.sums import NamedValues, ValuesInUse
from ps_tables.changed_rows import RowWalk
from ps_tables.cold import POSITION_BYTES
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.copies import TableCopy
from ps_tables.increments import newest
from ps_tables.sizes import index_bytes, record_bytes, rows_within
from ps_tables.table import Applied, Beyond, InFile, Table


@dataclass(frozen=True)
class RowsContribution:
    """One worker's contribution to a table on this shard.

    rows:     the gradients, in the messages in which they came; empty: the step has none for this shard
    assigned: the rows that the script has set before the step, by message: the update builds on them
    present:  the step has a gradient for the table, on this shard or on another one
    in_mean:  the step counts as a term of the mean
    values:   hyper-parameters to use from this update on; None: unchanged
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

    @property
    def is_empty(self) -> bool:
        """Whether the step has no row of this shard."""
        return not self.rows

    def left_out(self) -> RowsContribution:
        """Returns the contribution without its gradient: the mean does not count it."""
        return replace(self, rows=(), present=False, in_mean=False)

    def owned(self) -> RowsContribution:
        """Returns the contribution itself: rows in a segment were copied before they were checked."""
        return self


class TableRows:
    """The rows of one table on this shard, and the contributions to its open update. For one caller at a time.

    An update without any gradient or assigned row does not count as an update of the table: expiry counts only the
    others.

    """

    def __init__(self, table: JobTable, capacity: int, salt: int, beyond: Beyond | None = None) -> None:
        """capacity: the most rows
        salt:     of the index
        beyond:   the file for rows that memory does not hold
        """
        self.dim = table.rows.dim

        def made(spec: TableSpec) -> Table:
            return Table(spec, table.optimizer, table.values, capacity, salt, beyond)

        self._made, self._table = made, made(table.rows)
        self._open: list[RowsContribution] = []
        self._in_use = ValuesInUse()
        self._counts = dict.fromkeys((each.name for each in fields(RowCounts)), 0)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def wants_last(self) -> bool:
        """Whether `add` uses `is_last`: never."""
        return False

    def own(self) -> None:
        """Does nothing: rows were copied when they came. A bucket copies borrowed gradients in this method."""

    def add(self, contribution: RowsContribution, is_last: bool = False) -> None:
        """Adds one contribution to the open update. The order of calls is the order of the sums."""
        self._open.append(contribution)
        self._counts["pushed"] += sum(len(rows) for rows in contribution.rows)

    def step(self) -> None:
        """Applies the open update, with the mean of its contributions."""
        added, self._open = self._open, []
        if not any(each.present or each.assigned for each in added):
            return
        version = self._table.version + 1
        # In reverse, so that of several assignments to a row the first contribution's stays: the lowest rank's in sync.
        for each in reversed(added):
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
        counts = self._counts
        counts["admitted"] += done.admitted
        counts["expired"] += done.expired
        counts["evicted"] += done.evicted
        counts["waiting"] += done.waiting
        counts["no_room"] += done.no_room

    def pull(self, ids: Ids, out: torch.Tensor) -> int:
        """Reads rows; see Table.pull."""
        before = self._table.in_file.read
        found = self._table.pull(ids, out)
        counts = self._counts
        counts["cold"] += self._table.in_file.read - before
        counts["found"] += found
        counts["missing"] += len(ids) - found
        return found

    @property
    def counts(self) -> RowCounts:
        """Counts of ids and rows. Another thread may read them at any time."""
        return RowCounts(**self._counts)

    @property
    def spec(self) -> TableSpec:
        """The table, with the seed that it has: that of the job, or the one that rank 0 or a snapshot brought."""
        return self._table.spec

    @property
    def capacity(self) -> int:
        """The number of rows that fit now."""
        return self._table.capacity

    def begin(self, seed: int, version: int) -> None:
        """Empties the table before initial rows come. version: the number of updates that have trained these rows"""
        self._table = self._made(self.spec.seeded(seed))
        self._table.version = version

    def take(self, part: Mapping[str, torch.Tensor], more: int) -> None:
        """Adds some of the initial rows; see Table.restore. more: the number of rows that are still to come"""
        self._table.restore(part, more=more)

    @property
    def in_file(self) -> InFile:
        """The rows in a file; see Table.in_file."""
        return self._table.in_file

    @property
    def nbytes(self) -> int:
        """Bytes of memory; see Table.nbytes."""
        return self._table.nbytes

    @property
    def version(self) -> int:
        """The number of updates of the rows. An update without any gradient or assigned row does not count."""
        return self._table.version

    def changes(self, since: int | None) -> RowWalk:
        """Returns an iterator over the rows that changed after a version; see Table.changes."""
        return self._table.changes(since)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of all rows; see Table.snapshot."""
        return self._table.snapshot()

    def copy(self, since: int | None) -> TableCopy:
        """Begins a copy that is made some rows at a time; see Table.copy."""
        return self._table.copy(since)

    @property
    def values(self) -> HyperParameters:
        """The hyper-parameters of the last update."""
        return self._table.values

    def restore(self, tensors: Mapping[str, torch.Tensor], values: HyperParameters, seed: int | None) -> None:
        """Restores the rows, hyper-parameters and seed of a snapshot; see Table.restore.

        If fewer rows fit than when they were saved, those trained longest ago are evicted.
        """
        if seed is not None and seed != self.spec.initializer.seed:
            self._table = self._made(self.spec.seeded(seed))
        self._in_use = ValuesInUse()
        fitting = newest(tensors, self._table.capacity)
        self._table.restore(fitting, values)
        self._counts["evicted"] += len(tensors["ids"]) - len(fitting["ids"])


@dataclass(frozen=True)
class TableSize:
    """How large a table may become on one shard.

    rows:      the most rows, in memory and file together
    in_memory: the most rows in memory
    nbytes:    bytes of memory for them
    in_file:   the most rows in the file; 0: there is no file
    """

    rows: int
    in_memory: int
    nbytes: int
    in_file: int = 0


def table_size(table: JobTable, share: TableShare) -> TableSize:
    """Returns how large a table may become: its share of max_rows, as far as memory and a file can hold it.

    If ids wait for admission, memory must hold as many of these as rows.
    """
    record = record_bytes(table.rows, table.optimizer, table.values)
    waits, memory = table.rows.admit_after > 1, share.table_bytes
    most = min(MAX_ROWS, -(-table.rows.max_rows // share.shards) if table.rows.max_rows else MAX_ROWS)
    fit = max(1, min(most, rows_within(memory, record, waits)))
    in_memory = TableSize(fit, fit, fit * record + index_bytes(fit, waits))
    if fit == most or not share.file_bytes:
        return in_memory
    # For each row, in memory or in the file, memory has an entry of the index: these take three quarters at most.
    known, both = rows_within(3 * memory // 4, POSITION_BYTES, waits), memory + share.file_bytes
    rows = min(most, known, rows_within(both, record + POSITION_BYTES, waits))
    if rows <= fit:
        return in_memory
    left = memory - rows * POSITION_BYTES - index_bytes(rows, waits)
    return TableSize(rows, left // record, memory, min(rows, share.file_bytes // record))


def beyond_memory(table: JobTable, size: TableSize, share: TableShare) -> Beyond | None:
    """Returns the file for the rows that do not fit into memory; None if all fit."""
    if not size.in_file or share.open_file is None:
        return None
    elements = record_bytes(table.rows, table.optimizer, table.values) // 4
    return Beyond(share.open_file(elements, size.in_file), size.in_memory)
