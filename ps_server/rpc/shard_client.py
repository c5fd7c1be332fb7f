"""Calls a shard over gRPC, for the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import Deposed, Fenced, PSError, Unreachable
from ps_protocol.job import JobSpec
from ps_protocol.v1 import shard_pb2
from ps_protocol.v1.shard_pb2_grpc import ShardServiceStub
from ps_protocol.v1.types_pb2 import WorkerIdentity
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import error_from
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.timing import DEFAULT_SERVER_CALL_SECONDS
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import WorkerId
from ps_server.core.membership import Arrival, ShardProgress
from ps_server.core.snapshot import RestoreProgress, RestoreRequest, ShardSnapshot, SnapshotRequest
from ps_server.core.statistics import ShardStatistics
from ps_server.rpc import shard_messages

STATUS_SECONDS = 2.0


class ShardClient:
    """One shard over gRPC; see coordinator.shards.ShardApi.

    seconds: the deadline of a call, after which it raises TryLater
    charge:  the calling coordinator's: it has the term that calls carry, and learns from shards that a later
             coordinator is in charge
    """

    def __init__(
        self,
        index: int,
        address: str,
        access: Access = PLAINTEXT,
        seconds: float = DEFAULT_SERVER_CALL_SECONDS,
        charge: Charge | None = None,
    ) -> None:
        self._seconds, self._charge = seconds, charge or Charge()
        self.index = index
        self.address = address
        self._channel = open_channel(address, access)
        self._stub = ShardServiceStub(self._channel)
        # For calls that take seconds, one for each job. With more jobs than a connection carries calls at a time, other
        # calls, such as a join, would wait behind them.
        self._slow_channel = open_channel(address, access)
        self._slow_stub = ShardServiceStub(self._slow_channel)
        self._takes_several = True  # workers in one call

    def create_job(self, spec: JobSpec, buckets: list[int], run: str, shards: int) -> None:
        """Creates the buckets of a run of a job on the shard. shards: how many shards share its tables"""
        request = shard_pb2.CreateJobRequest(spec=job_spec_message(spec), buckets=buckets, run=run, shard_count=shards)
        self._call(self._stub.CreateJob, request)

    def drop_job(self, job: str, run: str) -> None:
        """Forgets a run of a job."""
        self._call(self._stub.DropJob, shard_pb2.DropJobRequest(job=job, run=run))

    def add_workers(self, job: str, workers: Sequence[Arrival], run: str) -> list[ShardProgress | Fenced]:
        """Counts workers as live. Returns for each the shard's state, or why it is fenced."""
        requests = [
            shard_pb2.AddWorkerRequest(
                worker=WorkerIdentity(
                    job=job, rank=each.rank, incarnation=each.incarnation, lease_key=each.key, run=run
                ),
                clock=each.clock,
            )
            for each in workers
        ]
        if len(requests) > 1 and self._takes_several:
            with self._unless_earlier():
                answer = self._call(self._stub.AddWorkers, shard_pb2.AddWorkersRequest(workers=requests))
                return [shard_messages.added(each) for each in answer.workers]
        return [self._added(request) for request in requests]

    def _added(self, request: Any) -> ShardProgress | Fenced:
        try:
            return shard_messages.counted(self._call(self._stub.AddWorker, request))
        except Fenced as error:
            return error

    def remove_workers(self, job: str, workers: Sequence[WorkerId], run: str) -> None:
        """Stops counting workers as live."""
        identities = [
            WorkerIdentity(job=job, rank=rank, incarnation=incarnation, run=run) for rank, incarnation in workers
        ]
        if len(identities) > 1 and self._takes_several:
            with self._unless_earlier():
                self._call(self._stub.RemoveWorkers, shard_pb2.RemoveWorkersRequest(workers=identities))
                return
        for worker in identities:
            self._call(self._stub.RemoveWorker, shard_pb2.RemoveWorkerRequest(worker=worker))

    @contextlib.contextmanager
    def _unless_earlier(self) -> Iterator[None]:
        """Switches to one worker a call if the shard's version does not know a call for several."""
        try:
            yield
        except Unreachable:
            self._takes_several = False

    def committed(self, job: str, run: str) -> Committed | None:
        """Returns the leased data that every bucket that trains there has had; None if there is no such bucket."""
        request = shard_pb2.GetCommittedDataRequest(job=job, run=run)
        return shard_messages.committed(
            self._call(self._stub.GetCommittedData, request, min(STATUS_SECONDS, self._seconds))
        )

    def begin_snapshot(self, request: SnapshotRequest) -> None:
        """Begins the shard's snapshot for a checkpoint."""
        self._call(self._stub.BeginSnapshot, shard_messages.snapshot_message(request))

    def await_snapshot(self, job: str, checkpoint: str, run: str) -> ShardSnapshot:
        """Returns the shard's file of the checkpoint, once it is on disk. Raises TryLater after a few seconds."""
        request = shard_pb2.AwaitSnapshotRequest(job=job, checkpoint=checkpoint, run=run)
        return shard_messages.shard_snapshot(self._call(self._slow_stub.AwaitSnapshot, request))

    def restore_job(self, request: RestoreRequest) -> RestoreProgress:
        """Makes the shard restore a job from a checkpoint. Returns its progress within seconds."""
        return shard_messages.restore_progress(
            self._call(self._slow_stub.RestoreJob, shard_messages.restore_message(request))
        )

    def statistics(self) -> ShardStatistics:
        """Returns the statistics of the shard and its jobs."""
        return shard_messages.shard_statistics(self._status())

    def process(self) -> int:
        """Returns the number of the process that answers at the shard's address."""
        return int(self._status().process)

    def _status(self) -> Any:
        request = shard_pb2.GetShardStatusRequest()
        return self._call(self._stub.GetShardStatus, request, min(STATUS_SECONDS, self._seconds))

    def close(self) -> None:
        """Closes the connections."""
        self._channel.close()
        self._slow_channel.close()

    def _call(self, method: Callable[..., Any], request: Any, seconds: float | None = None) -> Any:
        request.coordinator_term = self._charge.term
        try:
            return method(request, timeout=seconds or self._seconds)
        except grpc.RpcError as error:
            raise self._refused(error) from None

    def _refused(self, call: grpc.RpcError) -> PSError:
        # Not a variable of `_call`: its frame and the error would refer to each other, and keep all frames of the
        # caller alive, with the call of a worker that it serves.
        error = error_from(call, f"shard {self.index} at {self.address}")
        if isinstance(error, Deposed):
            self._charge.refused(error)
        return error
