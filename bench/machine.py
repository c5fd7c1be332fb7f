"""What the kernel says of this machine and of a process on it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
import torch

CPUCLOCK_SCHED = 2  # the kernel's clock of the time that a scheduler has given


def machine() -> str:
    """Cores, processor, memory and kernel: no name, no address."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = re.match(r"[\d.]*\d", platform.release())
    cores = len(os.sched_getaffinity(0))
    name = found[1].strip() if found else platform.machine()
    return f"{cores} cores of {name}, {gigabytes:.0f} GiB, Linux {kernel[0] if kernel else ''}".strip()


def versions() -> dict[str, str]:
    """What was measured with."""
    return {"torch": torch.__version__, "grpcio": grpc.__version__, "python": platform.python_version()}


def memory(pid: int | str = "self") -> dict[str, int]:
    """A process' resident memory in bytes.

    peak:   the most there has been
    shared: of what there is, pages of segments, which other processes may map as well
    private: of what there is, pages of no file or segment, which are this process' alone
    """
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    names = {"peak": "VmHWM", "shared": "RssShmem", "private": "RssAnon"}
    return {name: int(status[field]) * 1024 for name, field in names.items()}


def family(pid: int) -> list[int]:
    """Returns a process of this machine and all that it and its children have started and that still run."""
    found = [pid]
    for each in found:  # which grows meanwhile
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended
                found += map(int, task.read_text().split())
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds of a core that processes of this machine have used: all their threads, in user and in kernel mode.

    To the nanosecond, by each process' own clock: see clock_getcpuclockid(3).
    """
    return sum(time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED) for pid in pids)


def waits(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """How often each thread of processes of this machine has waited for something, by process and thread.

    The end of each wait is a wake-up of a core. The kernel calls it a voluntary context switch.
    """
    found = {}
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # a thread that has ended
                count = re.search(r"^voluntary_ctxt_switches:\s+(\d+)$", status.read_text(), re.MULTILINE)
                assert count
                found[pid, int(status.parent.name)] = int(count[1])
    return found


def traffic() -> tuple[int, int]:
    """Bytes received and sent by this host's interfaces other than loopback, with all headers, since they came up."""
    received = sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received += int(fields[0])
            sent += int(fields[8])
    return received, sent
