"""A supervised process' standard input: it brings one line, and is open for as long as the parent is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ps_runtime.background import start
from ps_runtime.signals import await_event

_READ_BYTES = 4096


class Lifeline:
    """Reads the standard input of this process to its end, in a thread of its own.

    descriptor: of the standard input. It is read without Python's buffer, whose lock a thread that waits for input
                would hold when the process ends
    when_cut:   called when it closes: the parent is gone

    Raises TryLater where no thread can be had: the parent starts such a process again
    """

    def __init__(self, descriptor: int, when_cut: Callable[[], object]) -> None:
        self._descriptor = descriptor
        self._when_cut = when_cut
        self._line: str | None = None
        self._answered = threading.Event()  # the line is there, or will never be
        start(threading.Thread(target=self._read, name="lifeline", daemon=True))

    def line(self) -> str | None:
        """Waits for the line, and returns it; None if the parent has gone without it. Signals are handled meanwhile."""
        await_event(self._answered)
        return self._line

    def _read(self) -> None:
        text = b""
        while data := os.read(self._descriptor, _READ_BYTES):
            if self._line is None:
                text += data
                line, end, _ = text.partition(b"\n")
                if end:
                    self._line = line.decode().strip()
                    self._answered.set()
        self._when_cut()
        self._answered.set()
