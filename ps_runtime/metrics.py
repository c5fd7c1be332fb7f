"""Serves /metrics, and pages of JSON, over HTTP(S); and what all metrics have in common."""

from __future__ import annotations

import contextlib
import math
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ps_protocol.errors import InvalidRequest
from ps_runtime.background import errors
from ps_runtime.credentials import Tls, certificate_expiry
from ps_runtime.reloading import ReloadingFiles
from ps_runtime.troubles import counts

# How long stopping may take; serve_forever looks at its flag this often.
_POLL_SECONDS = 0.05
# A scrape is one short request: a client that takes longer to ask, to shake hands, or to read is cut off.
CONNECTION_SECONDS = 10.0
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_OF_A_HOST = 16  # so that no single host keeps the scraper out

# A page is made anew after so many times the time that making it took: scrapers in a loop take a tenth of a core.
PAUSES_PER_PAGE = 10

# Half a millisecond doubling up to half a minute: a bucket's apply is at one end, a wait for a straggler at the other.
LATENCY_BUCKETS = tuple(0.0005 * 2**k for k in range(17))

Sample = tuple[tuple[str, ...], float]  # the values of its labels, and the number
S = TypeVar("S")


class Gauges(Collector, Generic[S]):
    """Metrics that are read from statistics at each scrape: once for all of them, so that they fit together.

    gauges: (name, help, label names, function that lists the samples that the statistics have); names that end in
            `_total` are counters
    """

    def __init__(
        self,
        read: Callable[[], S],
        gauges: list[tuple[str, str, tuple[str, ...], Callable[[S], Iterable[Sample]]]],
    ) -> None:
        self._read = read
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Reads every gauge."""
        statistics = self._read()
        for name, text, labels, samples in self._gauges:
            # What only grows says so by its name; the suffix is put back when the family is written.
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=labels)
            for values, number in samples(statistics):
                family.add_metric(values, number)
            yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not read them."""
        return []


class _ThreadingServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a limit; more are closed at once. `secure` wraps each in TLS, or not.

    A connection is over when its time is: a timeout alone would begin anew with every byte that comes.
    """

    daemon_threads = True
    block_on_close = False  # a connection that lies idle does not hold up the end of the process
    request_queue_size = 128
    secure: Callable[[socket.socket], socket.socket] = staticmethod(lambda plain: plain)

    def server_activate(self) -> None:
        # A second handle on each socket (TLS takes the first away), its host, and when its time is over.
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._lock = threading.Lock()
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        host = str(client_address[0])
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            if full or sum(host == other for other, _ in self._open.values()) >= MAX_CONNECTIONS_OF_A_HOST:
                self.shutdown_request(request)
                return
            handle = request.dup()
            self._open[handle] = host, time.monotonic() + CONNECTION_SECONDS
        try:
            super().process_request((request, handle), client_address)
        except RuntimeError:  # no thread can be had
            self._over(handle)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        plain, handle = request
        try:
            plain.settimeout(CONNECTION_SECONDS)
            super().process_request_thread(self.secure(plain), client_address)
        except OSError:
            self.shutdown_request(plain)  # its handshake failed, or took too long
        finally:
            self._over(handle)

    def _over(self, handle: socket.socket) -> None:
        with self._lock:
            del self._open[handle]
            handle.close()

    def service_actions(self) -> None:
        """Hangs up, every _POLL_SECONDS, on connections whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [handle for handle, (_, until) in self._open.items() if until <= now]
            for handle in late:
                with contextlib.suppress(OSError):  # it hung up itself
                    handle.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect during a scrape."""


class _Page:
    """A page that is made once for all that wait for it, and never older than the request that it answers."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page = b""
        self._begun = self._next = -math.inf  # when it was made, and when it may be made again

    def get(self) -> bytes:
        """Returns the page, after a pause if it was made just now."""
        asked = time.monotonic()
        with self._lock:
            if self._begun < asked:
                time.sleep(max(0.0, self._next - time.monotonic()))
                self._begun = time.monotonic()
                self._page = self._make()
                ended = time.monotonic()
                self._next = ended + PAUSES_PER_PAGE * (ended - self._begun)
            return self._page


class _Silent(WSGIRequestHandler):
    timeout = CONNECTION_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: there is a scrape every few seconds."""


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


def process_registry() -> CollectorRegistry:
    """Returns a registry with the metrics of this process: its memory, its interpreter, its garbage collector."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    def samples(numbers: Mapping[str, int]) -> Iterable[Sample]:
        return [((name,), number) for name, number in numbers.items()]

    text = "Exceptions in background threads, which went on."
    registry.register(Gauges(errors, [("ps_background_errors_total", text, ("thread",), samples)]))
    text = "Troubles that come again and again, by kind: the log has each once."
    registry.register(Gauges(counts, [("ps_troubles_total", text, ("kind",), samples)]))
    return registry


def certificate_gauges(tls: Tls) -> Gauges[dict[Path, float]]:
    """Returns the gauge of when the certificates end that this process shows, and verifies others by."""

    def samples(ends: dict[Path, float]) -> Iterable[Sample]:
        return [((str(path),), end) for path, end in ends.items()]

    text = "When the certificate in a file ends, in seconds since 1970."
    return Gauges(certificate_expiry(tls), [("ps_certificate_expiry_timestamp_seconds", text, ("file",), samples)])


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    pages: Mapping[str, Callable[[], bytes]] | None = None,
    tls: Tls | None = None,
) -> tuple[int, Callable[[], None]]:
    """Serves /metrics from a registry, and `pages` of JSON by path. Returns the port and a function that stops serving.

    port: 0 lets the system choose. tls: with it /metrics is https, and with its CA a scraper must show a certificate of
    that CA; the files may change while it is served, and /metrics tells when they end. Raises InvalidRequest if the
    port cannot be bound.
    """
    if tls is not None:
        registry.register(certificate_gauges(tls))
    known = {path: ("application/json", _Page(make)) for path, make in (pages or {}).items()}
    known["/metrics"] = CONTENT_TYPE_LATEST, _Page(lambda: generate_latest(registry))

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in known:
            kind, page = known[path]
            start_response("200 OK", [("Content-Type", kind)])
            return [page.get()]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"here are {', '.join(sorted(known))}\n".encode()]

    try:
        server = make_server(host, port, app, _ThreadingServer, handler_class=_Silent)
    except OSError as error:
        raise InvalidRequest(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); choose another --metrics-port"
        ) from None
    if tls is not None:
        watched = ReloadingFiles(tls.paths(), lambda: _context(tls))
        server.secure = lambda plain: watched.get().wrap_socket(plain, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
