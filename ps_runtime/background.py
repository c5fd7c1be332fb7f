"""Background threads, which survive exceptions in their work.

An exception in one round of a thread's work is logged and counted, and the thread continues with the next round: a
thread that ended silently would be missing when it is needed. An exception that repeats in every round is logged once;
see troubles.py.
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
    """Waits for threads that are about to end, for `seconds` seconds in all.

    A daemon thread that still runs when the interpreter exits is stopped when it next requests the GIL. Inside C++ code
    this aborts the process ("terminate called without an active exception"). Freeing a tensor is enough for that,
    because torch releases the GIL meanwhile.
    """
    until = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def start(thread: threading.Thread) -> None:
    """Starts a thread. Raises TryLater if no more can be started: `pids.max` of a container, RLIMIT_NPROC,
    or memory.
    """
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
    """Calls `work`. Records an exception under `name`."""
    if name not in _errors:  # from now on it is counted, from 0: an alert on its increase needs the number before
        with _lock:
            _errors.setdefault(name, 0)
    try:
        work()
    except Exception:
        note_error(name)
    else:
        if _troubles.open:
            _troubles.over(name)


class Background:
    """The background threads of one object, until `stop`. Before `start` it has none; see `apart`."""

    def __init__(self) -> None:
        self._started = False
        self._stopping = threading.Event()
        self._repeating: list[threading.Thread] = []
        self._apart: set[str] = set()  # the name and key of each work in a thread of its own
        self._delayed: list[tuple[str, Callable[[], object]]] = []  # the work for which `run` could start no thread
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Allows threads to be started from now on."""
        self._started = True

    def repeat(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Calls `work` every `seconds` seconds in its own thread. Raises TryLater if no thread can be started."""

        def run() -> None:
            while not self._stopping.wait(seconds):
                guarded(name, work)
                self._run_delayed()

        thread = threading.Thread(target=run, name=name, daemon=True)
        start(thread)
        self._repeating.append(thread)

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Calls `work`, which ends by itself, in its own thread; before `start` it does nothing.

        If no thread can be started, the threads that repeat something will call it later.
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
        """Calls `work` once, after `seconds` seconds, in its own thread; not if `stop` comes first.

        Returns False before `start`, or if no thread can be started: then `work` is not called.
        """
        if not self._started:
            return False

        def run() -> None:
            if not self._stopping.wait(seconds):
                guarded(name, work)

        try:
            start(threading.Thread(target=run, name=name, daemon=True))
        except TryLater:
            note_error(name)
            return False
        return True

    def apart(self, name: str, key: str, work: Callable[[], object]) -> None:
        """Calls `work`, which may take long, in another thread; does nothing if the last work of this name and key
        still runs.

        Before `start` the calling thread does the work.
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
