"""A thread pool that keeps working when no more threads can be started: `pids.max` of a container, or RLIMIT_NPROC.

concurrent.futures raises from `submit` if it cannot start a thread, although the task is queued by then. gRPC calls
`submit` on the one thread that dispatches all calls, and this exception ends it: the process stays alive and answers
nothing.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from ps_protocol.errors import TryLater
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
