"""The memory that this process may still allocate: beyond it, the kernel would kill this process or another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def free_bytes(root: Path = _ROOT) -> int | None:
    """Returns the free bytes of the machine, or of the control group of this process if that is less; None: unknown.

    The page cache counts as free, because the kernel drops it when needed; files in a tmpfs do not. root: the directory
    that has /proc and /sys
    """
    return min(_free(root), default=None)


def resident_bytes() -> int | None:
    """Returns the bytes of memory that this process uses, including shared memory; None: unknown."""
    kilobytes = numbers(_ROOT / "proc/self/status").get("VmRSS:")
    return None if kilobytes is None else kilobytes * 1024


def limit_bytes() -> int | None:
    """Returns the most bytes that this process may use: those of the machine, or of its control group;
    None: unknown.
    """
    limits = [kilobytes * 1024 for kilobytes in [numbers(_ROOT / "proc/meminfo").get("MemTotal:")] if kilobytes]
    for group in control_groups(_ROOT):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            limits.append(int((group / "memory.max").read_text()))
    return min(limits, default=None)


def _free(root: Path) -> Iterator[int]:
    machine = numbers(root / "proc/meminfo")
    if "MemAvailable:" in machine:
        yield machine["MemAvailable:"] * 1024
    for group in control_groups(root):
        try:
            limit = int((group / "memory.max").read_text())  # "max" where there is none
            taken = int((group / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        kinds = numbers(group / "memory.stat")
        yield max(0, limit - taken + kinds.get("file", 0) - kinds.get("shmem", 0))


def control_groups(root: Path, controller: str | None = None) -> Iterator[Path]:
    """Yields the control group of this process and all groups above it: the limit of each applies.

    controller: also yield the groups of this controller of version 1; None: only those of version 2
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            yield from (place for place in (group, *group.parents) if place == top or top in place.parents)


def numbers(path: Path) -> dict[str, int]:
    """Returns the numbers in a file such as /proc/meminfo: by name, the first number in the line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
