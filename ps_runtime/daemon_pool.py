"""Threads that never keep a script from ending.

concurrent.futures waits for its threads before the interpreter runs exit handlers; a thread inside a pull would then
wait for other workers without ever learning that the session is over. These are daemon threads, so whoever closes them
waits for their end: see ps_runtime.background.join_within.
"""

from __future__ import annotations

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
    """Runs calls in the order of their submission on daemon threads: on fewer than `count` where no more can be had.

    Raises TryLater if not even the first can be had
    threads: its threads, which end soon after `close`
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        for _ in range(count):
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                start(thread)
            except TryLater:
                if not self.threads:
                    raise
                break
            self.threads.append(thread)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Runs a call in its turn; returns the future of its result, which fails at once when the pool is closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._closed:
                self._calls.put((future, call))
                return future
        future.set_exception(Closed("the session is closed: the call does not run"))
        return future

    def close(self) -> None:
        """Ends the threads after what is queued."""
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
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call  # nothing of a call outlives it here
