"""Group commit: calls that arrive while one is under way are carried out together by the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from ps_protocol.errors import PSError, TryLater, anew, without_traceback

log = logging.getLogger("ps_server")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class _Entry(Generic[T, R]):
    """One caller's request and its outcome. outcome: the result, or the error that the caller raises"""

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
    """Carries out requests in batches, here called turns. Thread-safe.

    A caller that finds no turn under way begins one at once, in its own thread. Callers that come meanwhile wait, and
    one of them runs the next turn for all of them. This is the group commit of databases: a single caller never waits,
    and the number of turns does not grow with the number of callers.

    work: carries out a turn: takes its requests, and returns a result or an error for each, in the same order. If it
          raises, all callers of the turn get this error. One that is no PSError is a bug: it goes, with its traceback,
          to the first of them alone, and the others are told that there is one. Threads that raise the same error add
          to its traceback, and whoever logs it first drops what the others would log
    most: the largest number of requests in one turn
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R | BaseException]], most: int) -> None:
        self._work, self._most = work, most
        self._changed = threading.Condition()
        self._waiting: list[_Entry[T, R]] = []
        self._is_busy = False

    def do(self, wanted: T) -> R:
        """Carries out one request, alone or with others, and returns its result. Raises its error, or that of the whole
        turn.
        """
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
            # The traceback refers to this frame: a cycle would keep the caller's call. That of a bug is logged here, as
            # the one caller that gets it may log nothing.
            is_bug = not isinstance(error, PSError)
            if is_bug and len(turn) > 1:
                log.exception("%d calls that were answered together failed", len(turn))
            others = PSError("internal error; the server's log says more") if is_bug else without_traceback(error)
            outcomes = [error, *[others] * (len(turn) - 1)]
        finally:
            with self._changed:
                self._is_busy = False
                for entry, outcome in zip(turn, outcomes, strict=True):
                    entry.outcome, entry.is_done = outcome, True
                self._changed.notify_all()
