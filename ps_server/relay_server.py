"""One relay process: a gRPC port, a metrics port, downloads over HTTP, and behind them the jobs that it follows.

Making a `RelayServer` starts it; `stop` ends every thread. It treats callers like every server process:
they are known by tokens or certificates, have roles and limits, and are counted.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable

import grpc

from ps_protocol.convert import AnsweringShard
from ps_protocol.handover import MOST_FILES
from ps_runtime import downloads, web
from ps_runtime.arrivals import HostLimits
from ps_runtime.channel import server_options
from ps_runtime.credentials import Access, is_loopback
from ps_runtime.downloads import serve_downloads
from ps_runtime.metrics import process_registry, serve_metrics
from ps_runtime.pools import Pool
from ps_server.core.thread_shares import POOLS_OF_EACH
from ps_server.ops.health_port import HealthPort
from ps_server.ops.relay_gauges import relay_gauges
from ps_server.ops.security_gauges import security_gauges
from ps_server.relay.relayed import Relayed
from ps_server.relay.upstream import Upstream
from ps_server.relay_config import RelayConfig
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.call_limits import CallLimits, grpc_options
from ps_server.rpc.grpc_port import allow_many_files, bind, reachable, shares_of_threads, start_grpc, stop_grpc
from ps_server.rpc.health import HEALTH_THREADS, add_health
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.own_ports import OwnPorts
from ps_server.rpc.relay_service import RelayClusterService, RelayFeedService
from ps_server.rpc.relay_site import RelaySite
from ps_server.shard.mapped import MOST_READERS

log = logging.getLogger("ps_server")

POOLS_OF_A_RELAY = 2
EDITIONS_OF_A_JOB = 4  # two that are read, one that waits, one that is being received


class RelayServer:
    """A running relay. `address`, `metrics_address` and `http_address` are its public addresses.

    Raises InvalidRequest if a port cannot be bound, naming it.
    """

    def __init__(self, config: RelayConfig) -> None:
        self._config, server, exposed = config, config.server, config.check_exposure()
        allow_many_files(server.limits.connections + _shared_files(config))
        authenticator = Authenticator(server.tokens)
        token = authenticator.cluster_token if authenticator.is_required else None
        sites = 1 + (server.health_port is not None)
        threads = sites * web.MAX_CONNECTIONS + (config.http_port is not None) * downloads.MAX_CONNECTIONS
        shares = shares_of_threads(server.limits, POOLS_OF_EACH + POOLS_OF_A_RELAY, threads)
        self.limits = CallLimits(authenticator, server.limits, False, pool=shares.pool)
        registry, pool = process_registry(), Pool(shares.pool, "control")
        interceptors = [CallInterceptor(registry, self.limits, pool)]
        options = server_options() + grpc_options(server.limits)
        self._grpc = grpc.server(pool, interceptors=interceptors, options=options)
        port = bind(self._grpc, server.host, server.port, server.tls)
        self.address = server.advertise or f"{reachable(server.host)}:{port}"
        upstream = Upstream(config.upstream, config.access(Access(server.tls, token, server.insecure)))
        self.relayed = Relayed(
            upstream,
            named=config.jobs,
            every=config.every,
            period=config.period,
            limit=server.limits.feeds,
            shared_directory=server.shared_directory,
            name=_known_as(self.address),
        )
        feeds = RelayFeedService(self.relayed, AnsweringShard(0, secrets.randbits(63)), shares.pool)
        registry.register(relay_gauges(self.relayed))
        registry.register(security_gauges(self.limits, exposed, server.tls is not None, authenticator.is_required))
        hosts = HostLimits(server.limits.connections_of_a_host, server.limits.new_connections)
        where = server.metrics_host, server.metrics_port
        metrics_port, stop_metrics = serve_metrics(*where, registry, tls=server.tls, limits=hosts)
        self.metrics_address = f"{reachable(server.metrics_host)}:{metrics_port}"
        cluster = RelayClusterService(self.relayed, self.address, self.metrics_address)
        feeds.register(self._grpc)
        cluster.register(self._grpc)
        health_pool = Pool(HEALTH_THREADS, "health")
        self._health = add_health(self._grpc, health_pool, [feeds.NAME, cluster.NAME])
        self.http_address, stop_http = self._serve_downloads(hosts)
        self._stops: list[Callable[[], None]] = [
            self.relayed.stop,
            self.limits.stop,
            stop_metrics,
            stop_http,
        ]
        # The pools come last: a call for one that is shut down would end gRPC's thread with an exception.
        self._last_stops: list[Callable[[], None]] = [feeds.stop, health_pool.shutdown, pool.shutdown]
        serving = [self.limits.thread, *start_grpc(self._grpc)]
        name = self.address.rpartition(":")[0].strip("[]")
        self.ports = OwnPorts(server.host, port, 0, server.tls, name, serving)
        self.health_port = self._open_health_port()

    def is_ready(self) -> bool:
        """Whether it has an edition of each job that it always follows."""
        return self.relayed.is_ready()

    def stop(self) -> None:
        """Stops admitting calls, and ends every thread."""
        if self.health_port is not None:
            self.health_port.is_ending = True
        self._health.enter_graceful_shutdown()
        stop_grpc(self._grpc, self._stops, self._last_stops)

    def _serve_downloads(self, hosts: HostLimits) -> tuple[str, Callable[[], None]]:
        """Starts serving downloads. Returns the address and a function that stops it; an empty address: not served."""
        config, server = self._config, self._config.server
        if config.http_port is None:
            return "", lambda: None
        site, where = RelaySite(self.relayed, self.limits), (config.http_host, config.http_port)
        stall = server.limits.stall_seconds
        port, stop = serve_downloads(*where, site.answer, "--http-port", server.tls, hosts, stall)
        return f"{reachable(config.http_host)}:{port}", stop

    def _open_health_port(self) -> HealthPort | None:
        server = self._config.server
        if server.health_port is None:
            return None
        why = "this relay has not all of the jobs that it is to follow yet"
        port = HealthPort(server.host, server.health_port, self.is_ready, self.ports.trouble, why)
        self._stops.append(port.stop)
        return port


def _known_as(address: str) -> str:
    """Returns what a relay calls itself, from its address. The host's name takes the place of a loopback address, which
    every host has.
    """
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if is_loopback(host) else address


def _shared_files(config: RelayConfig) -> int:
    """Returns how many files a relay may have open for readers of its host, while they read one job, or those it names:
    the files of editions, and the connections of readers that have them mapped."""
    return max(1, len(config.jobs)) * (MOST_READERS + EDITIONS_OF_A_JOB * MOST_FILES)
