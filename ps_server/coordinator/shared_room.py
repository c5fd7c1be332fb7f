"""Memory that all jobs share: no principal's jobs have more than half of it, so that others find room."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

from ps_protocol.errors import LimitExceeded
from ps_server.core.limits import share


@dataclass(eq=False)
class Owner:
    """The principal that began a job; empty: nobody knows, as after a coordinator's restart."""

    name: str = ""


class SharedRoom:
    """Bytes of all jobs together. Thread-safe.

    limit: of these; None: none
    flag:  by which it is set; what: the bytes are of
    """

    def __init__(self, limit: int | None, flag: str = "max-all-state-bytes", what: str = "workers' states") -> None:
        self._limit = math.inf if limit is None else limit
        self._flag, self._what = flag, what
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self._lock = threading.Lock()

    def part(self, owner: Owner) -> Part:
        """Returns the part of one job. owner: of the job"""
        part = Part(self, owner)
        with self._lock:
            self._parts.add(part)
        return part

    def hold(self, part: Part, more: int) -> None:
        """Notes that a part has so many bytes more, or fewer. Raises LimitExceeded, and notes nothing, past a limit."""
        owner = part.owner.name
        with self._lock:
            if more > 0:
                held = sum(other.held for other in self._parts)
                if held + more > self._limit:
                    raise LimitExceeded(
                        f"{self._flag} is {self._limit}, the coordinator has {held} bytes of {self._what}, "
                        f"and got {more} more"
                    )
                own = sum(other.held for other in self._parts if other.owner.name == owner)
                if owner and own + more > share(self._limit):
                    raise LimitExceeded(
                        f"{owner} has {own} bytes of {self._what}, and sent {more} more: half of {self._flag}, "
                        f"{self._limit}, is for one principal's jobs"
                    )
            part.held += more


class Part:
    """What one job has of a room. held: bytes; owner: whose it is"""

    def __init__(self, room: SharedRoom, owner: Owner) -> None:
        self._room, self.owner, self.held = room, owner, 0

    def hold(self, more: int) -> None:
        """Notes that it has so many bytes more, or fewer. Raises LimitExceeded, and notes nothing, past a limit."""
        self._room.hold(self, more)
