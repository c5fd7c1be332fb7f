"""Who can reach a port: this machine alone, unless it is encrypted or somebody said that it need not be."""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest
from ps_runtime.credentials import is_loopback


def is_exposed(host: str, encrypted: bool, allowed: bool, what: str, flag: str) -> bool:
    """True where plaintext is served beyond this machine, which somebody has allowed.

    host: the address to listen on; flag: what would allow it. Raises InvalidRequest where nobody has.
    """
    if encrypted or is_loopback(host):
        return False
    if not allowed:
        raise InvalidRequest(
            f"{what} on {host} would be open to the network in plaintext: give --tls-cert and --tls-key, "
            f"listen on 127.0.0.1, or say {flag}"
        )
    return True
