"""Admits the buffers of a model that rank 0 sends for readers: a job was admitted without the memory for them.

A job does not declare which of its frozen tensors are buffers; the shard learns it when rank 0 sends them. To promise
the memory earlier would promise it twice to every frozen parameter.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_protocol.errors import LimitExceeded
from ps_runtime.memory import free_bytes


def check_reader_buffers(name: str, size: int, promised: Callable[[], int]) -> None:
    """Raises LimitExceeded if memory has no room: readers keep the buffers that they have, and rank 0 sends them again
    later.

    size:     bytes to keep for readers
    promised: returns the bytes of free memory that training was promised and has not allocated yet
    """
    free, taken = free_bytes(), promised()
    if free is not None and size + taken > free:
        raise LimitExceeded(
            f"job {name!r}: this shard's memory has no room for {size} bytes of buffers for readers: {free} are free, "
            f"of which training still takes {taken}"
        )
