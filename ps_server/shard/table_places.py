"""What a shard gives to a job's tables: memory, and where there is a directory for it, a part of a disk."""

from __future__ import annotations

import secrets

from ps_server.core.placement import Place
from ps_server.storage.row_files import RowFiles

_SALT = secrets.randbits(62)  # of the indices of tables: ids that share slots cannot be chosen


class TablePlaces:
    """The places of tables on one shard.

    index: of the shard
    limit: bytes of memory that the tables of a job may take; None: half of what is free
    files: of rows that memory has no room for; None: there are none
    """

    def __init__(self, index: int, limit: int | None = None, files: RowFiles | None = None) -> None:
        self._index, self._limit, self._files = index, limit, files

    def place(self, tables: int, shards: int, free: int) -> Place:
        """Returns what each of so many tables of a job may have here.

        shards: that have a part of each
        free:   bytes of memory
        """
        memory = max(0, free // 2 if self._limit is None else min(free, self._limit)) // max(1, tables)
        if self._files is None or not tables:
            return Place(self._index, shards, memory, _SALT)
        return Place(self._index, shards, memory, _SALT, self._files.free_bytes() // tables, self._files.open)
