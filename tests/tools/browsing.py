"""A request as a browser makes it, to the page or the metrics port."""

from __future__ import annotations

import http.client


def ask(address: str, path: str, host: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """A request as a browser makes it: status, headers and body."""
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, headers={"Host": host or address})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
