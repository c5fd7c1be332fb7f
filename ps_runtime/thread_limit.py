"""The number of threads that this process may have: beyond it, no more can be started.

Containers limit it (`pids.max`: Compose's `pids_limit`, Kubernetes' `podPidsLimit`, systemd's `TasksMax`); so does
RLIMIT_NPROC, for all processes of a user together, and the kernel for the whole machine. Only what others have left of
each limit counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ps_runtime.memory import control_groups, numbers

_ROOT = Path("/")
# RLIMIT_NPROC does not apply to a process with one of these capabilities, CAP_SYS_ADMIN or CAP_SYS_RESOURCE, nor to
# root.
_UNLIMITED = 1 << 21 | 1 << 24


@dataclass(frozen=True, order=True)
class ThreadLimit:
    """A limit of this process's threads.

    threads: the most threads that it may have, including those that it has
    name:    the limit that applies
    """

    threads: int
    name: str


def thread_limit(root: Path = _ROOT) -> ThreadLimit | None:
    """Returns the lowest limit of this process's threads; None: unknown. root: the directory that has /proc and /sys"""
    own = numbers(root / "proc/self/status").get("Threads:", 1)
    free = min((ThreadLimit(max(0, most), name) for most, name in _free(root)), default=None)
    return None if free is None else ThreadLimit(free.threads + own, free.name)


def _free(root: Path) -> Iterator[tuple[int, str]]:
    for group in control_groups(root, "pids"):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            most = int((group / "pids.max").read_text())
            yield most - int((group / "pids.current").read_text()), "pids.max of its control group"
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):  # an emulated /proc may lack some lines
        limits = (root / "proc/self/limits").read_text().splitlines()
        processes = next((line for line in limits if line.startswith("Max processes")), "")
        most = int(processes.split()[2])  # or "unlimited"
        status = _status(root / "proc/self/status")
        if status["Uid:"] != "0" and not int(status["CapEff:"], 16) & _UNLIMITED:
            yield most - _threads_of(root, status["Uid:"]), "RLIMIT_NPROC of its user"
    with contextlib.suppress(OSError, ValueError, IndexError):
        most = min(int((root / f"proc/sys/kernel/{name}").read_text()) for name in ("threads-max", "pid_max"))
        there = int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
        yield most - there, "the kernel's threads-max or pid_max"


def _status(path: Path) -> dict[str, str]:
    """Returns the first word after each name in a file such as /proc/self/status."""
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}


def _threads_of(root: Path, user: str) -> int:
    """Counts the threads of all processes of a user: of its real id, as the kernel does."""
    count = 0
    for path in (root / "proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has ended meanwhile, or its name is no UTF-8
            status = _status(path)
            count += int(status["Threads:"]) if status["Uid:"] == user else 0
    return count
