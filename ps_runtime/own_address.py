"""The address by which a machine is seen from a server."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def own_address(server: str | None) -> str:
    """Returns the address by which this machine is seen from the server: where Prometheus can reach it too."""
    if server is None:
        return "127.0.0.1"
    host, _, port = server.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing: it only picks the route
        return str(ipaddress.ip_address(probe.getsockname()[0]))
    return "127.0.0.1"
