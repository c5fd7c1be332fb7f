"""What a main thread does on signals, and how it waits for long and hears them.

Python runs the handler of a signal in the main thread, between two instructions. A signal that comes after the last of
them, while the thread is about to wait for a lock, is noted and interrupts nothing: a wait without end would not end by
it. On a busy machine that is no rare case, because the thread gives up the interpreter in between. So a main thread
waits for a second at a time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]

HEARD_SECONDS = 1.0  # in which a signal is heard


def on_signals(action: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Sets what SIGTERM and SIGINT do from now on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def await_event(event: threading.Event) -> None:
    """Waits for an event, and hears signals."""
    while not event.wait(HEARD_SECONDS):
        pass


def await_done(futures: Collection[Future[Any]]) -> None:
    """Waits for futures until all are done, whatever comes of them, and hears signals."""
    while wait(futures, HEARD_SECONDS).not_done:
        pass


def await_all(futures: Collection[Future[Any]]) -> set[Future[Any]]:
    """Waits for futures until all are done or one has failed, and hears signals; returns those that are done."""
    while True:
        done, left = wait(futures, HEARD_SECONDS, FIRST_EXCEPTION)
        if not left or any(future.exception() is not None for future in done):
            return done


# SIGKILL and SIGSTOP have no handler; faults are for the instruction that made them.
_FAULTS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_HANDLED = sorted(signal.valid_signals() - _FAULTS)


class HeldBack:
    """Keeps the handlers of signals from interrupting this thread inside a `with`, except in `waiting`.

    Python runs handlers in the main thread, between any two instructions. A handler that raises, as that of Ctrl-C
    does, would end the thread in the middle of work that must be done as a whole. A signal that comes meanwhile is
    handled at the next wait, or at the end. In other threads, which run no handlers, this does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._may_interrupt = False

    def __enter__(self) -> HeldBack:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _HANDLED}
            self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
            try:
                for number in self._handlers:
                    signal.signal(number, self._note)
            except BaseException:  # of a signal that was not held back yet
                self._restore(list(self._handlers))
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._restore(list(self._handlers))
        finally:
            self._handle()

    def waiting(self, wait: Callable[[], T]) -> T:
        """Calls what waits for something: handlers may interrupt it."""
        self._may_interrupt = True
        try:
            if self._came:
                self._handle()
            return wait()
        finally:
            self._may_interrupt = False

    def _restore(self, numbers: list[int]) -> None:
        """Sets the handlers as they were, also where one of them raises meanwhile."""
        if numbers:
            number = numbers.pop()
            try:
                if signal.getsignal(number) == self._note:  # a handler may have set another one
                    signal.signal(number, self._handlers[number])
            finally:
                self._restore(numbers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            self._handlers[number](number, frame)
        else:
            self._came.append((number, frame))

    def _handle(self) -> None:
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)
