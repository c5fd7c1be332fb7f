"""A shard's metrics for Prometheus: its pushes, pulls and updates.

Counters and histograms are updated by the events that they count; gauges are read at each scrape (ops/gauges.py).
Labels are bounded: job, rank, mode, result, kind, method; never an address, a tensor's name or an error's text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from ps_protocol.errors import PSError
from ps_runtime.metrics import LATENCY_BUCKETS
from ps_server.core.commands import Staged
from ps_server.core.consistency import Add, Step
from ps_server.core.dense import Gradient
from ps_server.core.server_figures import ShardJobFigures

# ssp:K allows K + 1 and no more: K and K + 1 have buckets of their own for each K up to 8, and for 16, 32 and 64.
STALENESS_BUCKETS = (*range(10), 12, 16, 17, 32, 33, 64, 65)


def _samples(metric: Counter | Histogram) -> Iterable[Any]:
    return [sample for family in metric.collect() for sample in family.samples]


class Series:
    """The label sets of each metric that are in use, by job: a cache, and the list of series to remove when a job ends.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._of_jobs: dict[str, dict[tuple[Any, tuple[str, ...]], Any]] = {}
        self._changing = threading.Lock()  # held while a series is added or removed; a look-up needs no lock

    def of(self, metric: Any, job: str, *labels: str) -> Any:
        """Returns one series of a metric, new or known."""
        known = self._of_jobs.get(job, {}).get((metric, labels))
        if known is None:
            with self._changing:
                known = self._of_jobs.setdefault(job, {})[metric, labels] = metric.labels(job, *labels)
        return known

    def forget(self, job: str) -> None:
        """Drops the series of a job."""
        with self._changing:
            for metric, labels in self._of_jobs.pop(job, {}):
                metric.remove(job, *labels)


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
        self._late = counter(
            "ps_late_contributions_total",
            "Contributions to a bucket that came after an update without them, and counted in a later one.",
            "job",
            "rank",
        )
        self._spent = counter(
            "ps_data_spent_total", "Pushes left out because the bucket has had their samples from another.", "job"
        )
        self._lost = counter("ps_data_lost_samples_total", "Samples left out with those of such a push.", "job")
        self._series = Series()

    def pushed(self, job: str, size: int, staged: Staged) -> None:
        """Counts a push that was acknowledged."""
        result = (
            "kept" if staged.kept else "duplicate" if staged.duplicate else "skipped" if staged.skipped else "staged"
        )
        self._series.of(self._push, job, result).inc()
        self._series.of(self._push_bytes, job).inc(size)
        if staged.use.spent:
            self._series.of(self._spent, job).inc()
            self._series.of(self._lost, job).inc(staged.use.lost)

    def refused(self, job: str, error: PSError) -> None:
        """Counts a push that was refused."""
        self._series.of(self._push, job, "refused").inc()
        self._series.of(self._refused, job, error.reason).inc()

    def pulled(self, job: str, size: int) -> None:
        """Counts a bucket that was sent."""
        self._series.of(self._pull, job).inc()
        self._series.of(self._pull_bytes, job).inc(size)

    def applied(self, job: str, work: Add[Gradient] | Step, seconds: float) -> None:
        """Counts a contribution that was added, or a step of the optimizer."""
        if isinstance(work, Add):
            self._series.of(self._accumulate, job).observe(seconds)
        else:
            self._series.of(self._apply, job).observe(seconds)
            self._series.of(self._staleness, job).observe(work.staleness)
            for rank in work.late:
                self._series.of(self._late, job, str(rank)).inc()

    def waited(self, job: str, mode: str, seconds: float) -> None:
        """Counts the wait of a pull for other workers, once it is admitted."""
        self._series.of(self._wait, job, mode).observe(seconds)

    def waited_for(self, job: str, seconds: float, ranks: Iterable[int]) -> None:
        """Counts the time that a pull has waited for these ranks."""
        for rank in ranks:
            self._series.of(self._waited_for, job, str(rank)).inc(seconds)

    def figures(self) -> dict[str, ShardJobFigures]:
        """Returns the measurements of each job so far."""
        sums: dict[str, dict[str, float]] = {}
        for metric in (self._apply, self._push_bytes, self._pull_bytes):
            for sample in _samples(metric):
                sums.setdefault(sample.labels["job"], {})[sample.name] = sample.value
        staleness, awaited = self._staleness_counts(), self._awaited()
        return {
            job: ShardJobFigures(
                applies=int(of_job.get("ps_apply_seconds_count", 0)),
                apply_seconds=of_job.get("ps_apply_seconds_sum", 0.0),
                received=int(of_job.get("ps_push_bytes_total", 0)),
                sent=int(of_job.get("ps_pull_bytes_total", 0)),
                staleness=staleness.get(job, ()),
                awaited=awaited.get(job, {}),
            )
            for job, of_job in sums.items()
        }

    def _staleness_counts(self) -> dict[str, tuple[tuple[float, int], ...]]:
        """Returns, by job, a histogram of the staleness of gradients: Prometheus' cumulative counts, made into single
        ones.
        """
        up_to: dict[str, dict[float, int]] = {}
        for sample in _samples(self._staleness):
            if "le" in sample.labels:
                up_to.setdefault(sample.labels["job"], {})[float(sample.labels["le"])] = int(sample.value)
        counts: dict[str, tuple[tuple[float, int], ...]] = {}
        for job, of_job in up_to.items():
            below = [0, *(count for _, count in sorted(of_job.items()))]
            counts[job] = tuple((most, count - below[i]) for i, (most, count) in enumerate(sorted(of_job.items())))
        return counts

    def _awaited(self) -> dict[str, dict[int, float]]:
        awaited: dict[str, dict[int, float]] = {}
        for sample in _samples(self._waited_for):
            if sample.name.endswith("_total"):
                awaited.setdefault(sample.labels["job"], {})[int(sample.labels["rank"])] = sample.value
        return awaited

    def forget(self, job: str) -> None:
        """Drops the series of an ended job, so that a cluster that runs many jobs does not grow."""
        self._series.forget(job)
