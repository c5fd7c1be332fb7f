"""What relays have said of themselves: on a shard, or on a relay that has others behind it. For status and metrics.

Nobody checks what a relay says, and any reader may claim to be one. So the number of names is bounded, for all readers
and for each principal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.messages.editions import RelayReport
from ps_server.core.feed_figures import RelayFigures
from ps_server.core.limits import share

MOST_RELAYS = 256  # of one job; half of them of one principal
KEPT_SECONDS = 10.0  # after the last call of a relay, as editions are


@dataclass
class _Told:
    report: RelayReport
    caller: str
    heard: float
    feeds: int = 0


class ToldRelays:
    """The relays among the readers of one job, by name. Thread-safe."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._lock = threading.Lock()

    def tell(self, report: RelayReport | None, caller: str, now: float) -> None:
        """Records what a relay says. Does nothing if there is no room, or if another principal has the name.

        caller: the principal that reads; empty: unknown
        """
        if report is not None:
            with self._lock:
                self._tell(report, caller, now)

    def hold(self, report: RelayReport | None, caller: str, clock: Callable[[], float]) -> Callable[[], None]:
        """Records what a relay says, and keeps it while a feed of the relay is open.

        Returns a function to call when the feed is over; further calls of it do nothing.
        """
        with self._lock:
            told = None if report is None else self._tell(report, caller, clock())
            if told is not None:
                told.feeds += 1
        held = [] if told is None else [told]

        def release() -> None:
            with self._lock:
                if held:
                    over = held.pop()
                    over.feeds, over.heard = over.feeds - 1, clock()

        return release

    def figures(self, latest: int, now: float) -> tuple[RelayFigures, ...]:
        """Returns the figures of each relay, by name. latest: the version of the job's weights here"""
        with self._lock:
            self._forget(now)
            reports = [self._told[name].report for name in sorted(self._told)]
        return tuple(
            RelayFigures(name, readers, version, 0 if version is None else max(0, latest - version))
            for name, readers, version in reports
        )

    def _tell(self, report: RelayReport, caller: str, now: float) -> _Told | None:
        """Returns what is recorded; None: nothing. The caller holds the lock."""
        told = self._told.get(report.name)
        if told is None or (told.caller != caller and self._is_over(told, now)):
            self._forget(now)
            own = sum(each.caller == caller for each in self._told.values()) if caller else 0
            if len(self._told) >= MOST_RELAYS or own >= share(MOST_RELAYS):
                return None
            told = self._told[report.name] = _Told(report, caller, now)
        if told.caller != caller:
            return None
        told.report, told.heard = report, now
        return told

    def _forget(self, now: float) -> None:
        """Forgets relays that are gone. The caller holds the lock."""
        self._told = {name: each for name, each in self._told.items() if not self._is_over(each, now)}

    @staticmethod
    def _is_over(told: _Told, now: float) -> bool:
        return not told.feeds and now - told.heard > KEPT_SECONDS
