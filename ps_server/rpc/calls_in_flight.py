"""How many calls each principal has in flight from each host, and all together.

A call counts while it has a thread, as a push does until it is staged. One that only waits, as a pull does for other
workers, counts by itself: otherwise the pulls of a crowd behind one address would keep its pushes out, for which they
wait. So do heartbeats and watches, without which a worker would be taken for dead, or wait for workers that are there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

from ps_protocol.errors import Backlogged
from ps_server.core.limits import Limits

HEARTBEAT = "/ps_protocol.v1.MembershipService/Heartbeat"
WATCH = "/ps_protocol.v1.MembershipService/Watch"
BUSY_SECONDS = 0.5  # after which a call that finds a limit reached is made again
WAITING_FOR_EACH = 4  # calls that wait, or heartbeats, or watches, for each call of max-calls
_ACTIVE, _WAITING = "", "waiting"

Key = TypeVar("Key", bound=Hashable)
Count = tuple[str, str, str]  # principal, host, and what is counted by itself


class CallInFlight:
    """One call, until `end`. is_listed: whether it counts among all"""

    def __init__(self, calls: CallsInFlight, count: Count, is_listed: bool) -> None:
        self._calls, self.count, self.is_listed, self.is_over = calls, count, is_listed, False

    def wait(self) -> None:
        """Notes that it waits from now on and has no thread; it goes on to count as before where too many wait."""
        self._calls.wait(self)

    def end(self) -> None:
        """Stops counting the call."""
        self._calls.end(self)


class CallsInFlight:
    """The calls of one server. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._counts: Counter[Count] = Counter()
        self._listed: Counter[str] = Counter()  # by principal, those that count among all
        self._all = 0  # of these

    def statistics(self) -> dict[str, int]:
        """Returns how many calls are in flight, and callers that have some."""
        with self._lock:
            callers = {(principal, host) for principal, host, _ in self._counts}
            return {"calls": sum(self._counts.values()), "callers": len(callers)}

    def begin(self, principal: str, host: str, method: str, is_listed: bool) -> CallInFlight:
        """Counts a call in. Raises Backlogged where there are too many: workers make it again after a pause.

        is_listed: it counts among all
        """
        count = (principal, host, method if method in (HEARTBEAT, WATCH) else _ACTIVE)
        most, most_of_all = self._most(count), self._limits.all_calls
        with self._lock:
            if is_listed and self._all >= most_of_all:
                raise _busy(f"{most_of_all} calls are in flight here: max-all-calls is {most_of_all}")
            if is_listed and self._listed[principal] >= max(1, most_of_all // 2):
                raise _busy(
                    f"{principal} has {self._listed[principal]} calls in flight, half of what all may have: "
                    f"max-all-calls is {most_of_all}"
                )
            if self._counts[count] >= most:
                raise _busy(f"{principal} has {most} calls in flight: that is the limit max-calls")
            self._counts[count] += 1
            if is_listed:
                self._listed[principal] += 1
                self._all += 1
        return CallInFlight(self, count, is_listed)

    def wait(self, call: CallInFlight) -> None:
        """Counts a call among those that wait, if it has room there."""
        principal, host, kind = call.count
        waiting = (principal, host, _WAITING)
        with self._lock:
            if not call.is_over and kind == _ACTIVE and self._counts[waiting] < self._most(waiting):
                _take_one(self._counts, call.count)
                self._counts[waiting] += 1
                call.count = waiting

    def end(self, call: CallInFlight) -> None:
        """Counts a call no more."""
        with self._lock:
            call.is_over = True
            _take_one(self._counts, call.count)
            if call.is_listed:
                _take_one(self._listed, call.count[0])
                self._all -= 1

    def _most(self, count: Count) -> int:
        return self._limits.calls * (1 if count[2] == _ACTIVE else WAITING_FOR_EACH)


def _take_one(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _busy(text: str) -> Backlogged:
    error = Backlogged(text)
    error.retry_after = BUSY_SECONDS
    return error
