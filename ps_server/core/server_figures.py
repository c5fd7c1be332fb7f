"""What processes measure of their own work, for people who watch: sums since each began to measure, by its own clock.

The numbers come from other processes. Those of workers are checked here; nothing in training depends on any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import MAX_TOTAL, MAX_VALUE_NAME, MAX_VALUES, WorkerFigures, is_value_name
from ps_server.core.validation import check_once

TABLES_TOLD = 100  # of a job, each by itself: whoever registers a job chooses how many there are, and their names
OTHER_TABLES = "(others)"


@dataclass(frozen=True)
class ShardFigures:
    """What a shard's process has measured of itself.

    measured: seconds for which it has
    resident, limit: bytes of memory that it has in use, and that it may have; 0: not known
    library:  that it uses for tables: the level of processors that it is for, or numpy; empty: not known
    """

    measured: float = 0.0
    resident: int = 0
    limit: int = 0
    library: str = ""


@dataclass(frozen=True)
class ShardJobFigures:
    """What a shard has measured of one job.

    applies:   optimizer steps of single buckets; apply_seconds: how long they took, all together
    received, sent: payload bytes of accepted pushes, and to workers
    staleness: (the most clocks that count here, how many gradients), ascending
    awaited:   by rank, seconds for which pulls of single buckets have waited for that worker
    """

    applies: int = 0
    apply_seconds: float = 0.0
    received: int = 0
    sent: int = 0
    staleness: tuple[tuple[float, int], ...] = ()
    awaited: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RowCounts:
    """What became of ids and rows of a table on a shard, since it took up the job: when that began, or was restored.

    found, missing: ids that were looked up and had a row, and those that had none
    pushed:   gradients of single rows that updates took in
    admitted: rows that came into being; expired, evicted: rows that were forgotten, see Applied
    waiting, no_room: gradients that were dropped, see Applied
    cold:     of the ids that were found, those whose row was read from a file
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
    """What a shard has of one table.

    nbytes:    of memory: rows, their optimizer's state, and the index
    file_rows: of the rows, those in a file that memory has no room for; file_bytes: of that file
    """

    name: str
    rows: int
    nbytes: int
    counts: RowCounts = RowCounts()
    file_rows: int = 0
    file_bytes: int = 0


def told(tables: Sequence[TableFigures]) -> tuple[TableFigures, ...]:
    """Returns what is told of a job's tables: the first ones as they are, and the rest added up, if there are more."""
    rest = tables[TABLES_TOLD:]
    if not rest:
        return tuple(tables)
    counts = sum((table.counts for table in rest), RowCounts())
    rows, nbytes = sum(each.rows for each in rest), sum(each.nbytes for each in rest)
    in_file = sum(each.file_rows for each in rest), sum(each.file_bytes for each in rest)
    others = TableFigures(OTHER_TABLES, rows, nbytes, counts, *in_file)
    return (*tables[:TABLES_TOLD], others)


def check_worker_figures(figures: WorkerFigures) -> None:
    """Raises InvalidRequest naming the first thing that is wrong with what a worker says of itself."""
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
