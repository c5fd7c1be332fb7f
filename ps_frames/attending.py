"""A thread that waits for answers receives them itself.

Waking another thread for each answer, which then wakes the waiting one, took a third of the CPU of a small step in
shared memory: the two contend for the interpreter lock. So a thread that waits takes the receiving of its connections
over from the shared threads (reading.py), hands out all answers that come, also those to other threads' calls, and
gives the receiving back when it has what it waits for. Nothing depends on it: what no waiting thread receives, the
shared threads do, at the latest after a second.
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
from ps_runtime.signals import HEARD_SECONDS, interruptible, is_held_back, undisturbed


class _Bell:
    """Wakes a thread that polls its descriptor. It is closed once nothing can ring it any more."""

    descriptor = -1  # none, where the process may open no more files

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _Awaited:
    """Futures of which all must be done, or one must have failed: then it `is_over`."""

    def __init__(self, futures: Collection[Future[Any]], bell: _Bell) -> None:
        self.is_over = not futures
        self._count = len(futures)
        self._done: deque[None] = deque()
        self._bell, self._thread = bell, threading.get_ident()
        for future in futures:
            future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        self._done.append(None)  # counts in one step, whichever threads are here
        if future.exception() is not None or len(self._done) == self._count:
            self.is_over = True
        if self.is_over and threading.get_ident() != self._thread:
            self._bell.ring()


class Attending:
    """A thread's waits for answers over connections. For one thread.

    begun: the connections of `begin`, until `end`
    Raises OSError if this process has too many files open.
    """

    def __init__(self) -> None:
        self._bell = _Bell()
        self.begun: Sequence[ClientConnection] = ()
        self._taken: set[ClientConnection] = set()  # over, and some that are about to be

    def begin(self, connections: Sequence[ClientConnection]) -> None:
        """Announces that this thread is about to `wait` on these connections: no other thread need be woken for their
        answers.
        """
        self.begun = connections
        for each in connections:
            each.attend(True)

    def end(self) -> None:
        """Undoes `begin`: other threads are woken for the answers that are still to come."""
        if self._taken:
            self._give_back()  # what an interrupted `wait` has left
        connections, self.begun = self.begun, ()
        for each in connections:
            each.attend(False)

    def wait(self, futures: Collection[Future[Any]], connections: Sequence[ClientConnection]) -> None:
        """Waits until all futures are done or one has failed, whoever completes them; receives meanwhile, and calls
        `end`. Signals are handled meanwhile, but in the middle of an answer only if its rest does not come, or takes
        long: then the connection ends."""
        with undisturbed():
            try:
                if self._taken:
                    self._give_back()  # what an interrupt has left, and another wait needs
                awaited = _Awaited(futures, self._bell)
                while not awaited.is_over:
                    for each in connections:
                        self._take_over(each)
                    self._receive(awaited)
            finally:
                self.end()

    def _take_over(self, connection: ClientConnection) -> None:
        self._taken.add(connection)  # first: an interrupt must not leave one that nobody gives back
        if not connection.take_over():
            self._taken.discard(connection)

    def _give_back(self, but: ClientConnection | None = None) -> None:
        """Gives back all connections, except for one whose answer this thread has received in part."""
        for each in self._taken - {but}:
            each.give_back(goes_on=True)
            self._taken.discard(each)

    def _receive(self, awaited: _Awaited) -> None:
        """Receives until it is over, a connection is no longer this thread's, or other threads have completed
        something."""
        poll, held = select.poll(), {each.descriptor: each for each in self._taken}
        for number in (self._bell.descriptor, *held):
            poll.register(number, select.POLLIN)
        while not awaited.is_over:
            with interruptible():
                ready = poll.poll(HEARD_SECONDS * 1000)
            for number, _ in ready:
                if number not in held:
                    self._bell.silence()
                elif self._goes_on(held[number], awaited):
                    continue
                return
            if len(self._taken) < len(held):
                return

    def _goes_on(self, connection: ClientConnection, awaited: _Awaited) -> bool:
        """Reads from a connection. Returns whether it is still this thread's."""
        if not connection.is_taken:  # a signal handler has closed it, or a read of another one took long
            self._taken.discard(connection)
            return False
        goes_on = False
        try:
            goes_on = connection.read(
                lambda: awaited.is_over or is_held_back(),
                lambda: self._give_back(but=connection),  # others' answers must not wait for this one's rest
            )
        finally:
            if not goes_on:
                connection.give_back(goes_on=False)
                self._taken.discard(connection)
        return goes_on
