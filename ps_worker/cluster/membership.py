"""A worker's place in its job: taken, kept by heartbeats, and taken again when it was lost.

A lease runs out while a process is stopped, a cable is cut, or the job is rolled back to a checkpoint. The heartbeat's
thread learns of it and joins again at once, so that a long step is no obstacle; the training thread takes the new place
at its next step, or when its calls fail. A worker whose rank another process has taken gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ps_protocol.errors import Fenced, LimitExceeded, NotFound, PSError, UnknownWorker
from ps_runtime.background import guarded
from ps_runtime.quantities import ranges
from ps_worker.cluster.coordinator import CoordinatorClient, Watch
from ps_worker.cluster.options import JobOptions
from ps_worker.values import JoinResult, Roster, SavedState

log = logging.getLogger("ps_worker")

HEARTBEATS_PER_LEASE = 4
NOTICE_SECONDS = 2.0
START_NOTICE_SECONDS = 5.0  # workers that start together are there by then
NOTICE_PAUSE_SECONDS = 10.0
DOUBT_SECONDS = 0.2
DISOWNED_SECONDS = 1.0  # so long a shard may hear of a change before the coordinator says so
CLOSE_SECONDS = 1.0
CLOSED_EARLY = "the session was closed while it waited for the other workers to join"


class Doubt:
    """What may be wrong with a place; the heartbeat's thread looks into it before its time. Thread-safe.

    disowned: the place that a shard does not know of, or whose job it does not know
    """

    def __init__(self) -> None:
        self.disowned: JoinResult | None = None
        self._raised = threading.Event()

    def raise_it(self) -> None:
        """Wakes the heartbeat's thread."""
        self._raised.set()

    def wait(self, seconds: float) -> None:
        """Waits until there is a doubt, or for so many seconds."""
        self._raised.wait(seconds)
        self._raised.clear()


class Membership:
    """One worker's place in one job. Methods may be called from any thread and raise PSError.

    metrics_address: where this worker serves /metrics, for the servers' side
    finished:        says how many steps the training thread has finished in a place
    moved:           called in the heartbeat's thread with each new place; with None when there will be none
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        options: JobOptions,
        metrics_address: str,
        finished: Callable[[JoinResult], int],
        moved: Callable[[JoinResult | None], None],
    ) -> None:
        self._coordinator = coordinator
        self._options = options
        self._metrics_address = metrics_address
        self._finished = finished
        self._moved = moved
        self.place: JoinResult | None = None
        self.roster = Roster((), options.world_size, False)
        self._roster_of: JoinResult | None = None  # the place in which the roster was asked for
        self._error: PSError | None = None
        self._joining = False
        self._watching: Watch | None = None
        self._changed = threading.Condition()
        self._doubt = Doubt()
        self._beating: threading.Thread | None = None

    def join(self, run: str) -> JoinResult:
        """Takes a place in a run of the job, and keeps it from here on."""
        place = self._ask(run, None)
        with self._changed:
            self.place = place
        self._beating = threading.Thread(target=self._beat, args=(place.lease,), name="heartbeat", daemon=True)
        self._beating.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return place

    def close(self, state: SavedState | None = None, done: bool = False) -> None:
        """Leaves the job, unless the place is another's by now, and ends the threads.

        state: what it leaves behind; done: its script has come to its end
        """
        self._coordinator.closing.set()
        self._doubt.raise_it()
        with self._changed:
            self._changed.notify_all()  # `prepare` in another thread may be waiting
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(CLOSE_SECONDS)  # otherwise it could join once more after this worker has left
        if self.place is not None and not isinstance(self._error, UnknownWorker):
            self._coordinator.leave(self.place.identity, state, done)

    # -- the training thread -----------------------------------------------------------------------------------------

    def raise_lost(self) -> None:
        """Raises the error that took this worker off the job for good, if there is one."""
        if self._error is not None:
            raise self._error

    def has_lost(self, place: JoinResult, error: BaseException) -> bool:
        """Whether a call failed because the place it was made from was lost: `renewed` says what comes then."""
        if isinstance(error, NotFound | UnknownWorker) and not self._coordinator.closing.is_set():
            return True
        with self._changed:
            return self.place is not place  # its calls were cut off

    def renewed(self, place: JoinResult, cause: BaseException | None) -> JoinResult:
        """Waits for the place that follows one. Raises the `cause` that told of its loss if none will come."""
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
                    self._error = cause
                    raise cause
                # While it joins it waits as long as the coordinator says that it gets on: that has a time of its own.
                is_late = time.monotonic() >= until and not self._joining
                if cause is not None and (self._coordinator.closing.is_set() or is_late):
                    raise cause
                # A shard does not count this worker, or does not know its job, and the coordinator does: one of them
                # missed something, or the job is being rolled back. That may take long, and a worker that joins waits.
                if isinstance(cause, NotFound | UnknownWorker) and time.monotonic() >= disowned:
                    self._doubt.disowned = place
                self._doubt.raise_it()  # the coordinator says whether the place is lost, or the job
                self._changed.wait(DOUBT_SECONDS)
            assert self.place is not None
            return self.place

    def await_change(self, place: JoinResult) -> None:
        """Waits a moment for the place that follows one."""
        with self._changed:
            self._doubt.raise_it()
            self._changed.wait_for(lambda: self._has_changed(place), DOUBT_SECONDS)

    def _has_changed(self, place: JoinResult) -> bool:
        """Whether another place follows one, or none ever will."""
        return self.place is not place or self._error is not None

    def await_started(self, place: JoinResult) -> None:
        """Waits until every declared worker has joined: a job that goes on without some trains another model.

        Raises LimitExceeded with the ranks that are missing if it takes longer than the start timeout.
        """
        began, limit = time.monotonic(), self._options.start_timeout
        notice_at = began + START_NOTICE_SECONDS
        with self._changed:
            while self.place is place and not (self._roster_of is place and self.roster.started):
                if self._error is not None or self._coordinator.closing.is_set():
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
        """Says which ranks have not joined, how many have, and for how long this worker has waited."""
        present, count = self.roster.ranks, self._options.world_size
        missing = ranges(sorted(set(range(count)) - set(present)))
        return (
            f"waiting for ranks {missing} to join job {self._options.job!r}: {len(present)} of {count} workers are "
            f"there (ranks {ranges(sorted(present))}), waiting for {seconds:.0f} s"
        )

    # -- the threads beside it ---------------------------------------------------------------------------------------

    def _ask(self, run: str, before: JoinResult | None) -> JoinResult:
        clock = 0 if before is None else self._finished(before)
        return self._coordinator.join(self._options, run, self._metrics_address, before, clock)

    def _beat(self, lease: float) -> None:
        pause, closing = lease / HEARTBEATS_PER_LEASE, self._coordinator.closing
        while not closing.is_set() and self._error is None:
            self._doubt.wait(pause)
            if not closing.is_set():
                guarded("heartbeat", lambda: self._beat_once(pause))

    def _beat_once(self, timeout: float) -> None:
        place = self.place
        assert place is not None
        try:
            try:
                self._coordinator.heartbeat(place.identity, self._finished(place), timeout)
                if self._doubt.disowned is place:
                    self._join_again(place)
            except Fenced:
                raise
            except UnknownWorker:
                self._join_again(place)
        except PSError as error:
            if error.retryable or self._coordinator.closing.is_set():
                return  # the coordinator may come back; training does not need it
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._moved(None)

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
        self._moved(place)

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
        watching.stop()
