"""One server process: a gRPC port, a metrics port, and behind them a coordinator, a shard, or both.

Making a `Server` starts it: it binds its port, wires coordinator and shard to their services, and registers with the
coordinator. `drain` makes last checkpoints before an ordered stop; `stop` ends every thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import grpc
import torch
from grpc_health.v1.health import HealthServicer

from ps_frames.listener import Where
from ps_protocol.convert import AnsweringShard
from ps_protocol.errors import TryLater
from ps_protocol.handover import MOST_FILES
from ps_protocol.optimizers import ELEMENTWISE
from ps_runtime.arrivals import HostLimits
from ps_runtime.background import guarded
from ps_runtime.channel import server_options
from ps_runtime.credentials import Access
from ps_runtime.memory import free_bytes
from ps_runtime.memory_place import memory_place
from ps_runtime.metrics import process_registry, serve_metrics
from ps_runtime.pools import Pool
from ps_runtime.retry import Peer
from ps_runtime.web import MAX_CONNECTIONS
from ps_server.config import ServerConfig
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.coordinator import Coordinator
from ps_server.core.limits import Limits
from ps_server.core.thread_shares import (
    POOLS_OF_A_COORDINATOR,
    POOLS_OF_A_SHARD,
    POOLS_OF_EACH,
    ThreadShares,
)
from ps_server.ops.gauges import (
    coordinator_gauges,
    loops_gauge,
    restart_gauges,
    service_discovery,
    shard_gauges,
)
from ps_server.ops.glibc import give_memory_back
from ps_server.ops.health_port import HealthPort
from ps_server.ops.page import coordinators_page
from ps_server.ops.security_gauges import security_gauges
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.call_limits import CallLimits, grpc_options, note_event
from ps_server.rpc.cluster_service import ClusterService
from ps_server.rpc.data_service import DataService
from ps_server.rpc.feed_service import FeedService
from ps_server.rpc.grpc_port import allow_many_files, bind, reachable, shares_of_threads, start_grpc, stop_grpc
from ps_server.rpc.health import HEALTH_THREADS, add_health
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.job_service import ANSWER_SECONDS, JobService
from ps_server.rpc.own_ports import OwnPorts
from ps_server.rpc.registration import ShardRegistration
from ps_server.rpc.shard_client import ShardClient
from ps_server.rpc.shard_service import ShardService
from ps_server.rpc.views import Views
from ps_server.rpc.worker_services import DataLeaseService, MembershipService, RoundService
from ps_server.shard.mapped import MOST_READERS
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.native_loops import use_native_loops
from ps_server.shard.shard import Shard
from ps_server.shard.threads import OwnThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.own_disk import own_directory, take_own_disk
from ps_server.storage.row_files import RowFiles
from ps_server.view.watch import Watch

log = logging.getLogger("ps_server")

OTHERS_LOOK_SECONDS = 0.2
_LEAST_STATE_BYTES = 64 * 2**20  # where next to nothing is free, or nothing is known
# Open files for readers on this host that read one job: two editions, with two descriptors for each mapped file.
_SHARED_FILES = MOST_READERS + 2 * 2 * MOST_FILES
_LEAST_FEED_BYTES = 256 * 2**20  # 64 readers of rows


class Service(Protocol):
    """A gRPC service of this process; NAME is its full name."""

    NAME: str

    def register(self, server: grpc.Server) -> None:
        """Adds its methods to a server."""


@dataclass(frozen=True)
class Health:
    """A server's health: the gRPC service, and the port for probes if there is one."""

    service: HealthServicer
    port: HealthPort | None

    def say_ending(self) -> None:
        """Marks the server as no longer ready, for probes."""
        if self.port is not None:
            self.port.is_ending = True


class Server:
    """A running server process. `address` and `metrics_address` are its public addresses. `process` is a number that no
    other process has; its launcher reports the process's end with it.

    Raises InvalidRequest if a port cannot be bound, naming it.
    """

    def __init__(self, config: ServerConfig) -> None:
        # torch imports much of itself when the first optimizer is made: now, not while the first job waits.
        ELEMENTWISE["SGD"]([torch.zeros(1)], lr=0.0)  # type: ignore[call-arg]
        torch.set_num_threads(1)  # the apply threads are the parallelism; more would fight over the same cores
        self._config = config
        self.process = secrets.randbits(63)  # a restarted process has another number
        exposed = config.is_exposed()
        allow_many_files(config.limits.connections + _SHARED_FILES)
        authenticator = Authenticator(config.tokens)
        token = authenticator.cluster_token if authenticator.is_required else None
        self._access = Access(config.tls, token, config.insecure)
        self._registry = process_registry()
        self._threads = _shares_of_threads(config)
        limits = CallLimits(
            authenticator, config.limits, config.index is not None, give_memory_back, self._threads.pool
        )
        control_pool = Pool(self._threads.pool, "control")
        self._calls = CallInterceptor(self._registry, limits, control_pool)
        self._grpc = grpc.server(
            control_pool,
            interceptors=[self._calls],
            options=server_options() + grpc_options(config.limits),
        )
        port = bind(self._grpc, config.host, config.port, config.tls)
        self.address = config.advertise or f"{reachable(config.host)}:{port}"
        self._stops: list[Callable[[], None]] = [limits.stop]
        self._last_stops: list[Callable[[], None]] = [control_pool.shutdown]
        encrypted, asks = config.tls is not None, authenticator.is_required
        self._registry.register(security_gauges(limits, exposed, encrypted, asks))
        if exposed:
            log.warning("insecure: %s serves plaintext beyond this machine, as --insecure says", self.address)
        self._serving: list[threading.Thread] = []  # without which nothing is served
        self._data_port = 0
        self.shard: Shard | None = None  # set where this process is a shard
        self.coordinator = self._make_coordinator() if config.shard_count is not None else None
        self.metrics_address = ""
        views = self._make_views(self.coordinator) if self.coordinator is not None else None
        self.metrics_address = self._serve_metrics(config, views)
        names: list[str] = []
        if self.coordinator is not None and views is not None:
            names += self._add_coordinator(self.coordinator, views)
        if config.index is not None:
            names += self._add_shard()
        health_pool = Pool(HEALTH_THREADS, "health")
        health = add_health(self._grpc, health_pool, names)
        self._last_stops.append(health_pool.shutdown)
        self._serving += [limits.thread, *start_grpc(self._grpc)]
        self.ports = self._own_ports(port)
        self._registration = self._register(config.index, port) if config.index is not None else None
        self.health = Health(health, self._open_health_port(config))

    def _own_ports(self, port: int) -> OwnPorts:
        config, name = self._config, self.address.rpartition(":")[0].strip("[]")
        return OwnPorts(config.host, port, self._data_port, config.tls, name, self._serving)

    def _register(self, index: int, port: int) -> ShardRegistration:
        config = self._config
        address = config.coordinator or f"{reachable(config.host)}:{port}"
        return ShardRegistration(
            Peer("coordinator", address, self._access),
            *(index, self.address, self.metrics_address, self.process),
            restart_count=config.restart_count,
            memory_place=memory_place(config.shared_directory),
        )

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the coordinator knows this shard; returns True at once for a coordinator alone."""
        return self._registration is None or self._registration.known.wait(timeout)

    def calls_in_flight(self) -> int:
        """Returns how many calls this process is answering now."""
        return self._calls.limits.statistics()["calls"]

    def drain(self, seconds: float) -> None:
        """Prepares an ordered stop: lets no more workers join, and makes last checkpoints if the servers make any.

        seconds: how long workers have to reach the last checkpoint. A push that a shard acknowledged after its copy
                 would be missing in it, so the shard acknowledges none from then on.
        """
        self.health.say_ending()
        if self._config.checkpoint_dir is None:
            return
        if self.coordinator is not None:
            self.coordinator.drain(seconds)
        elif self.shard is not None and self._registration is not None:
            timing = self._config.timing
            most = timing.stops_together + seconds + timing.fallback + ANSWER_SECONDS
            jobs = self.shard.jobs()
            for job in jobs.values():
                job.refusals.seconds = most + timing.refusal
            last = [partial(guarded, "drain", partial(self._registration.checkpoint, name, most)) for name in jobs]
            try:
                with Pool(max(1, len(jobs)), "drain") as pool:  # each job has all of the time
                    for task in last:
                        pool.submit(task)
            except TryLater:  # no thread can be had: one after the other
                for task in last:
                    task()

    def is_in_checkpoints(self) -> bool:
        """Whether a checkpoint that is made now needs this shard."""
        has_jobs = self.shard is not None and len(self.shard.jobs()) > 0
        return has_jobs and self._config.checkpoint_dir is not None and self.wait_ready(0)

    def outlive(self, seconds: float) -> None:
        """Keeps the coordinator alive while other shards of the cluster answer.

        The `ps-worker run` beside each of them asks it whether the job is over, and then ends its shard.

        Returns at once on a server that is no coordinator, and while a job runs.

        seconds: the longest time to wait
        """
        coordinator, until = self.coordinator, time.monotonic() + seconds
        if coordinator is None or coordinator.jobs():
            return
        while time.monotonic() < until and coordinator.shard_directory.others_answer(self._config.index):
            time.sleep(OTHERS_LOOK_SECONDS)

    def stop(self) -> None:
        """Stops admitting calls, applies staged contributions, and ends every thread."""
        self.health.say_ending()
        self.health.service.enter_graceful_shutdown()
        if self._registration is not None:
            self._registration.stop()
        # The pools are shut down last: a call that needs a pool which is shut down would end gRPC's thread with an
        # exception.
        stop_grpc(self._grpc, self._stops, self._last_stops)

    def _make_coordinator(self) -> Coordinator:
        config = self._config
        assert config.shard_count is not None
        charge = Charge()

        def connect(index: int, address: str) -> ShardClient:
            return ShardClient(index, address, self._access, config.server_call_seconds, charge)

        policy = config.checkpoint_policy(self.address)
        timing = replace(config.timing, deserted=config.job_timeout, absence=config.absence_seconds)
        coordinator = Coordinator(
            *(config.shard_count, connect, config.lease, _with_memory(config.limits, config.index is not None), policy),
            *(timing,),
            charge=charge,
        )
        coordinator.events.notify = note_event
        coordinator.start()
        return coordinator

    def _make_views(self, coordinator: Coordinator) -> Views:
        watch = Watch(coordinator, self._config.limits.views)
        return Views(
            watch, coordinator.events, coordinator.shard_directory.count, lambda: (self.address, self.metrics_address)
        )

    def _serve_metrics(self, config: ServerConfig, views: Views | None) -> str:
        coordinator = self.coordinator
        pages = {} if coordinator is None else {"/sd": lambda: service_discovery(coordinator, config.tls is not None)}
        site = coordinators_page(views) if views is not None and config.shows_page() else None
        where = config.metrics_host, config.metrics_port
        hosts = HostLimits(config.limits.connections_of_a_host, config.limits.new_connections)
        port, stop = serve_metrics(*where, self._registry, pages, config.tls, site, hosts)
        self._stops.append(stop)
        host = self.address.rpartition(":")[0] if config.advertise else reachable(config.metrics_host)
        return f"{host}:{port}"

    def _open_health_port(self, config: ServerConfig) -> HealthPort | None:
        if config.health_port is None:
            return None
        port = HealthPort(config.host, config.health_port, lambda: self.wait_ready(0), self.ports.trouble)
        self._stops.append(port.stop)
        return port

    def _add_coordinator(self, coordinator: Coordinator, views: Views) -> list[str]:
        senders = Pool(self._threads.pool, "watch")
        membership = MembershipService(coordinator, senders, self._threads.pool)
        views.watch.start()
        cluster = ClusterService(coordinator, views, senders)
        services: list[Service] = [
            JobService(coordinator),
            membership,
            DataLeaseService(coordinator),
            RoundService(coordinator, senders),
            cluster,
        ]
        for service in services:
            service.register(self._grpc)
        self._registry.register(coordinator_gauges(coordinator))
        self._stops += [views.watch.stop, coordinator.stop]
        self._last_stops += [membership.stop, senders.shutdown, cluster.stop]
        return [service.NAME for service in services]

    def _add_shard(self) -> list[str]:
        checkpoints, release = self._open_checkpoints()
        level = use_native_loops(self._config.native)
        shard = Shard(
            ShardMetrics(self._registry),
            OwnThreads(self._config.apply_threads),
            shared_directory=self._config.shared_directory,
            staged_limit=self._config.limits.staged_bytes,
            checkpoints=checkpoints,
            index=self._config.index or 0,
            norm_limit=self._config.limits.push_norm,
            principal_limit=self._config.limits.caller_bytes,
            pulled_limit=self._config.limits.pulled_buckets,
            feed_limit=self._config.limits.feeds,
            feed_bytes=_feed_bytes(self._config.limits),
            table_limit=self._config.limits.table_bytes,
            row_files=self._row_files(),
        )
        self.shard = shard
        origin = AnsweringShard(self._config.index or 0, self.process)
        pool, connections = self._threads.pool, self._threads.connections
        data, feeds = DataService(shard, origin, pool), FeedService(shard, origin, pool)
        data.register(self._grpc)
        feeds.register(self._grpc)
        config = self._config
        port = None if config.no_data_port else config.data_port
        where = Where(config.host, port, config.tls, config.shared_directory)
        listener = data.listen(self._calls, config.limits, where, connections)
        self._serving.append(listener.thread)
        self._data_port = listener.offer.port
        control_pool = Pool(pool, "shard")
        control = ShardService(shard, self._config.limits, self.process, control_pool)
        control.register(self._grpc)
        self._registry.register(shard_gauges(shard))
        self._registry.register(restart_gauges(self._config.restart_count))
        self._registry.register(loops_gauge(level))
        self._stops += [shard.stop, data.close_connections, release]
        self._last_stops += [data.stop, feeds.stop, control_pool.shutdown]
        return [data.NAME, feeds.NAME, control.NAME]

    def _row_files(self) -> RowFiles | None:
        directory = self._config.cold_rows_dir
        if directory is None:
            return None
        files = RowFiles(directory, self._config.limits.cold_row_bytes, Pool)
        self._last_stops.append(files.stop)
        return files

    def _open_checkpoints(self) -> tuple[CheckpointStore | None, Callable[[], None]]:
        """Returns the store of this shard's checkpoints, if there is one, and a function that releases its lock."""
        directory, index = self._config.checkpoint_dir, self._config.index or 0
        if directory is None or not self._config.own_disk:
            return CheckpointStore(directory) if directory is not None else None, lambda: None
        disk, release = take_own_disk(directory, index, self.address, time.time())
        log.info("checkpoints: this shard's own disk is %s, at %s", disk, own_directory(directory, index))
        return CheckpointStore(directory, own_disk=disk), release


def _shares_of_threads(config: ServerConfig) -> ThreadShares:
    """Divides the threads that this process may have, and logs the shares."""
    is_shard, is_coordinator = config.index is not None, config.shard_count is not None
    pools = POOLS_OF_EACH + is_shard * POOLS_OF_A_SHARD + is_coordinator * POOLS_OF_A_COORDINATOR
    sites = 1 + (config.health_port is not None)
    others = config.apply_threads + (config.shard_count or 0) + sites * MAX_CONNECTIONS
    return shares_of_threads(config.limits, pools, others)


def _feed_bytes(limits: Limits) -> int:
    """Returns the bytes that messages of one principal's feeds may take: by default a quarter of the free memory."""
    if limits.feed_bytes is not None:
        return limits.feed_bytes
    return max(_LEAST_FEED_BYTES, (free_bytes() or 0) // 4)


def _with_memory(limits: Limits, is_shard: bool) -> Limits:
    """Returns the limits with the coordinator's budgets for workers' states and values: a fraction of the free memory.

    is_shard: whether this process also needs memory for weights
    """
    states, free = limits.all_state_bytes, free_bytes()
    if states is None:
        states = _LEAST_STATE_BYTES if free is None else max(_LEAST_STATE_BYTES, free // (8 if is_shard else 2))
    values = limits.all_round_bytes
    if values is None:
        values = max(4 * limits.round_bytes, states // 4)  # a whole round, and past ones, are half of one's share
    return replace(limits, all_state_bytes=states, all_round_bytes=values)
