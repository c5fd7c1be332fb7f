"""What relays have said of themselves: on a shard, or on a relay that has others behind it. For status and metrics.

Nobody checks what a relay says, and any reader may claim to be one. So the number of names is bounded, for all readers
and for each principal, and so is the number of those that are shown.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from ps_protocol.messages.editions import RelayReport
from ps_server.core.feed_figures import AllRelays, RelayFigures
from ps_server.core.limits import share

MOST_RELAYS = 256  # the most relays of one job; one principal may have half of them
MOST_SHOWN = 32  # the most relays of one job that are shown
KEPT_SECONDS = 20.0  # after the last report. A relay sends one every 7.5 s, and one or two may be lost


@dataclass
class _Report:
    report: RelayReport
    caller: str
    heard: float


class RelayReports:
    """The relays among the readers of one job, by name. Thread-safe."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._lock = threading.Lock()

    def tell(self, report: RelayReport | None, caller: str, now: float) -> None:
        """Records what a relay says. Does nothing if there is no room, or if another principal has the name.

        report: None: the reader is no relay
        caller: the principal that reads; empty: unknown
        """
        if report is None:
            return
        with self._lock:
            last = self._reports.get(report.name)
            if last is None or last.caller != caller:
                self._forget(now)
                if report.name in self._reports or not self._has_room(caller):
                    return
            self._reports[report.name] = _Report(report, caller, now)

    def readers(self, now: float) -> int:
        """Returns how many readers the relays have."""
        with self._lock:
            self._forget(now)
            return sum(each.report.readers for each in self._reports.values())

    def figures(self, lowest: int, now: float, highest: int = 0) -> AllRelays:
        """Returns the figures of the relays.

        lowest, highest: the versions of the job's weights here, if they differ
        """
        highest = max(lowest, highest)
        with self._lock:
            self._forget(now)
            reports = list(self._reports.values())
        shown = tuple(_figures(each.report, lowest, highest) for each in _ranked(reports)[:MOST_SHOWN])
        return AllRelays(shown, len(reports), sum(each.report.readers for each in reports))

    def _has_room(self, caller: str) -> bool:
        """Whether a caller may add a name. The caller of this holds the lock."""
        own = sum(each.caller == caller for each in self._reports.values()) if caller else 0
        return len(self._reports) < MOST_RELAYS and own < share(MOST_RELAYS)

    def _forget(self, now: float) -> None:
        """Forgets relays that are gone. The caller holds the lock."""
        if any(now - each.heard > KEPT_SECONDS for each in self._reports.values()):
            self._reports = {name: each for name, each in self._reports.items() if now - each.heard <= KEPT_SECONDS}


def _ranked(reports: list[_Report]) -> list[_Report]:
    """Returns relays, those with the most readers first. The relays of one principal past its share come after all
    others: their numbers may be made up.
    """
    ranked = sorted(reports, key=lambda each: (-each.report.readers, each.report.name))
    counts: Counter[str] = Counter()
    first: list[_Report] = []
    rest: list[_Report] = []
    for each in ranked:
        counts[each.caller] += 1
        (first if counts[each.caller] <= share(MOST_SHOWN) else rest).append(each)
    return first + rest


def _figures(report: RelayReport, lowest: int, highest: int) -> RelayFigures:
    version = report.version
    if version is None or version > highest:  # a version of another timeline, or one that is made up
        return RelayFigures(report.name, report.readers)
    return RelayFigures(report.name, report.readers, version, max(0, lowest - version))
