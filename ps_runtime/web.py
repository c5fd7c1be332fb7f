"""Serves HTTP(S): a thread for each connection, each for a bounded time; and sites of a few files and pages of data."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import selectors
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer, make_server

from ps_protocol.errors import InvalidRequest, PSError, TryLater
from ps_runtime import arrivals
from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.background import join_within, start
from ps_runtime.credentials import Tls
from ps_runtime.reloading import ReloadingFiles
from ps_runtime.tls_contexts import server_context, tls_socket

_HANG_UP_SECONDS = 1.0
_LATE_SECONDS = 0.05  # connections may be cut off this late: several at once, without a busy loop
# A scrape is one short request. A client that takes longer for its request, the handshake or reading is disconnected.
CONNECTION_SECONDS = 10.0
SILENT_SECONDS = 3.0  # the longest silence of a client
MAX_CONNECTIONS = 64
MOST_OF_A_HOST = 16  # the most connections of one host: no single host keeps the scraper out

_LONGEST_LINE = 65_536  # the longest first line of a request, as in the standard library

# A page is generated again after this many times the time that generating it took: so scrapers in a loop use a tenth of
# a core.
PAUSES_PER_PAGE = 10

# The Content-Security-Policy of a site's pages: nothing is loaded from another server, and no other site may show
# them in a frame or read them.
_SITE_HEADERS = [
    ("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
]

SERVER_SOFTWARE = "ps-torch"  # in the Server header

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def plaintext(connection: socket.socket) -> socket.socket:
    """Returns a connection as it is, without TLS."""
    return connection


class ConnectionServer(socketserver.ThreadingMixIn, WSGIServer):
    """Handles each connection in a thread, up to a limit; further connections are closed at once. `secure` adds TLS.

    A connection has a total time: a timeout for each read alone would start again with every byte of a slow client.
    """

    daemon_threads = True
    block_on_close = False  # a connection that lies idle does not hold up the end of the process
    request_queue_size = 128
    arrivals = Arrivals(HostLimits(MOST_OF_A_HOST))  # each server has its own
    most = MAX_CONNECTIONS
    secure: Callable[[socket.socket], socket.socket] = staticmethod(plaintext)

    def server_bind(self) -> None:
        self._wake, self._woken = socket.socketpair()
        super().server_bind()

    def server_activate(self) -> None:
        # A second handle on each socket (TLS detaches the first), its host, and the time at which its time is over.
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._serving: set[threading.Thread] = set()
        self._here = threading.local()  # the handle of the connection that a thread serves
        self._lock = threading.Lock()
        self._is_stopping = False
        self.timeout = 0  # of `handle_request`, which is called where there is one
        super().server_activate()

    def serve_forever(self, poll_interval: float = 0.0) -> None:
        """Handles requests until `shutdown`. It wakes up for requests, and for connections whose time is over."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.socket, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._is_stopping:
                if ready.select(self._patience()) and not self._is_stopping:
                    self.handle_request()
                self.service_actions()

    def _patience(self) -> float | None:
        """Returns the seconds until the first connection's time is over; None if there is no connection."""
        with self._lock:
            until = min((until for _, until in self._open.values()), default=None)
        return None if until is None else max(0.0, until - time.monotonic()) + _LATE_SECONDS

    def shutdown(self) -> None:
        """Ends `serve_forever`."""
        self._is_stopping = True
        with contextlib.suppress(OSError):  # it was shut down and closed before
            self._wake.send(b"\0")

    def server_close(self) -> None:
        super().server_close()
        self._wake.close()
        self._woken.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        host = str(client_address[0])
        with self._lock:
            if len(self._open) >= self.most or not self.arrivals.comes(host):
                self.shutdown_request(request)
                return
            try:
                handle = request.dup()
            except OSError:  # too many files are open in this process
                self.arrivals.goes(host)
                raise
            self._open[handle] = host, time.monotonic() + CONNECTION_SECONDS
        try:
            super().process_request((request, handle), client_address)
        except RuntimeError:  # no thread can be had
            self._over(handle)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        plain, handle = request
        with self._lock:
            self._serving.add(threading.current_thread())
        self._here.handle = handle
        try:
            plain.settimeout(SILENT_SECONDS)
            super().process_request_thread(self.secure(plain), client_address)
        except OSError:
            self.shutdown_request(plain)  # its handshake failed, or took too long
        finally:
            self._over(handle)

    def give_time(self, seconds: float) -> None:
        """Sets the remaining time of the connection that this thread serves, in seconds."""
        with self._lock:
            host, _ = self._open[self._here.handle]
            self._open[self._here.handle] = host, time.monotonic() + seconds

    def _over(self, handle: socket.socket) -> None:
        with self._lock:
            self._serving.discard(threading.current_thread())
            host, _ = self._open.pop(handle)
            handle.close()
        self.arrivals.goes(host)

    def hang_up(self) -> None:
        """Ends all connections, and waits a moment for their threads, which may be running code of torch for a page."""
        with self._lock:
            threads = list(self._serving)
            for handle in self._open:
                with contextlib.suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)
        join_within(threads, _HANG_UP_SECONDS)

    def service_actions(self) -> None:
        """Closes connections whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [handle for handle, (_, until) in self._open.items() if until <= now]
            for handle in late:
                with contextlib.suppress(OSError):  # the client has closed
                    handle.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect during a scrape."""


class Page:
    """A page that is generated once for all requests that wait for it. It is never older than the request that it
    answers.

    make: generates it for a query, the text after the question mark
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._query, self._page = "", b""
        self._begun = self._next = -math.inf  # when it was made, and when it may be made again

    def get(self, query: str = "") -> bytes:
        """Returns the page, after a pause if it was generated just now."""
        asked = time.monotonic()
        with self._lock:
            if self._begun < asked or self._query != query:
                time.sleep(max(0.0, self._next - time.monotonic()))
                self._begun = time.monotonic()
                self._query, self._page = query, self._make(query)
                ended = time.monotonic()
                self._next = ended + PAUSES_PER_PAGE * (ended - self._begun)
            return self._page


class _Answer(ServerHandler):
    """One answer. A client that hangs up or stops reading is no error here. Over TLS this raises an error of another
    class.
    """

    server_software = SERVER_SOFTWARE

    def handle_error(self) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self.close()
        else:
            super().handle_error()


class _Silent(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def handle(self) -> None:
        """Answers one request, as the base class does, by an `_Answer`."""
        self.raw_requestline = self.rfile.readline(_LONGEST_LINE + 1)
        if len(self.raw_requestline) > _LONGEST_LINE:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
        elif self.parse_request():
            self.connection.settimeout(CONNECTION_SECONDS)  # from here on the client reads at its own pace
            streams = self.rfile, self.wfile, self.get_stderr()
            answer = _Answer(*streams, self.get_environ(), multithread=False)  # type: ignore[arg-type]  # they are binary
            answer.request_handler = self  # type: ignore[attr-defined]  # which ServerHandler logs by
            answer.run(self.server.get_app())  # type: ignore[attr-defined]

    def version_string(self) -> str:
        """Returns the name of the server without versions, which would help an attacker."""
        return SERVER_SOFTWARE

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: there is a scrape every few seconds."""


class Site:
    """A few static files, and pages of JSON that are generated on request, for people on this machine.

    The browser must use a loopback name of this machine. Otherwise a page of another site, whose name was pointed to
    this machine, could read the answers (DNS rebinding).

    files: by path, the type and the content of each
    data: by path, the function that makes the JSON for a query; it may raise InvalidRequest
    """

    def __init__(self, files: Mapping[str, tuple[str, bytes]], data: Mapping[str, Callable[[str], bytes]]) -> None:
        self._files = files
        self._pages = {path: Page(make) for path, make in data.items()}
        self.paths = files.keys() | data.keys()

    def app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request."""
        status, kind, body = self._answer(environ)
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *_SITE_HEADERS])
        return [b""] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, str, bytes]:
        path, text = environ.get("PATH_INFO", ""), "text/plain; charset=utf-8"
        refused = refusal(environ, is_of_loopback=True)
        if refused is not None:
            return refused[0], text, refused[1]
        if path in self._files:
            return "200 OK", *self._files[path]
        if path not in self._pages:
            return "404 Not Found", text, f"here are {', '.join(sorted(self.paths))}\n".encode()
        try:
            return "200 OK", "application/json", self._pages[path].get(environ.get("QUERY_STRING", ""))
        except InvalidRequest as error:
            return "400 Bad Request", text, f"{error}\n".encode()
        except PSError as error:  # of a server behind this one
            return "502 Bad Gateway", text, f"{error}\n".encode()


def refusal(environ: dict[str, Any], is_of_loopback: bool) -> tuple[str, bytes] | None:
    """Returns the status and the text with which a request is refused; None if it may read a page.

    is_of_loopback: the page is for this machine alone, so a browser must use a loopback name
    """
    if is_of_loopback and not names_loopback(environ.get("HTTP_HOST", "")):
        return "403 Forbidden", b"this page is for this machine alone: ask for it at 127.0.0.1 or localhost\n"
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return "405 Method Not Allowed", b"this page is only to be read\n"
    return None


def names_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower().rstrip(".") == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    return False


def serve(
    host: str,
    port: int,
    app: App,
    what: str,
    flag: str,
    tls: Tls | None = None,
    limits: HostLimits = arrivals.DEFAULTS,
) -> tuple[int, Callable[[], None]]:
    """Serves an application until the returned function is called. Returns the port, and a function that stops serving.

    port: 0: the system chooses
    tls: serve HTTPS; with its CA, a client must present a certificate of that CA. The files may change while it is
         served
    limits: for the connections of each host, up to MOST_OF_A_HOST
    what, flag: for the text of the InvalidRequest if the port cannot be bound
    """

    def make() -> ConnectionServer:
        return make_server(host, port, app, ConnectionServer, handler_class=_Silent)

    return run_server(make, (host, port), what, flag, tls, HostLimits(min(limits.most, MOST_OF_A_HOST), limits.new))


def run_server(
    make: Callable[[], ConnectionServer],
    where: tuple[str, int],
    what: str,
    flag: str,
    tls: Tls | None,
    limits: HostLimits,
) -> tuple[int, Callable[[], None]]:
    """Runs a server in a thread; see `serve`. make: binds its port. where: the host and the port, for the error"""
    try:
        server = make()
    except OSError as error:
        raise InvalidRequest(
            f"cannot serve {what} on {where[0]}:{where[1]} ({error.strerror}); choose another {flag}"
        ) from None
    server.arrivals = Arrivals(limits)
    if tls is not None:
        watched = ReloadingFiles(tls.paths(), lambda: server_context(tls, "metrics"))
        server.secure = lambda plain: tls_socket(watched.get(), plain, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name=what, daemon=True)
    try:
        start(thread)
    except TryLater:
        server.server_close()
        raise

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()
        server.hang_up()

    return server.server_port, stop
