"""A thread pool that keeps working when no more threads can be started: `pids.max` of a container, or RLIMIT_NPROC.

concurrent.futures raises from `submit` if it cannot start a thread, although the task is queued by then. gRPC calls
`submit` on the one thread that dispatches all calls, and this exception ends it: the process stays alive and answers
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ps_protocol.errors import TryLater
from ps_runtime.background import guarded
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_runtime")

_troubles = Troubles(log, "threads")


class Pool(ThreadPoolExecutor):
    """At most `count` threads, one of them from the beginning: where no other can be started, those that there are do
    the work, one task after the other.

    name: of its threads. Raises TryLater if not even the first can be had
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self._name, self._is_made = name, False
        self.submit(int)  # so that whatever is queued later is done
        self._is_made = True

    def _adjust_thread_count(self) -> None:
        """Starts a thread if one is wanted: what `submit` calls once a task is queued, in each Python from 3.10 on."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._is_made:
                raise TryLater(f"no thread for {self._name!r} can be had in this process: {error}") from None
            what = "the pool %r goes on with the threads that it has, %d: %s"
            _troubles.met(self._name, what, self._name, len(self._threads), error)
        else:
            _troubles.over(self._name)


class FairPool:
    """A pool of which each owner of tasks has few threads at a time: its other tasks wait for these. Thread-safe.

    most: threads of one owner
    """

    def __init__(self, pool: ThreadPoolExecutor, most: int) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[Callable[[], object]]] = {}

    def submit(self, owner: str, task: Callable[[], object]) -> None:
        """Runs a task, after those that the owner has waiting; never where the pool is shut down."""
        with self._lock:
            if self._running[owner] >= self._most:
                self._waiting.setdefault(owner, deque()).append(task)
                return
            self._running[owner] += 1
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._run, owner, task)

    def stop(self) -> None:
        """Ends the threads, after what they are doing."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown()

    def _run(self, owner: str, task: Callable[[], object]) -> None:
        following: Callable[[], object] | None = task
        while following is not None:
            guarded("answers", following)
            following = self._next(owner)

    def _next(self, owner: str) -> Callable[[], object] | None:
        with self._lock:
            if owner in self._waiting:
                task = self._waiting[owner].popleft()
                if not self._waiting[owner]:
                    del self._waiting[owner]
                return task
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            return None
