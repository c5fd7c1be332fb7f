"""Sets signal handlers, and waits in the main thread so that signals are handled.

Python runs a signal handler in the main thread, between two instructions. A signal that comes just before the thread
waits for a lock does not interrupt the wait, so an endless wait would never handle it. On a busy machine this is no
rare case, because the thread releases the GIL in between. So a main thread waits for a second at a time.
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
