"""What a worker tells Prometheus: where its step's time goes, above all.

A step is split into data (waiting for the loader), forward, backward (from the end of forward to `optimizer.step()`,
the loss included), push (until the last gradient is staged), wait (held back for other workers) and pull (the rest,
until the last weight is here). In ddp, communication is part of backward, where it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import nn

from ps_protocol.credentials import Tls
from ps_protocol.scrape import serve_metrics

LATENCY_BUCKETS = tuple(0.0005 * 2**k for k in range(17))
PHASES = ("data", "forward", "backward", "push", "pull", "wait")


class StepTimer:
    """Splits a step's time by the moments at which the session sees it: loader, forward, step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = time.perf_counter()
        self._forward: float | None = None

    def now(self) -> float:
        """Seconds on the timer's clock."""
        return time.perf_counter()

    def measure(self, phase: str, since: float) -> None:
        """Adds the time since a moment to a phase, and makes now the last mark."""
        self._mark = time.perf_counter()
        self.seconds[phase] += self._mark - since

    def since_mark(self, moment: float) -> float:
        """Seconds from the last mark to a moment."""
        return moment - self._mark

    def watch(self, model: nn.Module) -> None:
        """Times the model's forward while it trains."""

        def before(*_: Any) -> None:
            self._forward = time.perf_counter()

        def after(*_: Any) -> None:
            if self._forward is not None:
                self.measure("forward", self._forward)
                self._forward = None

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def stepping(self) -> None:
        """`optimizer.step()` begins: backward is over."""
        self.measure("backward", self._mark)

    def stepped(self) -> dict[str, float]:
        """The step is over: its time by phase; the next one begins."""
        found, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        self._mark = time.perf_counter()
        return found


class WorkerMetrics:
    """Counters and histograms of one worker, and the port they are served on."""

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.address = ""
        self.announced = ""
        self.registry = CollectorRegistry()
        self._stop: Callable[[], None] = lambda: None
        self._phase = Histogram(
            "ps_worker_step_seconds",
            "Time of one step by phase.",
            ("phase",),
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._steps = Counter("ps_worker_steps_total", "Steps finished.", registry=self.registry)
        self._push_bytes = Counter("ps_worker_push_bytes_total", "Bytes pushed.", registry=self.registry)
        self._pull_bytes = Counter("ps_worker_pull_bytes_total", "Bytes pulled.", registry=self.registry)
        self._not_finite = Counter(
            "ps_worker_non_finite_total", "Steps whose gradient held an infinity or a NaN.", registry=self.registry
        )
        self._empty_steps = Counter(
            "ps_worker_empty_steps_total",
            "Steps without a gradient, made because others wait for this worker's clock while it has no data.",
            registry=self.registry,
        )
        self._rejoins = Counter(
            "ps_worker_rejoins_total",
            "Times that the worker lost its place and took another.",
            registry=self.registry,
        )
        self._lost_steps = Counter(
            "ps_worker_lost_steps_total", "Steps whose gradient was lost with the place.", registry=self.registry
        )
        self._clock = Gauge("ps_worker_clock", "Steps finished since the job began.", registry=self.registry)

    def serve(self, host: str, port: int, tls: Tls | None = None, known: bool = True) -> None:
        """Serves /metrics; `address` says where. Raises InvalidRequest if the port cannot be bound.

        known: whether scrapers elsewhere can reach it; `announced` stays empty if not.
        """
        bound, self._stop = serve_metrics(host, port, self.registry, tls=tls)
        self.address = f"{host}:{bound}"
        self.announced = self.address if known else ""

    def close(self) -> None:
        """Stops serving."""
        self._stop()
        self._stop = lambda: None

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, stepped: Callable[[], int]) -> None:
        """Times the steps of an optimizer that runs here (single, ddp); `stepped` counts them."""
        optimizer.register_step_pre_hook(lambda *_: self.timer.stepping())
        optimizer.register_step_post_hook(lambda *_: self._observe(stepped()))

    def stepped(self, sent: int, received: int, pushed: float, waited: float, clock: int) -> None:
        """A step on the servers is over: its bytes, when the last push was staged, and seconds held back at most."""
        rest = max(0.0, self.timer.now() - pushed)
        seconds = self.timer.seconds
        seconds["wait"] = min(waited, rest)
        seconds["pull"] = rest - seconds["wait"]
        seconds["push"] = self.timer.since_mark(pushed)
        self._push_bytes.inc(sent)
        self._pull_bytes.inc(received)
        self._observe(clock)

    def not_finite(self) -> None:
        """A step's gradient held an infinity or a NaN."""
        self._not_finite.inc()

    def empty_step(self) -> None:
        """A step has no gradient, because there was no data for it."""
        self._empty_steps.inc()

    def rejoined(self, lost: bool, clock: int) -> None:
        """The worker took its place again, at a clock; `lost`: the gradient of a step is in no weights."""
        self.timer.stepped()
        self._rejoins.inc()
        self._lost_steps.inc(lost)
        self._clock.set(clock)

    def _observe(self, clock: int) -> None:
        for phase, seconds in self.timer.stepped().items():
            self._phase.labels(phase).observe(seconds)
        self._steps.inc()
        self._clock.set(clock)
