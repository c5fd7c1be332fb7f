"""A thread that waits for answers receives them itself.

To wake another thread for each answer, which then wakes the one that waits, took a third of the CPU of a small step in
shared memory: the two contend for the interpreter. So a thread that waits takes the receiving of its connections over
from the shared threads (reading.py), hands out all answers that come, also those to other threads' calls, and gives the
receiving back when it has what it waits for. Nothing depends on it: what no waiting thread receives, the shared threads
do, at the latest after a second.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from ps_frames.client import ClientConnection
from ps_runtime.signals import HEARD_SECONDS, interruptible, undisturbed


class _Bell:
    """Wakes a thread that polls its descriptor. It is closed once nothing can ring it any more."""

    def __init__(self) -> None:
        self._number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._number

    def ring(self) -> None:
        os.eventfd_write(self._number, 1)

    def silence(self) -> None:
        os.eventfd_read(self._number)

    def __del__(self) -> None:
        os.close(self._number)


class _Awaited:
    """Futures of which all must be done, or one must have failed."""

    def __init__(self, futures: Collection[Future[Any]], bell: _Bell) -> None:
        self._count = len(futures)
        self._done: deque[None] = deque()
        self._bell, self._thread = bell, threading.get_ident()
        self._has_failed = False
        for future in futures:
            future.add_done_callback(self._ended)

    def is_over(self) -> bool:
        return self._has_failed or len(self._done) == self._count

    def _ended(self, future: Future[Any]) -> None:
        if future.exception() is not None:
            self._has_failed = True
        self._done.append(None)  # counts in one step, whichever threads are here
        if threading.get_ident() != self._thread and self.is_over():
            self._bell.ring()


class Attending:
    """A thread's waits for answers over connections. For one thread.

    Raises OSError if this process has too many files open.
    """

    def __init__(self) -> None:
        self._bell = _Bell()
        self._attended: Sequence[ClientConnection] = ()

    def begin(self, connections: Sequence[ClientConnection]) -> None:
        """Says that this thread is about to `wait` on connections: no other one need be woken for answers there."""
        self._attended = connections
        for each in connections:
            each.attend(True)

    def end(self) -> None:
        """Takes back what `begin` said: other threads are woken for answers that are still to come."""
        connections, self._attended = self._attended, ()
        for each in connections:
            each.attend(False)

    def wait(self, futures: Collection[Future[Any]], connections: Sequence[ClientConnection]) -> None:
        """Waits until all futures are done or one has failed, whoever completes them; receives meanwhile, and calls
        `end`. Signals are handled meanwhile, but none in the middle of an answer."""
        held: dict[int, ClientConnection] = {}
        with undisturbed():
            try:
                awaited = _Awaited(futures, self._bell)
                while not awaited.is_over():
                    for each in connections:
                        descriptor = None if each in held.values() else each.take_over()
                        if descriptor is not None:
                            held[descriptor] = each
                    self._receive(held, awaited)
            finally:
                for each in held.values():
                    each.give_back(goes_on=True)
                self.end()

    def _receive(self, held: dict[int, ClientConnection], awaited: _Awaited) -> None:
        """Receives until it is over, a connection has ended, or other threads have completed something."""
        poll = select.poll()
        for number in (self._bell.fileno(), *held):
            poll.register(number, select.POLLIN)
        while not awaited.is_over():
            with interruptible():
                ready = poll.poll(HEARD_SECONDS * 1000)
            for number, _ in ready:
                if number not in held:
                    self._bell.silence()
                elif self._goes_on(number, held, awaited):
                    continue
                return

    def _goes_on(self, number: int, held: dict[int, ClientConnection], awaited: _Awaited) -> bool:
        goes_on = False
        try:
            goes_on = held[number].read(awaited.is_over)
        finally:
            if not goes_on:
                held.pop(number).give_back(goes_on=False)
        return goes_on
