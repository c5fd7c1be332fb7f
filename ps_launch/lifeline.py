"""The standard input of a supervised process: it brings one line, and stays open as long as the parent lives.

A parent that stops the process writes STOP before it closes the input.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ps_runtime.background import start
from ps_runtime.signals import SignalEvent, await_event, on_further_signals

# The time limits of a stop that a parent and its servers share, in addition to the workers' time to reach the last
# checkpoints. To write these:
WRITE_SECONDS = 5.0
# How long a coordinator with one node's servers outlives the others' shards, which ask it whether the job is over.
OTHERS_END_SECONDS = 20.0
STOP = "stop"  # without this line, the end of the input means that the parent was killed
_READ_BYTES = 4096


class Lifeline:
    """Reads the standard input of this process to its end, in a thread of its own.

    descriptor: of the standard input. It is read without Python's buffer: a waiting thread would hold the buffer's lock
                when the process ends
    when_cut:   is called when the input closes, because the parent stops this process or is gone

    Raises TryLater if the thread cannot be started. The parent then restarts this process.
    """

    def __init__(self, descriptor: int, when_cut: Callable[[], object]) -> None:
        self._descriptor = descriptor
        self._when_cut = when_cut
        self._line: str | None = None
        self._is_stopped = False  # the parent has written STOP
        self._is_cut = False  # the input is closed
        self._answered = threading.Event()  # set once the line has come, or the input is closed
        self._is_over = SignalEvent()  # the input is closed, or a signal has ended the wait for that
        start(threading.Thread(target=self._read, name="lifeline", daemon=True))

    def line(self) -> str | None:
        """Waits for the line, and returns it; None if the input was closed first. Signals are handled meanwhile."""
        await_event(self._answered)
        return self._line

    def await_parent(self, seconds: float) -> None:
        """Waits until the input closes, so many seconds at most. A signal ends the wait, unless it comes together with
        the one before.
        """
        on_further_signals(lambda *_: self._is_over.set())
        self._is_over.wait(seconds)

    def has_lost_parent(self) -> bool:
        """Whether the parent was killed: its end of the input is closed, and it has stopped nothing."""
        return self._is_cut and not self._is_stopped

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._descriptor, _READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == STOP.encode():
                    self._is_stopped = True
                elif self._line is None:
                    self._line = line.decode().strip()
                    self._answered.set()
        self._is_cut = True
        self._is_over.set()
        self._when_cut()
        self._answered.set()
