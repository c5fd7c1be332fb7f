"""Weights that are sent from where they are, and copied only if an update comes to change them before they have left.

A worker that reads slowly delays no update: an update waits for no socket, at most for the bytes that the kernel is
taking at this moment.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from ps_protocol.framing import Buffer


class Loan:
    """Memory that one sender reads. It stays as it is, except while the sender gives way."""

    def __init__(self) -> None:
        self._reading = threading.Lock()  # held by the sender, except while it gives way
        self._left: list[Buffer] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the memory as it is for the calling thread, the sender."""
        with self._reading:
            yield

    def give_way(self, left: Sequence[Buffer], wait: Callable[[], None]) -> Sequence[Buffer]:
        """Has the sender wait, and the owner change its memory meanwhile.

        left: what is still to be read. Returns it, or a copy of it as it was if the owner has recalled its memory.
        """
        self._left = list(left)
        self._reading.release()
        try:
            wait()
        finally:
            self._reading.acquire()
        return self._left

    def recall(self) -> None:
        """Copies what is still to be read, once the sender gives way or has ended."""
        with self._reading:
            self._left = [bytes(part) for part in self._left]


class Loans:
    """The loans of one bucket's weights. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Loan] = set()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Loan]:
        """Lends the weights to the calling thread. None may change them before this has begun."""
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
        """Returns when the weights may be changed. The caller sees to it that none are lent meanwhile."""
        with self._lock:
            recalled, self._open = self._open, set()
        for loan in recalled:
            loan.recall()
