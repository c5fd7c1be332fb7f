"""Series of a job come from many threads, and go with the job."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_server.shard.metrics import ShardMetrics

LONG_ENOUGH = 0.3  # for another thread, unless it has to wait for this one


def test_a_series_that_comes_while_the_job_ends_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, labels = CollectorRegistry(), Counter.labels
    metrics = ShardMetrics(registry)
    ends = threading.Thread(target=metrics.forget, args=("job",))

    def labels_while_the_job_ends(metric: Counter, *values: Any) -> Any:
        if not ends.ident:
            ends.start()
            ends.join(LONG_ENOUGH)
        return labels(metric, *values)

    monkeypatch.setattr(Counter, "labels", labels_while_the_job_ends)
    metrics.waited_for("job", 1.0, range(2))
    ends.join()
    metrics.forget("job")
    assert [sample for family in registry.collect() for sample in family.samples if sample.labels.get("job")] == []
