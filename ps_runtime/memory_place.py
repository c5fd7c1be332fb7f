"""Identifies the memory that processes can share: one directory on one machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def memory_place(directory: Path) -> str:
    """Returns an id, 32 hexadecimal digits, that is equal in all processes which see this very directory on this
    machine since its boot, also in containers, and in no others. Empty if the system does not tell it."""
    try:
        found = os.stat(directory)
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}:{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:32]
