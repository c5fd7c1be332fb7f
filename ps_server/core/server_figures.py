"""The measurements of processes, for dashboards: sums since each process began to measure, on its own clock.

The numbers come from other processes. Those of workers are checked here; nothing in training depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import MAX_TOTAL, MAX_VALUE_NAME, MAX_VALUES, WorkerFigures, is_value_name
from ps_server.core.validation import check_once

# Tables of a job that are reported one by one. Their number is limited because whoever registers a job chooses how many
# tables it has, and their names.
TABLES_REPORTED = 100
OTHER_TABLES = "(others)"


@dataclass(frozen=True)
class ShardFigures:
    """The measurements of a shard's process.

    measured: seconds of measurement
    resident, limit: bytes of memory that it uses, and that it may use; 0: unknown
    library:  the processor level of the compiled library for tables, or "numpy"; empty: unknown
    """

    measured: float = 0.0
    resident: int = 0
    limit: int = 0
    library: str = ""


@dataclass(frozen=True)
class ShardJobFigures:
    """A shard's measurements of one job.

    applies, apply_seconds: the optimizer steps of single buckets, and their seconds in all
    received, sent: payload bytes of accepted pushes, and of answers to workers
    staleness: a histogram: (upper bound in clocks, the number of gradients), ascending
    awaited:   by rank, the seconds for which pulls of single buckets have waited for that worker
    """

    applies: int = 0
    apply_seconds: float = 0.0
    received: int = 0
    sent: int = 0
    staleness: tuple[tuple[float, int], ...] = ()
    awaited: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RowCounts:
    """Counts of a table's ids and rows on a shard, since the shard began or restored the job.

    found, missing: ids that were looked up, with a row and without one
    pushed:   gradients of single rows in updates
    admitted: rows that were created
    expired, evicted: rows that were removed, see Applied
    waiting, no_room: gradients that were dropped, see Applied
    cold:     looked-up ids whose row was read from a file
    """

    found: int = 0
    missing: int = 0
    pushed: int = 0
    admitted: int = 0
    expired: int = 0
    evicted: int = 0
    waiting: int = 0
    no_room: int = 0
    cold: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class TableFigures:
    """The size of one table on a shard, and its counts.

    nbytes:    bytes of memory: rows, their optimizer's state, and the index
    file_rows: the number of rows in a file, because memory has no room for them
    file_bytes: bytes of that file
    """

    name: str
    rows: int
    nbytes: int
    counts: RowCounts = RowCounts()
    file_rows: int = 0
    file_bytes: int = 0


def reported(tables: Sequence[TableFigures]) -> tuple[TableFigures, ...]:
    """Returns the figures of a job's tables for a message: the first TABLES_REPORTED, and the sum of the others."""
    rest = tables[TABLES_REPORTED:]
    if not rest:
        return tuple(tables)
    counts = sum((table.counts for table in rest), RowCounts())
    rows, nbytes = sum(each.rows for each in rest), sum(each.nbytes for each in rest)
    in_file = sum(each.file_rows for each in rest), sum(each.file_bytes for each in rest)
    others = TableFigures(OTHER_TABLES, rows, nbytes, counts, *in_file)
    return (*tables[:TABLES_REPORTED], others)


def check_worker_figures(figures: WorkerFigures) -> None:
    """Raises InvalidRequest that names the first error in a worker's reported figures."""
    for what, seconds in (("measured_duration", figures.measured), *figures.phases.items()):
        if not 0.0 <= seconds < math.inf:
            raise InvalidRequest(f"figures: {what} must be 0 or more, got {seconds:g} s")
    ratio = figures.residual_ratio
    if ratio is not None and not 0.0 <= ratio < math.inf:
        raise InvalidRequest(f"figures: residual_ratio must be a number of 0 or more, got {ratio:g}")
    for what, steps in (("total_step_count", figures.total), ("done_step_count", figures.done)):
        if steps > MAX_TOTAL:
            raise InvalidRequest(f"figures: {what} must be 2^53 at most, got {steps}")
    names = [value.name for value in figures.values]
    if len(names) > MAX_VALUES:
        raise InvalidRequest(f"figures: expected up to {MAX_VALUES} values, got {len(names)}")
    for name in names:
        if not is_value_name(name):
            raise InvalidRequest(
                f"figures: a value's name is a letter of a to z, then letters, digits and '_', {MAX_VALUE_NAME} "
                f"characters at most, got {name[:80]!r}"
            )
    check_once(names, "figures: values have each name")
