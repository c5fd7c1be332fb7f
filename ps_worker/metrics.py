"""A worker's metrics for Prometheus: above all, where a step's time goes.

A step is split into data (waiting for the loader), forward (until the first gradient is there, the loss included),
backward (until `optimizer.step()`), push (until the last gradient is staged), wait (held back for other workers) and
pull (the rest, until the last weight is here). In ddp, communication is part of backward, where it happens.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch.nn.parameter import is_lazy
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import MAX_TOTAL, MAX_VALUES, PHASES, LoggedValue, WorkerFigures, is_value_name
from ps_runtime.credentials import Tls
from ps_runtime.metrics import LATENCY_BUCKETS, Gauges, Sample, process_registry, serve_metrics
from ps_worker.values import PullResult, PushResult

ROUND_BUCKETS = tuple(0.004 * 4**k for k in range(14))  # seconds: up to more than a day
MEAN_WEIGHT = 0.05  # of the newest value in an exponential mean: it remembers about twenty

COUNTERS = {
    "ps_worker_steps_total": "Steps finished.",
    "ps_worker_push_bytes_total": "Bytes pushed.",
    "ps_worker_pull_bytes_total": "Bytes pulled.",
    "ps_worker_non_finite_total": "Steps whose gradient held an infinity or a NaN.",
    "ps_worker_empty_steps_total": "Steps without a gradient, made because others wait for this worker's clock while "
    "it has no data.",
    "ps_worker_rejoins_total": "Times that the worker lost its place and took another.",
    "ps_worker_lost_steps_total": "Steps whose gradient, or a part of it, was lost with the place.",
    "ps_worker_fresh_inner_state_total": "Times that this worker's own optimizers began without a state in a job of "
    "local:H that was under way.",
}


class StepTimer:
    """Splits a step's time by events. Between two of them, time belongs to one phase.

    asked     a loader is asked for a batch: data begins
    yielded   the batch is there: forward begins
    gradient  backward has finished a gradient: with the first one, backward begins
    stepping  `optimizer.step()` begins
    stepped   it is over: forward begins, for a script that asks no loader

    It keeps nothing in the user's modules, which would copy, save and compile it. Forward counts only if a gradient or
    a step follows: a script's time between a step and its next batch is in no phase, nor is an evaluation.

    now:           returns seconds on the timer's clock
    phase:         to which time belongs now
    has_gradients: backward has ever finished one
    has_asked:     the script has ever asked a loader for a batch
    """

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.has_gradients = self.has_asked = False
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = "forward"
        self._mark = self.began = time.perf_counter()
        self._asking = False  # a loader made the step while the script waited for its data
        self._trained = False  # a gradient was made since the last step

    def switch(self, phase: str) -> None:
        """Adds the time since the last switch to the phase that ends; begins another."""
        moment = time.perf_counter()
        self.seconds[self.phase] += moment - self._mark
        self.phase, self._mark = phase, moment

    def begin(self, phase: str) -> None:
        """Begins a phase. The time since the last switch belongs to none."""
        self.phase, self._mark = phase, time.perf_counter()

    def asked(self) -> None:
        """Records that the script asks a loader for a batch."""
        self.has_asked = True
        (self.begin if self.phase == "forward" else self.switch)("data")

    def yielded(self) -> None:
        """Records that the script gets the batch."""
        self.switch("forward")

    def ended(self) -> None:
        """Ends the loop over a loader. If it trained nothing (an evaluation), its data is in no phase."""
        self.switch("forward")
        if not self._trained:
            self.seconds["data"] = 0.0

    def gradient(self, _parameter: object = None) -> None:
        """Records that backward has finished a gradient. Also used as a hook of a parameter."""
        if self.phase != "backward":
            self.switch("backward")
            self._trained = self.has_gradients = True

    def since_mark(self, moment: float) -> float:
        """Returns the seconds from the last switch to a moment."""
        return moment - self._mark

    def stepping(self) -> None:
        """Records that `optimizer.step()` begins: backward is over."""
        self._asking = self.phase == "data"
        self.switch("forward")  # a closure's

    def stepped(self) -> dict[str, float]:
        """Ends the step and begins the next one; returns its seconds by phase."""
        if self.phase == "backward":
            self.switch("forward")
        asking = self._asking or self.phase == "data"
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        self._asking = self._trained = False
        self.begin("data" if asking else "forward")
        return seconds


class LoggedValues:
    """The values that a script logs: for each name, the last value and the exponential mean of the finite ones. Also
    gauges.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "What the script logs with session.log: the last value."
        self._last = Gauge("ps_worker_value", text, ("name",), registry=registry)
        text = "The exponential mean of the finite ones of these values."
        self._mean = Gauge("ps_worker_value_mean", text, ("name",), registry=registry)
        self._values: dict[str, LoggedValue] = {}
        self._counts: dict[str, int] = {}  # by name, the number of finite values

    def log(self, given: Mapping[str, Any]) -> tuple[LoggedValue, ...]:
        """Adds values by name; returns all present ones. Raises InvalidRequest, and adds none, if one is invalid."""
        numbers_given = {_checked_name(name): _number(name, value) for name, value in given.items()}
        names = list(dict.fromkeys([*self._values, *numbers_given]))
        if len(names) > MAX_VALUES:
            raise InvalidRequest(f"session.log takes at most {MAX_VALUES} names in all, got {', '.join(names)}")
        for name, value in numbers_given.items():
            before = self._values.get(name)
            mean = before.mean if before is not None else math.nan
            if math.isfinite(value):
                count = self._counts[name] = self._counts.get(name, 0) + 1
                weight = max(MEAN_WEIGHT, 1 / count)  # at first the plain mean of all values, then an exponential one
                mean = value if count == 1 else (1 - weight) * mean + weight * value
            self._values[name] = LoggedValue(name, value, mean)
            self._last.labels(name).set(value)
            self._mean.labels(name).set(mean)
        return tuple(self._values.values())


def _checked_name(name: str) -> str:
    if not is_value_name(name):
        raise InvalidRequest(
            "a name for session.log is a letter of a to z, then letters of a to z, digits and '_', 40 characters at "
            f"most, got {name[:80]!r}"
        )
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    if isinstance(value, numbers.Real):
        with suppress(OverflowError):  # an integer that is too large for it
            return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise InvalidRequest(f"session.log takes numbers, and tensors of one element, got {name} as {what}")


def _no_lookups() -> tuple[int, int]:
    return 0, 0


def _no_residual() -> None:
    return None


@dataclass(frozen=True)
class ModelNumbers:
    """Numbers that the trained model keeps itself. They are read at each scrape or heartbeat, in any thread.

    looked_up:      returns the counts of ids looked up in tables so far, and of the distinct ones in each lookup
    residual_ratio: returns the relative residual; see Residuals.ratio
    """

    looked_up: Callable[[], tuple[int, int]] = field(default_factory=lambda: _no_lookups)
    residual_ratio: Callable[[], float | None] = field(default_factory=lambda: _no_residual)


def _model_gauges(now: Callable[[], ModelNumbers]) -> Gauges[ModelNumbers]:
    """Returns the gauges of the model's numbers."""

    def ratio(model: ModelNumbers) -> Iterable[Sample]:
        found = model.residual_ratio()
        return [] if found is None else [((), found)]

    text = "Ids looked up in tables."
    distinct = "Ids looked up in tables, those of each lookup once."
    left_out = "Norm of what the wire format has left out, over the norm of what was pushed."
    return Gauges(
        now,
        [
            ("ps_worker_lookups_total", text, (), lambda model: [((), model.looked_up()[0])]),
            ("ps_worker_distinct_lookups_total", distinct, (), lambda model: [((), model.looked_up()[1])]),
            ("ps_residual_ratio", left_out, (), ratio),
        ],
    )


def added(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of counts of bytes, by wire format."""
    total: dict[str, int] = {}
    for each in sizes:
        _add(total, each)
    return total


def _add(total: dict[str, int], sizes: Mapping[str, int]) -> None:
    for wire, size in sizes.items():
        total[wire] = total.get(wire, 0) + size


class RoundTimer:
    """Splits the time of a round of local steps: in `exchange` the worker waits for its pushes and pulls; all other
    time is `steps`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Time of one round of local steps by phase."
        self._seconds = Histogram("ps_worker_round_seconds", text, ("phase",), buckets=ROUND_BUCKETS, registry=registry)
        self._began = time.perf_counter()
        self._exchanged = 0.0
        self._exchanging_since: float | None = None

    def begin(self) -> None:
        """Begins a round. One that was under way is forgotten."""
        self._begin(time.perf_counter())

    def _begin(self, moment: float) -> None:
        self._began, self._exchanged = moment, 0.0
        if self._exchanging_since is not None:
            self._exchanging_since = moment

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A `with` block that counts as the round's exchange, or a part of it. The round may end inside. Do not nest
        it.
        """
        self._exchanging_since = time.perf_counter()
        try:
            yield
        finally:
            self._exchanged += time.perf_counter() - self._exchanging_since
            self._exchanging_since = None

    def ended(self) -> None:
        """Counts the round that ends, and begins the next one."""
        moment = time.perf_counter()
        exchanged = self._exchanged + (0.0 if self._exchanging_since is None else moment - self._exchanging_since)
        self._seconds.labels("exchange").observe(exchanged)
        self._seconds.labels("steps").observe(moment - self._began - exchanged)
        self._begin(moment)


class WorkerMetrics:
    """Counters and histograms of one worker, and the port they are served on.

    timer:     times the phases of a step
    rounds:    times the rounds of local steps
    address:   HOST:PORT at which /metrics is served; empty before `serve`
    announced: the same, if scrapers elsewhere can reach it; otherwise empty
    """

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.address = ""
        self.announced = ""
        self.registry = process_registry()
        self._stop: Callable[[], None] = lambda: None
        self._hooks: list[RemovableHandle] = []
        self._phase = Histogram(
            "ps_worker_step_seconds",
            "Time of one step by phase.",
            ("phase",),
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.rounds = RoundTimer(self.registry)
        self._counters = {name: Counter(name, text, registry=self.registry) for name, text in COUNTERS.items()}
        text = "Payload bytes of buckets and rows, by what their elements travel as."
        self._wire = Counter("ps_wire_bytes_total", text, ("direction", "format"), registry=self.registry)
        self._logged = LoggedValues(self.registry)
        self._model = ModelNumbers()
        self.registry.register(_model_gauges(lambda: self._model))
        self._figures = WorkerFigures(phases=dict.fromkeys(PHASES, 0.0))  # replaced as a whole: another thread reads it
        self._ahead: dict[str, int] = {}  # bytes of rows that came with the last step
        self._clock = Gauge("ps_worker_clock", "Steps finished since the job began.", registry=self.registry)
        text = "Steps that this worker makes in all, as its script says; 0: it does not say."
        self._total = Gauge("ps_worker_total_steps", text, registry=self.registry)

    def serve(self, host: str, port: int, tls: Tls | None = None, known: bool = True) -> None:
        """Serves /metrics; `address` says where. Raises InvalidRequest if the port cannot be bound.

        known: whether scrapers elsewhere can reach it
        """
        bound, self._stop = serve_metrics(host, port, self.registry, tls=tls)
        self.address = f"{host}:{bound}"
        self.announced = self.address if known else ""

    def close(self) -> None:
        """Stops serving, and removes the hooks of optimizers and parameters."""
        self._stop()
        self._stop = lambda: None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, stepped: Callable[[], int]) -> None:
        """Times the steps of an optimizer that runs in this process (single, ddp).

        The hooks are on these objects alone: a copy, or a pickled one, is not timed.

        stepped: counts a step that has ended, and returns how many there were
        """

        def begins(*_: Any) -> None:
            self.timer.stepping()

        def ends(*_: Any) -> None:
            self._observe(stepped())

        self._hooks += [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)]
        self.watch_gradients(optimizer)

    def watch_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Times backward, by hooks on the parameters of an optimizer."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self.timer.gradient))

    def watch_model(self, model: ModelNumbers) -> None:
        """Sets the trained model's numbers, which the gauges read."""
        self._model = model

    def fetched(self, received: Mapping[str, int]) -> None:
        """Counts the bytes of rows that were fetched from the servers, by wire format."""
        pulled, before = self._count("pull", received), self._figures
        self._figures = replace(before, received=before.received + pulled)

    def fetched_ahead(self, received: Mapping[str, int]) -> None:
        """As `fetched`, for rows that came with the last step: they are counted with the next one."""
        _add(self._ahead, received)

    def stepped(self, pushes: Sequence[PushResult], pulls: Sequence[PullResult], began: float, clock: int) -> None:
        """Counts a step on the servers.

        began: when the worker began to wait for it, on the timer's clock
        clock: the clock of the step
        """
        pushed, waited = began, 0.0
        sent: dict[str, int] = {}
        received, self._ahead = self._ahead, {}
        for push in pushes:
            pushed = max(pushed, push.staged)
            _add(sent, push.sizes)
        for pull in pulls:
            waited = max(waited, pull.waited)
            _add(received, pull.sizes)
        rest = max(0.0, self.timer.now() - pushed)
        seconds = self.timer.seconds
        seconds["wait"] = min(waited, rest)
        seconds["pull"] = rest - seconds["wait"]
        seconds["push"] = self.timer.since_mark(pushed)
        self._observe(clock, self._count("push", sent), self._count("pull", received))

    def _count(self, direction: str, sizes: Mapping[str, int]) -> int:
        """Counts bytes that were pushed or pulled, by wire format. Returns how many they are."""
        total = sum(sizes.values())
        if total:
            self._counters[f"ps_worker_{direction}_bytes_total"].inc(total)
        for wire, size in sizes.items():
            if size:
                self._wire.labels(direction, wire).inc(size)
        return total

    def figures(self) -> WorkerFigures:
        """Returns the measurements so far. May be called from any thread."""
        looked_up, distinct = self._model.looked_up()
        measured = self.timer.now() - self.timer.began
        ratio = self._model.residual_ratio()
        return replace(self._figures, measured=measured, looked_up=looked_up, distinct=distinct, residual_ratio=ratio)

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds values that the script logs. Raises InvalidRequest, and adds none, if one is invalid."""
        self._figures = replace(self._figures, values=self._logged.log(values))

    def progress(self, total: Any) -> None:
        """Records how many steps the worker makes in all. Raises InvalidRequest for an invalid number."""
        steps = int(total) if isinstance(total, numbers.Integral) and not isinstance(total, bool) else 0
        if not 0 < steps <= MAX_TOTAL:
            raise InvalidRequest(f"session.progress takes a total of 1 to 2^53 steps, got {total!r}")
        self._figures = replace(self._figures, total=steps)
        self._total.set(steps)

    def not_finite(self) -> None:
        """Counts a step whose gradient holds an infinity or a NaN."""
        self._counters["ps_worker_non_finite_total"].inc()

    def empty_step(self) -> None:
        """Begins a step without a gradient, for which there is no data."""
        self.timer.stepping()
        self._counters["ps_worker_empty_steps_total"].inc()

    def rejoined(self, lost: bool, clock: int) -> None:
        """Counts a rejoin, at a clock; `lost`: the gradient of a step is in no weights."""
        self.timer.stepped()
        self._counters["ps_worker_rejoins_total"].inc()
        self._counters["ps_worker_lost_steps_total"].inc(lost)
        self.at(clock)

    def lost_step(self) -> None:
        """Counts a step whose gradient, or a part of it, is lost without another rejoin."""
        self._counters["ps_worker_lost_steps_total"].inc()

    def fresh_inner_state(self) -> None:
        """Counts that the script's own optimizers begin without a state in a job that is under way."""
        self._counters["ps_worker_fresh_inner_state_total"].inc()

    def stepped_alone(self, clock: int) -> None:
        """Counts a step that was made on this worker alone."""
        self._observe(clock)

    def at(self, clock: int) -> None:
        """Sets how many steps are finished."""
        self._figures = replace(self._figures, done=clock)
        self._clock.set(clock)

    def _observe(self, clock: int, sent: int = 0, received: int = 0) -> None:
        step, before = self.timer.stepped(), self._figures
        for phase, seconds in step.items():
            self._phase.labels(phase).observe(seconds)
        phases = {phase: before.phases[phase] + seconds for phase, seconds in step.items()}
        sent, received = before.sent + sent, before.received + received
        steps = before.steps + 1
        self._figures = replace(before, steps=steps, phases=phases, sent=sent, received=received, done=clock)
        self._counters["ps_worker_steps_total"].inc()
        self._clock.set(clock)


# -- names for torch's profiler ----------------------------------------------------------------------------------------
# So that a user's own trace shows where a step communicates.


PUSH = "ps_worker.push"  # buckets are handed over to the threads that send them
WAIT = "ps_worker.wait"  # until all are staged, and all weights have landed
PULL = "ps_worker.pull"  # pulled weights are copied into the model


def named(name: str) -> AbstractContextManager[object]:
    """Returns a context that the profiler shows; one that does nothing while none runs.

    `record_function` alone takes some 10 microseconds each time, profiler or not.
    """
    running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if running else nullcontext()
