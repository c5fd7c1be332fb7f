"""What workers push to a table: gradients of rows, of a step or the sum of several, and rows that a script has set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.row_ids import Ids, Which
from ps_tables.distinct import distinct
from ps_tables.row_sums import add_rows

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowValues:
    """Rows that a script has set.

    ids:    [n], distinct
    values: [n, dim] float32, contiguous, finite
    """

    ids: Ids
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return self.ids.nbytes + self.values.nbytes


@dataclass(frozen=True)
class RowGradients:
    """The contribution of one step of a worker, or of several steps, to a table.

    ids:       [n], distinct
    counts:    [n], the occurrences of each id in the step's data
    gradients: [n, dim] float32, contiguous, summed over the occurrences
    ends:      [shards]: if the ids are sorted by shard, where the ids of each shard end; None: unknown
    """

    ids: Ids
    counts: Counts
    gradients: torch.Tensor
    ends: Ids | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, which: Which) -> RowGradients:
        """Returns the rows at `which`, without `ends`. For a slice the result is a view, for indices a copy."""
        rows = which if isinstance(which, slice) else torch.from_numpy(which)
        return RowGradients(self.ids[which], self.counts[which], self.gradients[rows])

    @staticmethod
    def none(dim: int) -> RowGradients:
        """Returns a contribution without rows, of a table with `dim` elements a row."""
        empty = np.empty(0, np.int64)
        return RowGradients(empty, empty, torch.empty(0, dim, dtype=torch.float32, device="cpu"))

    @staticmethod
    def union(contributions: Sequence[RowGradients]) -> RowGradients:
        """Returns the sum of at least one contribution: each row's gradients are added in the order given."""
        if len(contributions) == 1:
            return contributions[0]
        ids, positions, *_ = distinct(np.concatenate([each.ids for each in contributions]))
        counts = np.zeros(len(ids), np.int64)
        sums = torch.zeros(len(ids), contributions[0].gradients.shape[1], dtype=torch.float32, device="cpu")
        first = 0
        for each in contributions:
            at = positions[first : first + len(each)]
            counts[at] += each.counts  # distinct within one contribution
            add_rows(sums, at, each.gradients)
            first += len(each)
        return RowGradients(ids, counts, sums)
