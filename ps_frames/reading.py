"""Threads that read from connections as bytes come. The connections share them.

A thread waits for all connections at once (epoll), and has one to itself while it reads from it. So a connection that
is silent costs a descriptor and no thread. The thread that a request has woken also carries it out: to hand it to
another one would take a second wake-up for each request.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ps_frames.sockets import nothing
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


class ReadingThreads:
    """Calls readers when bytes have come. Thread-safe.

    There are at most as many threads as connections, so none waits for a thread while another one's request arrives
    slowly. Where no more can be started, connections wait for those that there are.

    name: that of the threads
    """

    def __init__(self, name: str, troubles: Troubles) -> None:
        self._name, self._troubles = name, troubles
        self._epoll = select.epoll()
        self._woken, self._wake = os.pipe()
        self._epoll.register(self._woken, select.EPOLLIN)  # stays readable, so that it wakes every thread
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._readers: dict[int, _Readable] = {}  # by descriptor
        self._threads: set[threading.Thread] = set()
        self._waiting = 0  # threads without a connection
        self._is_stopping = False

    def add(self, descriptor: int, ready: Callable[[], bool], ended: Callable[[], None]) -> None:
        """Adds a connection.

        ready: called at once, and then each time bytes have come or the connection has ended, by one thread at a time.
               Reads without waiting for the first of them; returns whether the connection goes on
        ended: called after `ready` has returned False or raised. Closes the descriptor

        Raises TryLater if there is no thread, and none can be started, or if the kernel watches no more.
        """
        with self._lock:
            self._readers[descriptor] = _Readable(ready, ended)
            lacks_thread, is_first = self._lacks_thread(), not self._threads
        try:
            if is_first:
                self._start()
            elif lacks_thread:  # those that there are have a request each
                self._start_another()
            self._epoll.register(descriptor, _ONCE | select.EPOLLOUT)
        except (TryLater, OSError) as error:
            with self._lock:
                del self._readers[descriptor]
            raise TryLater(f"this process can watch no more connections: {error}") from None

    def stop(self) -> None:
        """Waits until all connections have ended, which the caller has broken off. Ends the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            if self._is_stopping:
                return
            self._is_stopping = True
            threads = list(self._threads)
        os.write(self._wake, b"\0")
        for thread in threads:
            thread.join()
        self._epoll.close()
        os.close(self._woken)
        os.close(self._wake)

    def _lacks_thread(self) -> bool:
        """Returns whether no thread waits for connections, of which one has no thread. The caller holds the lock."""
        return not self._waiting and len(self._threads) < len(self._readers)

    def _start(self) -> None:
        """Starts a thread. Raises TryLater."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with self._lock:
            self._threads.add(thread)
            self._waiting += 1
        try:
            start(thread)
        except TryLater:
            with self._lock:
                self._threads.discard(thread)
                self._waiting -= 1
            raise

    def _run(self) -> None:
        guarded(self._name, nothing)  # its errors are counted from now on, from 0
        while self._turn():
            pass  # nothing here refers to a connection, so that one that has ended gives its memory back

    def _turn(self) -> bool:
        """Reads once from the next connection that has bytes; returns whether this thread goes on."""
        events = self._epoll.poll(IDLE_SECONDS, maxevents=1)
        with self._lock:
            if self._is_stopping or (not events and self._waiting > KEPT):
                self._waiting -= 1
                self._threads.discard(threading.current_thread())
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
        guarded(self._name, reader.ended)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
