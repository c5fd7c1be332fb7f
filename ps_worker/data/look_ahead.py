"""Reads a loader one batch ahead of its loop, so that what the next batch needs can be asked for with the step before.

The loop's place in the data is not touched: a batch that was read ahead counts as taken when the loop has it. One that
the loop never asks for is read again by the next loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

LookAhead = Callable[[Iterator[Any]], Iterator[Any]]

_END = object()


def look_ahead(batches: Iterator[Any], announce: Callable[[Any], None]) -> Iterator[Any]:
    """Yields batches, each after `announce` was called with the one behind it: None behind the last.

    A loop without gradients reads nothing ahead: no step follows its batches. An error in a batch that is read ahead is
    raised where the loop asks for that batch.
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
