"""Serves /metrics, and pages of JSON. Has the parts that the metrics of all processes share."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

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

from ps_protocol.versions import VERSION
from ps_runtime import arrivals
from ps_runtime.arrivals import HostLimits
from ps_runtime.background import errors
from ps_runtime.credentials import Tls, certificate_expiry, is_loopback
from ps_runtime.troubles import counts
from ps_runtime.version import version
from ps_runtime.web import Page, Site, refusal, serve

# Half a millisecond doubling up to half a minute: a bucket's apply is at one end, a wait for a straggler at the other.
LATENCY_BUCKETS = tuple(0.0005 * 2**k for k in range(17))

Sample = tuple[tuple[str, ...], float]  # the values of its labels, and the number
S = TypeVar("S")


class Gauges(Collector, Generic[S]):
    """Metrics that are read from statistics at each scrape. The statistics are read once, so that all values fit
    together.

    read:   returns the statistics
    gauges: (name, help, label names, function that returns the samples, given the statistics); names that end in
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
            # The name of a counter ends in `_total`. The library cuts the suffix off, and appends it again in its
            # output.
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=labels)
            for values, number in samples(statistics):
                family.add_metric(values, number)
            yield family

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not read the statistics."""
        return []


def build_gauge() -> Gauges[dict[str, str]]:
    """Returns a gauge that is always 1 and whose labels are the versions of what this process runs."""
    built = {"version": version(), "protocol": str(VERSION), "torch": version("torch"), "openssl": ssl.OPENSSL_VERSION}
    text = "What this process runs: its version, that of the protocol, torch's, and that of Python's OpenSSL."
    return Gauges(
        lambda: built, [("ps_build_info", text, tuple(built), lambda labels: [(tuple(labels.values()), 1.0)])]
    )


class _Registry(CollectorRegistry):
    """Leaves out the `..._created` series of each counter and histogram.

    They are a fifth of a shard's output, and nothing reads them. `prometheus_client.disable_created_metrics` would also
    disable them for a script's own metrics.
    """

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            if metric.type in ("counter", "histogram"):
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def process_registry() -> CollectorRegistry:
    """Returns a registry with the metrics of this process: versions, memory, the interpreter, and garbage
    collection.
    """
    registry = _Registry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(build_gauge())

    def samples(numbers: Mapping[str, int]) -> Iterable[Sample]:
        return [((name,), number) for name, number in numbers.items()]

    text = "Exceptions in background threads, which went on."
    registry.register(Gauges(errors, [("ps_background_errors_total", text, ("thread",), samples)]))
    text = "Troubles that come again and again, by kind: the log has each once."
    registry.register(Gauges(counts, [("ps_troubles_total", text, ("kind",), samples)]))
    return registry


def certificate_gauges(tls: Tls) -> Gauges[dict[Path, float]]:
    """Returns the gauge of the expiry of certificates: those that this process presents, and those by which it verifies
    others.
    """

    def samples(ends: dict[Path, float]) -> Iterable[Sample]:
        return [((str(path),), end) for path, end in ends.items()]

    text = "When the certificate in a file ends, in seconds since 1970."
    return Gauges(certificate_expiry(tls), [("ps_certificate_expiry_timestamp_seconds", text, ("file",), samples)])


def _ignoring_queries(make: Callable[[], bytes]) -> Callable[[str], bytes]:
    return lambda _: make()


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    pages: Mapping[str, Callable[[], bytes]] | None = None,
    tls: Tls | None = None,
    site: Site | None = None,
    limits: HostLimits = arrivals.DEFAULTS,
) -> tuple[int, Callable[[], None]]:
    """Serves /metrics. Returns the port and a function that stops serving. Raises InvalidRequest if the port is not
    available.

    host:   if it is loopback, only requests for a loopback name are answered: otherwise a page in a browser on this
            machine could read the metrics under another name (DNS rebinding)
    port:   0: the system chooses
    pages:  by path, functions that make further pages of JSON
    tls:    None: plain HTTP. With its CA, a scraper must present a certificate of that CA. The files may change while
            it is served; /metrics has when the certificates expire
    site:   pages for people that are served at the same port; None: none
    limits: for the connections of each host
    """
    if tls is not None:
        registry.register(certificate_gauges(tls))
    known = {path: ("application/json", Page(_ignoring_queries(make))) for path, make in (pages or {}).items()}
    known["/metrics"] = CONTENT_TYPE_LATEST, Page(_ignoring_queries(lambda: generate_latest(registry)))

    def answer(environ: dict[str, Any]) -> tuple[str, str, bytes]:
        path, refused = environ.get("PATH_INFO", ""), refusal(environ, is_loopback(host))
        if refused is not None:
            return refused[0], "text/plain", refused[1]
        if path in known:
            kind, page = known[path]
            return "200 OK", kind, page.get()
        return "404 Not Found", "text/plain", f"here are {', '.join(sorted(known))}\n".encode()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if site is not None and environ.get("PATH_INFO", "") in site.paths:
            return site.app(environ, start_response)
        status, kind, body = answer(environ)
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [b""] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return serve(host, port, app, "metrics", "--metrics-port", tls, limits)
