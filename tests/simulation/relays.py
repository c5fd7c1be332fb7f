"""Relays between the servers and readers: the real ones, called over the simulated network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ps_feed.edition_client import KnownShards
from ps_runtime.credentials import PLAINTEXT
from ps_server.relay.relayed import Relayed
from ps_server.relay.upstream import Upstream
from tests.simulation.network import Network
from tests.simulation.processes import Host
from tests.simulation.servers import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


class RelayProcess:
    """A process as a relay.

    upstream: HOST:PORT of each that it follows, with a comma between them
    """

    def __init__(self, network: Network, host: Host, upstream: str) -> None:
        self.host, self._upstream = host, upstream
        self._relayed: Relayed | None = None
        network.listen(host)
        host.spawn("main", self._main)

    def _main(self) -> None:
        relayed = self._relayed = Relayed(Upstream(self._upstream, PLAINTEXT))
        self.host.methods |= {
            "known_shards": self._known_shards,
            "describe_weights": relayed.describe,
            "pull_edition": lambda call, outbox: relayed.pull(call, outbox, ""),
        }

    def _known_shards(self) -> KnownShards:
        """Returns what rpc.relay_service tells: a cluster with one shard, which is this relay."""
        assert self._relayed is not None
        return KnownShards({0: self.host.address}, 1, frozenset(self._relayed.jobs()))


class Relays:
    """The relays of a cluster.

    count: how many there are
    all:   the processes that were started last; each is started again where it has died
    """

    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster, self.count = cluster, count
        self.all: list[RelayProcess] = []

    def begin(self) -> None:
        """Starts them. Each follows the servers, or one that was started before."""
        draw = self._cluster.world.random
        for number in range(self.count):
            upstream = draw.choice([COORDINATOR, *(each.host.address for each in self.all)])
            self.all.append(self._start(number, upstream))

    def hosts(self) -> list[Host]:
        """Returns their processes."""
        return [each.host for each in self.all]

    def draw_servers(self) -> str:
        """Returns what a reader is to follow: the servers, a relay, or two of them."""
        draw, addresses = self._cluster.world.random, [each.host.address for each in self.all]
        if not addresses:
            return COORDINATOR
        return draw.choice([COORDINATOR, *addresses, ",".join(draw.sample(addresses, len(addresses)))])

    def _start(self, number: int, upstream: str) -> RelayProcess:
        host = Host(self._cluster.world, f"relay {number}", f"10.0.2.{number}:7000")
        host.on_death.append(partial(self._has_died, number, upstream))
        return RelayProcess(self._cluster.network, host, upstream)

    def _has_died(self, number: int, upstream: str) -> None:
        world = self._cluster.world
        world.at(world.random.uniform(0.3, self._cluster.lease), partial(self._start_again, number, upstream))

    def _start_again(self, number: int, upstream: str) -> None:
        self.all[number] = self._start(number, upstream)
