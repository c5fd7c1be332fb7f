"""Serves what workers ask of the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ps_protocol.convert import job_spec
from ps_protocol.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.members import Roster
from ps_server.coordinator.rounds import Standing
from ps_server.rpc import convert, lease_messages
from ps_server.rpc.call_limits import check_job, in_pool
from ps_server.rpc.streams import Outbox, Send


class JobService(jobs_pb2_grpc.JobServiceServicer):  # type: ignore[misc,unused-ignore]
    """What workers ask of the coordinator."""

    def __init__(self, coordinator: Coordinator, senders: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._senders = senders
        setattr(self, "WatchJob", in_pool(self._watch, senders, non_blocking=True))  # noqa: B010
        setattr(self, "ExchangeValues", in_pool(self._exchange, senders, non_blocking=True))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self, server)

    def RegisterJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.spec.name)
        job, created = self._coordinator.register_job(job_spec(request.spec))
        shard_map, size = self._shard_map(job.placed.placement), job.spec.bucket_bytes
        return jobs_pb2.RegisterJobResponse(shard_map=shard_map, created=created, bucket_bytes=size)

    def _shard_map(self, placement: Sequence[int]) -> Any:
        addresses = {index: shard.address for index, shard in self._coordinator.shards().items()}
        return convert.shard_map(addresses, placement)

    def JoinJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        rank = request.rank if request.HasField("rank") else None
        result = self._coordinator.join(request.job, rank, convert.join_request(request))
        return convert.join_response(result, self._coordinator.lease, self._shard_map(result.placement))

    def _watch(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        check_job(request.job)
        outbox = Outbox(send, context, self._senders)

        def changed(roster: Roster | None) -> None:
            if roster is None:
                outbox.finish()
            else:
                outbox.put(lambda: convert.watch_response(*roster))

        outbox.on_close(self._coordinator.job(request.job).watch(changed))

    def Heartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        who = request.rank, request.incarnation
        live = self._coordinator.job(request.job).members.heartbeat(*who, request.clock, request.lease_key)
        return membership_pb2.HeartbeatResponse(live_count=live)

    def LeaveJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        ended = self._coordinator.leave(request.job, request.rank, request.incarnation, request.lease_key)
        return membership_pb2.LeaveResponse(ended=ended)

    def LeaseData(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        who, ask = (request.rank, request.incarnation), lease_messages.lease_request(request)
        return lease_messages.lease_response(self._coordinator.job(request.job).data.lease(who, request.lease_key, ask))

    def _exchange(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        check_job(request.job)
        outbox = Outbox(send, context, self._senders)
        ask = convert.exchange_request(request)
        outbox.on_close(self._coordinator.job(request.job).rounds.exchange(ask, _RoundListener(outbox)))

    def SaveWorkerState(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        who = request.rank, request.incarnation, request.lease_key
        self._coordinator.job(request.job).save_worker_state(*who, request.clock, request.state)
        return membership_pb2.SaveWorkerStateResponse()

    def CheckpointJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        made = self._coordinator.job(request.job).checkpoint()
        return jobs_pb2.CheckpointJobResponse(name=made.name, clock=made.clock, bytes=made.bytes)

    def EndJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._coordinator.job(request.job).end()
        return jobs_pb2.EndJobResponse()


class _RoundListener:
    """Tells a worker over its stream how a round stands; see rounds.Listener."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.finish, self.fail = outbox.finish, outbox.fail

    def tell(self, standing: Standing) -> None:
        for response in convert.exchange_responses(standing):
            self._outbox.put(lambda response=response: response)  # type: ignore[misc]
        if standing.found is not None:
            self.finish()
