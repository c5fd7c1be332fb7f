"""The name of each run of a job: the time at which the job was registered, so it sorts after every earlier run."""

from __future__ import annotations

import threading

from ps_server.coordinator.timing import Clock

NANOSECONDS = 1e9  # in a second: a run is the time at which it was made, in nanoseconds since 1970


def began_at(run: str) -> float:
    """Returns when a run was made, in seconds since 1970."""
    return int(run or "0", 16) / NANOSECONDS


class Runs:
    """Makes runs, and knows which are being made on the shards. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0
        self._being_made: dict[str, str] = {}

    def new(self) -> str:
        """Returns a new run, which sorts after all runs that this coordinator has made or has followed."""
        with self._lock:
            self._last = max(self._last + 1, int(self._clock.since_1970() * NANOSECONDS))
            return f"{self._last:016x}"

    def follow(self, run: int) -> None:
        """Makes all later runs sort after `run`, which a coordinator whose clock was ahead has made."""
        with self._lock:
            self._last = max(self._last, run)

    def making(self, name: str, run: str) -> None:
        """Records that a run is being made, until `made`. Meanwhile the shards' copies of it do not count as
        orphans.
        """
        with self._lock:
            self._being_made[name] = run

    def made(self, name: str) -> None:
        """Records that the job is made, or that making it failed."""
        with self._lock:
            self._being_made.pop(name, None)

    def being_made(self) -> set[tuple[str, str]]:
        """Returns the names and runs of the jobs that are being made."""
        with self._lock:
            return set(self._being_made.items())
