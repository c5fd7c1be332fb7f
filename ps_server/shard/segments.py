"""Mapping a worker's segment, without trusting what it says."""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import re
import stat
from pathlib import Path

import numpy as np
import torch

from ps_protocol.errors import NotShared
from ps_protocol.segment_layout import MEMORY_FILE, NAME_PREFIX, NONCE_BYTES, SegmentMap, SegmentPlan

_MEMORY_FILE = re.compile(r"(\d{1,10})/(\d{1,10})")
_NAME = re.compile(re.escape(NAME_PREFIX) + r"[0-9a-f]{32}")


def attach(location: str, nonce: bytes, plan: SegmentPlan, directory: Path) -> SegmentMap:
    """Maps the segment at a location, if it is the caller's, this user's alone, and as large as the job needs.

    location: "PID/FD" or a bare file name in `directory`; anything else is refused, so that no peer can have another
    file opened. Raises NotShared saying what was expected and what came.
    """
    number = _MEMORY_FILE.fullmatch(location)
    if number:
        path = Path(f"/proc/{number[1]}/fd/{number[2]}")
        flags = os.O_RDWR | os.O_NONBLOCK
        _refuse_other_files(path, location)
    elif _NAME.fullmatch(location):
        path = directory / location
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    else:
        raise NotShared(f"a segment is PID/FD or {NAME_PREFIX} and 32 hexadecimal digits, got {location[:80]!r}")
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise NotShared(f"the segment {location} cannot be opened here ({error.strerror})") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise NotShared(f"the segment {location} must be a file of this user alone (mode 0600)")
        if status.st_size != plan.size:
            raise NotShared(f"the segment {location} has {status.st_size} bytes where this job needs {plan.size}")
        _refuse_shrinking(descriptor, location, bool(number))
        memory = mmap.mmap(descriptor, plan.size)
    finally:
        os.close(descriptor)
    if len(nonce) != NONCE_BYTES or not hmac.compare_digest(memory[:NONCE_BYTES], nonce):
        memory.close()
        raise NotShared(f"the segment {location} is another one: its first {NONCE_BYTES} bytes differ")
    return SegmentMap(memory, plan)


def copy_out(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a flat tensor of [numel] into one of that size in a segment, which may be of another type.

    Without conversion by numpy, which leaves it to the C library: that streams (see ops.glibc), and torch never does.
    """
    if target.dtype == source.dtype:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)


def _refuse_other_files(path: Path, location: str) -> None:
    """Raises NotShared for another kind of file: in another PID namespace the number may be of any process."""
    try:
        target = path.readlink()
    except OSError as error:
        raise NotShared(f"the segment {location} is not to be seen from here ({error.strerror})") from None
    if not str(target).startswith(MEMORY_FILE):
        raise NotShared(f"the segment {location} is no memory file of a worker")


def _refuse_shrinking(descriptor: int, location: str, sealed: bool) -> None:
    """Raises NotShared for a memory file that may shrink: reading beyond the end of a mapped file kills the reader."""
    if sealed and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise NotShared(f"the segment {location} must be sealed against shrinking")
