"""The launches that have taken part in a job, and how its last worker left: whether the job has finished, for whom.

A job whose last worker has left may wait for one that was taken off as silent: until that comes back, is known to be
dead, or has been away for too long. The job is finished then.
"""

from __future__ import annotations

LAUNCHES_KEPT = 256  # that took part in one job; the first are forgotten


class Attendance:
    """Which launches have taken part in a job, the last one last, and how the worker went that left last.

    has_been: a worker has joined since this coordinator knows the job
    has_left: no worker has joined since one left, and none was lost
    is_done:  the script of that one had come to its end
    left_at:  when it left, in seconds since 1970
    waits:    the job ends as soon as no worker is left that may come back
    """

    def __init__(self) -> None:
        self.launches: tuple[str, ...] = ()
        self.has_been = self.has_left = self.is_done = self.waits = False
        self.left_at = 0.0

    def joined(self, launch: str) -> None:
        """Notes a worker. launch: that started it; empty: not known"""
        self.has_been, self.has_left, self.waits = True, False, False
        if launch and launch not in self.launches:
            self.launches = (*self.launches, launch)[-LAUNCHES_KEPT:]

    def left(self, done: bool, at: float) -> None:
        """Notes that a worker has left. done: its script has come to its end"""
        self.has_left, self.is_done, self.left_at = True, done, at

    def lost(self) -> None:
        """Notes that a live worker is gone: what it had to do is still to be done, whoever has left before."""
        self.has_left = self.waits = False

    def wait(self) -> bool:
        """Has the job wait for those that may come back. Returns whether it did not wait yet."""
        begins, self.waits = not self.waits, True
        return begins
