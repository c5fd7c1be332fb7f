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
from types import FrameType
from typing import Any

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
