"""A worker's membership in its job. A join gives it a *place*, heartbeats keep it, and another join replaces a lost
one.

A lease runs out if the process is stopped, a cable is cut, or the job is rolled back to a checkpoint. The heartbeat
thread learns of it and joins again at once, even during a long step. The training thread uses the new place from its
next step on, or when its calls fail. A worker whose rank another process has taken does not join again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ps_protocol.errors import (
    Fenced,
    FinishedWithout,
    JobFinished,
    LimitExceeded,
    NotFound,
    PSError,
    TryLater,
    Unauthenticated,
    UnknownWorker,
    anew,
)
from ps_protocol.messages.workers import Continued, JoinResult, SavedState, write_heartbeat
from ps_runtime.background import guarded, join_within, start
from ps_runtime.dates import described
from ps_runtime.pools import JOIN_SECONDS, DaemonPool
from ps_runtime.quantities import ranges
from ps_worker.cluster.coordinator_calls import CoordinatorClient, RosterWatch
from ps_worker.cluster.heartbeat_process import HeartbeatProcess
from ps_worker.cluster.options import JobOptions
from ps_worker.cluster.script import ScriptTelling
from ps_worker.values import Roster

log = logging.getLogger("ps_worker")

E = TypeVar("E", bound=BaseException)

HEARTBEATS_PER_LEASE = 4
NOTICE_SECONDS = 2.0
START_NOTICE_SECONDS = 5.0  # workers that start together have joined by then
NOTICE_PAUSE_SECONDS = 10.0
DOUBT_SECONDS = 0.2
DISOWNED_SECONDS = 1.0  # how much earlier a shard may learn of a change than this worker
CLOSE_SECONDS = 1.0
CLOSED_EARLY = "the session was closed while it waited for the other workers to join"


class Doubt:
    """A signal that the worker's place may be lost. It wakes the heartbeat thread before its next turn. Thread-safe.

    disowned: a place that is unknown to a shard, or whose job is; None if there is none
    """

    def __init__(self) -> None:
        self.disowned: JoinResult | None = None
        self._raised = threading.Event()

    def raise_it(self) -> None:
        """Wakes the heartbeat's thread."""
        self._raised.set()

    def wait(self, seconds: float) -> None:
        """Waits until `raise_it` is called, or for `seconds`."""
        self._raised.wait(seconds)
        self._raised.clear()


class OwnMembership:
    """One worker's membership in one job. Methods may be called from any thread and raise PSError.

    metrics_address: the address of this worker's /metrics, which the coordinator announces
    reached:         returns the clock of the last step that the training thread has sent from a place
    finished:        as `reached`, without a step that would be pushed again after a loss of the place
    cut_off:         called in the heartbeat thread with each lost place
    script:          answers requests for the settings of this worker's script

    place: the last place that it got; None before the first join
    lost:  in a group, a lost place until this member has the next one; None if no place is lost
    error: the error that ended its part in the job for good; None if it takes part
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        options: JobOptions,
        metrics_address: str,
        reached: Callable[[JoinResult], int],
        finished: Callable[[JoinResult], int],
        cut_off: Callable[[JoinResult], None],
        script: ScriptTelling,
    ) -> None:
        self._coordinator = coordinator
        self._options = options
        self._metrics_address = metrics_address
        self._reached = reached
        self._finished = finished
        self._cut_off = cut_off
        self.place: JoinResult | None = None
        self.roster = Roster((), options.world_size, False)
        self._roster_of: JoinResult | None = None  # the place with which the roster was requested
        self.lost: JoinResult | None = None
        self.error: PSError | None = None
        self._watch_error = ""  # the error that ended the last watch of the roster; empty: none
        self._joining = False
        self._is_unknown = False  # the last heartbeat showed no token or certificate that the coordinator knows
        self._watching: RosterWatch | None = None
        self._changed = threading.Condition()
        self._doubt = Doubt()
        self._threads: list[threading.Thread] = []
        self._script = script
        script.send = self._tell
        self._telling = DaemonPool(1, "script")

    def join(self, run: str) -> JoinResult:
        """Joins a run of the job, and begins heartbeats. Returns the place."""
        place = self._first_place(run)
        if place.continued is not None:
            _tell_of_continuing(place, place.continued)
        with self._changed:
            self.place = place
        timeout = place.lease / HEARTBEATS_PER_LEASE
        process = HeartbeatProcess(self._options, timeout)
        # Before `join` returns: C code of the script that keeps the GIL from then on leaves the thread no turn.
        guarded("heartbeat", lambda: process.turn(self._message()))
        beating = threading.Thread(target=self._beat, args=(timeout, process), name="heartbeat", daemon=True)
        watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        try:
            for thread in (beating, watching):
                start(thread)
                self._threads.append(thread)
        except TryLater:  # without the threads nothing would keep the place
            if not self._threads:  # if the heartbeat's thread runs, that one ends the process
                process.close()
            self.close()
            raise
        return place

    def close(self, state: SavedState | None = None, done: bool = False) -> None:
        """Leaves the job, unless another process has taken the rank, and ends the threads.

        state: the worker's state for a successor; None if it leaves none
        done:  the script has ended
        """
        self._coordinator.closing.set()
        self._doubt.raise_it()
        with self._changed:
            self._changed.notify_all()  # `prepare` in another thread may be waiting
        join_within(self._threads[:1], CLOSE_SECONDS)  # otherwise it could join once more after this worker has left
        if self.place is not None and not isinstance(self.error, UnknownWorker):
            self._coordinator.leave(self.place.identity, state, done, self._script.last())
        self._telling.close()

    def join_threads(self) -> None:
        """Waits for the threads. Call it when the coordinator's connection is closed, which ends their calls."""
        join_within(self._threads, JOIN_SECONDS)

    # -- the training thread -----------------------------------------------------------------------------------------

    def raise_lost(self) -> None:
        """Raises the error that ended this worker's part in the job, if there is one."""
        if self.error is not None:
            raise anew(self.error)  # it may be raised again and again

    def has_lost(self, place: JoinResult, error: BaseException) -> bool:
        """Whether a call failed because its place was lost. Then `renewed` returns the next place."""
        if isinstance(error, NotFound | UnknownWorker) and not self._coordinator.closing.is_set():
            return True
        with self._changed:
            return not self.holds(place)  # its calls were cut off

    def holds(self, place: JoinResult) -> bool:
        """Whether a place is still the current one, as far as this worker knows."""
        return self.place is place and self.lost is not place

    def renewed(self, place: JoinResult, cause: BaseException | None) -> JoinResult:
        """Waits for the place that follows a lost one, and returns it. Raises `cause`, the error that showed the loss,
        if none comes.
        """
        # For so long a shard and the coordinator may disagree about whether this worker is live.
        until = time.monotonic() + self._options.connect_timeout
        disowned = time.monotonic() + DISOWNED_SECONDS
        asked = False
        with self._changed:
            while self.place is place:
                self.raise_lost()
                # A shard has fenced this worker, which is not joining again: another process has taken the rank.
                if isinstance(cause, Fenced) and not self._joining:
                    if not asked:  # the coordinator knows which process
                        asked = True
                        self._doubt.raise_it()
                        self._changed.wait_for(lambda: self._has_changed(place) or self._joining, NOTICE_SECONDS)
                        continue
                    self.error = cause
                    raise cause
                # A join under way has its own timeout: it waits while the coordinator reports progress.
                is_late = time.monotonic() >= until and not self._joining
                if cause is not None and (self._coordinator.closing.is_set() or is_late):
                    raise _as_member(cause)
                # A shard does not count this worker, or does not know its job, and the coordinator does: one of them
                # missed something, or the job is being rolled back. That may take long, and a worker that joins waits.
                if isinstance(cause, NotFound | UnknownWorker) and time.monotonic() >= disowned:
                    self._doubt.disowned = place
                self._doubt.raise_it()  # the next heartbeat's answer shows whether the place is lost, or the job
                self._changed.wait(DOUBT_SECONDS)
            assert self.place is not None
            return self.place

    def await_change(self, place: JoinResult) -> None:
        """Waits up to DOUBT_SECONDS for the place that follows this one."""
        with self._changed:
            self._doubt.raise_it()
            self._changed.wait_for(lambda: self._has_changed(place), DOUBT_SECONDS)

    def _has_changed(self, place: JoinResult) -> bool:
        """Whether a place is no longer this worker's: another one follows, or none ever will."""
        return self.place is not place or self.error is not None

    def await_started(self, place: JoinResult, waits: Callable[[list[int]], None] = lambda _: None) -> None:
        """Waits until all declared workers have joined: with fewer, the job would train another model.

        waits: called with the missing ranks, each time that the log names them
        Raises LimitExceeded, with the missing ranks, after the start timeout.
        """
        began, limit = time.monotonic(), self._options.start_timeout
        notice_at = began + START_NOTICE_SECONDS
        with self._changed:
            while self.holds(place) and not (self._roster_of is place and self.roster.started):
                if self.error is not None or self._coordinator.closing.is_set():
                    break
                now = time.monotonic()
                if now - began >= limit:
                    raise LimitExceeded(f"gave up after --start-timeout {limit:g} s: {self._missing(now - began)}")
                if now >= notice_at:
                    log.warning("%s", self._missing(now - began))
                    waits(self._missing_ranks())
                    notice_at = now + NOTICE_PAUSE_SECONDS
                self._changed.wait(min(notice_at, began + limit) - now)
        self.raise_lost()
        if self._coordinator.closing.is_set():
            raise UnknownWorker(CLOSED_EARLY)

    def _missing(self, seconds: float) -> str:
        """Returns a text: the ranks that this worker waits for, how many have joined, and for how long it has
        waited.
        """
        present, count = self.roster.ranks, self._options.world_size
        own = None if self.place is None else self.place.identity.rank
        missing = ranges(self._missing_ranks())
        what = f"ranks {missing} to join job {self._options.job!r}"
        if count and not missing and (others := ranges(sorted(set(present) - {own}))):
            what = (
                f"a sign of life of ranks {others} in job {self._options.job!r} (they were silent when rank {own} "
                "joined, and may have died at the same time as the worker before it)"
            )
        elif not missing:
            what = f"the workers of job {self._options.job!r} that were live before to join again"
        return (
            f"waiting for {what}: {len(present)} of {count or 'any number of'} workers are there (ranks "
            f"{ranges(sorted(present))}), waiting for {seconds:.0f} s"
            + (f"; the coordinator's list of workers does not arrive: {self._watch_error}" if self._watch_error else "")
        )

    def _missing_ranks(self) -> list[int]:
        return sorted(set(range(self._options.world_size)) - set(self.roster.ranks))

    # -- threads ----------------------------------------------------------------------------------------------------

    def _first_place(self, run: str) -> JoinResult:
        return self._ask(run, None)

    def _is_for_good(self, error: BaseException) -> bool:
        """Whether an error that a retry of the heartbeat cannot cure ends this worker's part in the job."""
        return True

    def _ask(self, run: str, before: JoinResult | None) -> JoinResult:
        clock = 0 if before is None else self._finished(before)
        return self._coordinator.join(self._options, run, self._metrics_address, before, clock)

    def _beat(self, timeout: float, process: HeartbeatProcess) -> None:
        closing, pause = self._coordinator.closing, self._pause(timeout)
        try:
            while not closing.is_set() and self.error is None:
                guarded("heartbeat", lambda: process.turn(self._message()))
                self._doubt.wait(pause)
                if not closing.is_set():
                    guarded("heartbeat", lambda: self._beat_once(timeout))
        finally:
            process.close()

    def _pause(self, seconds: float) -> float:
        """Returns the seconds between two heartbeats. seconds: the most that the lease allows"""
        return seconds

    def _message(self) -> bytes:
        """Returns the present heartbeat, without measurements."""
        place = self.place
        assert place is not None
        return write_heartbeat(place.identity, self._reached(place)).SerializeToString()

    def _beat_once(self, timeout: float) -> None:
        place = self.place
        assert place is not None
        if not self.holds(place):
            return  # the training thread joins again
        try:
            try:
                answer = self._coordinator.heartbeat(place.identity, self._reached(place), timeout)
                self._is_held()
                self._script.want(answer.script_request)
                if self._doubt.disowned is place:
                    self._join_again(place)
            except UnknownWorker as error:
                if isinstance(error, Fenced) and self._is_for_good(error):
                    raise
                self._join_again(place)
        except Unauthenticated as error:
            if self._is_unknown or self._coordinator.closing.is_set():
                self._lost_for_good(place, error)
            self._is_unknown = True  # the token may have been renewed a moment ago: the next heartbeat reads it again
        except PSError as error:
            if error.retryable or self._coordinator.closing.is_set():
                return  # the coordinator may come back; training does not need it
            self._lost_for_good(place, error)
        else:
            self._is_unknown = False

    def _is_held(self) -> None:
        """Is called once the coordinator has accepted a heartbeat."""

    def _lost_for_good(self, place: JoinResult, error: PSError) -> None:
        """Records the error that ends this worker's part in the job, unless the error belongs to an older place."""
        with self._changed:
            if not self.holds(place):
                return  # a late answer about an older place
            self.error = _as_member(error)
            self._changed.notify_all()
        self._cut_off(place)

    def _join_again(self, lost: JoinResult) -> None:
        """Joins again after a loss. Raises Fenced if another process has the rank."""
        with self._changed:
            self._joining = True
        try:
            place = self._ask(lost.identity.run, lost)
            with self._changed:
                self.place = place
        finally:
            with self._changed:
                self._joining = False
                self._changed.notify_all()
                watching = self._watching
        if watching is not None:
            watching.stop()  # the roster is requested again: the known one is outdated
        self._cut_off(lost)

    def _tell(self, request: int, script: SavedState | None) -> None:
        """Sends the script's settings to the coordinator, in another thread."""
        place = self.place
        assert place is not None

        def tell() -> None:
            with contextlib.suppress(PSError):  # the coordinator asks again
                self._coordinator.tell_script(place.identity, request, script)

        self._telling.submit(tell)

    def _watch(self) -> None:
        closing = self._coordinator.closing
        while not closing.is_set():
            place = self.place
            guarded("watch", lambda: self._watch_once(place))  # noqa: B023 (called at once)
            with self._changed:  # a new place needs a new roster at once
                self._changed.wait_for(lambda: self.place is not place or closing.is_set(), NOTICE_SECONDS)  # noqa: B023

    def _watch_once(self, place: JoinResult | None) -> None:
        watching = self._coordinator.watch(self._options.job)
        with self._changed:
            self._watching = watching
            current = self.place is place
        if current:
            for roster in watching:
                with self._changed:
                    self.roster, self._roster_of, self._watch_error = roster, place, ""
                    self._changed.notify_all()
                if roster.asked is not None and place is not None and roster.asked[0] == place.identity.rank:
                    self._script.want(roster.asked[1])
        watching.stop()
        with self._changed:
            self._watch_error = watching.error


def _as_member(error: E) -> E | FinishedWithout:
    """Returns the error for a worker that has taken part in the job. Servers of earlier releases answer JobFinished,
    the error for a process that comes late and has nothing to do.
    """
    return FinishedWithout(str(error)) if isinstance(error, JobFinished) else error


def _tell_of_continuing(place: JoinResult, continued: Continued) -> None:
    """Logs that this launch continues weights that other launches have trained: as a warning, or as information if
    these launches still train them.
    """
    job = place.identity.job
    log.log(
        logging.INFO if continued.live else logging.WARNING,
        "continues job %r at clock %d: %s. To begin anew: another name (--job), or `ps-server end --job %s` before",
        *(job, place.clock, described(continued.began, continued.trained), job),
    )
