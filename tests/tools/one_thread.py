"""Has torch compute in the calling thread alone, as servers do.

Tensors are tiny in tests: where other tests run, threads of torch wait for each other a hundred times as long as they
compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sets the number of torch's threads to one, and back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
