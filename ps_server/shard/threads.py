"""The threads of a shard, which apply updates, read and write checkpoints, and run periodic work; and NoThreads.

To hand a bucket to another thread costs as much as adding a contribution (measured). So a thread that has just staged
the last push of an update applies it itself, if its caller waits for nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ps_protocol.errors import TryLater
from ps_runtime.background import guarded, start
from ps_runtime.pools import Pool

Task = Callable[[], None]

READERS = 4  # restores at a time, each of another job
IDLE_SECONDS = 1.0  # the pause between two calls of a repeated task while nothing waits for it
# Idle runs before the thread sleeps longer and must be woken; a round of training takes less time than these
_IDLE_AFTER = 20


class Threads(Protocol):
    """Runs a shard's work beside its calls. Tasks do not raise. `write` and `read` raise TryLater once the
    shard stops.
    """

    def submit(self, task: Task) -> None:
        """Runs a task that applies updates, in another thread if there is one."""

    def run_here(self, tasks: Iterable[Task]) -> None:
        """As `submit`, but the calling thread runs the tasks itself, unless enough threads are at work already."""

    def write(self, task: Task) -> None:
        """Runs a task that writes to disk, in a thread of its own if there are threads."""

    def read(self, task: Task) -> None:
        """Runs a task that reads from disk, in a thread of its own if there are threads."""

    def repeat(self, seconds: float, task: Callable[[], bool]) -> None:
        """Runs a task every `seconds`, until the shard stops. Without threads it does nothing: see Shard.tick.

        The task returns whether anything waits for its next run. While nothing does, it runs every IDLE_SECONDS.
        """

    def wake(self) -> None:
        """Tells the repeated task that something waits for it. Cheap while the task runs often anyway."""

    def stop(self) -> None:
        """Returns when everything has been run, and ends the threads."""


class ApplyThreads:
    """Runs tasks in their order of arrival, at most `count` at a time, in its own threads or in callers of
    `run_here`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = Pool(count, "apply")
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._running = 0

    def submit(self, task: Task) -> None:
        """Runs a task in one of its own threads, or in the calling thread once those have ended."""
        if self._enters([task]):
            try:
                self._threads.submit(self._run)
            except RuntimeError:  # `stop` came after the caller had found the task
                self._run()

    def run_here(self, tasks: Iterable[Task]) -> None:
        """As `submit`, but the calling thread runs the tasks itself, unless `count` threads are at work already."""
        if self._enters(tasks):
            self._run()

    def stop(self) -> None:
        """Returns when everything has been run, and ends the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._threads.shutdown(wait=True)

    def _enters(self, tasks: Iterable[Task]) -> bool:
        """Queues tasks. Returns whether another thread must be started for them."""
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
            guarded("apply", task)


class OwnThreads(ApplyThreads):
    """A shard's own threads: `count` that apply updates, one that writes, some that read, and one for each repeated
    task.
    """

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self._writer = Pool(1, "checkpoint")
        self._readers = Pool(READERS, "restore")
        self._stopping = threading.Event()
        self._repeating: list[threading.Thread] = []
        self._wanted = threading.Event()
        self._is_idle = False

    def write(self, task: Task) -> None:
        """Runs a task in the writing thread. Raises TryLater after `stop`."""
        _submit(self._writer, "checkpoint", task)

    def read(self, task: Task) -> None:
        """Runs a task in a reading thread. Raises TryLater after `stop`."""
        _submit(self._readers, "restore", task)

    def repeat(self, seconds: float, task: Callable[[], bool]) -> None:
        """Starts a thread that runs a task every `seconds`, or every IDLE_SECONDS while nothing waits for it. For one
        task.
        """
        unwanted = 0

        def run_once() -> None:
            nonlocal unwanted
            unwanted += 1
            if task():
                unwanted = 0

        def run() -> None:
            while not self._stopping.is_set():
                if self._is_idle:
                    self._wanted.wait(IDLE_SECONDS)
                else:
                    self._stopping.wait(seconds)
                self._wanted.clear()
                if self._stopping.is_set():
                    return
                # Set before the task runs: a caller that begins to wait later sees it, and wakes this thread.
                self._is_idle = unwanted >= _IDLE_AFTER
                guarded("notices", run_once)
                self._is_idle = self._is_idle and unwanted > 0

        thread = threading.Thread(target=run, name="notices", daemon=True)
        start(thread)
        self._repeating.append(thread)

    def wake(self) -> None:
        """Tells the repeated task that something waits for it."""
        if self._is_idle:
            self._is_idle = False
            self._wanted.set()

    def stop(self) -> None:
        """Returns when everything has been run, and ends the threads."""
        self._stopping.set()
        self._wanted.set()
        for thread in self._repeating:
            thread.join()
        super().stop()
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)


def _submit(pool: ThreadPoolExecutor, name: str, task: Task) -> None:
    try:
        pool.submit(guarded, name, task)
    except RuntimeError:  # the pool was shut down
        raise TryLater("the shard is stopping") from None


class NoThreads:
    """Runs everything in the calling thread, at once. Nothing is repeated: see Shard.tick."""

    def submit(self, task: Task) -> None:
        """Runs a task."""
        task()

    def run_here(self, tasks: Iterable[Task]) -> None:
        """Runs tasks."""
        for task in tasks:
            task()

    def write(self, task: Task) -> None:
        """Runs a task."""
        task()

    def read(self, task: Task) -> None:
        """Runs a task."""
        task()

    def repeat(self, seconds: float, task: Callable[[], bool]) -> None:
        """Does nothing."""

    def wake(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""
