"""Names for torch's profiler, so that a user's own trace shows where a step communicates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

PUSH = "ps_worker.push"  # buckets are handed over to the threads that send them
WAIT = "ps_worker.wait"  # until all are staged, and all weights have landed
PULL = "ps_worker.pull"  # what has landed is taken over


def named(name: str) -> AbstractContextManager[object]:
    """Returns a context that the profiler shows; one that does nothing while none runs.

    `record_function` alone takes some 10 microseconds each time, profiler or not.
    """
    running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if running else nullcontext()
