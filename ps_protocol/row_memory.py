"""The memory for rows that a worker shares with the shards on its host: ids, gradients and rows of the current step.

It is a second segment, which the worker hands over like that of the buckets. The worker chooses its layout, and its
messages name offsets. A shard reads and writes there only while it answers such a message.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES
from ps_protocol.segment_layout import PAGE_BYTES

MAX_ROW_BYTES = 2**32
ELEMENT_BYTES = 4
_ALIGNMENT = 8


def pushed_bytes(rows: int, dim: int) -> int:
    """Returns the size of the ids, counts and gradients of `rows` rows."""
    return rows * (ID_BYTES + COUNT_BYTES + ELEMENT_BYTES * dim)


def pulled_bytes(rows: int, dim: int) -> int:
    """Returns the size of `rows` rows and of the ids before them."""
    return rows * (ID_BYTES + ELEMENT_BYTES * dim)


def aligned(size: int) -> int:
    """Returns a size rounded up to the alignment, so that another array can follow directly."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RowMemory:
    """A mapped segment for rows. `size`: the bytes behind its first page"""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.size = len(memory) - PAGE_BYTES

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the numbers at an offset: [count]. Raises InvalidRequest for an offset outside of the segment."""
        end = offset + count * np.dtype(dtype).itemsize
        if offset % ELEMENT_BYTES or offset < PAGE_BYTES or end > PAGE_BYTES + self.size:
            raise InvalidRequest(
                f"expected a place in a segment for rows of {self.size} bytes, got bytes {offset} to {end}"
            )
        return np.frombuffer(self._memory, dtype, count, offset)

    def rows(self, offset: int, count: int, dim: int) -> torch.Tensor:
        """Returns the rows at an offset: [count, dim] float32. Raises InvalidRequest for an offset outside of the
        segment."""
        return torch.from_numpy(self.array(offset, count * dim, np.float32)).view(count, dim)
