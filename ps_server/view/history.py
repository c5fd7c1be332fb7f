"""The samples of the last 15 minutes, in bounded memory: one a second, of each job a bounded number of series."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SAMPLES = 900  # one a second: 15 minutes
MAX_SERIES = 60  # per job, of 3.6 kB each: its own, three for each logged value, one for each sampled worker

# Of a job: what is measured, and the rank of the worker (None: of the job as a whole).
Name = tuple[str, int | None]


@dataclass(frozen=True)
class Samples:
    """Consecutive samples.

    first:  the number of the first; times: of each, in seconds since 1970
    series: by job, the values of each name, one for each sample; NaN: there was none
    """

    first: int
    times: array[float]
    series: Mapping[str, Mapping[Name, array[float]]]


@dataclass
class _Series:
    """One value of each sample that is kept. last: the number of the last sample that had it"""

    values: array[float]
    last: int


class History:
    """Keeps the last samples. Not thread-safe.

    next: the number of the next sample
    """

    def __init__(self, capacity: int = SAMPLES) -> None:
        self._capacity = capacity
        self.next = 0
        self._times = array("d")
        self._jobs: dict[str, dict[Name, _Series]] = {}

    def add(self, time: float, jobs: Mapping[str, Mapping[Name, float]]) -> None:
        """Adds a sample: by job, the value of each name. Names beyond a job's first MAX_SERIES are left out."""
        for job, values in jobs.items():
            series = self._jobs.setdefault(job, {})
            for name in values:
                if name not in series and len(series) < MAX_SERIES:
                    series[name] = _Series(array("f", [math.nan]) * len(self._times), self.next)
        for job, series in self._jobs.items():
            values = jobs.get(job, {})
            for name, kept in series.items():
                kept.values.append(values.get(name, math.nan))
                kept.last = self.next if name in values else kept.last
        self._times.append(time)
        self.next += 1
        if len(self._times) > self._capacity:
            self._forget_first()

    def _forget_first(self) -> None:
        """Drops the oldest sample, and series without samples."""
        del self._times[0]
        first = self.next - len(self._times)
        for job, series in list(self._jobs.items()):
            for kept in series.values():
                del kept.values[0]
            self._jobs[job] = {name: kept for name, kept in series.items() if kept.last >= first}
            if not self._jobs[job]:
                del self._jobs[job]

    def after(self, number: int, jobs: Iterable[str]) -> Samples:
        """Returns the samples of jobs from a number on, or from the first that is kept."""
        begin = self.next - len(self._times)
        skip = min(max(0, number - begin), len(self._times))
        series = {
            job: {name: kept.values[skip:] for name, kept in self._jobs[job].items()}
            for job in jobs
            if job in self._jobs
        }
        return Samples(begin + skip, self._times[skip:], series)
