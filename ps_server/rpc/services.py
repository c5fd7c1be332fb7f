"""The gRPC methods: each checks, delegates, and answers. `messages` does the translating, `boundary` the errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ps_protocol.convert import job_spec
from ps_protocol.errors import PSError
from ps_protocol.v1 import control_pb2, control_pb2_grpc, data_pb2
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.job import CoordinatedJob, Roster
from ps_server.coordinator.rounds import Standing
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.core.validation import check_job_spec
from ps_server.rpc import convert, data_messages, lease_messages
from ps_server.rpc.call_limits import caller_name, check_job, may_see
from ps_server.rpc.streams import Outbox, Send
from ps_server.shard.job import HostedJob
from ps_server.shard.shard import Shard

DATA_SERVICE = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name
CONTROL_SERVICES = {name: service.full_name for name, service in control_pb2.DESCRIPTOR.services_by_name.items()}

AWAIT_SECONDS = 5.0

# More than one caller may have in flight (Limits.calls), so that none who dawdles holds them all. Threads are made when
# they are needed: ordinary traffic makes a few.
PUSH_THREADS = PULL_THREADS = SENDER_THREADS = 1024


class DataService:
    """Push and Pull, with identity serializers: protobuf never sees a payload."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.senders = ThreadPoolExecutor(SENDER_THREADS, "send")
        self._push_pool = ThreadPoolExecutor(PUSH_THREADS, "push")
        self._pull_pool = ThreadPoolExecutor(PULL_THREADS, "pull")

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server. Pushes and pulls have pools of their own, so neither can starve the other."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_in_pool(method, self._push_pool))
            for name, method in (
                ("Push", self._push),
                ("PushShared", self._push_shared),
                ("AttachSegment", self._attach),
            )
        } | {
            name: grpc.unary_stream_rpc_method_handler(_in_pool(method, self._pull_pool, non_blocking=True))
            for name, method in (
                ("Pull", self._pull),
                ("PullState", self._pull_state),
                ("PullShared", self._pull_shared),
                ("PushPullShared", self._push_pull_shared),
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DATA_SERVICE, handlers),))

    def stop(self) -> None:
        """Ends the pools after what they are doing."""
        for pool in (self._push_pool, self._pull_pool, self.senders):
            pool.shutdown(wait=True)

    def _push(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        push = data_messages.push(request)
        check_job(push.job)
        return data_messages.push_response(self._shard.push(replace(push, caller=caller_name())))

    def _attach(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        found = data_messages.attach_request(request)
        check_job(found[0])
        self._shard.attach(*found)
        return b""

    def _push_shared(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        push = data_messages.shared_push(request)
        check_job(push.job)
        return data_messages.shared_push_response(self._shard.push_shared(replace(push, caller=caller_name())))

    def _pull_shared(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        # What is ready at the same time goes in one message: a header is not worth a message of its own.
        call = data_messages.pull(request)
        check_job(call.job)
        outbox = Outbox(send, context, self.senders, join=True)
        self._shard.pull(call, outbox, shared=True)

    def _push_pull_shared(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        push, pull = data_messages.push_pull(request)
        check_job(push.job)
        outbox = Outbox(send, context, self.senders, join=True)
        self._shard.push_pull_shared(replace(push, caller=caller_name()), pull, outbox)

    def _pull(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull(request)
        check_job(call.job)
        outbox = Outbox(send, context, self.senders)
        self._shard.pull(call, outbox)

    def _pull_state(self, request: bytes, context: grpc.ServicerContext, send: Send) -> None:
        call = data_messages.pull_state(request)
        check_job(call.job)
        self._shard.pull_state(call, data_messages.pull_state_response, Outbox(send, context, self.senders))


def _in_pool(behaviour: Callable[..., Any], pool: ThreadPoolExecutor, non_blocking: bool = False) -> Callable[..., Any]:
    """A handler that runs in a pool of its own, and, if non-blocking, gives its thread back at once."""

    def handler(*arguments: Any) -> Any:
        return behaviour(*arguments)

    handler.experimental_thread_pool = pool  # type: ignore[attr-defined]
    handler.experimental_non_blocking = non_blocking  # type: ignore[attr-defined]
    return handler


class ShardService(control_pb2_grpc.ShardServiceServicer):  # type: ignore[misc,unused-ignore]
    """What the coordinator asks of a shard."""

    def __init__(self, shard: Shard, limits: Limits = DEFAULTS) -> None:
        self._shard = shard
        self._limits = limits

    def CreateJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = job_spec(request.spec)
        check_job_spec(spec, self._limits)
        self._shard.create_job(spec, list(request.buckets))
        return control_pb2.CreateJobResponse()

    def DropJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._shard.drop_job(request.job)
        return control_pb2.DropJobResponse()

    def AdmitWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        clock = request.clock if request.HasField("clock") else None
        frontier = self._shard.admit(request.job, request.rank, request.incarnation, clock, request.lease_key)
        return control_pb2.AdmitWorkerResponse(frontier=frontier)

    def RetireWorker(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._shard.retire(request.job, request.rank, request.incarnation)
        return control_pb2.RetireWorkerResponse()

    def GetCommittedData(self, request: Any, context: grpc.ServicerContext) -> Any:
        return lease_messages.committed_response(*self._shard.committed(request.job))

    def BeginCheckpoint(self, request: Any, context: grpc.ServicerContext) -> Any:
        clock = request.clock if request.HasField("clock") else None
        self._shard.begin_checkpoint(request.job, request.name, clock)
        return control_pb2.BeginCheckpointResponse()

    def AwaitCheckpoint(self, request: Any, context: grpc.ServicerContext) -> Any:
        captured = self._shard.await_checkpoint(request.job, request.name, AWAIT_SECONDS)
        return convert.await_checkpoint_response(captured)

    def RestoreJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = job_spec(request.spec)
        check_job_spec(spec, self._limits)
        reached = self._shard.restore_job(spec, list(request.buckets), request.name, request.last_incarnation)
        return convert.restore_job_response(reached)

    def GetShardStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        jobs = [_shard_job_status(name, job) for name, job in sorted(self._shard.jobs().items()) if may_see(name)]
        return control_pb2.GetShardStatusResponse(jobs=jobs)


def _shard_job_status(name: str, job: HostedJob) -> Any:
    now = time.monotonic()
    with job.lock:
        low, high = job.state.versions()
        status = control_pb2.ShardJobStatus(
            job=name,
            bucket_count=len(job.buckets),
            parameter_bytes=job.state.parameter_bytes,
            optimizer_bytes=job.state.optimizer_bytes,
            staged_bytes=job.state.staged_bytes,
            version_min=low,
            version_max=high,
            clocks=job.state.clocks(),
        )
        waits: dict[int, Any] = {}
        for bucket in job.buckets.values():
            for waiter in bucket.waiters:
                wait = waits.setdefault(waiter.pull.rank, control_pb2.WaitStatus(rank=waiter.pull.rank))
                wait.clock = waiter.pull.clock
                wait.bucket_count += 1
                wait.waiting_for[:] = sorted({*wait.waiting_for, *waiter.verdict.waiting_for})
                wait.reason = waiter.verdict.reason
                wait.waited.FromTimedelta(timedelta(seconds=now - waiter.pull.since))
    status.waits.extend(wait for _, wait in sorted(waits.items()))
    return status


class JobService(control_pb2_grpc.JobServiceServicer):  # type: ignore[misc,unused-ignore]
    """What workers ask of the coordinator."""

    def __init__(self, coordinator: Coordinator, senders: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._senders = senders
        setattr(self, "WatchJob", _in_pool(self._watch, senders, non_blocking=True))  # noqa: B010
        setattr(self, "ExchangeValues", _in_pool(self._exchange, senders, non_blocking=True))  # noqa: B010

    def RegisterJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.spec.name)
        job, created = self._coordinator.register_job(job_spec(request.spec))
        shard_map, size = self._shard_map(job.placement), job.spec.bucket_bytes
        return control_pb2.RegisterJobResponse(shard_map=shard_map, created=created, bucket_bytes=size)

    def _shard_map(self, placement: list[int]) -> Any:
        addresses = {index: shard.client.address for index, shard in self._coordinator.shards().items()}
        return convert.shard_map(addresses, placement)

    def JoinJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        rank = request.rank if request.HasField("rank") else None
        newcomer = convert.newcomer(request)
        seat = self._coordinator.join(request.job, rank, newcomer)
        return convert.join_response(seat, self._coordinator.lease, self._shard_map(seat.placement))

    def _watch(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        check_job(request.job)
        outbox = Outbox(send, context, self._senders)

        def changed(roster: Roster | None) -> None:
            if roster is None:
                outbox.finish()
            else:
                outbox.put(lambda: convert.watch_response(*roster))

        outbox.on_close(self._coordinator.watch(request.job, changed))

    def Heartbeat(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        who = request.rank, request.incarnation
        live = self._coordinator.heartbeat(request.job, *who, request.clock, request.lease_key)
        return control_pb2.HeartbeatResponse(live_count=live)

    def LeaveJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        ended = self._coordinator.leave(request.job, request.rank, request.incarnation, request.lease_key)
        return control_pb2.LeaveJobResponse(ended=ended)

    def LeaseData(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        ask = lease_messages.lease_request(request)
        return lease_messages.lease_response(ask.loader, self._coordinator.lease_data(request.job, ask))

    def _exchange(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        check_job(request.job)
        outbox = Outbox(send, context, self._senders)
        ask = convert.exchange_request(request)
        outbox.on_close(self._coordinator.exchange(request.job, ask, _RoundListener(outbox)))

    def SaveWorkerState(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.job)
        who = request.rank, request.incarnation, request.lease_key
        self._coordinator.save_worker_state(request.job, *who, request.clock, request.state)
        return control_pb2.SaveWorkerStateResponse()

    def CheckpointJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        made = self._coordinator.checkpoint_job(request.job)
        return control_pb2.CheckpointJobResponse(name=made.name, clock=made.clock, bytes=made.bytes)

    def EndJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._coordinator.end_job(request.job)
        return control_pb2.EndJobResponse()


class _RoundListener:
    """Tells a worker over its stream how a round stands; see exchanging.Listener."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.finish, self.fail = outbox.finish, outbox.fail

    def tell(self, standing: Standing) -> None:
        for response in convert.exchange_responses(standing):
            self._outbox.put(lambda response=response: response)  # type: ignore[misc]
        if standing.found is not None:
            self.finish()


class ClusterService(control_pb2_grpc.ClusterServiceServicer):  # type: ignore[misc,unused-ignore]
    """What shards and operators ask of the coordinator."""

    def __init__(self, coordinator: Coordinator, address: str, metrics_address: str) -> None:
        self._coordinator = coordinator
        self._address = address
        self._metrics_address = metrics_address
        self._pool = ThreadPoolExecutor(max(4, coordinator.shard_count), "status")

    def RegisterShard(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._coordinator.register_shard(
            request.index, request.address, request.metrics_address, request.pid, request.process
        )
        return control_pb2.RegisterShardResponse(
            shard_count=self._coordinator.shard_count, stopping=self._coordinator.stopping
        )

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        shards = sorted(self._coordinator.shards().items())
        answers = list(self._pool.map(lambda item: _ask_status(*item), shards))
        for shard in answers:  # the shards have told the coordinator, which may see everything
            seen = [job for job in shard.jobs if may_see(job.job)]
            del shard.jobs[:]
            shard.jobs.extend(seen)
        return control_pb2.GetStatusResponse(
            address=self._address,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
            shard_count=self._coordinator.shard_count,
            shards=answers,
            jobs=[_job_status(job) for name, job in sorted(self._coordinator.jobs().items()) if may_see(name)],
        )


def _ask_status(index: int, shard: Any) -> Any:
    status = control_pb2.ShardStatus(
        index=index, address=shard.client.address, metrics_address=shard.metrics_address, pid=shard.pid
    )
    try:
        status.jobs.extend(shard.client.status().jobs)
        status.reachable = True
    except PSError:
        status.reachable = False
    return status


def _job_status(job: CoordinatedJob) -> Any:
    _, world_size, started = job.roster()
    status = control_pb2.JobStatus(
        name=job.spec.name,
        mode=str(job.spec.consistency),
        world_size=world_size,
        started=started,
        parameter_bytes=job.bytes,
        bucket_count=len(job.placement),
        imbalance=job.imbalance,
        restore_count=job.restore_count,
        lost_steps=job.lost_steps,
        redone_steps=job.redone_steps,
        awaited=sorted(job.membership.awaited),
    )
    last = job.checkpoints.last if job.checkpoints is not None else None
    if last is not None:
        status.checkpoint, status.checkpoint_clock = last.name, last.clock
    now = time.monotonic()
    for member in job.members():
        worker = status.workers.add(
            rank=member.rank,
            incarnation=member.incarnation,
            clock=member.clock,
            pid=member.pid,
            host=member.host,
            metrics_address=member.metrics_address,
            launch=member.launch,
        )
        if member.since:
            worker.since.FromMilliseconds(int(member.since * 1e3))
        worker.lease_left.FromTimedelta(timedelta(seconds=max(0.0, member.expires - now)))
    status.loaders.extend(lease_messages.loader_status(loader, how) for loader, how in job.data.progress().items())
    return status


def add_health(server: grpc.Server, pool: ThreadPoolExecutor, services: list[str]) -> health.HealthServicer:
    """The standard health service, which answers while pushes and pulls keep their own pools busy; and reflection."""
    servicer = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=pool)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer
