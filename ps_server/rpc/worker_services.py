"""The coordinator's services for workers: membership, rounds of values, and data leases."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

from ps_protocol.convert import data_range_messages
from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.identity import Identity
from ps_protocol.job import MAX_SCRIPT_BYTES
from ps_protocol.messages.workers import (
    JoinResult,
    SavedState,
    ShardPushed,
    ValueNews,
    read_gather,
    read_join,
    read_lease_request,
    write_joined,
    write_round_news,
)
from ps_protocol.v1 import leases_pb2, leases_pb2_grpc, membership_pb2, membership_pb2_grpc, rounds_pb2, rounds_pb2_grpc
from ps_runtime.pools import Pool
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.job_value_rounds import Standing
from ps_server.coordinator.job_workers import Roster
from ps_server.core.membership import NamedProcess, ShardProgress
from ps_server.core.thread_shares import MOST_OF_A_POOL
from ps_server.core.validation import check_host, check_launch
from ps_server.rpc import shard_messages
from ps_server.rpc.call_limits import check_job, in_pool
from ps_server.rpc.streams import GrpcCall, ResponseStream, Send


class _Newest:
    """The next roster for one watcher. A newer roster replaces one that was not sent yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roster: Roster | None = None

    def put(self, roster: Roster) -> bool:
        """Sets the next roster. Returns True if none was waiting to be sent, so that the caller must start a send."""
        with self._lock:
            is_first, self._roster = self._roster is None, roster
            return is_first

    def take(self) -> Roster:
        """Returns the roster to send, and removes it."""
        with self._lock:
            roster, self._roster = self._roster, None
            assert roster is not None
            return roster


class MembershipService(membership_pb2_grpc.MembershipServiceServicer):  # type: ignore[misc,unused-ignore]
    """Workers join, send heartbeats and leave; watchers get the roster. Heartbeats have threads of their own.

    senders: the threads that send rosters to watchers
    threads: the number of threads for heartbeats
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
        joined = self._coordinator.join(request.job, rank, read_join(request))
        live, state = joined.worker, joined.state
        result = JoinResult(
            Identity(request.job, live.rank, live.incarnation, live.key, joined.run),
            joined.clock,
            self._coordinator.lease,
            self._coordinator.shard_map(joined.placement),
            joined.restore_count,
            SavedState(*state) if state is not None else None,
            live.pushed,
            _pushed(live.on_shards),
            joined.continued,
        )
        return write_joined(result)

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
        figures = shard_messages.worker_figures(request.figures) if request.HasField("figures") else None
        job.check_member(worker.member)
        check_host(request.host)
        process = (request.host, request.pid) if request.host else None
        identity = worker.rank, worker.incarnation
        live = job.workers.heartbeat(*identity, request.clock, worker.lease_key, worker.member, process)
        if job.checkpoints is not None:
            job.checkpoints.joined(worker.rank, has_place=True)
        answer = membership_pb2.HeartbeatResponse(live_count=live)
        if not worker.member:  # the first member of a group speaks for it
            if figures is not None:
                job.figures.heard(worker.rank, worker.incarnation, figures)
            answer.script_request = job.script.asked_by_heartbeat(worker.rank)
        if request.script_wanted:
            report, answer.script_coming = job.script.ask(worker.rank, worker.incarnation)
            if report is not None:
                answer.script.clock, answer.script.content = report
        return answer

    def SaveWorkerState(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker, state = request.worker, request.state
        check_job(worker.job)
        identity, report = (worker.rank, worker.incarnation, worker.lease_key), _report(request)
        job = self._coordinator.job(worker.job, worker.run)
        if report is not None or request.script_request:
            job.workers.check(*identity)
        # The first member speaks for its group.
        if (report is not None or request.script_request) and not worker.member:
            job.script.tell(worker.rank, request.script_request, report)
        if request.HasField("state") or not request.script_request:
            job.save_worker_state(*identity, state.clock, state.content, worker.member)
        return membership_pb2.SaveWorkerStateResponse()

    def Leave(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker = request.worker
        check_job(worker.job)
        identity = worker.job, worker.rank, worker.incarnation
        state = (request.state.clock, request.state.content) if request.HasField("state") else None
        report = _report(request)
        speaks = not worker.member  # for its group
        if speaks and report is not None and len(report[1]) <= MAX_SCRIPT_BYTES:
            with suppress(PSError):  # the worker is no longer live, and leaves nevertheless
                job = self._coordinator.job(worker.job, worker.run)
                job.workers.check(worker.rank, worker.incarnation, worker.lease_key)
                job.script.tell(worker.rank, 0, report)
        if speaks and request.done and request.HasField("figures"):
            with suppress(PSError):  # the same; and an error in the report prevents no worker from leaving
                job = self._coordinator.job(worker.job, worker.run)
                job.workers.check(worker.rank, worker.incarnation, worker.lease_key)
                job.figures.done(worker.rank, shard_messages.worker_figures(request.figures))
        ended = self._coordinator.leave(*identity, worker.lease_key, worker.run, state, request.done, worker.member)
        return membership_pb2.LeaveResponse(ended=ended)

    def ReportWorkerEnd(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        process = _process(request)
        return membership_pb2.ReportWorkerEndResponse(ranks=self._coordinator.job(request.job).expire(process))


def _pushed(on_shards: Mapping[int, ShardProgress]) -> dict[int, ShardPushed]:
    """Returns the last clocks that a rank had pushed on each shard; empty if a shard does not report them."""
    if any(counted.further is None for counted in on_shards.values()):
        return {}
    return {
        shard: ShardPushed(counted.pushed, counted.further or {})
        for shard, counted in on_shards.items()
        if counted.pushed is not None
    }


def _report(request: membership_pb2.SaveWorkerStateRequest | membership_pb2.LeaveRequest) -> tuple[int, bytes] | None:
    """Returns the worker's state in a request, with its clock; None if it has none."""
    return (request.script.clock, request.script.content) if request.HasField("script") else None


def _process(request: membership_pb2.ReportWorkerEndRequest) -> NamedProcess:
    """Returns the process whose end a launcher reports. Raises InvalidRequest unless launch, host and pid are named as
    workers name them.
    """
    check_host(request.host)
    check_launch(request.launch)
    if not request.launch or not request.pid:
        raise InvalidRequest(f"a process is named by its launch and pid, got {request.launch!r} and {request.pid}")
    return NamedProcess(request.launch, request.host, request.pid, request.incarnation)


# -- leases of data ----------------------------------------------------------------------------------------------------


class DataLeaseService(leases_pb2_grpc.DataLeaseServiceServicer):  # type: ignore[misc,unused-ignore]
    """Leases batches of data."""

    NAME = leases_pb2.DESCRIPTOR.services_by_name["DataLeaseService"].full_name

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        leases_pb2_grpc.add_DataLeaseServiceServicer_to_server(self, server)

    def LeaseData(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker = request.worker
        check_job(worker.job)
        data, asked = self._coordinator.job(worker.job, worker.run).data, read_lease_request(request)
        lease = data.lease_batches((worker.rank, worker.incarnation), worker.lease_key, asked)
        return leases_pb2.LeaseDataResponse(ranges=data_range_messages(lease.ranges), complete=lease.complete)


# -- rounds of values --------------------------------------------------------------------------------------------------


class RoundService(rounds_pb2_grpc.RoundServiceServicer):  # type: ignore[misc,unused-ignore]
    """Collects a value from each worker, and sends all values to each. senders: the threads that send to waiting
    workers
    """

    NAME = rounds_pb2.DESCRIPTOR.services_by_name["RoundService"].full_name

    def __init__(self, coordinator: Coordinator, senders: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._senders = senders
        setattr(self, "GatherValues", in_pool(self._gather, None, non_blocking=True))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        rounds_pb2_grpc.add_RoundServiceServicer_to_server(self, server)

    def _gather(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        asked = read_gather(request)
        check_job(asked.worker.job)
        stream = ResponseStream(send, GrpcCall(context), self._senders)
        job = self._coordinator.job(asked.worker.job, asked.worker.run)
        stream.on_close(job.rounds.gather_values(asked, _RoundListener(stream)))


class _RoundListener:
    """Sends a worker the state of a round over its stream; see RoundReceiver."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self.finish, self.fail = stream.finish, stream.fail

    def tell(self, standing: Standing) -> None:
        complete = standing.complete
        values, refused = (dict(complete.values), complete.refused) if complete is not None else ({}, "")
        news = ValueNews(
            standing.number, complete is not None, values, refused, standing.waiting_for, standing.step_wanted
        )
        for response in write_round_news(news):
            self._stream.put(lambda response=response: response)  # type: ignore[misc]
        if standing.complete is not None:
            self.finish()
