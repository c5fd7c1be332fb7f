"""What has come of the rows that a table begins with, on one shard, from rank 0: in order, and all of them or none.

    ask    a message without rows, and not the last, asks whether there is room: nothing changes
    take   a message has the rows that come next; one that was taken before changes nothing
    begin  the last one says so: the table begins

Each incarnation of rank 0 begins anew. What one has sent that is gone then is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded, OutOfOrder
from ps_protocol.tables import Beginning, TableSpec
from ps_server.core.commands import BeginRows


class Beginnable(Protocol):
    """The rows of a table that has not begun."""

    @property
    def spec(self) -> TableSpec:
        """The table."""

    @property
    def capacity(self) -> int:
        """How many rows there may be."""

    def begin(self, seed: int, version: int) -> None:
        """Becomes empty, for rows that are to come."""

    def take(self, part: Mapping[str, torch.Tensor], more: int) -> None:
        """Takes some of the rows. more: how many come after these"""


@dataclass
class ComingRows:
    """What has come of one table.

    incarnation: of the worker that sends; 0: none does
    beginning:   what is to come in all; None: nothing is known
    came:        how many rows and ids are here
    """

    incarnation: int = 0
    beginning: Beginning | None = None
    came: int = 0
    is_complete: bool = False

    def take(self, command: BeginRows, rows: Beginnable) -> bool:
        """Takes a message; returns whether there was anything new in it. See BeginRows."""
        beginning, end = command.beginning, command.first + command.count
        is_known = command.incarnation == self.incarnation
        came = self.came if is_known else 0
        self._check(command, rows, came, is_known)
        if not command.count and not command.last:
            return True  # it only asks
        if not is_known:
            rows.begin(beginning.seed, beginning.version)
            self.incarnation, self.beginning, self.came = command.incarnation, beginning, 0
        is_new = not is_known or end > came
        if end > came:
            try:
                rows.take(command.part, max(0, beginning.rows - end))
            except LimitExceeded:
                self.drop(rows)
                raise
            self.came = end
        self.is_complete = command.last
        return is_new or command.last

    def _check(self, command: BeginRows, rows: Beginnable, came: int, is_known: bool) -> None:
        """Raises what is wrong with a message. came: rows and ids of this incarnation that are here"""
        name, beginning, end = rows.spec.name, command.beginning, command.first + command.count
        if is_known and beginning != self.beginning:
            raise InvalidRequest(f"table {name!r}: it begins with {self.beginning}, and a message says {beginning}")
        if beginning.rows > rows.capacity:
            share = f" (of max_rows {rows.spec.max_rows} on all)" if rows.spec.max_rows else ""
            raise LimitExceeded(
                f"table {name!r} has {beginning.rows} rows from before on this shard, and has room for "
                f"{rows.capacity} here{share}: raise max_rows, or give the shards more memory or a file for cold rows"
            )
        if command.first > came:
            raise OutOfOrder(f"table {name!r}: row {command.first} came where row {came} comes next")
        if command.count and command.first < came < end:
            raise InvalidRequest(f"table {name!r}: rows {command.first} to {end} came after {came} were here")
        if command.last and max(end, came) != beginning.total:
            raise InvalidRequest(
                f"table {name!r}: the last message came with {max(end, came)} of {beginning.total} rows and ids here"
            )

    def drop(self, rows: Beginnable) -> None:
        """Forgets what has come: its worker is gone, or there is no room for it."""
        if self.came:
            rows.begin(rows.spec.initializer.seed, 0)
        self.incarnation, self.beginning, self.came = 0, None, 0
