"""What a server asks of the C library: one pool of memory, to give some back, and copies past the processor's cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Mapping

from ps_runtime.settings import environment

_M_ARENA_MAX = -8  # of mallopt(3)
_TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_AT_SECURE = 23  # of getauxval(3): the program has rights that who started it lacks
_STREAMED_BYTES = 2**20  # smaller copies stay in the cache, and may well be read from there


def share_memory_pool() -> None:
    """Has all threads take memory from one pool.

    By default glibc gives threads pools of their own, and what one of them frees is of no use to the others: with
    buckets passing through dozens of threads, a shard kept half of its weights and optimizer state again in free
    memory. With one pool rounds are no slower (measured). To give freed buckets back to the system at once
    (M_MMAP_THRESHOLD) doubles the time of a round: fresh pages have to be cleared.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library: it has ways of its own
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Gives free memory back to the system: after requests that were large and never became whole."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def streaming(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which large copies stream; as it is where it says something about that already."""
    tunables = variables.get(_TUNABLES, "")
    if _THRESHOLD in tunables:
        return dict(variables)
    return {**variables, _TUNABLES: ":".join(filter(None, (tunables, f"{_THRESHOLD}={_STREAMED_BYTES:#x}")))}


def stream_large_copies() -> None:
    """Starts this program anew, in this process, unless its large copies stream already or cannot.

    What a shard writes into a worker's segment it does not read again. An ordinary store first reads the line that it
    overwrites into the cache, and drives out what is needed there; a streaming store does neither, and takes half the
    time where what is copied is in the cache (measured). glibc's memmove uses them above a size that only the
    environment can set, when a program starts.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64":
        return
    if ctypes.CDLL(None).getauxval(_AT_SECURE):  # the loader takes them out again: it would start for ever
        return
    present = environment()
    wanted = streaming(present)
    if wanted != present:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
