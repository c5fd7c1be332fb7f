"""Threads that run beside the calls of a process, and go on whatever happens in them.

An exception in one round of a thread's work is logged and counted, and the next round comes: a thread that has ended
without a word would be missed when it is needed. One that comes in every round is logged once; see troubles.py.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_runtime")

_troubles = Troubles(log, None)
_errors: Counter[str] = Counter()
_lock = threading.Lock()


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
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Lets threads be started."""
        self._started = True

    def repeat(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Calls `work` every so many seconds in a thread of its own."""

        def run() -> None:
            while not self._stopping.wait(seconds):
                guarded(name, work)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._repeating.append(thread)
        thread.start()

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Calls `work`, which ends by itself, in a thread of its own; not at all before `start`."""
        if self._started:
            threading.Thread(target=lambda: guarded(name, work), name=name, daemon=True).start()

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
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError:  # no thread can be had: the next call tries again
            with self._lock:
                self._apart.discard(key)
            note_error(name)

    def stop(self) -> None:
        """Ends the threads that repeat something."""
        self._stopping.set()
        for thread in self._repeating:
            thread.join()
