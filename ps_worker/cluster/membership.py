"""A worker's place in its job: taken, kept by heartbeats, and taken again when it was lost.

A lease runs out while a process is stopped, a cable is cut, or the job is set back to a checkpoint. The heartbeat's
thread learns of it and joins again at once, so that a long step is no obstacle; the training thread takes the new place
at its next step, or when its calls fail. A worker whose rank another process has taken gives up.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from ps_protocol.errors import Fenced, LimitExceeded, NotFound, PSError, UnknownWorker
from ps_runtime.launch_id import UNKNOWN, LaunchId
from ps_worker.cluster.convert import Applicant
from ps_worker.cluster.coordinator import CoordinatorClient, Watch
from ps_worker.values import JoinResult, Roster

log = logging.getLogger("ps_worker")

HEARTBEATS_PER_LEASE = 4
NOTICE_SECONDS = 2.0
NOTICE_PAUSE_SECONDS = 10.0
DOUBT_SECONDS = 0.2
CLOSE_SECONDS = 1.0


class Membership:
    """One worker's place in one job. Methods may be called from any thread and raise PSError.

    rank:     the one wanted; None: any
    timeout:  seconds for which a shard and the coordinator may disagree about whether this worker is live
    start_timeout: seconds to wait until all declared workers have joined
    finished: says how many steps the training thread has finished in a place
    moved:    called in the heartbeat's thread when there is a new place, with it; with None when there will be none
    launch:   what started this worker
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        job: str,
        rank: int | None,
        world_size: int,
        timeout: float,
        start_timeout: float,
        metrics_address: str,
        finished: Callable[[JoinResult], int],
        moved: Callable[[JoinResult | None], None],
        launch: LaunchId = UNKNOWN,
    ) -> None:
        self._coordinator = coordinator
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._metrics_address = metrics_address
        self._finished = finished
        self._moved = moved
        self._launch = launch
        self.place: JoinResult | None = None
        self.roster = Roster((), world_size, False)
        self._roster_of: JoinResult | None = None  # the place in which the roster was asked for
        self._error: PSError | None = None
        self._joining = False
        self._watching: Watch | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._doubted = threading.Event()  # wakes the heartbeat before its time
        self._beating: threading.Thread | None = None

    def join(self) -> JoinResult:
        """Takes a place, and keeps it from here on."""
        place = self._ask(None)
        with self._changed:
            self.place = place
        self._beating = threading.Thread(target=self._beat, args=(place.lease,), name="heartbeat", daemon=True)
        self._beating.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return place

    def close(self) -> None:
        """Leaves the job, unless the place is another's by now, and ends the threads."""
        self._closing.set()
        self._doubted.set()
        with self._changed:
            self._changed.notify_all()  # `prepare` in another thread may be waiting
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(CLOSE_SECONDS)  # or it would join once more after we have left
        if self.place is not None and not isinstance(self._error, UnknownWorker):
            self._coordinator.leave(self.place.identity)

    # -- the training thread -----------------------------------------------------------------------------------------

    def raise_lost(self) -> None:
        """Raises the error that took this worker off the job for good, if there is one."""
        if self._error is not None:
            raise self._error

    def has_lost(self, place: JoinResult, error: BaseException) -> bool:
        """Whether a call failed because the place it was made from was lost: `renewed` says what comes then."""
        if isinstance(error, NotFound | UnknownWorker) and not self._closing.is_set():
            return True
        with self._changed:
            return self.place is not place  # its calls were cut off

    def renewed(self, place: JoinResult, cause: BaseException | None) -> JoinResult:
        """Waits for the place that follows one. Raises the `cause` that told of its loss if none will come."""
        until = time.monotonic() + self._timeout
        asked = False
        with self._changed:
            while self.place is place:
                self.raise_lost()
                # Fenced by a shard, with no join of our own under way: by another process that took the rank.
                if isinstance(cause, Fenced) and not self._joining:
                    if not asked:  # the coordinator knows by which
                        asked = True
                        self._doubted.set()
                        self._changed.wait_for(lambda: self._has_changed(place) or self._joining, NOTICE_SECONDS)
                        continue
                    self._error = cause
                    raise cause
                if cause is not None and (self._closing.is_set() or time.monotonic() >= until):
                    raise cause
                self._doubted.set()  # the coordinator says whether the place is lost, or the job
                self._changed.wait(DOUBT_SECONDS)
            assert self.place is not None
            return self.place

    def await_change(self, place: JoinResult) -> None:
        """Waits a moment for the place that follows one."""
        with self._changed:
            self._doubted.set()
            self._changed.wait_for(lambda: self._has_changed(place), DOUBT_SECONDS)

    def _has_changed(self, place: JoinResult) -> bool:
        """Whether another place follows one, or none ever will."""
        return self.place is not place or self._error is not None

    def await_started(self, place: JoinResult) -> None:
        """Waits until every declared worker has joined: a job that goes on without some trains another model.

        Raises LimitExceeded with the ranks that are missing if it takes longer than the start timeout.
        """
        begun = time.monotonic()
        say_at = begun + NOTICE_SECONDS
        with self._changed:
            while self.place is place and not self._has_started(place):
                if self._error is not None or self._closing.is_set():
                    break
                now = time.monotonic()
                if now - begun >= self._start_timeout:
                    raise LimitExceeded(
                        f"gave up after --start-timeout {self._start_timeout:g} s: {self._missing(now - begun)}"
                    )
                if now >= say_at:
                    log.warning("%s", self._missing(now - begun))
                    say_at = now + NOTICE_PAUSE_SECONDS
                self._changed.wait(min(say_at, begun + self._start_timeout) - now)
        self.raise_lost()
        if self._closing.is_set():
            raise UnknownWorker("the session was closed while it waited for the other workers to join")

    def _has_started(self, place: JoinResult) -> bool:
        return self._roster_of is place and self.roster.started

    def _missing(self, seconds: float) -> str:
        """Which ranks have not joined, how many have, and for how long this worker has waited."""
        there = self.roster.ranks
        missing = ranges(sorted(set(range(self._world_size)) - set(there)))
        return (
            f"waiting for ranks {missing} to join job {self._job!r}: "
            f"{len(there)} of {self._world_size} workers are there (ranks {ranges(sorted(there))}), "
            f"waiting for {seconds:.0f} s"
        )

    # -- the threads beside it ---------------------------------------------------------------------------------------

    def _ask(self, before: JoinResult | None) -> JoinResult:
        rank = self._rank if before is None else before.identity.rank
        previous = 0 if before is None else before.identity.incarnation
        clock = 0 if before is None else self._finished(before)
        who = Applicant(os.getpid(), socket.gethostname(), self._metrics_address, previous, clock, self._launch)
        place = self._coordinator.join(self._job, rank, who)
        if place.identity.incarnation <= previous:
            self._coordinator.leave(place.identity)
            raise NotFound(f"job {self._job!r} ended, and another of that name began")
        return place

    def _beat(self, lease: float) -> None:
        pause = lease / HEARTBEATS_PER_LEASE
        while not self._closing.is_set():
            self._doubted.wait(pause)
            self._doubted.clear()
            place = self.place
            assert place is not None
            if self._closing.is_set():
                return
            try:
                try:
                    self._coordinator.heartbeat(place.identity, self._finished(place), pause)
                except Fenced:
                    raise
                except UnknownWorker:
                    self._join_again(place)
            except PSError as error:
                if error.retryable or self._closing.is_set():
                    continue  # the coordinator may come back; training does not need it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                self._moved(None)
                return

    def _join_again(self, lost: JoinResult) -> None:
        """Takes a place anew. Raises Fenced if the rank is another process's by now."""
        with self._changed:
            self._joining = True
        try:
            place = self._ask(lost)
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
        while not self._closing.is_set():
            place = self.place
            watching = self._coordinator.watch(self._job)
            with self._changed:
                self._watching = watching
                current = self.place is place
            if current:
                for roster in watching:
                    with self._changed:
                        self.roster, self._roster_of = roster, place
                        self._changed.notify_all()
            watching.stop()
            if self.place is place:
                self._closing.wait(NOTICE_SECONDS)


def ranges(ranks: list[int]) -> str:
    """Returns sorted ranks in short: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, ends)) for ends in runs)
