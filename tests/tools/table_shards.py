"""A job with one table on one of several shards, trained without a server around it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.rows import RowPushKind, RowsPush
from ps_protocol.modes import Consistency
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.commands import AddWorker, RestoreSnapshot
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare
from ps_server.core.snapshot import TableSnapshot, joined
from ps_tables.contributions import RowGradients
from ps_tables.sizes import index_bytes, record_bytes

DIM, WORKERS = 5, 3
SPEC = TableSpec("t", DIM, Initializer("uniform", 0.1, 1))
SYNC = Consistency(0, True)


class TableShard:
    """A job with one table, on one of several shards. share: what it has there; None: memory for 4,000 rows"""

    def __init__(
        self,
        table: JobTable,
        consistency: Consistency,
        shard: int = 0,
        shards: int = 1,
        share: TableShare | None = None,
    ) -> None:
        spec = JobSpec("t", (), "SGD", ({"lr": 0.1},), consistency, 64, WORKERS, tables=(table,))
        record = record_bytes(table.rows, table.optimizer, table.values)
        share = share or TableShare(shard, shards, 4_000 * record + index_bytes(4_000, table.rows.admit_after > 1))
        self.partition = JobPartition(spec, [], share=share)
        self.first = 1  # incarnation
        for rank in range(WORKERS):
            self.partition.execute(AddWorker(rank, rank + self.first, 0))
        self.table = self.partition.tables[0].weights

    def restore(self, parts: list[TableSnapshot]) -> None:
        """Goes on from what all shards had."""
        self.first += WORKERS
        rows = joined(parts, self.partition.row_checker.share)
        self.partition.execute(RestoreSnapshot({}, WORKERS, tables={0: rows}))
        for rank in range(WORKERS):
            self.partition.execute(AddWorker(rank, rank + self.first, None))

    def push(self, rank: int, clock: int, contribution: RowGradients, parts: int = 1) -> None:
        """One worker's step, in messages of which the last one comes first."""
        for message in reversed(list(messages(rank, rank + self.first, clock, contribution, parts))):
            self.partition.execute(self.partition.row_checker.push(message))
        rule = self.partition.rules[0]
        while (work := rule.next()) is not None:
            if isinstance(work, Add):
                self.table.add(work.contribution)
            else:
                self.table.step()
            self.partition.done(0, work)


def messages(rank: int, incarnation: int, clock: int, rows: RowGradients, parts: int) -> Iterator[RowsPush]:
    size = max(1, -(-len(rows) // parts))
    for first in range(0, max(1, len(rows)), size):
        part = rows.part(np.arange(first, min(first + size, len(rows))))
        counts = part.counts.astype(np.uint32)
        payload = part.ids.tobytes() + counts.tobytes() + part.gradients.numpy().tobytes()
        what = Identity("t", rank, incarnation), 0, clock
        yield RowsPush(*what, RowPushKind.GRADIENT, payload, first, len(part), len(rows), {})
