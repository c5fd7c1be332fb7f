"""Group commit, for work that costs as much for many callers as for one: those that come meanwhile share a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from ps_protocol.errors import PSError, TryLater, anew

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class _Entry(Generic[T, R]):
    """What one caller wants, and what has come of it. outcome: its result, or the error that it gets"""

    wanted: T
    outcome: R | BaseException | None = None
    is_done: bool = False

    def result(self) -> R:
        if isinstance(self.outcome, PSError):
            raise anew(self.outcome)  # several threads may raise it
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return cast(R, self.outcome)


class Together(Generic[T, R]):
    """Does what callers want, in turns. Thread-safe.

    A caller that finds nothing under way begins a turn at once, in its own thread. Those that come meanwhile wait, and
    one of them does the next turn for all. This is the group commit of databases: alone nobody waits longer, and in a
    crowd the number of turns does not grow with the number of callers.

    work: returns a result, or the caller's error, for each that is wanted; what it raises is the error of all
    most: in one turn
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R | BaseException]], most: int) -> None:
        self._work, self._most = work, most
        self._changed = threading.Condition()
        self._waiting: list[_Entry[T, R]] = []
        self._is_busy = False

    def do(self, wanted: T) -> R:
        """Returns what has come of it. Raises the caller's own error, or that of the turn."""
        entry: _Entry[T, R] = _Entry(wanted)
        with self._changed:
            self._waiting.append(entry)
        while True:
            with self._changed:
                while self._is_busy and not entry.is_done:
                    self._changed.wait()
                if entry.is_done:
                    return entry.result()
                self._is_busy = True
                turn, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            self._take(turn)

    def _take(self, turn: Sequence[_Entry[T, R]]) -> None:
        outcomes: Sequence[R | BaseException] = [TryLater("it was broken off")] * len(turn)
        try:
            outcomes = self._work([entry.wanted for entry in turn])
        except Exception as error:
            outcomes = [error] * len(turn)
        finally:
            with self._changed:
                self._is_busy = False
                for entry, outcome in zip(turn, outcomes, strict=True):
                    entry.outcome, entry.is_done = outcome, True
                self._changed.notify_all()
