"""Reads rows by index, copies them, and sums rows by index. Rows are added in order, so sums are equal to the bit
everywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from ps_protocol.tensors import is_finite
from ps_tables.native import in_use
from ps_tables.native.loops import Floats, Longs, Loops

# That numpy copies at once. A piece stays in the cache until it is checked; servers let larger copies go past it.
_PIECE = 2**16


def rows_at(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the rows with the indices `positions`: [m, dim], [n] to [n, dim]. Raises IndexError for an index out of
    range.
    """
    loops = _loops_for(rows)
    if loops is None or not rows.is_contiguous():
        return rows.index_select(0, positions)
    found = torch.empty(len(positions), rows.shape[1], dtype=torch.float32, device="cpu")
    loops.rows_at(rows.detach().numpy(), positions.numpy(), found.numpy())
    return found


def are_finite(rows: torch.Tensor) -> bool:
    """Returns whether no element of some rows is an infinity or a NaN."""
    loops = _loops_for(rows)
    return is_finite(rows) if loops is None else loops.are_finite(rows.detach().numpy())


def copy_numbers(numbers: Floats, out: Floats) -> bool:
    """Copies numbers: [n] to [n]. Returns whether none of those in `out` is an infinity or a NaN. Others may write to
    `numbers` meanwhile.
    """
    loops = in_use.loops()
    if loops is not None:
        return loops.copy(numbers, out)
    are_all = True
    for first in range(0, len(numbers), _PIECE):
        piece = out[first : first + _PIECE]
        piece[:] = numbers[first : first + _PIECE]
        are_all = is_finite(torch.from_numpy(piece)) and are_all
    return are_all


def add_rows(sums: torch.Tensor, positions: Longs, values: torch.Tensor) -> None:
    """Adds values, in order, to the rows of `sums` with the indices `positions`: [m, dim], [n], values [n, dim]."""
    loops = _loops_for(values)
    if loops is not None:
        loops.add(sums.numpy(), positions, values.detach().contiguous().numpy())
    else:
        sums.index_add_(0, torch.from_numpy(positions), values)


def added_up(values: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Returns, for each index below `count`, the sum of its values: values [n, dim], their indices `positions` [n] to
    [count, dim].
    """
    loops = _loops_for(values)
    if loops is not None:
        sums = torch.empty(count, values.shape[1], dtype=torch.float32, device="cpu")
        loops.sum(sums.numpy(), positions.numpy(), values.detach().contiguous().numpy())
        return sums
    if _is_plain(values) and len(positions):
        return _added_up_in_bags(values, positions.numpy(), count)
    return values.new_zeros(count, values.shape[1]).index_add_(0, positions, values)


def _added_up_in_bags(values: torch.Tensor, positions: Longs, count: int) -> torch.Tensor:
    """Returns the sums of float32 on the CPU by torch's bags, after sorting: half the time of index_add_, and the same
    bits (measured: 0.6 beside 1.1 ms for 26,624 gradients of 10,271 rows)."""
    keys = (positions << 32) | np.arange(len(positions))
    keys.sort()
    ends = np.cumsum(np.bincount(positions, minlength=count))
    begins = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), ends[:-1]]))
    order = torch.from_numpy(keys & (2**32 - 1))
    return functional.embedding_bag(order, values.contiguous(), begins, mode="sum")


def _is_plain(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32


def _loops_for(values: torch.Tensor) -> Loops | None:
    return in_use.loops() if _is_plain(values) else None
