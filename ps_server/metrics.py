"""What a server process tells Prometheus.

Counters and histograms are kept as things happen; gauges are read from the state itself when somebody scrapes. Labels
are bounded: job, rank, mode, result, kind, method; never an address, a tensor's name or an error's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ps_protocol.errors import PSError
from ps_server.core.bucket import Add, Step, Verdict
from ps_server.core.shard_job import Staged
from ps_server.core.weights import Gradient

# Half a millisecond doubling up to half a minute: a bucket's apply is at one end, a wait for a straggler at the other.
LATENCY_BUCKETS = tuple(0.0005 * 2**k for k in range(17))
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class ShardMetrics:
    """Counters and histograms of one shard."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=tuple(buckets), registry=registry)

        self._push = counter("ps_push_total", "Pushes of one bucket, by what became of them.", "job", "result")
        self._push_bytes = counter("ps_push_bytes_total", "Payload bytes of accepted pushes.", "job")
        self._refused = counter("ps_push_refused_total", "Pushes refused, by reason.", "job", "reason")
        self._pull = counter("ps_pull_total", "Buckets sent to workers.", "job")
        self._pull_bytes = counter("ps_pull_bytes_total", "Payload bytes sent to workers.", "job")
        self._apply = histogram("ps_apply_seconds", "One optimizer step of one bucket.", LATENCY_BUCKETS, "job")
        self._accumulate = histogram("ps_accumulate_seconds", "Adding one gradient.", LATENCY_BUCKETS, "job")
        self._staleness = histogram(
            "ps_apply_staleness_clocks",
            "How many clocks the weights a gradient was taken at lay behind the fastest worker when it was applied.",
            STALENESS_BUCKETS,
            "job",
        )
        self._wait = histogram(
            "ps_pull_wait_seconds", "How long a bucket was held back for other workers.", LATENCY_BUCKETS, "job", "mode"
        )
        self._waited_for = counter(
            "ps_waited_for_seconds_total", "Time that pulls of a bucket waited, by the rank waited for.", "job", "rank"
        )
        self._by_job = (self._push, self._push_bytes, self._refused, self._pull, self._pull_bytes)

    def pushed(self, job: str, size: int, staged: Staged) -> None:
        """A push was acknowledged."""
        result = "duplicate" if staged.duplicate else "skipped" if staged.skipped else "staged"
        self._push.labels(job, result).inc()
        self._push_bytes.labels(job).inc(size)

    def refused(self, job: str, error: PSError) -> None:
        """A push was refused."""
        self._push.labels(job, "refused").inc()
        self._refused.labels(job, error.reason).inc()

    def pulled(self, job: str, size: int) -> None:
        """A bucket was sent."""
        self._pull.labels(job).inc()
        self._pull_bytes.labels(job).inc(size)

    def applied(self, job: str, work: Add[Gradient] | Step, seconds: float) -> None:
        """A contribution was added, or the optimizer was stepped."""
        if isinstance(work, Add):
            self._accumulate.labels(job).observe(seconds)
        else:
            self._apply.labels(job).observe(seconds)
            self._staleness.labels(job).observe(work.staleness)

    def waited(self, job: str, mode: str, seconds: float, verdict: Verdict) -> None:
        """A pull that had to wait was admitted; `verdict` is the last that held it back."""
        self._wait.labels(job, mode).observe(seconds)
        for rank in verdict.waiting_for:
            self._waited_for.labels(job, str(rank)).inc(seconds)

    def forget(self, job: str) -> None:
        """Drops the series of an ended job, so that a cluster that runs many jobs does not grow."""
        for metric in (*self._by_job, self._apply, self._accumulate, self._staleness, self._wait, self._waited_for):
            metric.remove_by_labels({"job": job})


Sample = tuple[tuple[str, ...], float]


class Gauges(Collector):
    """Gauges that are read when somebody scrapes: (name, help, label names, function that lists the samples)."""

    def __init__(self, gauges: list[tuple[str, str, tuple[str, ...], Callable[[], Iterable[Sample]]]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        for name, text, labels, read in self._gauges:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, number in read():
                family.add_metric(values, number)
            yield family

    def describe(self) -> Iterable[Metric]:
        return []
