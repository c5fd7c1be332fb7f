"""How operators and shards call the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc

from ps_protocol.convert import consistency, duration, seconds
from ps_protocol.errors import TryLater
from ps_protocol.v1 import cluster_pb2, jobs_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.retry import Peer
from ps_server.rpc.position import Position

CALL_SECONDS = 10.0
CHECKPOINT_SECONDS = 310.0


class OperatorClient:
    """The coordinator, from the side of operators and shards. Methods make one attempt, and raise PSError."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._channel = open_channel(peer.address, peer.access)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, and ends the calls that wait for an answer."""
        self._channel.close()

    def status(self) -> Any:
        """Returns the status of the cluster, as a GetStatusResponse."""
        return _with_modes(self._call(ClusterServiceStub(self._channel).GetStatus, cluster_pb2.GetStatusRequest()))

    def watch(self, period: float) -> Iterator[Any]:
        """Yields a view now and every period, as WatchStatusResponses, until the coordinator stops."""
        request = cluster_pb2.WatchStatusRequest(period_duration=duration(period))
        with self._watching(request) as call:
            for view in call:
                _with_modes(view.status)
                yield view

    def view(self, seen: Position) -> Any:
        """Returns a view with its history, as a WatchStatusResponse. seen: the events and samples that the caller has
        already
        """
        request = cluster_pb2.WatchStatusRequest(
            history_wanted=True, process=seen.process, last_event=seen.last_event, next_sample=seen.next_sample
        )
        with self._watching(request, timeout=CALL_SECONDS) as call:
            try:
                view = next(call)
                _with_modes(view.status)
                return view
            except StopIteration:
                raise TryLater(f"{self._peer} stops") from None

    @contextlib.contextmanager
    def _watching(self, request: Any, **options: Any) -> Iterator[Any]:
        call: Any = None
        try:
            call = ClusterServiceStub(self._channel).WatchStatus(request, **options)
            yield call
        except grpc.RpcError as error:
            raise self._peer.error(error) from None
        finally:
            if call is not None:
                call.cancel()

    def end_job(self, job: str) -> None:
        """Ends a job, even while workers train it."""
        self._call(JobServiceStub(self._channel).EndJob, jobs_pb2.EndJobRequest(job=job))

    def checkpoint_job(self, job: str, seconds: float = CHECKPOINT_SECONDS, caller_ends: bool = False) -> Any:
        """Makes a checkpoint of a job; returns it as a Checkpoint when it is complete.

        caller_ends: the caller is a shard that ends after it
        """
        request = jobs_pb2.CheckpointJobRequest(job=job, caller_ends=caller_ends)
        return self._call(JobServiceStub(self._channel).CheckpointJob, request, seconds).checkpoint

    def register_shard(self, shard: cluster_pb2.RegisterShardRequest, seconds: float) -> None:
        """Registers a shard; waits for a coordinator that does not answer yet."""
        self._call(ClusterServiceStub(self._channel).RegisterShard, shard, seconds, wait_for_ready=True)

    def report_shard_end(self, index: int, process: int) -> bool:
        """Reports that a shard's process has ended. Returns whether the coordinator knew this process as the shard."""
        request = cluster_pb2.ReportShardEndRequest(index=index, process=process)
        return bool(self._call(ClusterServiceStub(self._channel).ReportShardEnd, request).known)

    def _call(self, method: Any, request: Any, seconds: float = CALL_SECONDS, **options: Any) -> Any:
        try:
            return method(request, timeout=seconds, **options)
        except grpc.RpcError as call:
            raise self._peer.error(call) from None


def _with_modes(status: Any) -> Any:
    """Returns a GetStatusResponse, with the modes that a coordinator of an earlier version does not name."""
    for job in status.jobs:
        job.mode = job.mode or _mode(job)
    return status


def _mode(job: Any) -> str:
    """Returns the name of a job's mode by the other fields of its JobStatus; empty if they do not tell it."""
    if job.HasField("round_duration"):
        return f"local:{seconds(job.round_duration):g}s"
    if job.local_steps:
        return f"local:{job.local_steps}" + (f"/{job.local_fragments}" if job.local_fragments else "")
    return str(consistency(job.consistency)) if job.HasField("consistency") else ""
