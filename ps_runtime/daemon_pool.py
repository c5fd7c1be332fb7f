"""Threads that never keep a script from ending.

concurrent.futures waits for its threads before the interpreter runs exit handlers; a thread inside a pull would then
wait for other workers without ever learning that the session is over. These are daemon threads, so whoever closes them
waits for their end: see ps_runtime.background.join_within.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ps_protocol.errors import TryLater
from ps_runtime.background import join_within, start

T = TypeVar("T")

JOIN_SECONDS = 2.0  # threads that were told to end are waited for so long: they end in milliseconds


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
            with self._lock:  # before its caller goes on, whose next call is to find this thread free
                self._free += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del item, future, call, result, error  # nothing of a call outlives it here
