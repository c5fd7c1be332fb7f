"""Reads a loader one batch ahead of its loop, so that a step can fetch the rows of the next batch.

The position in the data does not change: a batch that was read ahead counts as taken once the loop has it. A batch that
the loop never asks for is read again by the next loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

LookAhead = Callable[[Iterator[Any]], Iterator[Any]]

_END = object()


def look_ahead(batches: Iterator[Any], announce: Callable[[Any], None]) -> Iterator[Any]:
    """Yields batches. Calls `announce` with the following batch before each; None after the last.

    A loop in no_grad mode reads nothing ahead, as no step follows its batches. An error in a batch that is read ahead
    is raised when the loop asks for that batch.
    """
    if not torch.is_grad_enabled():
        yield from batches
        return
    batch = next(batches, _END)
    while batch is not _END:
        failed = None
        try:
            following = next(batches, _END)
        except Exception as error:
            following, failed = _END, error
        announce(None if following is _END else following)
        yield batch
        if failed is not None:
            raise failed
        batch = following
