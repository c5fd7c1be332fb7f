"""Admits what rank 0 tells of buffers, for readers: a job was admitted without the memory for it.

Which of the tensors that no optimizer steps are buffers is not known before rank 0 tells of them: a frozen model would
else be promised its memory twice.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_protocol.errors import LimitExceeded
from ps_runtime.memory import free_bytes


def check_told(name: str, size: int, promised: Callable[[], int]) -> None:
    """Raises LimitExceeded where memory has no room: readers keep the buffers that they have, and rank 0 tells again.

    size:     bytes that are to be kept for readers
    promised: returns the bytes of free memory that training was promised and has not allocated yet
    """
    free, taken = free_bytes(), promised()
    if free is not None and size + taken > free:
        raise LimitExceeded(
            f"job {name!r}: this shard's memory has no room for {size} bytes of buffers for readers: {free} are free, "
            f"of which training still takes {taken}"
        )
