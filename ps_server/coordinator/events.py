"""The log of a coordinator's recent events, as text, for status and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

from ps_server.coordinator.timing import Clock

EVENTS_KEPT = 200
MOST_CHARACTERS = 500  # the longest text of an event


@dataclass(frozen=True)
class Event:
    """An event in the coordinator's log.

    number: rises with every event, also with a repetition
    first:  the number of its first occurrence
    time:   when it last happened, in seconds since 1970
    kind:   a word for programs; see cluster.proto
    job:    the job's name; empty: all jobs
    count:  how many times it happened
    """

    number: int
    time: float
    kind: str
    job: str
    text: str
    first: int
    count: int = 1


class EventLog:
    """Keeps the last events. Thread-safe.

    A repeated event is kept once, with a count: a caller that is refused in a loop displaces no other event. An event
    repeats the last one if kind, job and text are equal; a refusal repeats any kept refusal of its job.
    If there are too many, the oldest event of the most frequent kind is dropped: a checkpoint every minute displaces no
    rollback.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._events: list[Event] = []
        self.notify: Callable[[str, str, str], object] = lambda kind, job, text: None  # called with each event
        self._last = 0

    def note(self, kind: str, job: str, text: str, audit_kind: str = "") -> None:
        """Logs an event. audit_kind: its kind in the audit log; empty: the same kind"""
        text = text[:MOST_CHARACTERS]
        self.notify(audit_kind or kind, job, text)
        with self._lock:
            self._last += 1
            before = self._same(kind, job, text)
            if before is None:
                self._events.append(Event(self._last, self._clock.since_1970(), kind, job, text, self._last))
                self._forget_one_too_many()
                return
            self._events.remove(before)
            again = replace(before, number=self._last, time=self._clock.since_1970(), count=before.count + 1)
            self._events.append(replace(again, text=text))

    def _forget_one_too_many(self) -> None:
        if len(self._events) > EVENTS_KEPT:
            [(most, _)] = Counter(event.kind for event in self._events).most_common(1)
            self._events.remove(next(event for event in self._events if event.kind == most))

    def _same(self, kind: str, job: str, text: str) -> Event | None:
        if kind == "refused":
            return next((event for event in self._events if (event.kind, event.job) == (kind, job)), None)
        last = self._events[-1] if self._events else None
        return last if last is not None and (last.kind, last.job, last.text) == (kind, job, text) else None

    def after(self, number: int) -> tuple[Event, ...]:
        """Returns the events with a higher number, oldest first."""
        with self._lock:
            return tuple(event for event in self._events if event.number > number)
