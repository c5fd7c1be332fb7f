"""How this process ends: at its script's end, or cut short by a signal or an error: then a loop it was in is not over.

A signal that ends the script is an exception that may come between any two lines, and so is Ctrl-C. What has to be
noted of a step, and the note, are therefore made `undisturbed`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


class Ending:
    """Whether a signal ends this process, and when. Signals are heard by the main thread alone."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._held = False

    @property
    def is_told(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def tell(self, number: int) -> None:
        """Ends this process with SystemExit: at once, or where the hold ends. For the handler of a signal."""
        self._signal = number
        if not self._held:
            self._exit()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Has a signal that ends this process, and Ctrl-C, wait for the end of the block, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._held = True
        try:
            with _interrupts_held():
                yield
        finally:
            self._held = False
            if self._signal is not None:
                self._exit()

    def _exit(self) -> None:
        assert self._signal is not None
        sys.exit(128 + self._signal)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Has SIGINT wait for the end of the block, and then be handled as it would have been. A second one is handled at
    once: the block may be longer than was thought. For the main thread."""
    handler = signal.getsignal(signal.SIGINT)
    came: list[tuple[int, FrameType | None]] = []
    if not callable(handler):  # ignored, or it ends the process at once
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            came.clear()
            handler(number, frame)
        else:
            came.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


_ending = Ending()


def end_by_signal(number: int) -> None:
    """Ends this process because of a signal: at once, or at the end of a block that is `undisturbed`."""
    _ending.tell(number)


def undisturbed() -> AbstractContextManager[None]:
    """Returns a context in which no signal ends this process. It is left soon: nothing in it waits for others."""
    return _ending.hold()


def is_cut_short() -> bool:
    """Whether the script does not come to its end. Called while an exception goes through, or after it has ended it."""
    return _ending.is_told or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
