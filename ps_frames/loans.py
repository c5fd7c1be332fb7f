"""Lends weights to threads that send them, without a copy. They are copied only if an update must change them before
they are sent.

A worker that reads slowly delays no update: an update waits for no socket, at most for the bytes that the kernel is
copying at this moment.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from ps_protocol.framing import Buffer


class Loan:
    """Memory that one sender reads. The owner does not change it, except while the sender is in `give_way`."""

    def __init__(self) -> None:
        self._reading = threading.Lock()  # held by the sender, except while it gives way
        self._left: list[Buffer] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A `with` block in which the calling thread, the sender, reads the memory."""
        with self._reading:
            yield

    def give_way(self, left: Sequence[Buffer], wait: Callable[[], None]) -> Sequence[Buffer]:
        """Calls `wait`, during which the owner may recall the memory.

        left: the parts still to be sent. Returns them, or copies of them if the owner has recalled the memory.
        """
        self._left = list(left)
        self._reading.release()
        try:
            wait()
        finally:
            self._reading.acquire()
        return self._left

    def recall(self) -> None:
        """Copies what is still to be sent. Waits until the sender is in `give_way` or has finished."""
        with self._reading:
            self._left = [bytes(part) for part in self._left]


class Loans:
    """The loans of one bucket's weights. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Loan] = set()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Loan]:
        """A `with` block in which the calling thread reads the weights. The caller makes sure that they do not change
        while it begins.
        """
        loan = Loan()
        with loan.held():
            with self._lock:
                self._open.add(loan)
            try:
                yield loan
            finally:
                with self._lock:
                    self._open.discard(loan)

    def recall(self) -> None:
        """Waits until the weights may be changed. The caller makes sure that none are lent meanwhile."""
        with self._lock:
            recalled, self._open = self._open, set()
        for loan in recalled:
            loan.recall()
