"""Serves workers that join a job, stay in it, and leave it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

from ps_protocol.errors import PSError
from ps_protocol.job import MAX_SCRIPT_BYTES
from ps_protocol.v1 import membership_pb2, membership_pb2_grpc
from ps_runtime.pools import Pool
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.members import Roster
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.rpc import convert, figure_messages
from ps_server.rpc.call_limits import check_job, in_pool
from ps_server.rpc.streams import GrpcCall, ResponseStream, Send


class _Newest:
    """The roster that a watcher is to be sent next: the newest in place of one that was not. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roster: Roster | None = None

    def put(self, roster: Roster) -> bool:
        """Puts a roster in place of one that was not taken; returns whether there was none."""
        with self._lock:
            is_first, self._roster = self._roster is None, roster
            return is_first

    def take(self) -> Roster:
        """Takes it."""
        with self._lock:
            roster, self._roster = self._roster, None
            assert roster is not None
            return roster


class MembershipService(membership_pb2_grpc.MembershipServiceServicer):  # type: ignore[misc,unused-ignore]
    """Lets workers join and leave, and says which are live. Heartbeats have threads of their own.

    senders: send to those that watch
    threads: for heartbeats
    """

    NAME = membership_pb2.DESCRIPTOR.services_by_name["MembershipService"].full_name

    def __init__(self, coordinator: Coordinator, senders: ThreadPoolExecutor, threads: int = MOST_OF_A_POOL) -> None:
        self._coordinator = coordinator
        self._senders = senders
        self._heartbeat_pool = Pool(threads, "heartbeat")
        setattr(self, "Watch", in_pool(self._watch, None, non_blocking=True))  # noqa: B010
        setattr(self, "Heartbeat", in_pool(self._heartbeat, self._heartbeat_pool))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(self, server)

    def stop(self) -> None:
        """Ends the threads for heartbeats."""
        self._heartbeat_pool.shutdown(wait=True)

    def Join(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        rank = request.rank if request.HasField("rank") else None
        result = self._coordinator.join(request.job, rank, convert.join_request(request))
        where = convert.shard_map(self._coordinator.shards(), result.placement)
        return convert.join_response(request.job, result, self._coordinator.lease, where)

    def _watch(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        check_job(request.job)
        stream, newest = ResponseStream(send, GrpcCall(context), self._senders), _Newest()

        def message() -> Any:
            ranks, world_size, started = newest.take()
            response = membership_pb2.WatchResponse(ranks=ranks, world_size=world_size, started=started)
            asked = job.script.asked_now()
            if asked is not None:
                response.script_rank, response.script_request = asked
            return response

        def changed(roster: Roster | None) -> None:
            if roster is None:
                stream.finish()
            elif newest.put(roster):
                stream.put(message)

        job = self._coordinator.job(request.job)
        stream.on_close(job.watchers.add(changed))

    def _heartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker = request.worker
        check_job(worker.job)
        job = self._coordinator.job(worker.job, worker.run)
        figures = figure_messages.worker_figures(request.figures) if request.HasField("figures") else None
        live = job.members.heartbeat(worker.rank, worker.incarnation, request.clock, worker.lease_key)
        if figures is not None:
            job.figures.heard(worker.rank, worker.incarnation, figures)
        answer = membership_pb2.HeartbeatResponse(
            live_count=live, script_request=job.script.asked_by_heartbeat(worker.rank)
        )
        if request.script_wanted:
            told, answer.script_coming = job.script.ask(worker.rank, worker.incarnation)
            if told is not None:
                answer.script.clock, answer.script.content = told
        return answer

    def SaveWorkerState(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker, state = request.worker, request.state
        check_job(worker.job)
        identity, told = (worker.rank, worker.incarnation, worker.lease_key), convert.told(request)
        job = self._coordinator.job(worker.job, worker.run)
        if told is not None or request.script_request:
            job.members.check(*identity)
            job.script.tell(worker.rank, request.script_request, told)
        if request.HasField("state") or not request.script_request:
            job.save_worker_state(*identity, state.clock, state.content)
        return membership_pb2.SaveWorkerStateResponse()

    def Leave(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker = request.worker
        check_job(worker.job)
        identity = worker.job, worker.rank, worker.incarnation
        state = (request.state.clock, request.state.content) if request.HasField("state") else None
        told = convert.told(request)
        if told is not None and len(told[1]) <= MAX_SCRIPT_BYTES:
            with suppress(PSError):  # it has lost its place, and leaves all the same
                job = self._coordinator.job(worker.job, worker.run)
                job.members.check(worker.rank, worker.incarnation, worker.lease_key)
                job.script.tell(worker.rank, 0, told)
        if request.done and request.HasField("figures"):
            with suppress(PSError):  # the same; and what is wrong with them keeps nobody from leaving
                job = self._coordinator.job(worker.job, worker.run)
                job.members.check(worker.rank, worker.incarnation, worker.lease_key)
                job.figures.done(worker.rank, figure_messages.worker_figures(request.figures))
        ended = self._coordinator.leave(*identity, worker.lease_key, worker.run, state, request.done)
        return membership_pb2.LeaveResponse(ended=ended)

    def ReportWorkerEnd(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        process = convert.worker_process(request)
        return membership_pb2.ReportWorkerEndResponse(ranks=self._coordinator.job(request.job).expire(process))
