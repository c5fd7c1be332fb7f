"""Computing that a benchmark imitates: its time counts, its result does not."""

from __future__ import annotations

import os
import time

import torch


def way_to_compute(processes: int) -> str:
    """Returns how so many processes compute: "busy", where each has a core of its own; otherwise "wait"."""
    return "busy" if len(os.sched_getaffinity(0)) >= processes else "wait"


def compute(how: str, seconds: float) -> None:
    """Takes so long. "busy" multiplies matrices; "wait" sleeps, as a process does while its GPU computes."""
    if how == "wait":
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    numbers = torch.ones(64, 64)
    while time.perf_counter() < end:
        numbers @ numbers
