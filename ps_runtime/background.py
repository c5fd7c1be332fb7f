"""Threads that run beside the calls of a process, and go on whatever happens in them.

An exception in one round of a thread's work is logged and counted, and the next round comes: a thread that has ended
without a word would be missed when it is needed. One that comes in every round is logged once; see troubles.py.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ps_protocol.errors import TryLater
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_runtime")

_troubles = Troubles(log, None)
_errors: Counter[str] = Counter()
_lock = threading.Lock()


def join_within(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Waits for threads that are about to end, for so many seconds in all.

    A thread that is still there when the interpreter ends is stopped where it next asks for the GIL. In C++ code that
    aborts the process ("terminate called without an active exception"), and freeing a tensor is enough for it: torch
    lets go of the GIL meanwhile.
    """
    until = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def start(thread: threading.Thread) -> None:
    """Starts a thread. Raises TryLater where none can be had: `pids.max` of a container, RLIMIT_NPROC, or memory."""
    try:
        thread.start()
    except RuntimeError as error:
        raise TryLater(f"no thread for {thread.name!r} can be had in this process: {error}") from None


def errors() -> Mapping[str, int]:
    """Returns how many exceptions the background threads of this process have met, by the thread's name."""
    with _lock:
        return dict(_errors)


def note_error(name: str) -> None:
    """Logs and counts the exception that a background thread is handling. name: of the thread"""
    with _lock:
        _errors[name] += 1
    what = "the background thread %r met an error, and goes on"
    _troubles.met(name, what, name, trace=sys.exc_info()[1], level=logging.ERROR)


def guarded(name: str, work: Callable[[], object]) -> None:
    """Calls `work`; notes an exception under `name`."""
    if name not in _errors:  # from now on it is counted, from 0: an alert on its increase needs the number before
        with _lock:
            _errors.setdefault(name, 0)
    try:
        work()
    except Exception:
        note_error(name)
    else:
        _troubles.over(name)


class Background:
    """The background threads of one object, until `stop`. Before `start` there are none; see `apart`."""

    def __init__(self) -> None:
        self._started = False
        self._stopping = threading.Event()
        self._repeating: list[threading.Thread] = []
        self._apart: set[str] = set()  # what is running apart
        self._delayed: list[tuple[str, Callable[[], object]]] = []  # what `run` had no thread for
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Lets threads be started."""
        self._started = True

    def repeat(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Calls `work` every so many seconds in a thread of its own. Raises TryLater where none can be had."""

        def run() -> None:
            while not self._stopping.wait(seconds):
                guarded(name, work)
                self._run_delayed()

        thread = threading.Thread(target=run, name=name, daemon=True)
        start(thread)
        self._repeating.append(thread)

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Calls `work`, which ends by itself, in a thread of its own; not at all before `start`.

        Where no thread can be had, the threads that repeat something see to it that it is called later.
        """
        if not self._started:
            return
        try:
            start(threading.Thread(target=lambda: guarded(name, work), name=name, daemon=True))
        except TryLater:
            note_error(name)
            with self._lock:
                self._delayed.append((name, work))

    def _run_delayed(self) -> None:
        if not self._delayed:
            return
        with self._lock:
            delayed, self._delayed = self._delayed, []
        for name, work in delayed:
            self.run(name, work)

    def later(self, name: str, seconds: float, work: Callable[[], object]) -> bool:
        """Calls `work` once, after so many seconds, in a thread of its own; not if `stop` comes first.

        Returns False where it cannot: before `start`, or where no thread can be had.
        """
        if not self._started:
            return False

        def run() -> None:
            if not self._stopping.wait(seconds):
                guarded(name, work)

        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError:
            note_error(name)
            return False
        return True

    def apart(self, name: str, key: str, work: Callable[[], object]) -> None:
        """Calls `work`, which may take long, beside what the caller does; not if it still runs for that key.

        Before `start` the caller does the work itself.
        """
        if not self._started:
            work()
            return
        key = f"{name} {key}"
        with self._lock:
            if key in self._apart:
                return
            self._apart.add(key)

        def run() -> None:
            try:
                guarded(name, work)
            finally:
                with self._lock:
                    self._apart.discard(key)

        try:
            start(threading.Thread(target=run, name=name, daemon=True))
        except TryLater:  # no thread can be had: the next call tries again
            with self._lock:
                self._apart.discard(key)
            note_error(name)

    def stop(self) -> None:
        """Ends the threads that repeat something."""
        self._stopping.set()
        for thread in self._repeating:
            thread.join()
