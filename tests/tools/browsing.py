"""A request as a browser makes it, to the page or the metrics port."""

from __future__ import annotations

import http.client


def ask(address: str, path: str, host: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """A request as a browser makes it: status, headers and body.

    As a browser, it asks once more where the server has closed a connection that was slow to say something: on a busy
    machine a client may take longer than the seconds that a silent connection has.
    """
    try:
        return _ask_once(address, path, host, method)
    except http.client.RemoteDisconnected:
        return _ask_once(address, path, host, method)


def _ask_once(address: str, path: str, host: str, method: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, headers={"Host": host or address})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
