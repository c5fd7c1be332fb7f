"""The joins of one job. Workers that come while others are being added to the shards are added together, after these.

Each worker has its own reservation, and gets its own membership or its own error. The calls to the shards, the write of
the coordinator's file, and the messages to the workers are made once for all of them. So W workers that start at once
on S shards cost a few times S calls instead of W times S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.errors import PSError, without_traceback
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.cluster import Registry
from ps_server.coordinator.coalesced import Together
from ps_server.coordinator.job_data import JobData
from ps_server.coordinator.job_workers import JobWorkers, Joined, Reservation
from ps_server.coordinator.lifecycle import Lifecycle
from ps_server.core.accounting import StepAccounting
from ps_server.core.membership import WORKERS_A_CALL, LiveWorker

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class _Arriving:
    """A worker whose join is under way: its reservation and its request."""

    reservation: Reservation
    request: JoinRequest


class JobJoins:
    """The joins of one job. Methods may be called from any thread.

    lost:     returns the shards that have lost their part of the job
    announce: sends the roster to the workers that watch it, and updates the rounds of values
    """

    def __init__(
        self,
        workers: JobWorkers,
        data: JobData,
        accounting: StepAccounting,
        life: Lifecycle,
        lost: Callable[[], Sequence[int]],
        registry: Registry,
        announce: Callable[[], None],
    ) -> None:
        self._workers, self._data, self._accounting, self._life = workers, data, accounting, life
        self._lost, self._registry, self._announce = lost, registry, announce
        self._together = Together(self._join, WORKERS_A_CALL)

    def join(self, reservation: Reservation, request: JoinRequest) -> LiveWorker:
        """Makes a worker with a reservation live. If it raises PSError, the reservation is void."""
        return self._together.do(_Arriving(reservation, request))

    def _join(self, arriving: Sequence[_Arriving]) -> list[LiveWorker | PSError]:
        """Makes all shards count workers, and makes these live. Returns for each the live worker or its error."""
        reservations = [each.reservation for each in arriving]
        try:
            self._registry.save_ahead()
        except BaseException:
            for reservation in reservations:
                self._workers.release(reservation)
            raise
        try:
            counted = self._workers.count(reservations)
            with self._life.deciding():
                self._life.check_open(self._lost())
                admitted = [self._admit(each, joined) for each, joined in zip(arriving, counted, strict=True)]
        except BaseException:
            self._abort(reservations)
            raise
        self._abort([each for each, worker in zip(reservations, admitted, strict=True) if isinstance(worker, PSError)])
        live = [worker for worker in admitted if isinstance(worker, LiveWorker)]
        if not live:
            return admitted
        for worker in live:
            self._data.gone(worker.rank, worker.incarnation - 1)
        self._registry.save()
        begun = [self._begin_lease(worker) for worker in admitted]
        self._announce()
        return begun

    def _admit(self, arriving: _Arriving, joined: Joined | PSError) -> LiveWorker | PSError:
        """Makes a worker live that all shards count. Call it in a `deciding` block."""
        if isinstance(joined, PSError):
            return joined
        request = arriving.request
        try:
            worker = self._workers.admit(arriving.reservation, request, joined)
        except PSError as error:
            return without_traceback(error)
        before = None if request.previous is None else request.clock
        self._accounting.joined(worker.rank, worker.clock, before, worker.pushed)
        return worker

    def _begin_lease(self, worker: LiveWorker | PSError) -> LiveWorker | PSError:
        if isinstance(worker, PSError):
            return worker
        try:
            return self._workers.begin_lease(worker)
        except PSError as error:
            return without_traceback(error)

    def _abort(self, reservations: Sequence[Reservation]) -> None:
        """Undoes joins that failed half way."""
        if not reservations:
            return
        fenced = [self._workers.abort(reservation) for reservation in reservations]
        for reservation in reservations:
            self._data.gone(reservation.rank, reservation.incarnation)
        self._registry.save()
        if any(fenced):
            self._announce()


def log_join(name: str, worker: LiveWorker, older: LiveWorker | None, request: JoinRequest) -> None:
    """Logs that a worker is live now. older: the live worker that it replaces"""
    if older is not None and request.take_over and older.launch != request.launch:
        log.warning(
            "job %s: worker %d (pid %d on %s) is replaced: another launch takes over",
            *(name, older.rank, older.pid, older.host),
        )
    log.info(
        "job %s: worker %d joins at clock %d (incarnation %d), metrics at %s",
        *(name, worker.rank, worker.clock, worker.incarnation, request.metrics_address or "no address"),
    )


def described_join(worker: LiveWorker, older: LiveWorker | None, request: JoinRequest) -> Iterator[tuple[str, str]]:
    """Yields the kind and text of each event of a join. older: the live worker that the new one replaces, or None"""
    if older is not None and request.previous is None:
        yield "fenced", f"worker {older.rank} (pid {older.pid} on {older.host}) is replaced by a new process"
    kind, verb = ("join", "joins") if request.previous is None else ("rejoin", "comes back")
    yield kind, f"worker {worker.rank} on {worker.host or 'an unknown host'} {verb} at clock {worker.clock}"
