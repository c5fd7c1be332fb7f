"""Copies that go past the processor's cache.

What a shard writes into a worker's segment it does not read again. An ordinary store first reads the line that it
overwrites into the cache, and drives out what is needed there; a streaming store does neither, and takes half the time
(measured, with a source that is in the cache). glibc's memmove uses them above a size that only its environment can set,
which is read when a program starts; torch's own copies never do.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

import numpy as np
import torch

_TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_BYTES = 2**20  # smaller copies stay in the cache: they may well be read from there


def streaming(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with which large copies stream; as it is where it says something about that already."""
    found = environment.get(_TUNABLES, "")
    if _THRESHOLD in found:
        return dict(environment)
    return {**environment, _TUNABLES: ":".join(filter(None, (found, f"{_THRESHOLD}={_BYTES:#x}")))}


def stream_from_now_on() -> None:
    """Starts this very program anew, in this process, if its large copies do not stream and can."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64":
        return
    environment = streaming(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def copy_out(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a flat tensor of [numel] into one of the same size, which may be of another type."""
    if target.dtype == source.dtype:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)
