"""Threads that read from connections as bytes come. The connections share them.

A thread waits for all connections at once (epoll), and has one to itself while it reads from it. So a connection that
is silent costs a descriptor and no thread. The thread that a request has woken also carries it out: to hand it to
another one would take a second wake-up for each request.

A thread that waits for bytes of one connection may take over reading from it (attending.py). The shared threads leave
the connection alone until that thread gives it back.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

from ps_frames.frames import nothing
from ps_protocol.errors import TryLater
from ps_runtime.background import guarded, note_error, start
from ps_runtime.troubles import Troubles

IDLE_SECONDS = 10.0  # a thread that has had nothing to do for so long ends, if more than KEPT threads wait
KEPT = 4

# Events for which one thread is woken. EPOLLONESHOT: no other thread is woken until the connection is armed again.
_ONCE = select.EPOLLIN | select.EPOLLONESHOT  # bytes have come
_FIRST = _ONCE | select.EPOLLOUT  # at once: a new connection can be written to
_END = select.EPOLLRDHUP | select.EPOLLONESHOT  # only if the other end closes the connection


@dataclass(eq=False)
class Watched:
    """A connection whose bytes are waited for.

    events: the events for which a thread is woken; 0: none, because one was woken, and has not armed it again
    reader: the identifier of the thread that reads, one of the shared threads or one that has taken the reading over;
            0: none does
    is_over: it has ended: its descriptor may belong to another one
    """

    descriptor: int
    ready: Callable[[], bool]
    ended: Callable[[], None]
    look: Callable[[], None]
    events: int = _FIRST
    reader: int = 0
    is_over: bool = False


class ReadingThreads:
    """Calls readers when bytes have come. Thread-safe.

    There may be as many threads as connections, so no connection waits for a thread while another one's request arrives
    slowly. If no more threads can be started, connections wait for the present ones.

    name: the name of the threads
    most: the most threads at a time; beyond it, connections wait for the present ones
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
        self._readers: dict[int, Watched] = {}  # by descriptor
        self._threads: set[threading.Thread] = set()
        self._leaving: set[threading.Thread] = set()  # threads that end, and may not have ended yet
        self._waiting = 0  # threads without a connection
        self._ending = 0  # threads that end a connection, which is no longer in `_readers`
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
    ) -> Watched:
        """Adds a connection. Returns its handle for `take_over` and others.

        ready: called at once, and then each time bytes have come or the connection has ended, by one thread at a time.
               Reads without waiting for the first of them; returns whether the connection goes on
        ended: called after `ready` has returned False or raised. Closes the descriptor
        look:  called now and then, also while `ready` runs in another thread; see the class

        Raises TryLater if there is no thread, and none can be started, if the kernel watches no more, or after `close`.
        """
        with self._lock:
            if self._is_closing:
                raise TryLater("no connection is taken any more")
            watched = self._readers[descriptor] = Watched(descriptor, ready, ended, look)
            lacks_thread, is_first = self._lacks_thread(), not self._threads
        try:
            if is_first:
                self._start()
            elif lacks_thread:  # each of the present threads is carrying out a request
                self._start_another()
            self._epoll.register(descriptor, watched.events)
        except (TryLater, OSError) as error:
            with self._changed:
                del self._readers[descriptor]
                self._end_threads()
            raise TryLater(f"this process can watch no more connections: {error}") from None
        return watched

    # -- a thread that waits reads itself ----------------------------------------------------------------------------

    def take_over(self, watched: Watched) -> bool:
        """Makes this thread the only one that reads from a connection, until `give_back`.

        Returns False if another thread is reading from the connection, or if the connection has ended. A thread that
        has taken it over already may do so again.
        """
        me = threading.get_ident()
        with self._lock:
            if watched.reader not in (0, me) or watched.is_over:
                return False
            watched.reader = me
            self._watch(watched, _END)  # or a thread would be woken, only to find this one here
            return True

    def give_back(self, watched: Watched, goes_on: bool, expected: Sized) -> None:
        """Gives back a connection that this thread has taken over. Does nothing if this thread has not.

        goes_on:  False: the connection has ended, and this thread calls its `ended`
        expected: the calls whose answers are still expected; if it is empty, no thread is woken for bytes until `want`
        """
        if not goes_on:
            with self._lock:
                if watched.reader != threading.get_ident() or watched.is_over:
                    return
                self._remove(watched)
            guarded(self._name, watched.ended)
            with self._changed:
                self._end_threads()
            return
        with self._lock:
            if watched.reader != threading.get_ident() or watched.is_over:
                return
            # A `want` that came while this thread was reading did nothing: its call is in `expected`.
            watched.reader = 0
            self._watch(watched, _ONCE if expected else _END)

    def want(self, watched: Watched) -> None:
        """Makes a thread read the bytes that come on a connection, if none does. This is the state after `add`."""
        with self._lock:
            if not (watched.reader or watched.is_over):
                self._watch(watched, _ONCE)

    def rest(self, watched: Watched) -> None:
        """Wakes a thread only for the end of a connection, and not for bytes, until `want` or `give_back`."""
        with self._lock:
            if not (watched.reader or watched.is_over):
                self._watch(watched, _END)

    def _watch(self, watched: Watched, events: int) -> None:
        """Sets the events for which a thread is woken. The caller holds the lock, so the descriptor is still open."""
        if watched.events != events:
            self._epoll.modify(watched.descriptor, events)
            watched.events = events

    def _remove(self, watched: Watched) -> None:
        """Watches a connection no more. The caller holds the lock, and closes the descriptor later."""
        watched.is_over = True
        self._epoll.unregister(watched.descriptor)
        del self._readers[watched.descriptor]

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuses further connections. The threads end when the last connection has ended. Returns at once."""
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
            # Looked at again: without the lock, several threads may have found at once that one more is needed.
            if self._is_stopping or not self._lacks_thread():
                return
            self._leaving = {each for each in self._leaving if each.is_alive()}
            try:
                # With the lock held: a caller of `threads` may join them, and only a started thread can be joined.
                start(thread)
            except TryLater:
                self._close_if_last()
                raise
            self._threads.add(thread)
            self._waiting += 1

    def _run(self) -> None:
        guarded(self._name, nothing)  # begins the count of this thread's errors at 0
        while self._turn():
            pass  # this frame refers to no connection: the memory of one that has ended is freed

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
            watched = self._readers.get(events[0][0]) if events else None
            if watched is None:  # nothing has come, or the connection has ended meanwhile
                return True
            watched.events = 0
            if watched.reader:  # the thread that has taken it over sees the bytes itself
                return True
            watched.reader = threading.get_ident()
            self._waiting -= 1
            lacks_thread = self._lacks_thread()
        if lacks_thread:
            self._start_another()
        if self._goes_on(watched):
            with self._lock:
                self._waiting += 1
                watched.reader = 0
                self._watch(watched, _ONCE)
        else:
            self._end(watched)
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
        """Starts a thread for other connections, while each of the present threads carries out a request."""
        try:
            self._start()
        except TryLater as error:
            self._troubles.met(self._name, "data connections wait for the threads that there are: %s", error)
        else:
            self._troubles.over(self._name)

    def _goes_on(self, reader: Watched) -> bool:
        try:
            return reader.ready()
        except Exception:
            note_error(self._name)
            return False

    def _end(self, reader: Watched) -> None:
        with self._lock:
            self._remove(reader)
            self._ending += 1
        guarded(self._name, reader.ended)
        with self._changed:
            self._ending -= 1
            self._waiting += 1
            self._end_threads()
