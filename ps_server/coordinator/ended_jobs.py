"""The jobs that are over: why, and which of them have finished.

A job has finished when the last of its workers has left because its script ended. It stays finished for the launches
that took part in it: a worker that such a launch starts late gets an error, and does not train the job a second time.
For every other launch the name is free.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from ps_protocol.errors import FinishedWithout, JobFinished, NotFound
from ps_protocol.job import is_added_to

JOBS_KEPT = 64  # jobs of each kind that are kept; those that ended first are forgotten


@dataclass(frozen=True)
class FinishedJob:
    """A run of a job that has finished. The names of the fields are those in the state file.

    launches: the launches that took part in this run, or in an earlier finished run of the same name
    at:       when it finished, in seconds since 1970
    """

    run: str
    launches: tuple[str, ...]
    at: float


class EndedJobs:
    """The ended jobs of a coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[str, str] = {}  # by name, why a job ended, if not because its workers left
        self._finished: dict[str, FinishedJob] = {}

    def finished(self) -> Mapping[str, FinishedJob]:
        """Returns the jobs that have finished, by name."""
        with self._lock:
            return dict(self._finished)

    def resume(self, finished: Mapping[str, FinishedJob]) -> None:
        """Adopts an earlier coordinator's record of finished jobs."""
        with self._lock:
            self._finished = dict(finished)

    def check(self, name: str, launch: str) -> None:
        """Raises JobFinished if the job of this name has finished and `launch` took part in it. An empty launch never
        did.
        """
        with self._lock:
            finished = self._finished.get(name)
            if finished is not None and launch and launch in finished.launches:
                raise has_finished(name, finished.at)

    def error(self, name: str, run: str) -> NotFound | None:
        """Returns the error for a worker that asks for a job that does not run; None if this coordinator has ended no
        job of that name.

        run: the worker's run; may be empty. If it is the run that has finished, the worker was away when it finished
        """
        with self._lock:
            finished, why = self._finished.get(name), self._why.get(name)
        if finished is not None and run == finished.run:
            return _finished_without(name, finished.at)
        return NotFound(f"job {name!r} ended: {why}") if why else None

    def ended(self, name: str, why: str, finished: FinishedJob | None) -> None:
        """Records that a job is over. why: the reason, as text; empty if its workers have left"""
        with self._lock:
            if finished is not None:
                before = self._finished.pop(name, None)
                launches = dict.fromkeys((*(before.launches if before is not None else ()), *finished.launches))
                self._finished[name] = replace(finished, launches=tuple(launches))
                while len(self._finished) > JOBS_KEPT:
                    del self._finished[next(iter(self._finished))]
            if why:
                self._why[name] = why
                while len(self._why) > JOBS_KEPT:
                    del self._why[next(iter(self._why))]

    def begun(self, name: str, launch: str) -> None:
        """Records that a job of this name begins anew.

        launch: the launch that begins it; empty: unknown, or the launch has explicitly asked for it
        """
        with self._lock:
            self._why.pop(name, None)
            if not launch:
                self._finished.pop(name, None)
            self._forget_added(name)  # jobs of the parameter groups that were added: the new run adds them again

    def joined(self, name: str, launch: str) -> None:
        """Records that a launch takes part in the running job of this name: the job is no longer finished for it."""
        with self._lock:
            finished = self._finished.get(name)
            if finished is not None and launch in finished.launches:
                left = tuple(other for other in finished.launches if other != launch)
                self._finished[name] = replace(finished, launches=left)

    def forget(self, name: str) -> bool:
        """Forgets that a job has finished, so that its next registration begins it anew. Returns whether it had
        finished.
        """
        with self._lock:
            self._forget_added(name)
            return self._finished.pop(name, None) is not None

    def _forget_added(self, name: str) -> None:
        for added in [other for other in self._finished if is_added_to(name, other)]:
            del self._finished[added]


def has_finished(name: str, at: float) -> JobFinished:
    """Returns the error for a worker that starts after its job has finished.

    at: the time of the job's end, in seconds since 1970
    """
    return JobFinished(
        f"job {name!r} has finished: its last worker was done at {_date(at)}, so there is nothing to do for a worker "
        f"of the same launch. Another launch begins the job anew; so does this one after `ps-server end --job {name}`"
    )


def _finished_without(name: str, at: float) -> FinishedWithout:
    return FinishedWithout(
        f"job {name!r} finished at {_date(at)} while this worker was away, and its weights are gone: what this worker "
        "had still to do is not done. `ps-server --absence-seconds` says for how long a job waits for such a worker"
    )


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(" ", "seconds")
