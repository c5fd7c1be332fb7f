"""Makes the view from the statistics of coordinator and shards. It makes no calls, and uses no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.figures import PHASES, WorkerFigures
from ps_runtime.quantities import ranges, ranks_text
from ps_server.coordinator.runs import began_at
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.membership import LiveWorker
from ps_server.core.server_figures import ShardJobFigures
from ps_server.core.statistics import JobStatistics, ShardStatistics, Wait
from ps_server.view.diagnosis import JobSigns, diagnosis, state
from ps_server.view.history import Name
from ps_server.view.rates import Span, Window
from ps_server.view.view import JobView, ShardView, ShardWork, View, WorkerView

SILENT_SECONDS = 2.5  # age of an unanswered query from which a shard counts as silent
# A worker counts as silent if less than this fraction of its lease is left: it sends a heartbeat every quarter.
SILENT_LEASE = 0.5
MEMBERS_NAMED = 2  # members of a group whose hosts and process ids are named: more would not fit the page
RANKS_SAMPLED = 32  # workers of a job that have samples of their own: those of the lowest ranks


@dataclass(frozen=True)
class Answer:
    """The last answer of one process of a shard.

    asked: when the first unanswered query was sent; None if all are answered
    """

    process: int
    statistics: ShardStatistics | None = None
    asked: float | None = None


@dataclass(frozen=True)
class Sources:
    """The input of a view. now: the time on the clock of the answers; time: in seconds since 1970"""

    now: float
    time: float
    lease: float
    shard_count: int
    jobs: Mapping[str, JobStatistics]
    shards: Mapping[int, RegisteredShard]
    answers: Mapping[int, Answer]


class ViewMaker:
    """Makes one view after the other, and keeps the reports for rates between them. Not thread-safe."""

    def __init__(self) -> None:
        # Reports of workers, by the job's run, rank and incarnation; of shards, by shard, process and the job's run.
        self._workers: dict[tuple[str, int, int], Window[WorkerFigures]] = {}
        self._shards: dict[tuple[int, int, str], Window[ShardJobFigures]] = {}

    def make(self, sources: Sources) -> View:
        """Returns the view of a moment."""
        self._report(sources)
        shards = tuple(self._shard(sources, index) for index in sorted(sources.shards))
        jobs = {name: self._job(sources, shards, job) for name, job in sorted(sources.jobs.items())}
        return View(sources.time, sources.lease, jobs, shards)

    # -- rates -------------------------------------------------------------------------------------------------------

    def _report(self, sources: Sources) -> None:
        """Adds the reports of workers and shards; forgets those that have left."""
        workers = {
            (job.run, *worker): figures for job in sources.jobs.values() for worker, figures in job.figures.items()
        }
        self._workers = {key: self._workers.get(key, Window()) for key in workers}
        for key, figures in workers.items():
            self._workers[key].report(figures.measured, figures)
        shards = {}
        for index, answer in sources.answers.items():
            held = answer.statistics
            if held is not None and held.figures is not None:
                for job in held.jobs.values():
                    if job.figures is not None:
                        shards[index, answer.process, job.run] = held.figures.measured, job.figures
        self._shards = {key: self._shards.get(key, Window()) for key in shards}
        for of_shard, report in shards.items():
            self._shards[of_shard].report(*report)

    def _span(self, job: JobStatistics, worker: LiveWorker) -> Span[WorkerFigures] | None:
        window = self._workers.get((job.run, worker.rank, worker.incarnation))
        return window.span() if window is not None else None

    def _spans(self, sources: Sources, job: JobStatistics) -> Iterable[Span[ShardJobFigures]]:
        """Yields each shard's work for a job, as spans of its figures."""
        for index, answer in sources.answers.items():
            window = self._shards.get((index, answer.process, job.run))
            span = window.span() if window is not None else None
            if span is not None:
                yield span

    # -- parts -------------------------------------------------------------------------------------------------------

    def _shard(self, sources: Sources, index: int) -> ShardView:
        shard, answer = sources.shards[index], sources.answers.get(index)
        if answer is None or answer.process != shard.process:
            return ShardView(shard, None, 0.0, {})
        held, quiet = answer.statistics, 0.0 if answer.asked is None else sources.now - answer.asked
        work: dict[str, ShardWork] = {}
        for name, job in held.jobs.items() if held is not None else ():
            window = self._shards.get((index, answer.process, job.run))
            span = window.span() if window is not None else None
            if span is not None:
                work[name] = _work(span)
        return ShardView(shard, held, quiet if quiet >= SILENT_SECONDS else 0.0, work)

    def _job(self, sources: Sources, shards: Sequence[ShardView], job: JobStatistics) -> JobView:
        hosted = [
            shard.statistics.jobs[job.name]
            for shard in shards
            if shard.statistics is not None and not shard.silent and job.name in shard.statistics.jobs
        ]
        current = replace(
            job, workers=tuple(_with_clock(worker, [each.clocks for each in hosted]) for worker in job.workers)
        )
        spans = {worker.rank: self._span(job, worker) for worker in job.workers}
        awaited = _sum_awaited(self._spans(sources, job))
        waits = [wait for each in hosted for wait in each.waits]
        silent = {shard.shard.index: shard.silent for shard in shards if shard.silent}
        workers = tuple(
            _worker(worker, job, sources.lease, spans[worker.rank], waits, awaited, silent) for worker in job.workers
        )
        signs = JobSigns(
            live=[worker.rank for worker in job.workers],
            world_size=job.world_size,
            started=job.started,
            rolling_back=job.rolling_back,
            rejoining=job.rejoining,
            absent=job.absent,
            silent=silent,
            missing=[index for index in range(sources.shard_count) if index not in sources.shards],
            phases=_sum_phases(span for span in spans.values() if span is not None),
            awaited=awaited,
        )
        total = sum(worker.steps_per_second or 0.0 for worker in workers)
        age = max(0.0, sources.time - began_at(job.run)) if job.run else None
        return JobView(current, state(signs), diagnosis(signs), workers, total, age, *_progress(current, workers))


def _progress(job: JobStatistics, views: Sequence[WorkerView]) -> tuple[float | None, float | None]:
    """Returns the done fraction of all steps, and the seconds until the last worker is done; None for what is unknown.

    Only workers whose scripts announce their number of steps count."""
    done, left = [], []
    for worker, view in zip(job.workers, views, strict=True):
        figures = job.figures.get((worker.rank, worker.incarnation))
        if figures is None or not figures.total:
            continue
        steps = max(0, figures.total - figures.done)
        done.append(1 - steps / figures.total)
        rate = view.steps_per_second
        left.append(0.0 if not steps else steps / rate if rate else None)
    known = [seconds for seconds in left if seconds is not None]
    return (sum(done) / len(done) if done else None), (max(known) if known and len(known) == len(left) else None)


def _work(span: Span[ShardJobFigures]) -> ShardWork:
    first, last, seconds = span.first, span.last, span.seconds
    applies = last.applies - first.applies
    return ShardWork(
        applies=applies / seconds,
        apply_seconds=(last.apply_seconds - first.apply_seconds) / applies if applies > 0 else None,
        received=(last.received - first.received) / seconds,
        sent=(last.sent - first.sent) / seconds,
    )


def _with_clock(worker: LiveWorker, clocks: Sequence[Mapping[int, int]]) -> LiveWorker:
    """Returns a worker with the lowest clock of it on any shard; if no shard knows one, with its last heartbeat's.

    Heartbeats come at different moments: between two of them, workers would seem further apart than their mode allows.
    """
    # A shard with frozen buckets only stays at clock 0 for all workers.
    known = [of_shard[worker.rank] for of_shard in clocks if worker.rank in of_shard and any(of_shard.values())]
    return replace(worker, clock=min(known, default=worker.clock))


def _worker(
    worker: LiveWorker,
    job: JobStatistics,
    lease: float,
    span: Span[WorkerFigures] | None,
    waits: Iterable[Wait],
    awaited: Mapping[int, float],
    silent: Iterable[int],
) -> WorkerView:
    own = [wait for wait in waits if wait.rank == worker.rank]
    ranks = tuple(sorted({rank for wait in own for rank in wait.waiting_for}))
    phases = _sum_phases([span] if span is not None else [])
    total, total_awaited = sum(phases.values()), sum(awaited.values())
    return WorkerView(
        rank=worker.rank,
        activity=_activity(worker, job, lease, own, ranks, silent),
        awaited=ranks,
        steps_per_second=(span.last.steps - span.first.steps) / span.seconds if span is not None else None,
        fractions={phase: seconds / total for phase, seconds in phases.items()} if total > 0 else {},
        awaited_fraction=awaited.get(worker.rank, 0.0) / total_awaited if total_awaited > 0 else 0.0,
    )


def _activity(
    worker: LiveWorker,
    job: JobStatistics,
    lease: float,
    waits: Sequence[Wait],
    ranks: Sequence[int],
    silent: Iterable[int],
) -> str:
    left = worker.expires - job.now
    if left < SILENT_LEASE * lease:
        text = f"silent, lease ends in {max(0.0, left):.0f} s"
        members = _silent_members(worker, job, lease)
        return f"{text}: no sign of {_named(worker, members)}" if members else text
    if waits:
        seconds = max(wait.seconds for wait in waits)
        return f"waits {seconds:.1f} s for {ranks_text(ranks) if ranks else 'its shard'}"
    for index in silent:
        return f"needs shard {index}, which does not answer"
    return "training"


def _silent_members(worker: LiveWorker, job: JobStatistics, lease: float) -> list[int]:
    """Returns the members of a group whose silence uses up its lease; none of a worker of one process."""
    latest = job.now - (1 - SILENT_LEASE) * lease
    members = range(job.group_size) if job.group_size > 1 else ()
    return [member for member in members if worker.signs.get(member, -math.inf) < latest]


def _named(worker: LiveWorker, members: list[int]) -> str:
    """Returns the names of members of a group. A few are named with their hosts and process ids, as far as known."""
    known = {0: (worker.host, worker.pid), **worker.processes}
    told = [member for member in members if member in known and all(known[member])]
    if not told or len(members) > MEMBERS_NAMED:
        return f"member{'s' * (len(members) > 1)} {ranges(members)}"
    where = {member: f" ({known[member][0]}, pid {known[member][1]})" for member in told}
    return ", ".join(f"member {member}{where.get(member, '')}" for member in members)


def _sum_phases(spans: Iterable[Span[WorkerFigures]]) -> dict[str, float]:
    total = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        for phase in PHASES:
            total[phase] += max(0.0, span.last.phases.get(phase, 0.0) - span.first.phases.get(phase, 0.0))
    return total


def _sum_awaited(spans: Iterable[Span[ShardJobFigures]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for span in spans:
        for rank, seconds in span.last.awaited.items():
            total[rank] = total.get(rank, 0.0) + seconds - span.first.awaited.get(rank, 0.0)
    return {rank: seconds for rank, seconds in total.items() if seconds > 0}


# -- samples -----------------------------------------------------------------------------------------------------------


def samples(view: View) -> dict[str, dict[Name, float]]:
    """Returns one sample for the history: by job, its rates, share of waiting and logged values, by name."""
    return {
        name: dict(_sample(job, [shard.work.get(name) for shard in view.shards])) for name, job in view.jobs.items()
    }


def _sample(job: JobView, work: Iterable[ShardWork | None]) -> Iterable[tuple[Name, float]]:
    yield ("steps_per_second", None), job.steps_per_second
    known = [each for each in work if each is not None]
    yield ("received_bytes_per_second", None), sum(each.received for each in known)
    yield ("sent_bytes_per_second", None), sum(each.sent for each in known)
    waits = [worker.fractions["wait"] for worker in job.workers if worker.fractions]
    if waits:
        yield ("wait_fraction", None), sum(waits) / len(waits)
    logged = logged_by_name(job.statistics.figures.values())
    for name, means in logged.items():
        yield (f"value.{name}", None), _mean(means)
    for worker in job.workers[:RANKS_SAMPLED]:
        if worker.steps_per_second is not None:
            yield ("steps_per_second", worker.rank), worker.steps_per_second
    for name, means in logged.items():
        if len(means) > 1:
            yield (f"least.{name}", None), min(means)
            yield (f"most.{name}", None), max(means)


def logged_means(reported: Iterable[WorkerFigures]) -> dict[str, float]:
    """Returns, by name, the mean over the workers of a logged value; NaN if no worker's last value is finite."""
    return {name: _mean(means) for name, means in logged_by_name(reported).items()}


def logged_by_name(reported: Iterable[WorkerFigures]) -> dict[str, list[float]]:
    """Returns, by name, the means that workers log, without workers whose last value is not finite."""
    logged: dict[str, list[float]] = {}
    for figures in reported:
        for value in figures.values:
            means = logged.setdefault(value.name, [])
            if math.isfinite(value.last) and math.isfinite(value.mean):
                means.append(value.mean)
    return logged


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
