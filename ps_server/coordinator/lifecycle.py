"""The phase of a job (running, rolling back or ending), and whether it has ended."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Iterator, Sequence

from ps_protocol.errors import NotFound, TryLater, anew
from ps_server.coordinator.refusals import try_soon
from ps_server.coordinator.timing import Clock


class Phase(enum.Enum):
    """The phases of a job. During a phase other than RUNNING no worker joins, and no other phase begins."""

    RUNNING = enum.auto()
    ROLLING_BACK = enum.auto()
    ENDING = enum.auto()


class Lifecycle:
    """One job's phase and end. Thread-safe. Take a decision, and begin the phase to which it leads, in one `deciding`
    block.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._phase = Phase.RUNNING
        self._ended: NotFound | None = None
        self._deserted = clock.now()
        self._not_rolled_back = ""  # why the last attempt to roll back failed
        self._roll_back_at = -math.inf  # the earliest time of the next attempt

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Locks the phase for a `with` block. In the block no call to a shard is made, and no file is written."""
        with self._lock:
            yield

    @property
    def is_running(self) -> bool:
        """Whether the job trains: it is not being made, rolled back or ended."""
        return self._phase is Phase.RUNNING and self._ended is None

    @property
    def may_roll_back(self) -> bool:
        """Whether a rollback may begin: the job is running, and the last failed attempt is long enough ago."""
        return self.is_running and self._clock.now() >= self._roll_back_at

    @property
    def is_rolling_back(self) -> bool:
        """Whether the job is being rolled back."""
        return self._phase is Phase.ROLLING_BACK

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self._ended is not None

    def begin(self, phase: Phase) -> None:
        """Begins a phase, which lasts until `done`. Call it in a `deciding` block, while the job is running."""
        assert self.is_running
        self._phase = phase

    def done(self) -> None:
        """Ends the phase that `begin` began: the job runs again. Call it outside of `deciding`, whose lock it takes."""
        with self._lock:
            self._phase = Phase.RUNNING

    def rollback_failed(self, why: str, pause: float) -> None:
        """Records why a rollback failed: the error for workers that ask to join.

        pause: seconds until the next attempt may begin
        """
        self._not_rolled_back, self._roll_back_at = why, self._clock.now() + pause

    def rolled_back(self) -> None:
        """Records that a rollback succeeded."""
        self._not_rolled_back = ""

    def end(self, why: str) -> NotFound | None:
        """Ends the job. Returns the error for later callers; None if the job had ended before.

        why: the reason in words; may be empty
        """
        with self._lock:
            if self._ended is not None:
                return None
            self._ended = NotFound(f"job {self._name!r} ended{f': {why}' if why else ''}")
            return self._ended

    def check_open(self, lost: Sequence[int]) -> None:
        """Raises NotFound or TryLater, with the reason, if no worker can join now. lost: the shards that lost their
        part
        """
        if self._ended is not None:
            raise anew(self._ended)
        if self._phase is Phase.ENDING:
            raise try_soon(f"job {self._name!r} ends at this moment")
        if lost or self._phase is Phase.ROLLING_BACK:
            shards = f"shard {lost[0]} was started anew" if lost else "a shard was started anew"
            tried = f"; the last try failed: {self._not_rolled_back}" if self._not_rolled_back else ""
            raise TryLater(f"job {self._name!r} is being rolled back to a checkpoint: {shards}{tried}")

    def deserted_for(self, empty: bool) -> float:
        """Returns for how many seconds the job has had no worker. empty: it has none now"""
        now = self._clock.now()
        with self._lock:
            if not empty or not self.is_running:
                self._deserted = now
            return now - self._deserted
