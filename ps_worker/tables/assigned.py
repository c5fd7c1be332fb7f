"""Rows that a script has set, until a step includes them. This worker's lookups see them at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.row_ids import Ids
from ps_tables.contributions import RowValues

AssignedRows = Mapping[int, RowValues]  # by the number of the table


class Assigned:
    """The rows of one table that its script has set since the last step. For the training thread.

    rows: all of them; None if there are none
    """

    def __init__(self) -> None:
        self.rows: RowValues | None = None
        self._sorted: tuple[Ids, npt.NDArray[np.int64]] | None = None  # ids in ascending order, and their indices

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    @property
    def ids(self) -> Ids:
        """The ids of all rows."""
        return np.empty(0, np.int64) if self.rows is None else self.rows.ids

    def add(self, rows: RowValues) -> None:
        """Adds rows. They replace earlier ones of the same ids."""
        if self.rows is not None and len(self.rows):
            kept = ~np.isin(self.rows.ids, rows.ids)
            before = self.rows.values[torch.from_numpy(kept)]
            rows = RowValues(np.concatenate([self.rows.ids[kept], rows.ids]), torch.cat([before, rows.values]))
        self.rows, self._sorted = rows, None

    def cover(self, ids: Ids, out: torch.Tensor) -> None:
        """Overwrites pulled rows with assigned ones: [n] ids, [n, dim]."""
        if self.rows is None or not len(self.rows):
            return
        if self._sorted is None:
            order = np.argsort(self.rows.ids)
            self._sorted = self.rows.ids[order], order
        ordered, places = self._sorted
        at = np.searchsorted(ordered, ids).clip(max=len(ordered) - 1)
        here = np.flatnonzero(ordered[at] == ids)
        if len(here):
            out[torch.from_numpy(here)] = self.rows.values[torch.from_numpy(places[at[here]])]

    def take(self) -> RowValues | None:
        """Removes and returns all rows, for the step that includes them; None if there are none."""
        rows, self.rows, self._sorted = self.rows, None, None
        return rows
