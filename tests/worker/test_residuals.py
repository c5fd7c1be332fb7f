"""Residuals: on a GPU all that is computed for them is queued in one order. test_gpu.py has the twin with a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ps_protocol.layout import BucketSpec, Slice
from ps_protocol.tensors import BLOCKS
from ps_worker.model.residual import Leaving, Residuals

NUMEL = 64


class Beside(TorchDispatchMode):
    """Notes what torch computes beside a queue."""

    def __init__(self) -> None:
        super().__init__()
        self._is_queued = False
        self.noted: list[str] = []

    @contextmanager
    def queue(self) -> Iterator[None]:
        self._is_queued = True
        yield
        self._is_queued = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_queued:
            self.noted.append(str(function))
        return function(*args, **(kwargs or {}))


def test_what_the_training_thread_computes_for_residuals_is_queued_behind_what_other_threads_encode() -> None:
    """A draft of a later step may be encoded while an earlier step, which was interrupted, is counted."""
    beside, cpu = Beside(), torch.device("cpu")
    bucket = BucketSpec(0, "float32", "float32", False, 0, NUMEL, (Slice(0, 0, 0, NUMEL),))
    residuals = Residuals({0: NUMEL}, cpu, beside.queue)
    first, second = Leaving(bucket, None), Leaving(bucket, None)
    for number, leaving in enumerate((first, second)):
        residuals.encode(leaving, torch.linspace(0.1, 1.7, NUMEL).roll(number), BLOCKS["int8"], ())
    expected = first.error + second.error  # type: ignore[operator]
    with beside:
        residuals.count(first)
        residuals.count(second)
        kept = residuals.copy()
        residuals.put(kept)
    assert torch.equal(kept[0], expected)
    assert beside.noted == []
