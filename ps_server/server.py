"""One server process: a gRPC port, a metrics port, and behind them a coordinator, a shard, or both."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from ps_protocol.errors import InvalidRequest, PSError, TryLater, error_from
from ps_protocol.optimizers import ELEMENTWISE
from ps_protocol.v1 import control_pb2_grpc
from ps_runtime.channel import open_channel, server_options
from ps_runtime.credentials import Access, Tls, server_credentials
from ps_runtime.exposure import is_exposed
from ps_runtime.metrics import serve_metrics
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_runtime.tls_diagnosis import refusal
from ps_server.coordinator.coordinator import DEFAULT_LEASE_SECONDS, Coordinator
from ps_server.coordinator.policy import DEFAULT_KEEP, CheckpointPolicy, parse_every
from ps_server.coordinator.shards import SHARD_CALL_SECONDS
from ps_server.coordinator.timing import DEFAULT_TIMING, Timing
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.ops.gauges import coordinator_gauges, security_gauges, service_discovery, shard_gauges
from ps_server.rpc import convert
from ps_server.rpc.auth import Callers
from ps_server.rpc.call_limits import CALL_THREADS, Gate
from ps_server.rpc.cluster_service import CONTROL_SERVICES, ClusterService, add_health
from ps_server.rpc.data_service import DATA_SERVICE, DataService
from ps_server.rpc.interceptor import Boundary
from ps_server.rpc.job_service import JobService
from ps_server.rpc.shard_client import ShardClient
from ps_server.rpc.shard_service import ShardService
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import OwnThreads
from ps_server.storage.checkpoints import CheckpointStore

log = logging.getLogger("ps_server")

CONTROL_THREADS = 1024  # more than one caller may have in flight; they are made when they are needed
STOP_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class ServerConfig:
    """What one server process is.

    shard_count: of the whole cluster; set where this process is the coordinator, None elsewhere
    index:       of the shard that this process is; None where it is the coordinator alone
    coordinator: HOST:PORT of the coordinator; None where it is this process
    host, port:  where to listen; port 0 lets the system choose
    advertise:   HOST:PORT under which the others reach this process; None: where it listens
    lease:       seconds for which a worker counts as live without a heartbeat
    apply_threads: threads that apply updates
    shared_directory: where workers on this host leave segments that are files
    tls:         certificates to serve with, and to call the other servers with; None: plaintext, on loopback
    tokens:      file that says who may do what; None: whoever can connect may do everything
    insecure:    plaintext may be served beyond this machine; metrics_insecure: metrics may
    limits:      how much anyone may take
    checkpoint_dir: where checkpoints are, the same directory for all shards and the coordinator; None: there are none
    checkpoint_every: `100steps` or `60s`; None: only when asked to, at a job's end, and when the server stops
    keep:        how many checkpoints of a job are kept
    restore:     jobs go on from what is in checkpoint_dir; resume: those that ran when the coordinator ended
    timing:      how long the coordinator waits for what
    """

    shard_count: int | None = None
    index: int | None = None
    coordinator: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    lease: float = DEFAULT_LEASE_SECONDS
    apply_threads: int = 1
    shared_directory: Path = DEFAULT_SHARED_DIRECTORY
    tls: Tls | None = None
    tokens: Path | None = None
    insecure: bool = False
    metrics_insecure: bool = False
    limits: Limits = DEFAULTS
    checkpoint_dir: Path | None = None
    checkpoint_every: str | None = None
    keep: int = DEFAULT_KEEP
    restore: bool = False
    resume: bool = False
    timing: Timing = DEFAULT_TIMING


class Server:
    """A running server process. `address` and `metrics_address` are how others reach it.

    Raises InvalidRequest if a port cannot be bound, naming it.
    """

    def __init__(self, config: ServerConfig) -> None:
        # torch imports much of itself when the first optimizer is made: now, not while the first job waits.
        ELEMENTWISE["SGD"]([torch.zeros(1)], lr=0.0)  # type: ignore[call-arg]
        torch.set_num_threads(1)  # the apply threads are the parallelism; more would fight over the same cores
        self._config = config
        exposed = is_exposed(config.host, config.tls is not None, config.insecure, "this server", "--insecure")
        _allow_many_files(config.limits.connections)
        self._callers = Callers(config.tokens)
        self._access = Access(config.tls, self._callers.cluster_token if self._callers.asks else None, config.insecure)
        self._gate = Gate(self._callers, config.limits)
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._control_pool = ThreadPoolExecutor(CONTROL_THREADS, "control")
        self._grpc = grpc.server(
            self._control_pool,
            interceptors=[Boundary(self._registry, self._gate)],
            options=server_options() + config.limits.options(),
        )
        port = _bind(self._grpc, config.host, config.port, config.tls)
        self.address = config.advertise or f"{_reachable(config.host)}:{port}"
        self._stops: list[Callable[[], None]] = [self._gate.stop]
        self._registry.register(security_gauges(self._gate, exposed, config.tls is not None, self._callers.asks))
        if exposed:
            log.warning("insecure: %s serves plaintext beyond this machine, as --insecure says", self.address)
        self.shard: Shard | None = None  # set where this process is a shard
        self.coordinator = self._make_coordinator() if config.shard_count is not None else None
        self.metrics_address = self._serve_metrics(config)
        names: list[str] = []
        if self.coordinator is not None:
            names += self._add_coordinator(self.coordinator)
        if config.index is not None:
            names += self._add_shard()
        self.health = add_health(self._grpc, self._control_pool, names)
        self._grpc.start()
        self._registration: Registration | None = None
        if config.index is not None:
            coordinator = config.coordinator or f"{_reachable(config.host)}:{port}"
            self._registration = Registration(
                coordinator, config.index, self.address, self.metrics_address, self._access
            )

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the coordinator knows this shard; at once true for a coordinator alone."""
        return self._registration is None or self._registration.known.wait(timeout)

    def calls_in_flight(self) -> int:
        """How many calls this process is answering now."""
        return self._gate.statistics()["calls"]

    def drain(self, seconds: float) -> None:
        """Before a wanted stop: admits nobody new, and has a last checkpoint of every job made, where there are any."""
        if self._config.checkpoint_dir is None:
            return
        if self.coordinator is not None:
            self.coordinator.drain(seconds)
        elif self.shard is not None and self._registration is not None:
            for job in self.shard.jobs():
                self._registration.checkpoint(job, seconds)

    def stop(self) -> None:
        """Stops admitting calls, finishes what is staged, and ends every thread."""
        self.health.enter_graceful_shutdown()
        if self._registration is not None:
            self._registration.stop()
        stopped = self._grpc.stop(STOP_GRACE_SECONDS)
        for stop in self._stops:
            stop()
        stopped.wait()
        self._control_pool.shutdown(wait=True)

    def _make_coordinator(self) -> Coordinator:
        config = self._config
        assert config.shard_count is not None
        policy: CheckpointPolicy | None = None
        if config.checkpoint_dir is not None:
            steps, seconds = parse_every(config.checkpoint_every) if config.checkpoint_every else (None, None)
            policy = CheckpointPolicy(config.checkpoint_dir, steps, seconds, config.keep, config.restore, config.resume)
        elif config.checkpoint_every or config.restore or config.resume:
            raise InvalidRequest("--checkpoint-every, --restore and --resume need --checkpoint-dir")

        def connect(index: int, address: str) -> ShardClient:
            return ShardClient(index, address, self._access)

        coordinator = Coordinator(config.shard_count, connect, config.lease, config.limits, policy, config.timing)
        coordinator.start()
        return coordinator

    def _serve_metrics(self, config: ServerConfig) -> str:
        coordinator = self.coordinator
        pages = {} if coordinator is None else {"/sd": lambda: service_discovery(coordinator, config.tls is not None)}
        allowed = config.metrics_insecure or config.insecure
        is_exposed(config.metrics_host, config.tls is not None, allowed, "metrics", "--metrics-insecure")
        port, stop = serve_metrics(config.metrics_host, config.metrics_port, self._registry, pages, config.tls)
        self._stops.append(stop)
        host = self.address.rpartition(":")[0] if config.advertise else _reachable(config.metrics_host)
        return f"{host}:{port}"

    def _add_coordinator(self, coordinator: Coordinator) -> list[str]:
        senders = ThreadPoolExecutor(CALL_THREADS, "watch")
        control_pb2_grpc.add_JobServiceServicer_to_server(JobService(coordinator, senders), self._grpc)
        cluster = ClusterService(coordinator, self.address, self.metrics_address)
        control_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, self._grpc)
        self._registry.register(coordinator_gauges(coordinator))
        self._stops += [coordinator.stop, senders.shutdown]
        return [CONTROL_SERVICES["JobService"], CONTROL_SERVICES["ClusterService"]]

    def _add_shard(self) -> list[str]:
        shard = Shard(
            ShardMetrics(self._registry),
            OwnThreads(self._config.apply_threads),
            shared_directory=self._config.shared_directory,
            staged_limit=self._config.limits.staged_bytes,
            checkpoints=CheckpointStore(self._config.checkpoint_dir) if self._config.checkpoint_dir else None,
            index=self._config.index or 0,
            norm_limit=self._config.limits.push_norm,
            principal_limit=self._config.limits.caller_bytes,
        )
        self.shard = shard
        data = DataService(shard)
        data.register(self._grpc)
        control_pb2_grpc.add_ShardServiceServicer_to_server(ShardService(shard, self._config.limits), self._grpc)
        self._registry.register(shard_gauges(shard))
        self._stops += [shard.stop, data.stop]
        return [DATA_SERVICE, CONTROL_SERVICES["ShardService"]]


class Registration:
    """Tells the coordinator every few seconds that this shard is here, for as long as it is."""

    def __init__(self, coordinator: str, index: int, address: str, metrics_address: str, access: Access) -> None:
        self.known = threading.Event()
        self._access = access
        self._coordinator = coordinator
        process = secrets.randbits(63)
        self._request = convert.register_shard_request(index, address, metrics_address, os.getpid(), process)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops telling."""
        self._stopping.set()
        self._thread.join()

    def checkpoint(self, job: str, seconds: float) -> None:
        """Asks the coordinator for a checkpoint; a warning if there is none."""
        with open_channel(self._coordinator, self._access) as channel:
            try:
                request = convert.checkpoint_job_request(job)
                control_pb2_grpc.JobServiceStub(channel).CheckpointJob(request, timeout=seconds)
            except grpc.RpcError as call:
                error = error_from(call, f"coordinator at {self._coordinator}")
                log.warning("stopping without a last checkpoint: %s", error)

    def _run(self) -> None:
        said = ""
        with open_channel(self._coordinator, self._access) as channel:
            register = control_pb2_grpc.ClusterServiceStub(channel).RegisterShard
            while not self._stopping.is_set():
                try:
                    register(self._request, timeout=SHARD_CALL_SECONDS, wait_for_ready=True)
                    self.known.set()
                    said = ""
                except grpc.RpcError as call:
                    error: PSError = error_from(call, f"coordinator at {self._coordinator}")
                    if isinstance(error, TryLater):
                        error = refusal(self._coordinator, self._access) or error
                    if type(error).__name__ != said:  # each trouble is said once, not every two seconds
                        log.warning("%s; trying again", error)
                        said = type(error).__name__
                self._stopping.wait(SHARD_CALL_SECONDS)


def _bind(server: grpc.Server, host: str, port: int, tls: Tls | None) -> int:
    where = f"{host}:{port}"
    try:
        bound = (
            server.add_insecure_port(where) if tls is None else server.add_secure_port(where, server_credentials(tls))
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise InvalidRequest(
            f"cannot listen on {host}:{port}: the port is in use, or the address is not this machine's"
        )
    return int(bound)


def _allow_many_files(wanted: int) -> None:
    """Each connection is an open file, and shells often allow few: takes what the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted += 1024  # for everything else
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _reachable(host: str) -> str:
    """An address that others can use, for one to bind to: every-address binds are reached by this machine's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]", "") else host
