"""Tables of rows in `ps-server plan`: the flag `--table`, and the memory that a table needs on a shard."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest
from ps_protocol.tables import MAX_ROWS, TableSpec
from ps_runtime.settings import magnitude

_EXPECTED = "expected ROWSxDIM or ROWSxDIM:OPTIMIZER, as in 100Mx64:RowWiseAdagrad"
# Memory keeps the position of each row in the file of --cold-rows-dir (docs/tables.md).
POSITION_BYTES = 4
DEFAULT_OPTIMIZER = "Adagrad"


@dataclass(frozen=True)
class TableQuestion:
    """A full table: its rows on all shards together, elements of a row, and its optimizer."""

    rows: int
    dim: int
    optimizer: str = DEFAULT_OPTIMIZER

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values on the wire, with its id."""
        return 8 + 4 * self.dim


@dataclass(frozen=True)
class TableMemory:
    """Bytes of tables on the fullest shard.

    rows:  values, and the optimizer's state
    index: the hash index
    cold:  the least of memory with --cold-rows-dir; the rows are in a file then
    """

    rows: int
    index: int
    cold: int


def table_question(text: str) -> TableQuestion:
    """Reads ROWSxDIM:OPTIMIZER. Raises ArgumentTypeError."""
    size, _, optimizer = text.partition(":")
    rows, cross, dim = size.partition("x")
    try:
        found = TableQuestion(int(magnitude(rows)), int(dim), optimizer or DEFAULT_OPTIMIZER)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{_EXPECTED}, got {text!r}") from None
    if not cross or found.dim < 1 or found.rows < 1:
        raise argparse.ArgumentTypeError(f"{_EXPECTED}, got {text!r}")
    return found


def table_memory(tables: Iterable[TableQuestion], shards: int) -> TableMemory:
    """Returns the memory of full tables on a shard. Raises InvalidRequest for tables that a shard would refuse."""
    rows = index = cold = 0
    for table in tables:
        here = most_rows(table.rows, shards)
        one_row, found = _sizes(table, here)
        rows += here * one_row
        index += found
        cold += here * POSITION_BYTES + found
    return TableMemory(rows, index, cold)


def fewest_shards(tables: Iterable[TableQuestion]) -> int:
    """Returns how many shards there are at the least, so that none gets more rows than a shard takes."""
    return max((table.rows // MAX_ROWS + 1 for table in tables), default=1)


def most_rows(rows: int, shards: int) -> int:
    """Returns how many rows the fullest shard comes to have: ids are spread by chance, so more than its equal part."""
    if shards == 1:
        return rows
    equal = rows / shards
    return min(rows, math.ceil(equal + 3 * math.sqrt(equal)))


def _sizes(table: TableQuestion, rows: int) -> tuple[int, int]:
    """Returns the bytes of a row with its state, and of the index of `rows` rows."""
    # These imports need numpy and torch. A plan without tables needs neither.
    from ps_protocol.row_optimizers import ROW_OPTIMIZERS, check_row_optimizer
    from ps_tables.sizes import index_bytes, record_bytes

    name = next((name for name in ROW_OPTIMIZERS if name.lower() == table.optimizer.lower()), table.optimizer)
    check_row_optimizer(name, {})
    if rows > MAX_ROWS:
        raise InvalidRequest(
            f"a shard has up to {MAX_ROWS:,} rows of a table, and would get {rows:,}: take more shards"
        )
    return record_bytes(TableSpec("table", table.dim), name, {}), index_bytes(rows)
