"""The value of a row without training: a function of seed, id and column.

So reading an id creates no row, and two runs agree, whatever the order of reads and the number of shards. Only sums,
products and shifts are used, whose results are the same on every machine; the last bit of a logarithm is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.row_ids import Ids, mix
from ps_protocol.tables import Initializer

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: multiples of it are far apart
_BLOCK = 4096  # rows at a time, which fit into a cache


def initial_rows(start: Initializer, ids: Ids, dim: int) -> torch.Tensor:
    """Returns the first values of rows: [n] to [n, dim] float32.

    "normal" is the sum of eight uniform numbers, which lies within 4.9 standard deviations and otherwise looks like the
    normal distribution.
    """
    values = np.empty((len(ids), dim), np.float32)
    if start.kind == "constant":
        values.fill(start.scale)
        return torch.from_numpy(values)
    fill = _fill_uniform if start.kind == "uniform" else _fill_normal
    for first in range(0, len(ids), _BLOCK):
        part = slice(first, first + _BLOCK)
        fill(values[part], mix(ids[part] ^ np.uint64(start.seed).astype(np.int64)), start.scale)
    return torch.from_numpy(values)


def _random(mixed: npt.NDArray[np.uint64], columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each row and column."""
    words = mixed[:, None] + columns * _GOLDEN
    return mix(words.view(np.int64).reshape(-1)).reshape(words.shape)


def _fill_uniform(values: npt.NDArray[np.float32], mixed: npt.NDArray[np.uint64], bound: float) -> None:
    words = _random(mixed, np.arange(1, values.shape[1] + 1, dtype=np.uint64))
    values[...] = words >> np.uint64(40)  # 24 bits, which float32 has
    values *= np.float32(2 * bound / 2**24)
    values -= np.float32(bound)


def _fill_normal(values: npt.NDArray[np.float32], mixed: npt.NDArray[np.uint64], deviation: float) -> None:
    columns = np.arange(1, 2 * values.shape[1] + 1, dtype=np.uint64)
    words = _random(mixed, columns).view(np.uint16).reshape(*values.shape, 8)
    values[...] = words.sum(axis=2, dtype=np.int32) - (8 * 2**15 - 4)  # the mean of each is 2**15 - 1/2
    values *= np.float32(deviation * _OF_ONE)


# Scales the sum of eight whole numbers below 2**16 to a standard deviation of 1, by the variance of this sum.
_OF_ONE = 1 / (8 * (2**32 - 1) / 12) ** 0.5
