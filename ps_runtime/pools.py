"""Pools of threads: those of servers survive a lack of threads, those of workers let a script end."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ps_protocol.errors import TryLater
from ps_runtime.background import guarded, join_within, start
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_runtime")

_troubles = Troubles(log, "threads")


# -- of servers --------------------------------------------------------------------------------------------------------

# No more threads can be started past `pids.max` of a container, or RLIMIT_NPROC. concurrent.futures raises from
# `submit` then, although the task is queued. gRPC calls `submit` on the one thread that dispatches all calls, and this
# exception ends it: the process stays alive and answers nothing.


class Pool(ThreadPoolExecutor):
    """A pool of at most `count` threads. The first is started at once. If no other thread can be started, the existing
    ones do the work, one task after the other.

    name: the name of the threads
    Raises TryLater if not even the first thread can be started.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self._name, self._is_made = name, False
        self.submit(int)  # so that whatever is queued later is done
        self._is_made = True

    def _adjust_thread_count(self) -> None:
        """Starts a thread if one is needed. `submit` of ThreadPoolExecutor calls this once a task is queued, in each
        Python from 3.10 on.
        """
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._is_made:
                raise TryLater(f"no thread for {self._name!r} can be had in this process: {error}") from None
            what = "the pool %r goes on with the threads that it has, %d: %s"
            _troubles.met(self._name, what, self._name, len(self._threads), error)
        else:
            if _troubles.open:
                _troubles.over(self._name)


class FairPool:
    """A pool in which each owner of tasks has at most `most` threads at a time. Thread-safe.

    The tasks of an owner come from several sources, which take turns. A source has one thread at most, so a source with
    many or endless tasks does not hold up the others.

    most: the most threads of one owner
    """

    def __init__(self, pool: ThreadPoolExecutor, most: int) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._running: dict[str, set[str]] = {}  # by owner, the sources that have a thread
        # By owner and source; whose turn is next comes first.
        self._waiting: dict[str, dict[str, deque[Callable[[], object]]]] = {}

    def submit(self, owner: str, source: str, task: Callable[[], object]) -> None:
        """Queues a task after the earlier tasks of its source. It is dropped if the pool is shut down."""
        with self._lock:
            running = self._running.setdefault(owner, set())
            if len(running) >= self._most or source in running:
                self._waiting.setdefault(owner, {}).setdefault(source, deque()).append(task)
                return
            running.add(source)
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._run, owner, source, task)

    def stop(self) -> None:
        """Drops the queued tasks, and waits for those that run."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown()

    def _run(self, owner: str, source: str, task: Callable[[], object]) -> None:
        following: tuple[str, Callable[[], object]] | None = (source, task)
        while following is not None:
            source, task = following
            guarded("answers", task)
            following = self._next(owner, source)

    def _next(self, owner: str, source: str) -> tuple[str, Callable[[], object]] | None:
        """Ends a task of a source. Returns the next source of the same owner and its task; None if there is none to
        start.
        """
        with self._lock:
            running, waiting = self._running[owner], self._waiting.get(owner, {})
            running.remove(source)
            turn = next((other for other in waiting if other not in running), None)
            if turn is None:
                if not running:
                    del self._running[owner]
                return None
            tasks = waiting.pop(turn)
            task = tasks.popleft()
            if tasks:
                waiting[turn] = tasks  # behind all other sources
            elif not waiting:
                del self._waiting[owner]
            running.add(turn)
            return turn, task


# -- of workers --------------------------------------------------------------------------------------------------------

# concurrent.futures waits for its threads before the interpreter runs exit handlers; a thread inside a pull would then
# wait for other workers without ever learning that the session is over. These are daemon threads, so whoever closes
# them waits for their end: see ps_runtime.background.join_within.


T = TypeVar("T")

JOIN_SECONDS = 2.0  # the wait for ending threads, which normally end in milliseconds


class Closed(Exception):
    """The pool is closed: the call does not run."""


class DaemonPool:
    """Runs calls in the order of their submission on at most `count` daemon threads.

    The first thread is started at once, another one whenever a call finds no free thread: a worker of sixteen shards
    has one pull under way for most of its life. If no more can be started, the call waits for a free one.

    Raises TryLater if not even the first thread can be started.

    threads: its threads, which end soon after `close`
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._count, self._name = count, name
        self._free = 0  # threads without a call, less calls without a thread
        self.threads: list[threading.Thread] = []
        if count:
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        start(thread)
        self.threads.append(thread)
        self._free += 1

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call. Returns the future of its result, which fails with Closed if the pool is closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._closed:
                self._free -= 1
                if self._free < 0 and len(self.threads) < self._count:
                    with contextlib.suppress(TryLater):
                        self._add_thread()
                self._calls.put((future, call))
                return future
        future.set_exception(Closed("the session is closed: the call does not run"))
        return future

    def close(self) -> None:
        """Ends the threads after the queued calls."""
        with self._lock:
            self._closed = True
            for _ in self.threads:
                self._calls.put(None)

    def join(self) -> None:
        """Waits for the threads, after `close`, for JOIN_SECONDS at most."""
        join_within(self.threads, JOIN_SECONDS)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with self._lock:  # before the caller gets its result: its next call should find this thread free
                self._free += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del item, future, call, result, error  # this thread keeps no reference to a finished call
