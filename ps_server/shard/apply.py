"""The threads that add gradients and step optimizers, and others that lend them a hand.

To hand a bucket to another thread and be told of it costs as much as adding one up (measured). A thread that has just
staged what completes an update, and whose caller waits for nothing else, does the work itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


class ApplyThreads:
    """Runs tasks in the order in which they came, at most `count` at a time, whoever runs them. Tasks do not raise."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, "apply")
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._running = 0

    def submit(self, task: Task) -> None:
        """Has a thread of its own run the task."""
        if self._enters([task]):
            self._threads.submit(self._run)

    def lend(self, tasks: Iterable[Task]) -> None:
        """As `submit`, but the calling thread runs what there is, unless enough are at it already."""
        if self._enters(tasks):
            self._run()

    def stop(self) -> None:
        """Returns when everything has been run, and ends the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._threads.shutdown(wait=True)

    def _enters(self, tasks: Iterable[Task]) -> bool:
        """Queues tasks; whether one more is to run them."""
        with self._changed:
            self._tasks.extend(tasks)
            enters = bool(self._tasks) and self._running < self._count
            self._running += enters
            return enters

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
            task()
