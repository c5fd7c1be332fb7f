"""Rates over the last seconds, from sums that processes report now and then, with times of their own clocks.

A report that comes late, or twice, changes no rate: its time is the process's own, not the time of arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

WINDOW_SECONDS = 15.0

S = TypeVar("S")


@dataclass(frozen=True)
class Span(Generic[S]):
    """The first and the last sums of a window. seconds: between the two"""

    first: S
    last: S
    seconds: float


class Window(Generic[S]):
    """The reports of one process over the last WINDOW_SECONDS, and the newest report before them.

    A report with an earlier time than the one before comes from a new process: the window begins anew with it.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, S]] = deque()

    def report(self, measured: float, sums: S) -> None:
        """Adds a report. measured: seconds for which the process has measured"""
        reports = self._reports
        if reports and measured < reports[-1][0]:
            reports.clear()
        if not reports or measured > reports[-1][0]:
            reports.append((measured, sums))
        while len(reports) > 2 and reports[1][0] <= measured - WINDOW_SECONDS:
            reports.popleft()

    def span(self) -> Span[S] | None:
        """Returns the first and the last report; None while there is only one."""
        if len(self._reports) < 2:
            return None
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        return Span(first, last, ended - began)
