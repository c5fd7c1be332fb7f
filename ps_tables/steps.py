"""Steps of plain SGD and of row-wise Adagrad, whose rounding is defined here: by numpy, operation by operation.

The library's loops give the same bits (native/loops.c). C code could not give the bits of torch's kernels: these fuse
products with sums on some processors and not on others, and their roots are not those of the processor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ps_tables.native import in_use
from ps_tables.row_arrays import RowArray, RowNumbers

Floats = npt.NDArray[np.float32]
BLOCK_ELEMENTS = 2**18  # stepped at a time, so that gathered rows stay in the processor's cache
_LANES = 8  # partial sums of squares of a row; loops.c has the same number, because it decides the rounding


def sgd(weights: RowArray, rows: RowNumbers, sums: Floats, count: int, lr: float) -> None:
    """Steps distinct rows by a mean gradient: rows [n], sums of gradients [n, dim]. count: the divisor of the mean"""
    loops = in_use.loops()
    if loops is not None:
        loops.sgd(weights.elements, rows, sums, float(count), lr)
        return
    with np.errstate(all="ignore"):  # an overflow gives infinity, as in C
        for block in _blocks(len(rows), weights.dim):
            here = _read(weights, rows[block])
            moved = sums[block] / np.float32(count)
            moved *= np.float32(lr)
            here -= moved
            weights.write(rows[block], torch.from_numpy(here))


def row_wise_adagrad(
    weights: RowArray, squares: RowArray, rows: RowNumbers, sums: Floats, count: int, lr: float, eps: float
) -> None:
    """Steps distinct rows by a mean gradient: rows [n], sums of gradients [n, dim].

    squares: [capacity, 1], for each row the sum of the means of its squared gradients
    count:   the divisor of the mean
    """
    loops = in_use.loops()
    if loops is not None:
        loops.adagrad(weights.elements, squares.elements, rows, sums, float(count), lr, eps)
        return
    with np.errstate(all="ignore"):
        for block in _blocks(len(rows), weights.dim):
            which, means = rows[block], sums[block] / np.float32(count)
            total = squares.elements[which, 0] + _sums_of_squares(means) / np.float32(weights.dim)
            squares.elements[which, 0] = total
            scale = np.float32(lr) / (np.sqrt(total) + np.float32(eps))
            here = _read(weights, which)
            means *= scale[:, None]
            here -= means
            weights.write(which, torch.from_numpy(here))


def _sums_of_squares(means: Floats) -> Floats:
    """Returns the sum of each row's squares: eight sums, of every eighth square, which are then added in pairs."""
    squares = means * means
    missing = -means.shape[1] % _LANES
    if missing:
        squares = np.pad(squares, ((0, 0), (0, missing)))
    lane = np.zeros((len(means), _LANES), np.float32)
    for first in range(0, squares.shape[1], _LANES):
        lane += squares[:, first : first + _LANES]
    half = lane[:, :4] + lane[:, 4:]
    total: Floats = (half[:, 0] + half[:, 2]) + (half[:, 1] + half[:, 3])
    return total


def _read(weights: RowArray, rows: RowNumbers) -> Floats:
    here = np.empty((len(rows), weights.dim), np.float32)
    weights.read(rows, torch.from_numpy(here))
    return here


def _blocks(rows: int, dim: int) -> list[slice]:
    length = max(1, BLOCK_ELEMENTS // dim)
    return [slice(first, first + length) for first in range(0, rows, length)]
