"""The settings that the script of one job makes for the whole job, above all its learning-rate schedule.

tell   One live worker reports the settings with each of its heartbeats, at the coordinator's request. So does each
       worker that leaves. The coordinator keeps the newest report.
ask    A worker that joined late asks for them before its first step. The coordinator then asks one live worker after
       the other at once, and all of them with their next heartbeats, until one reports its present settings. If none
       does, the newest of the earlier reports and of those in checkpoints counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import MAX_SCRIPT_BYTES
from ps_server.coordinator.job_workers import JobWorkers

Report = tuple[int, bytes]  # a report: the worker's clock, and its settings


class JobScript:
    """The settings of the script of one job. Thread-safe.

    in_step: True: all workers are at one clock, and the script of the lowest rank counts; False: that of the worker
             with the highest clock counts
    saved:   returns the settings in checkpoints, if their clock is above its argument; otherwise None
    changed: called when a worker must be asked at once
    """

    def __init__(
        self,
        workers: JobWorkers,
        in_step: bool,
        saved: Callable[[int], Report | None],
        changed: Callable[[], None],
    ) -> None:
        self._workers, self._in_step, self._saved, self._changed = workers, in_step, saved, changed
        self._report: Report | None = None
        self._asking: dict[tuple[int, int], int] = {}  # by rank and incarnation, the request of a worker that came late
        self._number = self._answered = 1
        self._candidates: list[int] = []  # ranks that may be asked for the last request, the first one first
        self._teller: int | None = None  # the rank that reports with each heartbeat; None: not chosen yet
        self._lock = threading.Lock()

    def workers_changed(self) -> None:
        """Records that a worker joined or left."""
        self._teller = None

    def asked_by_heartbeat(self, rank: int) -> int:
        """Returns the number of the request that a worker of this rank must answer with its next heartbeat; 0: none."""
        teller = self._teller
        if teller is None:
            self._teller = teller = next(iter(self._by_preference()), None)
        with self._lock:
            # Any of them: the first one may be dead, and count as live until its lease is over.
            asked = self._number > self._answered and rank in self._candidates
            return self._number if asked or rank == teller else 0

    def asked_now(self) -> tuple[int, int] | None:
        """Returns the rank to ask at once for a worker that joined late, and the number of the request; None if none
        waits.
        """
        with self._lock:
            waits = self._number > self._answered and self._candidates
            return (self._candidates[0], self._number) if waits else None

    def tell(self, rank: int, request: int, report: Report | None) -> None:
        """Keeps a live worker's report of its script's settings. Raises InvalidRequest if it has over MAX_SCRIPT_BYTES.

        request: the number of the request that it answers
        report:  the worker's clock and its settings; None if the worker has nothing to report
        """
        if report is not None and len(report[1]) > MAX_SCRIPT_BYTES:
            raise InvalidRequest(f"what a script has set may have {MAX_SCRIPT_BYTES} bytes, got {len(report[1])}")
        asks_next = False
        with self._lock:
            if report is not None and (self._report is None or report[0] >= self._report[0]):
                self._report = report
            if request == self._number > self._answered and rank in self._candidates:
                if report is None:
                    self._candidates.remove(rank)
                if report is not None or not self._candidates:
                    self._answered = self._number
                asks_next = self._number > self._answered
        if asks_next:
            self._changed()

    def ask(self, rank: int, incarnation: int) -> tuple[Report | None, bool]:
        """Returns the newest report, for a worker that joined late, and whether a newer one is on its way.

        If one is on its way, the caller asks again until the second result is False. The report is None if there is
        none.
        """
        worker = rank, incarnation
        is_new = worker not in self._asking
        candidates = self._by_preference(but=rank)
        with self._lock:
            if is_new:
                if candidates:
                    self._number, self._candidates = self._number + 1, candidates
                self._asking[worker] = self._number if candidates else 0
            elif not {*candidates} & {*self._candidates}:  # those that were to answer have left
                self._answered = self._number
            # Another heartbeat may have taken the worker out since `is_new` was read, with a list of live workers from
            # before this one joined.
            is_coming = self._asking.setdefault(worker, self._number) > self._answered
            if not is_coming:
                self._asking.pop(worker, None)
            report = self._report
        if is_new and candidates:
            self._changed()
        saved = None if is_coming else self._saved(-1 if report is None else report[0])
        return saved or report, is_coming

    def forget(self) -> None:
        """Forgets what scripts have reported since the checkpoint to which the job was rolled back."""
        with self._lock:
            self._report = None

    def _by_preference(self, but: int | None = None) -> list[int]:
        """Returns the live ranks, in the order in which to ask them: the rank whose script counts first, and ranks that
        ask themselves last.
        """
        live = self._workers.all()
        with self._lock:
            there = {(worker.rank, worker.incarnation) for worker in live}
            self._asking = {worker: number for worker, number in self._asking.items() if worker in there}
            asking = {rank for rank, _ in self._asking}
        clock = {worker.rank: 0 if self._in_step else -worker.clock for worker in live}
        # Ranks that ask are last, but included: a worker that got no answer in time trains on, and has a schedule by
        # now.
        ranks = sorted(clock, key=lambda rank: (rank in asking, clock[rank], rank))
        return [rank for rank in ranks if rank != but]
