"""Limits the connections of each host: how many it has, and how many it opens. A connection past a limit is closed at
once.

A host may open as many at once as in ten seconds on average: all workers behind one address (NAT) come back together
after a restart.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

AT_ONCE_SECONDS = 10.0
_MANY_HOSTS = 1024  # with more hosts than this, those that opened no connection for a while are forgotten


@dataclass(frozen=True)
class HostLimits:
    """The limits for each host.

    most: the connections that a host may have
    new:  the connections that it may open in a second, on average
    """

    most: int = 4096
    new: float = 100.0


DEFAULTS = HostLimits()


class Arrivals:
    """The connections of each host. Thread-safe.

    clock: returns the time in seconds
    """

    def __init__(self, limits: HostLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._here: Counter[str] = Counter()
        self._opened: dict[str, tuple[float, float]] = {}  # how many of late, and as of when

    def comes(self, host: str) -> bool:
        """Counts a new connection. Returns False, and does not count it, past a limit. host: empty for this machine's
        unix socket
        """
        if not host:
            return True
        name, now = _network(host), self._clock()
        with self._lock:
            opened = self._of_late(name, now)
            if self._here[name] >= self._limits.most or opened + 1 > max(1.0, AT_ONCE_SECONDS * self._limits.new):
                return False
            self._here[name] += 1
            self._opened[name] = opened + 1, now
            if len(self._opened) > _MANY_HOSTS:
                self._forget(now)
        return True

    def goes(self, host: str) -> None:
        """Records that a counted connection has ended."""
        if not host:
            return
        name = _network(host)
        with self._lock:
            self._here[name] -= 1
            if not self._here[name]:
                del self._here[name]

    def _of_late(self, name: str, now: float) -> float:
        opened, then = self._opened.get(name, (0.0, now))
        return max(0.0, opened - (now - then) * self._limits.new)

    def _forget(self, now: float) -> None:
        for name in [name for name in self._opened if not self._of_late(name, now)]:
            del self._opened[name]


def _network(host: str) -> str:
    """Returns the network that counts as one host: an IPv4 address, or for IPv6 its network of 64 bits, because one
    machine may have all addresses of it.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
