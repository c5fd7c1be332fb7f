"""The syntax of addresses and of host names. People see them, and Prometheus connects to them."""

from __future__ import annotations

import string

MAX_HOST_LENGTH = 255
_OF_A_NAME = frozenset(string.ascii_letters + string.digits + "._:-")
_OF_A_HOST = _OF_A_NAME | {"[", "]"}


def is_host_port(text: str) -> bool:
    """Returns whether a text is HOST:PORT, with a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    whole = port.isascii() and port.isdigit() and len(port) <= 5
    return 0 < len(host) <= MAX_HOST_LENGTH and _OF_A_HOST.issuperset(host) and whole and 0 < int(port) < 65536


def is_host(text: str) -> bool:
    """Returns whether a text can be the name of a host, or is empty."""
    return len(text) <= MAX_HOST_LENGTH and _OF_A_NAME.issuperset(text)
