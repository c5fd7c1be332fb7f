"""The last few jobs that have ended, each with its last state and its curves, as long as the servers live."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ps_protocol.figures import WorkerFigures
from ps_server.core.statistics import CheckpointStatistics
from ps_server.view.history import Samples
from ps_server.view.view import JobView, View

KEPT = 4  # jobs; each has at most as many samples as the history: 220 kB


@dataclass(frozen=True)
class End:
    """How and when a job has ended, and its last figures.

    checkpoints: None: none were made
    figures:     the last figures of the workers whose scripts ended, by rank
    """

    checkpoints: CheckpointStatistics | None = None
    figures: Mapping[int, WorkerFigures] = field(default_factory=dict)


@dataclass(frozen=True)
class EndedJobView:
    """A job that has ended.

    job:     its last view with workers
    ended:   when it had ended, in seconds since 1970
    gone:    the number of the first sample without it
    samples: its samples, from its beginning to its end
    end:     its coordinator's record of the end
    """

    job: JobView
    ended: float
    gone: int
    samples: Samples
    end: End

    @property
    def steps(self) -> tuple[int, ...]:
        """The finished steps of its workers: of those whose scripts ended; if none did, of the last live ones."""
        if self.end.figures:
            return tuple(figures.done for figures in self.end.figures.values())
        return tuple(worker.clock for worker in self.job.statistics.workers)

    @property
    def began(self) -> float | None:
        """When its run began, in seconds since 1970; None: not known."""
        return None if self.job.age is None else self.ended - self.job.age


class FinishedJobs:
    """Detects jobs that have ended, and keeps the last few. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[EndedJobView] = []
        self._running: dict[str, tuple[JobView, float]] = {}  # by run: the job's last view with workers, and its time

    @property
    def kept(self) -> tuple[EndedJobView, ...]:
        """The jobs that are kept, the one that ended last first."""
        return tuple(self._kept)

    def look(
        self,
        view: View,
        next_sample: int,
        samples: Callable[[str], Samples],
        end: Callable[[str], End],
    ) -> None:
        """Compares a view with the one before, and keeps the jobs that have ended. An ended job is forgotten when
        another job gets its name.

        next_sample: the number of this view's sample
        samples:     returns the samples of a job; end: returns the record of a run's end
        """
        running = {job.statistics.run: job for job in view.jobs.values()}
        for run, (job, seen) in self._running.items():
            if run not in running:
                age = None if job.age is None else job.age + view.time - seen
                own = _since(samples(job.statistics.name), None if age is None else view.time - age)
                ended = EndedJobView(replace(job, age=age), view.time, next_sample, own, end(run))
                self._kept.insert(0, ended)
        self._kept = [each for each in self._kept if each.job.statistics.name not in view.jobs][:KEPT]
        before = self._running
        self._running = {
            run: (job, view.time) if job.workers or run not in before else before[run] for run, job in running.items()
        }


def _since(samples: Samples, began: float | None) -> Samples:
    """Returns the samples from `began` on: earlier ones belong to an earlier job of the same name."""
    skip = 0 if began is None else bisect_left(samples.times, began)
    series = {job: {name: values[skip:] for name, values in each.items()} for job, each in samples.series.items()}
    return Samples(samples.first + skip, samples.times[skip:], series)
