"""How much memory so many rows come to take, and how many rows so much memory holds.

All of a table counts: its rows with their optimizer's state, the index, the ids that wait for admission, of which there
may be as many as rows, and the ids that went of late. What counts is what a full table takes, but for some KiB of the
smallest one. While an index is made anew, its old slots are there, too: at most as much memory again as its slots.
"""

from __future__ import annotations

import bisect

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_optimizers import numbers_kept
from ps_protocol.tables import MAX_ROWS, TableSpec
from ps_tables.index import SLOT_BYTES, most_slots
from ps_tables.removed import most_kept

COUNT_BYTES = 4  # of an id that waits: how often it has occurred
_ENTRY_BYTES = 12  # of an id: itself, and the version that used it last


def record_bytes(spec: TableSpec, optimizer: str, values: HyperParameters) -> int:
    """Returns the bytes of a row and its optimizer's state."""
    return 4 * (spec.dim + numbers_kept(optimizer, values, spec.dim))


def index_bytes(rows: int, waits: bool = False) -> int:
    """Returns the bytes that so many rows take besides their records. waits: as many ids may wait for admission"""
    one = SLOT_BYTES * most_slots(rows) + _ENTRY_BYTES * rows + 8 * most_kept(rows, rows)
    return one + waits * (one + COUNT_BYTES * rows)


def rows_within(memory: int, record: int, waits: bool = False) -> int:
    """Returns how many rows so many bytes hold. record: bytes of each, besides the index"""
    numbers = range(1, MAX_ROWS + 1)
    return bisect.bisect_right(numbers, memory, key=lambda rows: record * rows + index_bytes(rows, waits))
