"""The leased data of one job, on the coordinator: the rules of core.data_leases with a lock, and the shards to ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from ps_protocol.data import BatchLease, LeaseReport, LeaseRequest
from ps_protocol.errors import InvalidRequest, LimitExceeded, PSError
from ps_server.core.data_commits import MAX_LOADERS, Committed
from ps_server.core.data_leases import DataLeases, Progress, Who
from ps_server.core.limits import Limits

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class JobFace:
    """What leasing needs of the job.

    live:      how many workers are live; raises if the one that asks is not
    ghosts:    who is gone while not every shard knows it yet: something may still come from them
    committed: what every shard has committed; raises if one does not answer
    """

    limits: Limits
    live: Callable[[], int]
    ghosts: Callable[[], Set[Who]]
    committed: Callable[[], list[Committed]]


class JobData:
    """All loaders of one job. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaders: dict[int, DataLeases] = {}
        self._looks = 0  # begun so far

    def lease(self, who: Who, ask: LeaseRequest, job: JobFace) -> BatchLease:
        """Gives a worker batches; see DataLeases.lease."""
        _check(ask, job.limits)
        looks = self._looks
        with self._lock:
            workers = job.live()  # in here, so that nobody is given anything once `gone` was called for it
            leases = self._loader(ask, job.limits)
            settled = leases.doubtful - job.ghosts()
            if leases.stale or settled:
                self._look(leases, settled, job)
            lease = leases.lease(who, ask.pass_number, ask.count, workers, ask.report)
            # Nothing is left: the shards know best what is done. A look that others began since will do.
            if ask.count and not lease.ranges and not lease.complete:
                if self._looks == looks:
                    self._look(leases, leases.doubtful - job.ghosts(), job)
                lease = leases.lease(who, ask.pass_number, ask.count, workers, LeaseReport(held=ask.report.held))
            return lease

    def _loader(self, ask: LeaseRequest, limits: Limits) -> DataLeases:
        leases = self._loaders.get(ask.loader.loader)
        if leases is None:
            leases = self._loaders[ask.loader.loader] = DataLeases(ask.loader, limits.leases)
        leases.agree(ask.loader)
        return leases

    def _look(self, leases: DataLeases, gone: Set[Who], job: JobFace) -> None:
        self._looks += 1
        try:
            committed = job.committed()
        except PSError as error:
            if leases.stale:
                raise
            log.info("what is committed is not known yet: %s", error)
        else:
            leases.settle(committed, gone)

    def gone(self, rank: int, incarnation: int) -> None:
        """A worker takes no part any more, nor does any older one of its rank."""
        with self._lock:
            for leases in self._loaders.values():
                leases.gone(rank, incarnation)

    def restored(self) -> None:
        """Shards were set back to a checkpoint: they are asked before anything else is given out."""
        with self._lock:
            for leases in self._loaders.values():
                leases.stale = True

    def progress(self) -> dict[int, Progress]:
        """How far each loader's data is."""
        with self._lock:
            return {number: leases.progress for number, leases in sorted(self._loaders.items())}


def _check(ask: LeaseRequest, limits: Limits) -> None:
    loader = ask.loader
    if loader.loader >= MAX_LOADERS:
        raise LimitExceeded(f"a job leases the data of at most {MAX_LOADERS} loaders, got loader {loader.loader}")
    if loader.batch_size < 1:
        raise InvalidRequest(f"a batch has at least one sample, got batch_size {loader.batch_size}")
    if loader.size > limits.samples:
        raise LimitExceeded(f"max-samples is {limits.samples}, got a loader of {loader.size}")
    most = max(len(ask.report.held), len(ask.report.committed), len(ask.report.returned))
    if most > limits.leases:
        raise LimitExceeded(f"max-leases is {limits.leases}, got a report of {most}")
