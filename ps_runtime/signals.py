"""Signals: their handlers, waits in which they are handled, and blocks that they do not disturb.

Python runs a signal handler in the main thread, between two instructions. A signal that comes just before the thread
waits for a lock does not interrupt the wait, so an endless wait would never handle it. On a busy machine this is no
rare case, because the thread releases the GIL in between. So a main thread waits for a second at a time.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

HEARD_SECONDS = 1.0  # in which a signal is heard


def on_signals(action: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Sets the handler of SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def await_event(event: threading.Event) -> None:
    """Waits for an event. Signals are handled meanwhile."""
    while not event.wait(HEARD_SECONDS):
        pass


def await_done(futures: Collection[Future[Any]]) -> None:
    """Waits until all futures are done, failed or not. Signals are handled meanwhile."""
    while wait(futures, HEARD_SECONDS).not_done:
        pass


def await_all(futures: Collection[Future[Any]]) -> set[Future[Any]]:
    """Waits until all futures are done or one has failed. Returns those that are done. Signals are handled
    meanwhile.
    """
    while True:
        done, left = wait(futures, HEARD_SECONDS, FIRST_EXCEPTION)
        if not left or any(future.exception() is not None for future in done):
            return done


# -- blocks that no signal disturbs ------------------------------------------------------------------------------------

# A signal that ends the script is an exception that Python may raise between any two lines, and so is Ctrl-C. A step
# and the record of it must not be separated, so they run in `undisturbed`.


class Ending:
    """Whether a signal ends this process, and when. Python runs signal handlers in the main thread alone."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._held = False
        self._interrupts = ExitStack()  # holds them while `_held`

    @property
    def is_told(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def tell(self, number: int) -> None:
        """Ends this process with SystemExit, at once or at the end of `hold`. Called by signal handlers."""
        self._signal = number
        if not self._held:
            self._exit()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delays a signal that ends this process, and Ctrl-C, until the end of the block, in the main thread. A block
        within another one changes nothing."""
        if self._held or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Has signals act within a `hold` until the end of the block, and those that have come since its begin."""
        if not self._held or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._held = True
        self._interrupts.enter_context(_interrupts_held())

    def _end(self) -> None:
        try:
            self._interrupts.close()
        finally:
            self._held = False
            if self._signal is not None:
                self._exit()

    def _exit(self) -> None:
        assert self._signal is not None
        sys.exit(128 + self._signal)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delays SIGINT until the end of the block. A second SIGINT is handled at once, as the block may take longer than
    expected. For the main thread."""
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
    """Ends this process because of a signal, at once or at the end of an `undisturbed` block."""
    _ending.tell(number)


def undisturbed() -> AbstractContextManager[None]:
    """Returns a context in which no signal ends this process. Its block must be short, and must not wait for other
    processes, or `interruptible` there."""
    return _ending.hold()


def interruptible() -> AbstractContextManager[None]:
    """Returns a context for a wait within an `undisturbed` block, in which signals act. What the block has done so far
    must be of use without the rest of it."""
    return _ending.let_through()


def is_cut_short() -> bool:
    """Whether the script is interrupted. Call it while an exception propagates, or after it has ended the script."""
    return _ending.is_told or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
