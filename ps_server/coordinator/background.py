"""The threads of a coordinator, all started here."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Threads that run until `stop`. Before `start` there are none, and what is given to `run` is not run."""

    def __init__(self) -> None:
        self._started = False
        self._stopping = threading.Event()
        self._repeating: list[threading.Thread] = []

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
                work()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._repeating.append(thread)
        thread.start()

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Calls `work`, which ends by itself, in a thread of its own."""
        if self._started:
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """Ends the threads that repeat something."""
        self._stopping.set()
        for thread in self._repeating:
            thread.join()
