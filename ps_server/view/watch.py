"""Makes a view of coordinator and shards once a second, and sends it to viewers.

Shards are queried in other threads, one query at a time for each, and the view has the last answer: a shard that hangs
delays nothing. While no viewer asks for the view, a shard whose jobs do not change is queried less often: a query wakes
its process, the coordinator's, and threads of gRPC in both for a second afterwards.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ps_protocol.errors import LimitExceeded, PSError
from ps_runtime.background import Background
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.shards import RegisteredShard
from ps_server.coordinator.timing import Clock
from ps_server.core.limits import share
from ps_server.view.finished import End, EndedJobView, FinishedJobs
from ps_server.view.history import History, Samples
from ps_server.view.making import Answer, Sources, ViewMaker, samples
from ps_server.view.view import View

LOOK_SECONDS = 1.0
# A shard is queried again after so many times the time that its last answer took: watching costs it a twentieth.
PAUSES_PER_ANSWER = 20
REST_SECONDS = 5.0  # the pause between queries of a shard with unchanged jobs, while nobody asks for the view
READ_SECONDS = 30.0  # a view that was read may be read again for this long
MOST_PAUSE_SECONDS = 10.0  # the longest such pause: an answer that took long has mostly waited for other work

# Called with each view; with None when the coordinator stops. It must not wait.
Viewer = Callable[[View | None], None]


class Watch:
    """Makes the view of a cluster. Methods may be called from any thread.

    most_viewers: the most viewers at a time; one principal may have half as many
    process:      a number that no other coordinator's watch has
    """

    def __init__(self, coordinator: Coordinator, most_viewers: int, clock: Clock | None = None) -> None:
        self._coordinator = coordinator
        self._most_viewers = most_viewers
        self._clock = clock or Clock()
        self._lock = threading.Lock()  # guards all fields below
        self._maker, self._history = ViewMaker(), History()
        self._finished = FinishedJobs()
        self._jobs: Mapping[str, CoordinatedJob] = {}  # by run, at the last look
        self._answers: dict[int, Answer] = {}
        self._ask_at: dict[int, float] = {}
        self._rests_until: dict[int, float] = {}
        self._read_at = -math.inf
        self._silent: set[int] = set()
        self._viewers: list[tuple[Viewer, str]] = []  # with their principals
        self._over = False
        self._background = Background()
        self.process = secrets.randbits(53)
        self._view = self._make(coordinator.jobs())

    def start(self) -> None:
        """Starts the thread that makes views."""
        self._background.start()
        self._background.repeat("view", LOOK_SECONDS, self.look)

    def stop(self) -> None:
        """Ends the thread and the viewers."""
        self._background.stop()
        with self._lock:
            self._over = True
            viewers, self._viewers = self._viewers, []
        for viewer, _ in viewers:
            viewer(None)

    def look(self) -> None:
        """Starts queries of the shards, makes a view from the known answers, keeps a sample of it, and calls the
        viewers.
        """
        for index, shard in self._coordinator.shards().items():
            if self._is_due(shard):
                self._background.apart("view", str(index), partial(self._ask, shard))
        jobs = self._coordinator.jobs()
        view = self._make(jobs)
        self._note_shards(view)
        with self._lock:
            self._view = view
            before, self._jobs = self._jobs, {job.placed.run: job for job in jobs.values()}
            number = self._history.next
            self._finished.look(view, number, lambda job: self._history.after(0, [job]), partial(_end, before))
            self._history.add(view.time, samples(view))
            viewers = list(self._viewers)
        for viewer, _ in viewers:
            viewer(view)

    @property
    def view(self) -> View:
        """The last view."""
        self._read_at = self._clock.now()
        return self._view

    def samples(self, after: int, jobs: Collection[str]) -> Samples:
        """Returns the samples of jobs from a number on, or from the first that is kept."""
        with self._lock:
            return self._history.after(after, jobs)

    @property
    def finished(self) -> tuple[EndedJobView, ...]:
        """The last few jobs that have ended, the latest first."""
        with self._lock:
            return self._finished.kept

    def add(self, viewer: Viewer, caller: str = "") -> Callable[[], None]:
        """Calls a viewer with the present view and each later one. Returns a function that stops this.

        caller: the principal that reads; empty: unknown

        Raises LimitExceeded for too many viewers.
        """
        with self._lock:
            if len(self._viewers) >= self._most_viewers:
                raise LimitExceeded(f"max-views is {self._most_viewers}: so many watch this cluster already")
            own, most = sum(other == caller for _, other in self._viewers), share(self._most_viewers)
            if caller and own >= most:
                text = f"{caller} watches this cluster {own} times: its share is half of max-views"
                raise LimitExceeded(text)
            over = self._over
            if not over:
                self._viewers.append((viewer, caller))
            self._read_at = self._clock.now()
        viewer(None if over else self._view)

        def stop() -> None:
            with self._lock:
                if (viewer, caller) in self._viewers:
                    self._viewers.remove((viewer, caller))

        return stop

    # -- a look ------------------------------------------------------------------------------------------------------

    def _is_due(self, shard: RegisteredShard) -> bool:
        """Whether a shard must be queried now. Records a new process of a shard."""
        now, index = self._clock.now(), shard.index
        with self._lock:
            known = self._answers.get(index)
            if known is None or known.process != shard.process:
                self._answers[index] = Answer(shard.process)
                self._ask_at[index] = self._rests_until[index] = now
            is_read = self._viewers or now < self._read_at + READ_SECONDS
            ask_at = self._ask_at[index] if is_read else max(self._ask_at[index], self._rests_until[index])
        if known is not None and known.process != shard.process:
            text = f"shard {index} is served by a new process, {shard.pid} at {shard.address}"
            self._coordinator.events.note("shard", "", text)
        return now >= ask_at

    def _ask(self, shard: RegisteredShard) -> None:
        """Queries a shard, and keeps its answer."""
        began = self._clock.now()
        with self._lock:
            before = self._answers[shard.index]
            if before.process == shard.process and before.asked is None:
                self._answers[shard.index] = replace(before, asked=began)
        try:
            statistics = shard.api.statistics()
        except PSError:
            return  # the view shows for how long the shard has not answered
        now = self._clock.now()
        with self._lock:
            self._ask_at[shard.index] = now + min(PAUSES_PER_ANSWER * (now - began), MOST_PAUSE_SECONDS)
            if self._answers[shard.index].process == shard.process:  # a new process may serve the shard by now
                self._answers[shard.index] = Answer(shard.process, statistics)
                rests = before.statistics is not None and before.statistics.jobs == statistics.jobs
                self._rests_until[shard.index] = now + REST_SECONDS * rests

    def _make(self, running: Mapping[str, CoordinatedJob]) -> View:
        """Makes a view of these jobs, which the caller keeps: one may end before the view is made."""
        jobs = {name: job.statistics() for name, job in running.items()}
        with self._lock:
            sources = Sources(
                now=self._clock.now(),
                time=self._clock.since_1970(),
                lease=self._coordinator.lease,
                shard_count=self._coordinator.shard_directory.count,
                jobs=jobs,
                shards=self._coordinator.shards(),
                answers=dict(self._answers),
            )
            return self._maker.make(sources)

    def _note_shards(self, view: View) -> None:
        """Logs events for shards that have stopped answering since the last view, or answer again."""
        silent = {shard.shard.index for shard in view.shards if shard.silent}
        for index in sorted(silent - self._silent):
            self._coordinator.events.note("shard", "", f"shard {index} does not answer")
        for index in sorted(self._silent - silent):
            self._coordinator.events.note("shard", "", f"shard {index} answers again")
        self._silent = silent


def _end(jobs: Mapping[str, CoordinatedJob], run: str) -> End:
    """Returns the record of a run that has ended: its last checkpoint, and the last figures of its workers."""
    job = jobs.get(run)
    if job is None:
        return End()
    return End(job.checkpoints.statistics() if job.checkpoints is not None else None, job.figures.of_done())
