"""The leased data of one job, on the coordinator: the rules of core.data_leases with a lock, and the shards to ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from ps_protocol.errors import InvalidRequest, LimitExceeded, PSError
from ps_server.core.data_commits import MAX_LOADERS, Committed
from ps_server.core.data_leases import NOTHING, DataLeases, Grant, LoaderSpec, Progress, Report, Who
from ps_server.limits import Limits

log = logging.getLogger("ps_server")


@dataclass(frozen=True)
class LeaseRequest:
    """One worker's request for batches of one loader; see DataLeases.lease."""

    rank: int
    incarnation: int
    loader: int
    spec: LoaderSpec
    pass_number: int
    count: int
    report: Report = NOTHING
    key: bytes = field(default=b"", repr=False)


class JobData:
    """All loaders of one job. Methods may be called from any thread.

    ask: what every shard has committed; raises PSError if one does not answer
    """

    def __init__(self, job: str, limits: Limits, ask: Callable[[], list[Committed]]) -> None:
        self._job = job
        self._limits = limits
        self._ask = ask
        self._lock = threading.Lock()
        self._loaders: dict[int, DataLeases] = {}
        self._looks = 0  # begun so far

    def lease(self, ask: LeaseRequest, live: Callable[[], int], ghosts: Set[Who]) -> Grant:
        """What a worker gets; see DataLeases.lease.

        live:   how many workers are live; raises if the one that asks is not
        ghosts: who is gone while not every shard knows it yet: something may still come from them
        """
        self._check(ask)
        looks = self._looks
        with self._lock:
            workers = live()  # in here, so that nobody is given anything once `gone` was called for it
            leases = self._loader(ask)
            who = ask.rank, ask.incarnation
            settled = leases.doubtful - ghosts
            if leases.stale or settled:
                self._look(leases, settled)
            grant = leases.lease(who, ask.pass_number, ask.count, workers, ask.report)
            # Nothing is left: the shards know best what is done. A look that others began since will do.
            if ask.count and not grant.spans and not grant.complete:
                if self._looks == looks:
                    self._look(leases, leases.doubtful - ghosts)
                grant = leases.lease(who, ask.pass_number, ask.count, workers, Report(held=ask.report.held))
            return grant

    def _check(self, ask: LeaseRequest) -> None:
        if ask.loader >= MAX_LOADERS:
            raise LimitExceeded(f"a job leases the data of at most {MAX_LOADERS} loaders, got loader {ask.loader}")
        if ask.spec.batch_size < 1:
            raise InvalidRequest(f"a batch has at least one sample, got batch_size {ask.spec.batch_size}")
        if ask.spec.size > self._limits.samples:
            raise LimitExceeded(f"max-samples is {self._limits.samples}, got a loader of {ask.spec.size}")
        most = max(len(ask.report.held), len(ask.report.committed), len(ask.report.returned))
        if most > self._limits.leases:
            raise LimitExceeded(f"max-leases is {self._limits.leases}, got a report of {most}")

    def _loader(self, ask: LeaseRequest) -> DataLeases:
        leases = self._loaders.get(ask.loader)
        if leases is None:
            leases = self._loaders[ask.loader] = DataLeases(ask.loader, ask.spec, self._limits.leases)
        leases.agree(ask.spec)
        return leases

    def _look(self, leases: DataLeases, gone: Set[Who]) -> None:
        self._looks += 1
        try:
            committed = self._ask()
        except PSError as error:
            if leases.stale:
                raise
            log.info("job %s: what is committed is not known yet: %s", self._job, error)
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
