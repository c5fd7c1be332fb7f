"""The rounds of values of one job: core.rounds_of_values behind a lock, and one stream to each worker that waits.

A worker that waits holds no thread. Its stream says which ranks it waits for, and whether one of these waits for a step
of this worker. In sync and ssp that happens: a rank may be in a step that needs a step of a worker which is in the
round already.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.errors import NotFound, PSError, TryLater, UnknownWorker, anew
from ps_protocol.messages.workers import GatherRequest
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.coordinator.shared_room import Owner
from ps_server.core.rounds_of_values import Given, RoundsOfValues, ValueRound, newest
from ps_server.core.statistics import Wait


@dataclass(frozen=True)
class Standing:
    """The state of a round, for a waiting worker.

    complete:    the round, if it is complete; otherwise None
    waiting_for: the ranks that have not given their value yet
    step_wanted: one of these ranks waits for a step of the worker to which this is sent
    """

    number: int
    complete: ValueRound | None = None
    waiting_for: tuple[int, ...] = ()
    step_wanted: bool = False


class RoundReceiver(Protocol):
    """The response stream of a worker that waits for a round. Its methods do not wait."""

    def tell(self, standing: Standing) -> None:
        """Sends the state of the round. After a complete round nothing more is sent."""

    def finish(self) -> None:
        """Ends the stream without a result. The worker then repeats its request."""

    def fail(self, error: PSError) -> None:
        """Ends the stream of a worker that waits for a round, with an error."""


@dataclass(eq=False)
class _Waiter:
    rank: int
    incarnation: int
    clock: int
    listener: RoundReceiver
    since: float
    noticed_at: float


class JobValueRounds:
    """All rounds of one job. Methods may be called from any thread.

    save:  writes a complete round to disk, before any worker gets it; raises TryLater if the write fails
    owner: the principal to whom the values' memory is accounted
    """

    def __init__(self, workers: JobWorkers, cluster: Cluster, save: Callable[[], object], owner: Owner) -> None:
        self._room = cluster.rounds_room.of_job(owner)
        self._rounds = RoundsOfValues(cluster.limits.round_bytes)
        self._workers, self._save, self._timing, self._clock = workers, save, cluster.timing, cluster.clock
        self._lock = threading.RLock()
        self._waiters: list[_Waiter] = []
        # The number of the last complete round, and the kept rounds
        self._done: tuple[int, tuple[ValueRound, ...]] = (0, ())
        self._over: NotFound | TryLater | None = None
        self._looked = 0.0
        self._unsaved: ValueRound | None = None  # complete, and not on disk yet

    def resume(self, completed: int, kept: Sequence[ValueRound]) -> None:
        """Continues from the rounds that an earlier coordinator has kept."""
        with self._lock:
            self._rounds.completed, self._rounds.kept = completed, tuple(kept)
            self._rounds.behind = True
            self._count()
            self._done = completed, self._rounds.kept

    def _count(self) -> None:
        """Updates the number of bytes of the values.

        Past rounds are kept for workers that start late, and the last one always. A job keeps at most its equal share
        of the budget, so past rounds take no memory that other jobs need.
        """
        kept = newest(self._rounds.kept, int(min(self._rounds.limit, self._room.fair())))
        self._rounds.kept = kept
        given = sum(len(each.value) for each in self._rounds.given.values())
        self._room.held = given + (kept[-1].bytes if kept else 0)

    def done(self) -> tuple[int, tuple[ValueRound, ...]]:
        """Returns the number of the last complete round, and the rounds that are kept. Waits for nothing."""
        return self._done

    def gather_values(self, request: GatherRequest, listener: RoundReceiver) -> Callable[[], None]:
        """Adds a worker's value to its round, and streams the round's state to `listener` until it is complete.

        Returns a function that stops the stream.
        """
        rank, incarnation = request.worker.rank, request.worker.incarnation
        with self._lock:
            self._workers.check(rank, incarnation, request.worker.key)
            if self._over is not None:
                raise anew(self._over)
            if not request.number:
                listener.tell(Standing(self._rounds.following(request.clock)))
                listener.finish()
                return lambda: None
            given = Given(incarnation, request.clock, request.value)
            before = self._rounds.completed
            live, started = self._workers.live()
            self._room.hold(self._rounds.more(rank, request.number, given))
            try:
                complete = self._rounds.contribute(rank, request.number, given, live, started)
            finally:
                self._count()
            now = self._clock.now()
            if complete is None:
                waiter = _Waiter(rank, incarnation, request.clock, listener, now, now)
                self._waiters.append(waiter)
                listener.tell(Standing(request.number, waiting_for=self._missing(live)))
                return lambda: self._drop(waiter)
            if self._rounds.completed > before:
                self._publish(complete)
            elif self._unsaved is not None:  # the round that is not saved yet; the requested one may be earlier
                self._publish(self._unsaved)
            listener.tell(Standing(complete.number, complete))
            return lambda: None

    def changed(self) -> None:
        """Updates the rounds after a worker has joined or left. No round waits for a worker that has left; its stream
        fails.
        """
        with self._lock:
            live, started = self._workers.live()
            lost = [waiter for waiter in self._waiters if live.get(waiter.rank) != waiter.incarnation]
            self._waiters = [waiter for waiter in self._waiters if waiter not in lost]
            for waiter in lost:
                waiter.listener.fail(UnknownWorker(f"worker {waiter.rank} lost its place in the job: join again"))
            complete = self._rounds.settle(live, started)
            self._count()
            if complete is not None:
                with contextlib.suppress(TryLater):  # `look` tries again
                    self._publish(complete)

    def end(self, error: NotFound | TryLater) -> None:
        """Ends all rounds with an error, because the job is over or the coordinator stops."""
        with self._lock:
            self._over = error
            waiters, self._waiters = self._waiters, []
            self._room.held = 0
        for waiter in waiters:
            waiter.listener.fail(error)

    def waiting(self) -> int:
        """Returns the number of workers that wait for a round."""
        return len(self._waiters)

    def look_due(self) -> bool:
        """Whether it is time to call `look`, for which all shards are asked. The longer a round lasts, the
        less often.
        """
        with self._lock:
            now = self._clock.now()
            waited = min((now - waiter.since for waiter in self._waiters), default=0.0)
            if waited < self._timing.round_look or now - self._looked < min(self._timing.round_notice, waited / 4):
                return False
            self._looked = now
            return True

    def look(self, waits: Collection[Wait], mixes_clocks: bool = False) -> None:
        """Sends the state of the round to each waiting worker that is due for it; see Timing.round_notice.

        A worker whose step is wanted, or that has waited for Timing.round_hold, gets the state, and its stream ends: it
        asks again.

        waits:        the waits of workers on shards
        mixes_clocks: True: each worker counts its own steps; False: a worker that has reached the clock of a wait has
                      made its step, and is not asked for another
        """
        with self._lock:
            if self._unsaved is not None:
                with contextlib.suppress(TryLater):
                    self._publish(self._unsaved)
                return
            live, _ = self._workers.live()
            missing, now = self._missing(live), self._clock.now()
            number = self._rounds.completed + 1
            for waiter in list(self._waiters):
                # While a worker waits in this round, it makes no step. A rank that the round lacks may wait for one.
                wanted = any(
                    wait.rank in missing
                    and waiter.rank in wait.waiting_for
                    and (wait.clock > waiter.clock or mixes_clocks)
                    for wait in waits
                )
                if wanted or now - waiter.since >= self._timing.round_hold:
                    self._waiters.remove(waiter)
                    waiter.listener.tell(Standing(number, None, missing, wanted))
                    waiter.listener.finish()
                elif now - waiter.noticed_at >= self._timing.round_notice:
                    waiter.noticed_at = now
                    waiter.listener.tell(Standing(number, None, missing))

    def _missing(self, live: Mapping[int, int]) -> tuple[int, ...]:
        _, world_size, started = self._workers.roster()
        ranks = set(live) if started else {*live, *range(world_size)}
        return tuple(sorted(ranks - self._rounds.given.keys()))

    def _publish(self, complete: ValueRound) -> None:
        """Writes a complete round to disk, and sends it to all waiting workers. Raises TryLater if the write fails."""
        self._done, self._unsaved = (self._rounds.completed, self._rounds.kept), complete
        self._save()
        self._unsaved = None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.listener.tell(Standing(complete.number, complete))

    def _drop(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
