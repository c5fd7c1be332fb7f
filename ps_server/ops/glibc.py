"""A server's use of the C library: one pool of memory, returning free memory, and copies past the processor's cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Mapping

from ps_runtime.settings import environment

_M_ARENA_MAX = -8  # the parameter of mallopt(3)
_TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_AT_SECURE = 23  # AT_SECURE of getauxval(3): the program has privileges that its caller lacks
_STREAMED_BYTES = 2**20  # smaller copies stay in the cache, and may well be read from there


def share_memory_pool() -> None:
    """Makes all threads use one pool of memory.

    By default glibc gives threads pools of their own, and memory that one thread frees is of no use to the others.
    Buckets pass through dozens of threads, so a shard kept half as much free memory as its weights and optimizer state
    take. With one pool rounds are no slower (measured). To give freed buckets back to the system at once
    (M_MMAP_THRESHOLD) doubles the time of a round: fresh pages have to be cleared.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library, without this setting
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Returns free memory to the system. Called after large requests that were broken off."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def streaming(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which large copies stream; unchanged if it sets the threshold already."""
    tunables = variables.get(_TUNABLES, "")
    if _THRESHOLD in tunables:
        return dict(variables)
    return {**variables, _TUNABLES: ":".join(filter(None, (tunables, f"{_THRESHOLD}={_STREAMED_BYTES:#x}")))}


def stream_large_copies() -> None:
    """Starts this program anew, in this process, unless its large copies stream already or cannot.

    A shard does not read again what it writes into a worker's segment. An ordinary store first reads the overwritten
    line into the cache, and evicts useful lines. A streaming store does neither, and takes half the time if the source
    is in the cache (measured). glibc's memmove uses them above a size that only the environment can set, when a program
    starts.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64":
        return
    # With AT_SECURE the loader removes the variable from the environment: the program would restart for ever.
    if ctypes.CDLL(None).getauxval(_AT_SECURE):
        return
    present = environment()
    wanted = streaming(present)
    if wanted != present:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
