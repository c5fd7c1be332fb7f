"""Threads that read from connections as bytes come. The connections share them.

A thread waits for all connections at once (epoll), and has one to itself while it reads from it. So a connection that
is silent costs a descriptor and no thread. The thread that a request has woken also carries it out: to hand it to
another one would take a second wake-up for each request.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ps_frames.frames import nothing
from ps_protocol.errors import TryLater
from ps_runtime.background import guarded, note_error, start
from ps_runtime.troubles import Troubles

IDLE_SECONDS = 10.0  # after which a thread ends for which there was nothing to do, where there are more than KEPT
KEPT = 4

_ONCE = select.EPOLLIN | select.EPOLLONESHOT  # until it is armed again: no other thread is woken for it meanwhile


@dataclass(frozen=True)
class _Readable:
    ready: Callable[[], bool]
    ended: Callable[[], None]
    look: Callable[[], None]


class ReadingThreads:
    """Calls readers when bytes have come. Thread-safe.

    There are at most as many threads as connections, so none waits for a thread while another one's request arrives
    slowly. Where no more can be started, connections wait for those that there are.

    name: that of the threads
    most: the most threads at a time; beyond it, connections wait for those that there are
    look: seconds between two calls of each connection's `look`, which the threads make while they wait for bytes
    """

    def __init__(self, name: str, troubles: Troubles, most: int = sys.maxsize, look: float = math.inf) -> None:
        self._name, self._troubles, self._most, self._look = name, troubles, most, look
        self._looked = time.monotonic()
        self._epoll = select.epoll()
        self._woken, self._wake = os.pipe()
        self._epoll.register(self._woken, select.EPOLLIN)  # stays readable, so that it wakes every thread
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._readers: dict[int, _Readable] = {}  # by descriptor
        self._threads: set[threading.Thread] = set()
        self._leaving: set[threading.Thread] = set()  # threads that end, and may not have ended yet
        self._waiting = 0  # threads without a connection
        self._ending = 0  # threads whose connection ends, and is none of the readers any more
        self._is_closing = False
        self._is_stopping = False

    @property
    def threads(self) -> list[threading.Thread]:
        """Its threads, which end soon after `close` and the end of the last connection."""
        with self._lock:
            return [*self._threads, *self._leaving]

    def add(
        self,
        descriptor: int,
        ready: Callable[[], bool],
        ended: Callable[[], None],
        look: Callable[[], None] = nothing,
    ) -> None:
        """Adds a connection.

        ready: called at once, and then each time bytes have come or the connection has ended, by one thread at a time.
               Reads without waiting for the first of them; returns whether the connection goes on
        ended: called after `ready` has returned False or raised. Closes the descriptor
        look:  called now and then, also while `ready` runs in another thread; see the class

        Raises TryLater if there is no thread, and none can be started, if the kernel watches no more, or after `close`.
        """
        with self._lock:
            if self._is_closing:
                raise TryLater("no connection is taken any more")
            self._readers[descriptor] = _Readable(ready, ended, look)
            lacks_thread, is_first = self._lacks_thread(), not self._threads
        try:
            if is_first:
                self._start()
            elif lacks_thread:  # those that there are have a request each
                self._start_another()
            self._epoll.register(descriptor, _ONCE | select.EPOLLOUT)
        except (TryLater, OSError) as error:
            with self._changed:
                del self._readers[descriptor]
                self._end_threads()
            raise TryLater(f"this process can watch no more connections: {error}") from None

    def close(self) -> None:
        """Takes no connection any more; when the last one has ended, so do the threads. Returns at once."""
        with self._lock:
            self._is_closing = True
            self._end_threads()

    def stop(self) -> None:
        """Waits until all connections have ended, which the caller has broken off. Ends the threads."""
        self.close()
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping)
        for thread in self.threads:
            thread.join()

    def _end_threads(self) -> None:
        """Tells the threads to end if `close` was called and no connection is left. The caller holds the lock."""
        if self._is_closing and not self._readers and not self._is_stopping:
            self._is_stopping = True
            os.write(self._wake, b"\0")
            self._close_if_last()
            self._changed.notify_all()

    def _close_if_last(self) -> None:
        """Closes the descriptors once no thread waits for them. The caller holds the lock."""
        if self._is_stopping and not self._threads:
            self._epoll.close()
            os.close(self._woken)
            os.close(self._wake)

    def _lacks_thread(self) -> bool:
        """Returns whether no thread waits for connections, of which one has no thread. The caller holds the lock."""
        return not self._waiting and len(self._threads) - self._ending < min(len(self._readers), self._most)

    def _start(self) -> None:
        """Starts a thread, unless none is needed any more. Raises TryLater."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with self._lock:
            if self._is_stopping:
                return
            self._leaving = {each for each in self._leaving if each.is_alive()}
            self._threads.add(thread)
            self._waiting += 1
        try:
            start(thread)
        except TryLater:
            with self._lock:
                self._threads.discard(thread)
                self._waiting -= 1
                self._close_if_last()
            raise

    def _run(self) -> None:
        guarded(self._name, nothing)  # its errors are counted from now on, from 0
        while self._turn():
            pass  # nothing here refers to a connection, so that one that has ended gives its memory back

    def _turn(self) -> bool:
        """Reads once from the next connection that has bytes; returns whether this thread goes on."""
        events = self._epoll.poll(min(IDLE_SECONDS, self._look), maxevents=1)
        self._look_at_all()
        with self._lock:
            if self._is_stopping or (not events and self._waiting > KEPT):
                self._waiting -= 1
                self._threads.discard(threading.current_thread())
                self._leaving.add(threading.current_thread())
                self._close_if_last()
                return False
            if not events:
                return True
            descriptor = events[0][0]
            reader = self._readers[descriptor]
            self._waiting -= 1
            lacks_thread = self._lacks_thread()
        if lacks_thread:
            self._start_another()
        if self._goes_on(reader):
            with self._lock:
                self._waiting += 1
            self._epoll.modify(descriptor, _ONCE)
        else:
            self._end(descriptor, reader)
        return True

    def _look_at_all(self) -> None:
        """Calls `look` of all connections, if it is time."""
        if time.monotonic() < self._looked + self._look:
            return
        with self._lock:
            self._looked, readers = time.monotonic(), list(self._readers.values())
        for reader in readers:
            guarded(self._name, reader.look)

    def _start_another(self) -> None:
        """Starts a thread for other connections, while those that there are have a request each to carry out."""
        try:
            self._start()
        except TryLater as error:
            self._troubles.met(self._name, "data connections wait for the threads that there are: %s", error)
        else:
            self._troubles.over(self._name)

    def _goes_on(self, reader: _Readable) -> bool:
        try:
            return reader.ready()
        except Exception:
            note_error(self._name)
            return False

    def _end(self, descriptor: int, reader: _Readable) -> None:
        self._epoll.unregister(descriptor)  # before it is closed, and given to another connection
        with self._lock:
            del self._readers[descriptor]
            self._ending += 1
        guarded(self._name, reader.ended)
        with self._changed:
            self._ending -= 1
            self._waiting += 1
            self._end_threads()
