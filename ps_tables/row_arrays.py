"""Arrays of rows in reserved address space: they grow without a copy, because their addresses never change.

Linux allocates memory when it is first written. So an array for the most rows of a table takes only addresses at first,
and its rows begin as zeros. Rows are written as opaque records: numpy copies each with one move, several times as fast
as torch's index_copy_ (measured: 0.27 beside 1.10 ms for 10,000 rows of 64 elements).
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import LimitExceeded
from ps_tables.native import in_use

RowNumbers = npt.NDArray[np.int64]

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.12


def reserved(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array of zeros, [count]. Memory is allocated only for the parts that are written.

    Raises LimitExceeded if the addresses cannot be reserved.
    """
    nbytes = max(1, count) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        raise LimitExceeded(f"{nbytes} bytes of addresses for a table cannot be had ({error}): set max_rows") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype)


class RowArray:
    """[capacity, dim] float32, zeros at first; rows are read and written by their indices.

    capacity: the most rows; memory is allocated for those that were written
    dim:      elements of a row
    elements: the whole array
    """

    def __init__(self, capacity: int, dim: int) -> None:
        self.dim = dim
        self._records = reserved(capacity, f"V{4 * dim}")
        self.elements: npt.NDArray[np.float32] = self._records.view(np.float32).reshape(-1, dim)

    def read(self, rows: RowNumbers, out: torch.Tensor) -> None:
        """Copies rows [n] into `out`, [n, dim] contiguous or flat. A negative index reads any row."""
        loops = in_use.loops()
        if loops is not None:
            loops.gather(self._records, rows, self._as_records(out))
        else:
            np.take(self._records, rows, out=self._as_records(out), mode="clip")  # `raise` would copy once more

    def write(self, rows: RowNumbers, values: torch.Tensor) -> None:
        """Sets rows [n] to `values`, [n, dim] contiguous or flat."""
        loops = in_use.loops()
        if loops is not None:
            loops.scatter(self._records, rows, self._as_records(values))
        else:
            self._records[rows] = self._as_records(values)

    def _as_records(self, values: torch.Tensor) -> npt.NDArray[Any]:
        return values.detach().reshape(-1).numpy().view(self._records.dtype)
