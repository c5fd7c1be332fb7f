"""A free port for a process that listens there later, when it has imported what it needs."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

_LOWEST, _HIGHEST = 10_000, 65_535  # services of the system listen below
_TRIES = 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1", taken: Collection[int] = ()) -> int:
    """Returns a port that is free now. Where there is room, it is none of those that the system gives to outgoing
    connections: one of these could take it in the seconds until somebody listens there.

    host:  an address of this machine
    taken: ports that others are about to listen at
    """
    outside = _outside_of(*_given_out())
    for _ in range(_TRIES if outside else 0):
        port = random.choice(outside)
        if port not in taken and _bound(host, port):
            return port
    while (port := _bound(host, 0)) in taken:
        pass
    return port


def _given_out() -> tuple[int, int]:
    """Returns the first and the last port that the system gives to outgoing connections."""
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _LOWEST, _HIGHEST  # unknown: it may be any
    return first, last


def _outside_of(first: int, last: int) -> Sequence[int]:
    """Returns the ports on the larger side of a range."""
    below, above = range(_LOWEST, first), range(last + 1, _HIGHEST + 1)
    return below if len(below) >= len(above) else above


def _bound(host: str, port: int) -> int:
    """Returns the port to which a socket could be bound, 0 if that failed. port: 0: any"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            if not port:
                raise
            return 0
        return int(probe.getsockname()[1])
