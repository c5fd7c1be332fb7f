"""How every process of the project serves its metrics over HTTP: /metrics, and other paths that a scraper needs."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ps_protocol.credentials import Tls
from ps_protocol.errors import InvalidRequest
from ps_protocol.watched import Watched

# How long stopping may take; serve_forever looks at its flag this often.
_POLL_SECONDS = 0.05
# A scrape is one short request: who takes longer to ask, or to shake hands, or to read, is cut off.
CONNECTION_SECONDS = 10.0
MAX_CONNECTIONS = 64


class _ThreadingServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a limit; more are closed at once. `secure` wraps each in TLS, or not."""

    daemon_threads = True
    block_on_close = False  # a connection that lies idle does not hold up the end of the process
    request_queue_size = 128
    secure: Callable[[socket.socket], socket.socket] = staticmethod(lambda plain: plain)

    def server_activate(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(CONNECTION_SECONDS)
            super().process_request_thread(self.secure(request), client_address)
        except OSError:
            self.shutdown_request(request)  # its handshake failed, or took too long
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up, or is cut off, in the middle of a scrape is no news."""


class _Silent(WSGIRequestHandler):
    timeout = CONNECTION_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes every few seconds are no news."""


def _context(tls: Tls) -> ssl.SSLContext:
    tls.load()
    if tls.cert is None:
        raise InvalidRequest("metrics over TLS need --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(f"{tls.cert} cannot be served with its key ({error.strerror or error})") from None
    return context


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    pages: Mapping[str, Callable[[], bytes]] | None = None,
    tls: Tls | None = None,
) -> tuple[int, Callable[[], None]]:
    """Serves /metrics from a registry, and `pages` of JSON by path. Returns the port and a function that stops serving.

    port: 0 lets the system choose. tls: with it /metrics is https, and with its CA a scraper must show a certificate of
    that CA; the files may change while it is served. Raises InvalidRequest if the port cannot be bound.
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
    if tls is not None:
        watched = Watched(tls.paths(), lambda: _context(tls))
        server.secure = lambda plain: watched.get().wrap_socket(plain, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
