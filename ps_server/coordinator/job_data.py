"""The leased data of one job: core.data_leases behind a lock. Queries the shards for the data that the weights have
had.
"""

from __future__ import annotations

import logging
import threading

from ps_protocol.batches import BatchLease, LeaseReport, LeaseRequest
from ps_protocol.errors import InvalidRequest, LimitExceeded, NotFound, PSError, TryLater, without_traceback
from ps_runtime.troubles import Troubles
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.coordinator.refusals import try_soon
from ps_server.core.data_commits import MAX_LOADERS, Committed
from ps_server.core.data_leases import DataLeases, LoaderProgress, WorkerId
from ps_server.core.limits import Limits
from ps_server.core.placement import PlacedJob

log = logging.getLogger("ps_server")


class JobData:
    """All loaders of one job. Methods may be called from any thread."""

    def __init__(self, placed: PlacedJob, workers: JobWorkers, cluster: Cluster) -> None:
        self._spec, self._run = placed.spec, placed.run
        self._workers, self._shards, self._limits = workers, cluster.shards, cluster.limits
        self._lock = threading.Lock()
        self._loaders: dict[int, DataLeases] = {}
        self._looking: list[DataLeases] = []  # loaders for which the shards are being queried
        self._rollbacks = 0
        self._troubles = Troubles(log, "committed_data")

    def lease_batches(self, worker: WorkerId, key: bytes, request: LeaseRequest) -> BatchLease:
        """Gives a live worker batches, see DataLeases. Raises InvalidRequest for a job with a world size."""
        if self._spec.world_size:
            raise InvalidRequest(
                f"job {self._spec.name!r} has a world size: its workers divide the data by their ranks"
            )
        _check(request, self._limits)
        with self._lock:
            self._workers.check(*worker, key)
            leases = self._loader(request)
            wanted = leases.stale or bool(self._settled(leases))
        if wanted:
            self._look(leases)
        lease = self._give(worker, key, leases, request.pass_number, request.count, request.report)
        # No batch is free: query the shards for the committed ones.
        if request.count and not lease.ranges and not lease.complete:
            self._look(leases)
            leased = LeaseReport(leased=request.report.leased)
            lease = self._give(worker, key, leases, request.pass_number, request.count, leased)
        return lease

    def _give(
        self, worker: WorkerId, key: bytes, leases: DataLeases, number: int, count: int, report: LeaseReport
    ) -> BatchLease:
        with self._lock:
            # Checked under this lock, so that a worker gets no batch after `gone` was called for it.
            workers = self._workers.check(*worker, key)
            if leases.stale:
                raise try_soon(f"job {self._spec.name!r}: the shards are being asked which data is committed")
            return leases.lease_batches(worker, number, count, workers, report)

    def _loader(self, request: LeaseRequest) -> DataLeases:
        spec = request.loader
        leases = self._loaders.get(spec.loader)
        if leases is None:
            leases = self._loaders[spec.loader] = DataLeases(spec, self._limits.leases)
        leases.agree(spec)
        return leases

    def _settled(self, leases: DataLeases) -> set[WorkerId]:
        """Returns the workers that have left with leased batches, and from which no shard accepts a push any more."""
        half_gone = {(rank, incarnation) for _, rank, incarnation in self._workers.removals.pending()}
        return leases.doubtful - half_gone

    def _committed(self) -> list[Committed]:
        """Returns the committed data of every shard. Raises PSError if one does not answer."""
        name, run = self._spec.name, self._run
        try:
            answers = self._shards.call_all(lambda shard: shard.api.committed(name, run))
        except NotFound:
            raise TryLater(f"a shard was started anew: job {name!r} is being rolled back to a checkpoint") from None
        return [committed for committed in answers if committed is not None]

    def _look(self, leases: DataLeases) -> None:
        """Queries the shards for committed data, unless another call is doing so. No lock is held meanwhile."""
        with self._lock:
            if leases in self._looking:
                return
            self._looking.append(leases)
            # Chosen before the shards are queried: no further data of these workers can be committed.
            gone, rollbacks = self._settled(leases), self._rollbacks
        try:
            committed = self._committed()
            self._troubles.over("")
            with self._lock:
                if rollbacks == self._rollbacks:  # otherwise the answers may be from before a rollback
                    leases.settle(committed, gone)
        except PSError as error:
            if leases.stale:
                raise
            what = "job %s: the committed data is not known yet: %s"
            self._troubles.met("", what, self._spec.name, error, level=logging.INFO)
            without_traceback(error)  # else it keeps the worker's call, and this ends well
        finally:
            with self._lock:
                self._looking.remove(leases)

    def gone(self, rank: int, incarnation: int) -> None:
        """Records that worker `rank` of this incarnation, and all earlier workers of the rank, have left."""
        with self._lock:
            for leases in self._loaders.values():
                leases.gone(rank, incarnation)

    def rolled_back(self) -> None:
        """Records a rollback: before the next lease, the shards are queried again for the data in their weights."""
        with self._lock:
            self._rollbacks += 1
            for leases in self._loaders.values():
                leases.stale = True

    def progress(self) -> dict[int, LoaderProgress]:
        """Returns, for each loader, how many samples of its pass are committed."""
        with self._lock:
            return {number: leases.progress for number, leases in sorted(self._loaders.items())}


def _check(request: LeaseRequest, limits: Limits) -> None:
    loader = request.loader
    if loader.loader >= MAX_LOADERS:
        raise LimitExceeded(f"a job leases the data of at most {MAX_LOADERS} loaders, got loader {loader.loader}")
    if loader.batch_size < 1:
        raise InvalidRequest(f"a batch has at least one sample, got batch_size {loader.batch_size}")
    if loader.size > limits.samples:
        raise LimitExceeded(f"max-samples is {limits.samples}, got a loader of {loader.size}")
    most = max(len(request.report.leased), len(request.report.committed), len(request.report.returned))
    if most > limits.leases:
        raise LimitExceeded(f"max-leases is {limits.leases}, got a report of {most}")
