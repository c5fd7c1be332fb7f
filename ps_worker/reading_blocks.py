"""Blocks in which readers see no change, and the changes that wait until no reader is in one.

Readers share a block as long as they overlap. Where there is always one, a change would wait for ever: so a reader that
comes while changes wait lets them in first. It waits for that only so long, because a reader within may wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

GIVE_WAY_SECONDS = 1.0  # the longest that a reader lets changes go first


class ReadingBlocks:
    """The readers and the changes of one thing. Any thread may call the methods; a block may end in another one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._entering = 0  # readers that wait for the end of changes only: no change begins any more
        self._waiting = 0  # changes that have not begun
        self._changing = 0

    @property
    def gives_way(self) -> bool:
        """Whether `give_way` would wait."""
        return bool(self._waiting and self._readers)

    def give_way(self, seconds: float | None = None) -> None:
        """Lets changes in that wait for other readers. seconds: to wait at most; None: GIVE_WAY_SECONDS"""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting, GIVE_WAY_SECONDS if seconds is None else seconds)

    def enter(self) -> None:
        """Begins a block, which `leave` ends."""
        with self._condition:
            self._entering += 1
            try:
                self._condition.wait_for(lambda: not self._changing)
                self._readers += 1
            finally:
                self._entering -= 1
                self._condition.notify_all()

    def leave(self) -> None:
        """Ends a block."""
        with self._condition:
            self._readers -= 1
            self._condition.notify_all()

    @contextmanager
    def change(self, is_over: Callable[[], bool]) -> Iterator[bool]:
        """Waits until there is no reader. In the `with` block none begins, if it gives True.

        is_over: whether to wait no longer; then it gives False, and the change is not to be made. Call `wake` when it
                 becomes true
        """
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: is_over() or not (self._readers or self._entering))
            finally:
                self._waiting -= 1
                self._condition.notify_all()
            may_change = not is_over()
            self._changing += may_change
        try:
            yield may_change
        finally:
            with self._condition:
                self._changing -= may_change
                self._condition.notify_all()

    def wake(self) -> None:
        """Has changes look again whether they are over."""
        with self._condition:
            self._condition.notify_all()


def enter_all(blocks: Sequence[ReadingBlocks]) -> None:
    """Begins a block of each; `leave_all` ends them."""
    entered = list[ReadingBlocks]()
    try:
        for each in blocks:
            each.enter()
            entered.append(each)
    except BaseException:
        leave_all(entered)
        raise


def leave_all(blocks: Sequence[ReadingBlocks]) -> None:
    """Ends the blocks that `enter_all` has begun."""
    for each in blocks:
        each.leave()
