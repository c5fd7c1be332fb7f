"""The launches that have taken part in a job, and how its last worker left: whether the job has finished, for whom."""

from __future__ import annotations

LAUNCHES_KEPT = 256  # that took part in one job; the first are forgotten


class Attendance:
    """Which launches have taken part in a job, the last one last, and how the worker went that left last.

    has_left: no worker has joined since one left
    is_done:  the script of that one had come to its end
    """

    def __init__(self) -> None:
        self.launches: tuple[str, ...] = ()
        self.has_left = self.is_done = False

    def joined(self, launch: str) -> None:
        """Notes a worker. launch: that started it; empty: not known"""
        self.has_left = False
        if launch and launch not in self.launches:
            self.launches = (*self.launches, launch)[-LAUNCHES_KEPT:]

    def left(self, done: bool) -> None:
        """Notes that a worker has left. done: its script has come to its end"""
        self.has_left, self.is_done = True, done
