"""Where a reader of a table's feed is: a cursor, which it keeps and does not understand.

A history is one unbroken sequence of updates of a table on a shard: it ends when the shard's process ends, when the job
is rolled back to a checkpoint, and with the run of the job. What changed after a version is known within a history.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_protocol.errors import InvalidRequest

_FORMAT = 1  # the first byte: another one for what will be said in another way
_SIZES = (4, 8, 8)  # bytes of the fields


class RowCursor(NamedTuple):
    """All changes of a table up to a version.

    table:   its place in the job's list
    history: a number that no other history has
    version: of the table's rows: see TableRows.version
    """

    table: int
    history: int
    version: int

    def to_bytes(self) -> bytes:
        """Returns the cursor as readers keep it."""
        fields = (value.to_bytes(size, "little") for value, size in zip(self, _SIZES, strict=True))
        return b"".join((bytes((_FORMAT,)), *fields))


def row_cursor(data: bytes) -> RowCursor:
    """Returns the cursor that a reader has kept. Raises InvalidRequest for bytes that are none."""
    if len(data) != 1 + sum(_SIZES) or data[0] != _FORMAT:
        raise InvalidRequest(
            f"expected a cursor as WatchRows gave it, of {1 + sum(_SIZES)} bytes of format {_FORMAT:02x}, "
            f"got {len(data)} bytes of format {data[:1].hex() or 'none'}"
        )
    fields, first = [], 1
    for size in _SIZES:
        fields.append(int.from_bytes(data[first : first + size], "little"))
        first += size
    return RowCursor(*fields)
