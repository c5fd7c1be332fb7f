"""Signals: their handlers, waits in which they are handled, and blocks that they do not disturb.

Python runs a signal handler in the main thread, between two instructions. A signal that comes just before the thread
waits for a lock does not interrupt the wait, so an endless wait would never handle it. On a busy machine this is no
rare case, because the thread releases the GIL in between. So a main thread waits for a second at a time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

HEARD_SECONDS = 1.0  # the longest time until a waiting main thread handles a signal
# A signal that comes so soon after one that has acted belongs to it: a scheduler and a launcher both signal a process.
TOGETHER_SECONDS = 5.0


def on_signals(action: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Sets the handler of SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Ends this process without any clean-up. A signal handler."""
    os._exit(128 + number)


def on_further_signals(action: Callable[[int, FrameType | None], object]) -> None:
    """Sets the handler of SIGTERM and SIGINT in a process that a first one ends in order.

    A SIGTERM that comes within TOGETHER_SECONDS does nothing.
    """
    begun = time.monotonic()

    def act(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGTERM or time.monotonic() >= begun + TOGETHER_SECONDS:
            action(number, frame)

    on_signals(act)


class SignalEvent:
    """An event that a signal handler may set. For one thread that waits.

    A handler must not set a `threading.Event`: it runs in the main thread, which may be about to wait for that event
    and hold its lock, so `set` would wait for the lock for ever. `SimpleQueue.put` may be called at any point
    (https://docs.python.org/3/library/queue.html#queue.SimpleQueue.put).
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Sets the event and wakes the thread that waits. For handlers and threads."""
        self._is_set = True
        self._wakes.put(None)

    def is_set(self) -> bool:
        """Returns whether `set` was called."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Waits until the event is set, or so many seconds. Returns whether it is set."""
        until = time.monotonic() + seconds
        while not self._is_set and (left := until - time.monotonic()) > 0:
            with suppress(Empty):
                self._wakes.get(timeout=min(left, HEARD_SECONDS))
        return self._is_set


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
    """Whether a signal ends this process, and when. Python runs signal handlers in the main thread alone.

    at_exit: the process ends by itself
    """

    def __init__(self) -> None:
        self.at_exit = False
        self._signal: int | None = None
        self._is_due = False  # whether it has not acted yet
        self._acted_at = -math.inf  # when it has acted last
        self._held = False
        self._holder = 0  # the identifier of the thread that has begun the last `hold`
        self._interrupt: tuple[int, FrameType | None] | None = None  # a signal that came while `_held`
        # The handler of SIGINT, which `_note` replaces while `_held`.
        self._handler: Callable[[int, FrameType | None], object] | None = None

    @property
    def end_requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def is_held_back(self) -> bool:
        """Whether a signal has come that acts only at the end of a `hold` of this thread."""
        has_come = self._is_due or self._interrupt is not None
        return has_come and self._held and threading.current_thread() is threading.main_thread()

    def tell(self, number: int) -> None:
        """Ends this process with SystemExit, at once or at the end of `hold`. Called by signal handlers.

        Each signal acts once: what the script does afterwards, such as a last save in a `finally`, is not interrupted.
        A signal within TOGETHER_SECONDS of one that has acted does nothing.
        """
        if not self._is_due and time.monotonic() < self._acted_at + TOGETHER_SECONDS:
            return
        self._signal, self._is_due = number, True
        if not self._held:
            self._exit()

    def exit_if_requested(self) -> None:
        """Raises SystemExit once more in the main thread if a signal has come."""
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            self._exit()

    def forget(self) -> None:
        """Forgets the signals that have come. Called in a forked child: they were its parent's, and its own first one
        must act.

        A child of the thread that holds them has a copy of that thread's stack, and ends the hold itself. A child of
        another thread, such as that of a multiprocessing.Pool, has no `hold` that would end.
        """
        self._signal, self._is_due, self._acted_at, self._interrupt = None, False, -math.inf, None
        if self._held and self._holder != threading.get_ident():
            self._held = False
            if _signal.getsignal(signal.SIGINT) == self._note:
                _signal.signal(signal.SIGINT, self._handler)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delays a signal that ends this process, and Ctrl-C, until the end of the block, in the main thread. A block
        within another one changes nothing. A second Ctrl-C acts at once, as the block may take longer than expected."""
        if self._held or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._begin()
            yield
        finally:
            self._end()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """A block within a `hold`, in which signals act again, including those that came since the hold began."""
        if not self._held or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._end()
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._held, self._holder = True, threading.get_ident()
        # Of `_signal`: the functions of `signal` look for each handler in an enum, which took a tenth of a small step.
        handler = _signal.getsignal(signal.SIGINT)
        if handler == self._note:  # an `_end` was interrupted
            return
        self._handler = handler if callable(handler) else None  # None: ignored, or it ends the process at once
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._note)

    def _end(self) -> None:
        self._held = False  # first: signals act from here on, even if one of them interrupts this function
        came, self._interrupt = self._interrupt, None
        try:
            if _signal.getsignal(signal.SIGINT) == self._note:
                _signal.signal(signal.SIGINT, self._handler)
            if came is not None and self._handler is not None:
                self._handler(*came)
        finally:
            if self._is_due:
                self._exit()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT while a hold is active, in place of `_handler`."""
        assert self._handler is not None
        if self._held and self._interrupt is None:
            self._interrupt = number, frame
        else:
            self._interrupt = None
            self._handler(number, frame)

    def _exit(self) -> None:
        assert self._signal is not None
        if self._is_due:  # else it has acted before, and the time counts from then
            self._is_due, self._acted_at = False, time.monotonic()
        sys.exit(128 + self._signal)


_ending = Ending()
os.register_at_fork(after_in_child=_ending.forget)


def end_by_signal(number: int) -> None:
    """Ends this process because of a signal, at once or at the end of an `undisturbed` block."""
    _ending.tell(number)


# A block of `undisturbed` must be short, and must not wait for other processes, unless the wait is `interruptible`. By
# such a wait it must have done what is of use without the rest of it.
undisturbed, interruptible = _ending.hold, _ending.let_through
# Called by each step. A script trains on after the signal only where its SystemExit was lost: in a `__del__`, or in a
# callback from C.
exit_if_requested = _ending.exit_if_requested


def is_held_back() -> bool:
    """Whether a signal has come that acts only at the end of an `undisturbed` block of this thread."""
    return _ending.is_held_back


def is_cut_short() -> bool:
    """Whether the script is interrupted. Call it while an exception propagates, or after it has ended the script."""
    if _ending.end_requested or sys.exc_info()[1] is not None:
        return True
    # At a prompt, as in a notebook, an error ends no script: what ran since may have come to its end.
    goes_on = hasattr(sys, "ps1") and not _ending.at_exit
    return getattr(sys, "last_value", None) is not None and not goes_on


def process_ends() -> None:
    """Records that the process ends by itself. For exit handlers."""
    _ending.at_exit = True
