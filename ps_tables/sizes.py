"""The memory that a number of rows takes, and the number of rows that fit into memory.

All of a table counts: its rows with their optimizer's state, the index, the ids that wait for admission, which may be
as many as the rows, and the ids that were removed lately. The numbers are those of a full table, except for some
KiB of the smallest one. While an index is rebuilt, its old slots take memory, too: at most as much again as its slots.
"""

from __future__ import annotations

import bisect

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_optimizers import numbers_kept
from ps_protocol.tables import MAX_ROWS, TableSpec
from ps_tables.index import SLOT_BYTES, most_slots
from ps_tables.removed import most_kept

COUNT_BYTES = 4  # the count of occurrences of an id that waits
_ENTRY_BYTES = 12  # an id, and the version that used it last


def record_bytes(spec: TableSpec, optimizer: str, values: HyperParameters) -> int:
    """Returns the bytes of a row and its optimizer's state."""
    return 4 * (spec.dim + numbers_kept(optimizer, values, spec.dim))


def index_bytes(rows: int, waits: bool = False) -> int:
    """Returns the bytes that `rows` rows take besides their records. waits: as many ids may wait for admission"""
    one = SLOT_BYTES * most_slots(rows) + _ENTRY_BYTES * rows + 8 * most_kept(rows, rows)
    return one + waits * (one + COUNT_BYTES * rows)


def rows_within(memory: int, record: int, waits: bool = False) -> int:
    """Returns how many rows fit into `memory` bytes.

    record: the bytes of a row's record
    waits:  as many ids may wait for admission
    """
    numbers = range(1, MAX_ROWS + 1)
    return bisect.bisect_right(numbers, memory, key=lambda rows: record * rows + index_bytes(rows, waits))
