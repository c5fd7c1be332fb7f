"""A worker's place in its job: a join takes it, heartbeats keep it, and another join replaces it if it is lost.

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
START_NOTICE_SECONDS = 5.0  # workers that start together are there by then
NOTICE_PAUSE_SECONDS = 10.0
DOUBT_SECONDS = 0.2
DISOWNED_SECONDS = 1.0  # so long a shard may hear of a change before the coordinator says so
CLOSE_SECONDS = 1.0
CLOSED_EARLY = "the session was closed while it waited for the other workers to join"


class Doubt:
    """A signal that the place may be lost, which wakes the heartbeat thread before its next turn. Thread-safe.

    disowned: the place that a shard says it does not know, or whose job it does not know; None: there is none
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
    """One worker's place in one job. Methods may be called from any thread and raise PSError.

    metrics_address: where this worker serves /metrics, which the coordinator announces
    reached:         returns the clock of the last step that the training thread has sent from a place
    finished:        the same, without a step that would be pushed again if the place were lost
    cut_off:         is called in the heartbeat thread with each place that is lost
    script:          answers requests for what this worker's script has set

    place: the one that it has taken last; None before the first
    lost:  in a group, a place of whose loss this member has heard before it takes the next one; None: there is none
    error: the error that has taken it off the job for good; None: it takes part
    """

    _leave_attempts = 1

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
        self._roster_of: JoinResult | None = None  # the place in which the roster was asked for
        self.lost: JoinResult | None = None
        self.error: PSError | None = None
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
        """Takes a place in a run of the job, which heartbeats keep from now on. Returns it."""
        place = self._first_place(run)
        if place.continued is not None:
            _tell_of_continuing(place, place.continued)
        with self._changed:
            self.place = place
        beating = threading.Thread(target=self._beat, args=(place.lease,), name="heartbeat", daemon=True)
        watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        try:
            for thread in (beating, watching):
                start(thread)
                self._threads.append(thread)
        except TryLater:  # nothing would keep the place
            self.close()
            raise
        return place

    def close(self, state: SavedState | None = None, done: bool = False) -> None:
        """Leaves the job, unless another process has the place, and ends the threads.

        state: the worker's state for a successor; None: it leaves none
        done:  the script has run to its end
        """
        self._coordinator.closing.set()
        self._doubt.raise_it()
        with self._changed:
            self._changed.notify_all()  # `prepare` in another thread may be waiting
        join_within(self._threads[:1], CLOSE_SECONDS)  # otherwise it could join once more after this worker has left
        if self.place is not None and not isinstance(self.error, UnknownWorker):
            attempts = self._leave_attempts if done else 1
            self._coordinator.leave(self.place.identity, state, done, self._script.last(), attempts)
        self._telling.close()

    def join_threads(self) -> None:
        """Waits for the threads, once the coordinator's connection is closed: calls that are under way end with it."""
        join_within(self._threads, JOIN_SECONDS)

    # -- the training thread -----------------------------------------------------------------------------------------

    def raise_lost(self) -> None:
        """Raises the error that ended this worker's part in the job, if there is one."""
        if self.error is not None:
            raise self.error

    def has_lost(self, place: JoinResult, error: BaseException) -> bool:
        """Whether a call failed because its place was lost. Then `renewed` returns the next one."""
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
                # While it joins it waits as long as the coordinator says that it gets on: that has a time of its own.
                is_late = time.monotonic() >= until and not self._joining
                if cause is not None and (self._coordinator.closing.is_set() or is_late):
                    raise _as_member(cause)
                # A shard does not count this worker, or does not know its job, and the coordinator does: one of them
                # missed something, or the job is being rolled back. That may take long, and a worker that joins waits.
                if isinstance(cause, NotFound | UnknownWorker) and time.monotonic() >= disowned:
                    self._doubt.disowned = place
                self._doubt.raise_it()  # the coordinator says whether the place is lost, or the job
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

    def await_started(self, place: JoinResult) -> None:
        """Waits until all declared workers have joined: with fewer, the job would train another model.

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
                    notice_at = now + NOTICE_PAUSE_SECONDS
                self._changed.wait(min(notice_at, began + limit) - now)
        self.raise_lost()
        if self._coordinator.closing.is_set():
            raise UnknownWorker(CLOSED_EARLY)

    def _missing(self, seconds: float) -> str:
        """Says for which ranks this worker waits, how many have joined, and for how long it has waited."""
        present, count = self.roster.ranks, self._options.world_size
        own = None if self.place is None else self.place.identity.rank
        missing = ranges(sorted(set(range(count)) - set(present)))
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
        )

    # -- the threads beside it ---------------------------------------------------------------------------------------

    def _first_place(self, run: str) -> JoinResult:
        return self._ask(run, None)

    def _is_for_good(self, error: BaseException) -> bool:
        """Whether an error of a heartbeat that is not to be repeated ends this worker's part."""
        return True

    def _ask(self, run: str, before: JoinResult | None) -> JoinResult:
        clock = 0 if before is None else self._finished(before)
        return self._coordinator.join(self._options, run, self._metrics_address, before, clock)

    def _beat(self, lease: float) -> None:
        pause, closing = lease / HEARTBEATS_PER_LEASE, self._coordinator.closing
        process = HeartbeatProcess(self._options, pause)
        try:
            while not closing.is_set() and self.error is None:
                guarded("heartbeat", lambda: process.turn(self._message()))
                self._doubt.wait(pause)
                if not closing.is_set():
                    guarded("heartbeat", lambda: self._beat_once(pause))
        finally:
            process.close()

    def _message(self) -> bytes:
        """Returns the heartbeat of now, without what the worker has measured."""
        place = self.place
        assert place is not None
        return write_heartbeat(place.identity, self._reached(place)).SerializeToString()

    def _beat_once(self, timeout: float) -> None:
        place = self.place
        assert place is not None
        if not self.holds(place):
            return  # the training thread takes the next one
        try:
            try:
                answer = self._coordinator.heartbeat(place.identity, self._reached(place), timeout)
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
            self._is_unknown = True  # a token that was renewed a moment ago is read anew for the next heartbeat
        except PSError as error:
            if error.retryable or self._coordinator.closing.is_set():
                return  # the coordinator may come back; training does not need it
            self._lost_for_good(place, error)
        else:
            self._is_unknown = False

    def _lost_for_good(self, place: JoinResult, error: PSError) -> None:
        """Notes the error that takes this worker off the job, if it is of the place that it is in."""
        with self._changed:
            if not self.holds(place):
                return  # a late answer about the place before: it says nothing about the one taken since
            self.error = _as_member(error)
            self._changed.notify_all()
        self._cut_off(place)

    def _join_again(self, lost: JoinResult) -> None:
        """Takes a place anew. Raises Fenced if the rank is another process's by now."""
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
            watching.stop()  # the roster is asked for anew: what was known before says nothing about now
        self._cut_off(lost)

    def _tell(self, request: int, script: SavedState | None) -> None:
        """Tells the coordinator what the script has set, beside all else."""
        place = self.place
        assert place is not None

        def tell() -> None:
            with contextlib.suppress(PSError):  # the coordinator asks again
                self._coordinator.tell_script(place.identity, request, script)

        self._telling.submit(tell)

    def _watch(self) -> None:
        while not self._coordinator.closing.is_set():
            place = self.place
            guarded("watch", lambda: self._watch_once(place))  # noqa: B023 (called at once)
            if self.place is place:
                self._coordinator.closing.wait(NOTICE_SECONDS)

    def _watch_once(self, place: JoinResult | None) -> None:
        watching = self._coordinator.watch(self._options.job)
        with self._changed:
            self._watching = watching
            current = self.place is place
        if current:
            for roster in watching:
                with self._changed:
                    self.roster, self._roster_of = roster, place
                    self._changed.notify_all()
                if roster.asked is not None and place is not None and roster.asked[0] == place.identity.rank:
                    self._script.want(roster.asked[1])
        watching.stop()


def _as_member(error: E) -> E | FinishedWithout:
    """Returns what an error means to a worker that has taken part. Servers of earlier releases tell it of its finished
    job as they tell a process that comes late, which has nothing to do."""
    return FinishedWithout(str(error)) if isinstance(error, JobFinished) else error


def _tell_of_continuing(place: JoinResult, continued: Continued) -> None:
    """Says that a launch goes on with weights that others have trained; in small type where these train them now."""
    job = place.identity.job
    log.log(
        logging.INFO if continued.live else logging.WARNING,
        "continues job %r at clock %d: %s. To begin anew: another name (--job), or `ps-server end --job %s` before",
        *(job, place.clock, described(continued.began, continued.trained), job),
    )
