"""A memory budget that all jobs share. The jobs of one principal get at most half of it, so that others find room."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

from ps_protocol.errors import LimitExceeded
from ps_server.core.limits import share


@dataclass(eq=False)
class Owner:
    """The principal that began a job. The name is empty if it is unknown, as after a restart of the coordinator."""

    name: str = ""


class SharedRoom:
    """A budget of bytes for all jobs together. Thread-safe.

    limit: the budget in bytes; None: no limit
    flag: the flag that sets it, for error texts
    what: the name of these bytes, for error texts
    """

    def __init__(self, limit: int | None, flag: str = "max-all-state-bytes", what: str = "workers' states") -> None:
        self._limit = math.inf if limit is None else limit
        self._flag, self._what = flag, what
        self._jobs: weakref.WeakSet[JobShare] = weakref.WeakSet()
        self._lock = threading.Lock()

    def of_job(self, owner: Owner) -> JobShare:
        """Returns the share of one job, which is empty at first."""
        job = JobShare(self, owner)
        with self._lock:
            self._jobs.add(job)
        return job

    def fair(self) -> float:
        """Returns an equal share: the budget divided by the number of jobs."""
        with self._lock:
            return self._limit / max(1, len(self._jobs))

    def hold(self, job: JobShare, more: int) -> None:
        """Adds `more` bytes to a job's share; a negative number frees some.

        Raises LimitExceeded, and changes nothing, if all jobs would exceed the budget, or those of one principal half
        of it.
        """
        owner = job.owner.name
        with self._lock:
            if more > 0:
                held = sum(other.held for other in self._jobs)
                if held + more > self._limit:
                    raise LimitExceeded(
                        f"{self._flag} is {self._limit}, the coordinator has {held} bytes of {self._what}, "
                        f"and got {more} more"
                    )
                own = sum(other.held for other in self._jobs if other.owner.name == owner)
                if owner and own + more > share(self._limit):
                    raise LimitExceeded(
                        f"{owner} has {own} bytes of {self._what}, and sent {more} more: half of {self._flag}, "
                        f"{self._limit}, is for one principal's jobs"
                    )
            job.held += more


class JobShare:
    """The bytes that one job holds of a SharedRoom. owner: the principal to whom they are accounted"""

    def __init__(self, room: SharedRoom, owner: Owner) -> None:
        self._room, self.owner, self.held = room, owner, 0

    def fair(self) -> float:
        """Returns an equal share of the budget, in bytes."""
        return self._room.fair()

    def hold(self, more: int) -> None:
        """Adds `more` bytes; a negative number frees some. Raises LimitExceeded, and changes nothing, past a limit."""
        self._room.hold(self, more)
