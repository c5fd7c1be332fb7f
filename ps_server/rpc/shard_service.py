"""A shard's service for the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ps_protocol.convert import job_spec
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_protocol.versions import check_coordinator_run
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.core.membership import WORKERS_A_CALL
from ps_server.core.validation import check_job_spec
from ps_server.rpc import shard_messages
from ps_server.rpc.call_limits import in_pool, may_see
from ps_server.shard.shard import Shard
from ps_server.shard.terms import CoordinatorTerms

AWAIT_SECONDS = 5.0
RESTORE_SECONDS = 2.0  # the longest wait of a call before it answers with the restore's progress


class ShardService(shard_pb2_grpc.ShardServiceServicer):  # type: ignore[misc,unused-ignore]
    """A shard's methods for the coordinator.

    process: the number of this process
    pool: the threads in which its methods run; None: those of the server's own pool. A server that is also the
          coordinator has a separate pool: the coordinator's joins fill the server's pool while they wait for calls of
          this service, in the same process. With 26 threads and 32 joins at once these calls ran into their
          deadlines, and a join took 10 s.
    """

    NAME = shard_pb2.DESCRIPTOR.services_by_name["ShardService"].full_name

    def __init__(
        self, shard: Shard, limits: Limits = DEFAULTS, process: int = 0, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self._shard = shard
        self._limits = limits
        self._process = process
        self._terms = CoordinatorTerms()
        for method in shard_pb2.DESCRIPTOR.services_by_name["ShardService"].methods:
            setattr(self, method.name, in_pool(getattr(self, method.name), pool))

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        shard_pb2_grpc.add_ShardServiceServicer_to_server(self, server)

    def CreateJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        spec = job_spec(request.spec)
        check_job_spec(spec, self._limits)
        check_coordinator_run(request.run)
        self._shard.create_job(spec, list(request.buckets), request.run, request.shard_count or 1)
        return shard_pb2.CreateJobResponse()

    def DropJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        self._shard.drop_job(request.job, request.run)
        return shard_pb2.DropJobResponse()

    def AddWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        worker, each = request.worker, shard_messages.arrival(request)
        identity = worker.job, each.rank, each.incarnation
        return shard_messages.add_worker_response(self._shard.add_worker(*identity, each.clock, each.key, worker.run))

    def AddWorkers(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        job, run = _of_all([each.worker for each in request.workers])
        added = self._shard.add_workers(job, [shard_messages.arrival(each) for each in request.workers], run)
        return shard_pb2.AddWorkersResponse(workers=map(shard_messages.added_worker, added))

    def RemoveWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        worker = request.worker
        self._shard.remove_worker(worker.job, worker.rank, worker.incarnation, worker.run)
        return shard_pb2.RemoveWorkerResponse()

    def RemoveWorkers(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        job, run = _of_all(request.workers)
        self._shard.remove_workers(job, [(each.rank, each.incarnation) for each in request.workers], run)
        return shard_pb2.RemoveWorkersResponse()

    def GetCommittedData(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        return shard_messages.committed_response(*self._shard.committed(request.job, request.run))

    def BeginSnapshot(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        self._shard.begin_snapshot(shard_messages.snapshot_request(request))
        return shard_pb2.BeginSnapshotResponse()

    def AwaitSnapshot(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        seconds = _within(context, AWAIT_SECONDS)
        snapshot = self._shard.await_snapshot(request.job, request.checkpoint, seconds, request.run)
        return shard_messages.await_snapshot_response(snapshot)

    def RestoreJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term)
        wanted = shard_messages.restore_request(request)
        check_job_spec(wanted.spec, self._limits)
        check_coordinator_run(wanted.run)
        progress = self._shard.restore_job(wanted, _within(context, RESTORE_SECONDS))
        return shard_messages.restore_response(progress)

    def GetShardStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._terms.check(request.coordinator_term, is_look=True)
        statistics = self._shard.statistics_with_figures()
        figures = statistics.figures
        return shard_pb2.GetShardStatusResponse(
            jobs=[shard_messages.shard_job_status(name, job) for name, job in statistics.jobs.items() if may_see(name)],
            figures=shard_messages.shard_message(figures) if figures is not None else None,
            process=self._process,
        )


def _of_all(workers: Sequence[Any]) -> tuple[str, str]:
    """Returns the job and the run of a call's workers. Raises InvalidRequest if they differ, or are too many."""
    of = {(worker.job, worker.run) for worker in workers}
    if len(of) != 1 or len(workers) > WORKERS_A_CALL:
        expected = f"expected 1 to {WORKERS_A_CALL} workers of one run of a job"
        raise InvalidRequest(f"{expected}, got {len(workers)} of {len(of)} runs")
    return of.pop()


def _within(context: grpc.ServicerContext, most: float) -> float:
    """Returns how long a call may wait, so that its answer comes before the caller's deadline: `most` at most."""
    left = context.time_remaining()
    return most if left is None else min(most, left / 2)
