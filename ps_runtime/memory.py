"""How much memory this process may still take: beyond that the kernel would kill it, or another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def free_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that the machine has free, or the control group that this process is in, if that is less; None: unknown.

    Memory that holds files counts as free, because it is given up when it is needed; not so files of memory alone.
    `root`: where /proc and /sys are.
    """
    return min(_free(root), default=None)


def resident_bytes() -> int | None:
    """Bytes of memory that this process has in use, what it shares with others included; None: unknown."""
    kilobytes = numbers(_ROOT / "proc/self/status").get("VmRSS:")
    return None if kilobytes is None else kilobytes * 1024


def limit_bytes() -> int | None:
    """Bytes that this process may have at most: those of the machine, or of its control group; None: unknown."""
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
    """Yields the control group of this process and those above it: the limit of each counts.

    controller: of version 1, whose groups are yielded too; None: those of version 2 alone
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
    """Returns the first number behind each name in a file of the kernel's."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
