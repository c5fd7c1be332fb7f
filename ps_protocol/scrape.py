"""How every process of the project serves its metrics over HTTP: /metrics, and other paths that a scraper needs."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ps_protocol.errors import InvalidRequest

# How long stopping may take; serve_forever looks at its flag this often.
_POLL_SECONDS = 0.05


class _ThreadingServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes every few seconds are no news."""


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, pages: Mapping[str, Callable[[], bytes]] | None = None
) -> tuple[int, Callable[[], None]]:
    """Serves /metrics from a registry, and `pages` of JSON by path. Returns the port and a function that stops serving.

    port: 0 lets the system choose. Raises InvalidRequest if the port cannot be bound.
    """
    metrics = make_wsgi_app(registry)
    known = dict(pages or {})

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in known:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [known[path]()]
        if path == "/metrics":
            found: Iterable[bytes] = metrics(environ, start_response)
            return found
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"here are {', '.join(['/metrics', *known])}\n".encode()]

    try:
        server = make_server(host, port, app, _ThreadingServer, handler_class=_Silent)
    except OSError as error:
        raise InvalidRequest(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); choose another --metrics-port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
